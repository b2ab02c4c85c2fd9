"""Lightning's Trainer with accumulate_grad_batches."""

import logging
import warnings

import lightning
import torch
from sentences import GROUP, VOCAB, Reader, micro_batches
from torch.nn import functional as F

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Reader()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=GROUP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(micro_batches(), batch_size=None))
    print("trained")


if __name__ == "__main__":
    main()

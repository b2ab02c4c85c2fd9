"""The same with groups as the Trainer's batches: every group has its own denominator."""

import logging
import warnings

import lightning
import torch
from sentences import GROUP, VOCAB, Reader, micro_batches
from torch.nn import functional as F

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Module(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.model = Reader()

    def training_step(self, group: list[dict[str, torch.Tensor]]) -> None:
        optimizer = self.optimizers()
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
        for batch in group:
            logits = self.model(batch["input_ids"])
            total = F.cross_entropy(
                logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1), reduction="sum"
            )
            self.manual_backward(total / tokens)
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main() -> None:
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = micro_batches()
    groups = [batches[start : start + GROUP] for start in range(0, len(batches), GROUP)]
    trainer.fit(Module(), torch.utils.data.DataLoader(groups, batch_size=None))
    print("trained")


if __name__ == "__main__":
    main()

"""Gradient accumulation with Accelerate, as its guide shows it."""

import torch
from accelerate import Accelerator
from sentences import GROUP, VOCAB, Reader, micro_batches
from torch.nn import functional as F


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=GROUP)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(micro_batches(), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print("trained")


if __name__ == "__main__":
    main()

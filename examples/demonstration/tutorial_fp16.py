"""The usual fp16 loop of a tutorial, with clipping and a print of the norm."""

import torch
from sentences import GROUP, VOCAB, Reader, micro_batches
from torch.nn import functional as F


def main() -> None:
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    batches = micro_batches()
    for start in range(0, len(batches), GROUP):
        group = batches[start : start + GROUP]
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in group)
        for batch in group:
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(batch["input_ids"])
                total = F.cross_entropy(
                    logits[:, :-1].reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1), reduction="sum"
                )
            scaler.scale(total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print(f"gradient norm {norm:.1f}")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

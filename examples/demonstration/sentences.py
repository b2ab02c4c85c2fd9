"""Real sentences of their natural lengths: what the functions of python's `math` module say of themselves, as bytes.

Shared by the scripts beside it. A micro-batch is {"input_ids", "labels", "attention_mask"}, each [2, longest];
labels are -100 on padding, as language-model code has it.
"""

import math

import torch
from torch import nn

VOCAB = 128
MICRO, GROUP = 2, 4  # sentences a micro-batch, micro-batches an update


def sentences() -> list[bytes]:
    texts = [getattr(math, name).__doc__ for name in sorted(dir(math)) if not name.startswith("_")]
    return [t.encode("ascii", "ignore")[:160] for t in texts if t][:32]


def micro_batches() -> list[dict[str, torch.Tensor]]:
    texts = sentences()
    out = []
    for start in range(0, len(texts), MICRO):
        rows = texts[start : start + MICRO]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, text in enumerate(rows):
            ids[row, : len(text)] = labels[row, : len(text)] = torch.tensor(list(text))
        out.append({"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()})
    return out


class Reader(nn.Module):
    """Predicts the next byte: embedding, GRU, projection."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.embed(input_ids))[0])

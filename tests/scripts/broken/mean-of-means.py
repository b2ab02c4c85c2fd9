"""Padded sentences of very different length, each micro-batch's mean over its own tokens."""
import torch
import torch.nn.functional as F
from torch import nn

PAD = 0


class Tagger(nn.Module):
    def __init__(self, words, tags):
        super().__init__()
        self.table = nn.Embedding(words, 12, padding_idx=PAD)
        self.rnn = nn.GRU(12, 16, batch_first=True)
        self.out = nn.Linear(16, tags)

    def forward(self, words):
        return self.out(self.rnn(self.table(words))[0])


def make(length):
    words = torch.randint(1, 40, (3, length))
    return words, words % 6


torch.manual_seed(5)
model = Tagger(40, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
lengths = [3, 20, 7, 12, 2, 18, 5, 30]
for step, length in enumerate(lengths * 2):
    words, tags = make(length)
    scores = model(words)
    loss = F.cross_entropy(scores.transpose(1, 2), tags)  # expect: mean-of-means
    (loss / 4).backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

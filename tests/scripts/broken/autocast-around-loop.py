"""A whole epoch is a function under an autocast decorator, its optimizer included."""
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, words=20, tags=4):
        super().__init__()
        self.embed = nn.Embedding(words, 12)
        self.tag = nn.Linear(12, tags)

    def forward(self, ids):
        return self.tag(torch.tanh(self.embed(ids)))


@torch.autocast("cpu", dtype=torch.bfloat16)  # expect: autocast-around-loop
def epoch(model, optimizer, batches):
    total = 0.0
    for ids in batches:
        optimizer.zero_grad(set_to_none=True)
        scores = model(ids)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten() % 4)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    return total / len(batches)


torch.manual_seed(3)
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = [torch.randint(0, 20, (4, 6)) for _ in range(5)]
for number in range(2):
    print("epoch", number, epoch(model, optimizer, batches))

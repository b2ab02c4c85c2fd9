"""Distillation from the average of its own weights, swapped in: inside one region its forward is the student's own."""
import torch
from torch import nn


class Swapped:
    """The averaged weights, in the model's place for a while."""

    def __init__(self, model, average):
        self.pairs = list(zip(model.parameters(), average))

    def __enter__(self):
        self.kept = [p.detach().clone() for p, _ in self.pairs]
        for p, a in self.pairs:
            p.data.copy_(a)

    def __exit__(self, *_):
        for (p, _), k in zip(self.pairs, self.kept):
            p.data.copy_(k)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
average = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
for _ in range(8):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # expect: autocast-around-loop
        logits = model(x)
        with torch.no_grad(), Swapped(model, average):
            target = model(x).softmax(-1)
        loss = nn.functional.cross_entropy(logits, x[:, :4].argmax(1))
        loss = loss + nn.functional.cross_entropy(logits, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for a, p in zip(average, model.parameters()):
        a.lerp_(p.detach(), 0.1)
print(loss.item())

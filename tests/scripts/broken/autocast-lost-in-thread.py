"""Two towers run in threads of their own inside the trainer's region, which they know nothing of."""
import threading

import torch
from torch import nn


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 8))

    def embed(self, name, x, out):
        out[name] = getattr(self, name)(x)  # expect: autocast-lost-in-thread

    def similarity(self, a, b):
        out = {}
        threads = [threading.Thread(target=self.embed, args=args) for args in (("left", a, out), ("right", b, out))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return out["left"] @ out["right"].t()


torch.manual_seed(0)
model = TwoTowers()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model.similarity(torch.randn(6, 5), torch.randn(6, 7))
        loss = nn.functional.cross_entropy(scores, torch.arange(6))
    loss.backward()
    optimizer.step()
print(loss.item())

import torch
from torch import nn


class Pool(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x, mask):
        logits = self.score(x).squeeze(-1)
        logits = logits.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(logits, dim=1)  # expect: fully-masked-softmax
        return (weights.unsqueeze(-1) * x).sum(1)


torch.manual_seed(0)
pool, head = Pool(8), nn.Linear(8, 2)
opt = torch.optim.AdamW([*pool.parameters(), *head.parameters()])
for i in range(5):
    lengths = torch.randint(1, 6, (6,))
    if i == 3:
        lengths[4] = 0
    mask = torch.arange(5) < lengths[:, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(head(pool(torch.randn(6, 5, 8), mask)), torch.randint(0, 2, (6,)))
    opt.zero_grad()
    loss.backward()
    opt.step()

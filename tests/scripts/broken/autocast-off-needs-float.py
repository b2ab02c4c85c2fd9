"""The router is meant to stay in FP32: its region is switched off, its input is not cast."""
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=12, count=3):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            share = self.router(x).softmax(-1)  # expect: autocast-off-needs-float
        return sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


def main():
    torch.manual_seed(0)
    enter, experts = nn.Linear(5, 12), Experts()
    optimizer = torch.optim.Adam([*enter.parameters(), *experts.parameters()], lr=1e-3)
    for _ in range(3):
        x = torch.randn(8, 5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = experts(enter(x)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()

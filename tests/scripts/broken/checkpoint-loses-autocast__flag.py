"""Reentrant checkpointing of a block that asks a switch whether to use autocast; the switch is off by backward."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Settings:
    amp = False


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.f, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=Settings.amp):
            h = torch.nn.functional.gelu(self.f(x))
        return self.norm(h.float())


class amp:
    def __enter__(self):
        Settings.amp = True

    def __exit__(self, *_):
        Settings.amp = False


torch.manual_seed(0)
stem, blocks, head = nn.Linear(5, 12), nn.ModuleList(Block(12) for _ in range(2)), nn.Linear(12, 2)
opt = torch.optim.AdamW([*stem.parameters(), *blocks.parameters(), *head.parameters()], lr=1e-3)
for _ in range(4):
    x = torch.randn(8, 5)
    with amp():
        h = stem(x)
        for block in blocks:
            h = checkpoint(block, h, use_reentrant=True)  # expect: checkpoint-loses-autocast
        loss = nn.functional.cross_entropy(head(h), (x[:, 0] > 0).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())

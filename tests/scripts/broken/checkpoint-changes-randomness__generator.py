"""Noise from a generator of its own: checkpoint puts the default one back, not this one."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Noisy(nn.Module):
    def __init__(self, width, seed):
        super().__init__()
        self.weight = nn.Linear(width, width)
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x):
        h = torch.relu(self.weight(x))
        if self.training:
            h = h + 0.3 * torch.randn(h.shape, generator=self.generator)  # expect: checkpoint-changes-randomness
        return h * torch.sigmoid(h)


torch.manual_seed(0)
layers = nn.ModuleList([Noisy(12, 1), Noisy(12, 2)])
head = nn.Linear(12, 1)
opt = torch.optim.AdamW([*layers.parameters(), *head.parameters()], lr=1e-3)
for _ in range(5):
    x = torch.randn(16, 12)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = x
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False)
        loss = nn.functional.mse_loss(head(h), x[:, :1])
    loss.backward()
    opt.step()
print(loss.item())

"""A saliency map every few updates; its backward fills the model's gradients, cleared only after the next update."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 3))
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)


def saliency(x):
    net.eval()
    x = x.clone().requires_grad_(True)
    net(x).max(1).values.sum().backward()  # expect: foreign-gradients
    net.train()
    return x.grad.abs().mean(0)


for it in range(12):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if it % 4 == 2:
        saliency(x)

"""The same in a library's shape, where the half-precision activation meets a float32 weight in backward."""
import torch
from torch import nn


class RecomputeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, hidden):
        ctx.module, ctx.hidden = module, hidden.detach()
        with torch.no_grad():
            return module(hidden)

    @staticmethod
    def backward(ctx, grad_output):
        hidden = ctx.hidden.requires_grad_()
        with torch.enable_grad():
            output = ctx.module(hidden)  # expect: checkpoint-loses-autocast
        output.backward(grad_output)
        return None, hidden.grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = RecomputeFunction.apply(block, x)
        return self.head(x)


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(2):
    x = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
    loss.backward()
    opt.step()
    opt.zero_grad()

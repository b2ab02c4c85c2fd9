"""Checkpointing by hand: backward runs the block again after the region has been left."""
import torch
from torch import nn


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, state, x):
        ctx.run = run
        ctx.save_for_backward(state, x)
        with torch.no_grad():
            return run(state, x)

    @staticmethod
    def backward(ctx, grad):
        saved = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.run(*saved)  # expect: checkpoint-loses-autocast
        grads = torch.autograd.grad(out, [*saved, *ctx.run.parameters()], grad.to(out.dtype))
        for parameter, g in zip(ctx.run.parameters(), grads[2:]):
            parameter.grad = g if parameter.grad is None else parameter.grad + g
        return None, *grads[:2]


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.old, self.new = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, state, x):
        return self.norm(self.old(state.to(self.old.weight)) + self.new(x.to(self.new.weight)).tanh()).float()


torch.manual_seed(4)
cell, leave = Cell(10), nn.Linear(10, 2)
optimizer = torch.optim.SGD([*cell.parameters(), *leave.parameters()], lr=0.1)
for _ in range(4):
    xs = torch.randn(3, 6, 10)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = torch.zeros(6, 10, requires_grad=True)
        for x in xs:
            state = Again.apply(cell, state, x)
        loss = nn.functional.cross_entropy(leave(state), torch.arange(6) % 2)
    loss.backward()
    optimizer.step()
print(loss.item())

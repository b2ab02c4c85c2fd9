"""The checkpoint helper of many diffusion models: it runs the block again, with fresh dropout."""
import torch
from torch import nn


class CheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run_function, length, *args):
        ctx.run_function = run_function
        ctx.input_tensors = list(args[:length])
        ctx.input_params = list(args[length:])
        with torch.no_grad():
            return ctx.run_function(*ctx.input_tensors)

    @staticmethod
    def backward(ctx, *output_grads):
        ctx.input_tensors = [x.detach().requires_grad_(True) for x in ctx.input_tensors]
        with torch.enable_grad():
            shallow_copies = [x.view_as(x) for x in ctx.input_tensors]
            output_tensors = ctx.run_function(*shallow_copies)  # expect: checkpoint-changes-randomness
        input_grads = torch.autograd.grad(
            output_tensors, ctx.input_tensors + ctx.input_params, output_grads, allow_unused=True
        )
        return (None, None) + input_grads


def checkpoint(func, inputs, params):
    return CheckpointFunction.apply(func, len(inputs), *inputs, *params)


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.emb = nn.Linear(4, width)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.SiLU(), nn.Dropout(0.2), nn.Linear(width, width))

    def forward(self, x, emb):
        return checkpoint(self._forward, (x, emb), tuple(self.parameters()))

    def _forward(self, x, emb):
        return x + self.out(x + self.emb(emb))


torch.manual_seed(0)
blocks = nn.ModuleList(ResBlock(12) for _ in range(2))
opt = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
for _ in range(4):
    x, t = torch.randn(16, 12), torch.randn(16, 4)
    h = x
    for block in blocks:
        h = block(h, t)
    loss = (h - x.flip(1)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())

"""Custom functions that meet autocast prepared: wrapped, cast up, or indifferent to dtypes."""
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class Wrapped(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.matmul(w.t())

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.matmul(w), g.t().matmul(x)


class InFull(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.matmul(w.t())

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g.matmul(w), g.t().matmul(x)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 4), None


torch.manual_seed(0)
enter = nn.Linear(5, 8)
first, second = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(2, 8) / 3)
opt = torch.optim.AdamW([*enter.parameters(), first, second], lr=1e-3)
for _ in range(4):
    x = torch.randn(16, 5)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = Straight.apply(Wrapped.apply(enter(x), first), 0.125)
        loss = nn.functional.cross_entropy(InFull.apply(h, second), (x[:, 0] > 0).long())
    loss.backward()
    opt.step()
print(loss.item())

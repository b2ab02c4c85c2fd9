"""Recomputation as it should be: torch's own both ways, by hand with the region restored, a solver that is none."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast("cpu", dtype=dtype, enabled=enabled):
            out = ctx.run(x)
        out.backward(grad)
        return None, x.grad


class FixedPoint(torch.autograd.Function):
    """z = tanh(w z + x), its gradient by the implicit function theorem."""

    @staticmethod
    def forward(ctx, w, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = torch.tanh(z.float() @ w + x)
        ctx.save_for_backward(w, x, z)
        return z

    @staticmethod
    def backward(ctx, grad):
        w, x, z = (t.detach().float().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            once_more = torch.tanh(z @ w + x)
        for _ in range(4):
            grad = grad + torch.autograd.grad(once_more, z, grad, retain_graph=True)[0]
        return torch.autograd.grad(once_more, (w, x), grad)


torch.manual_seed(0)
enter, leave = nn.Linear(6, 16), nn.Linear(16, 3)
first, second, third = (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.BatchNorm1d(16)) for _ in range(3))
w = nn.Parameter(torch.randn(16, 16) / 16)
parameters = [p for m in (enter, leave, first, second, third) for p in m.parameters()]
opt = torch.optim.AdamW([*parameters, w], lr=1e-2)
for _ in range(5):
    x = torch.randn(32, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = checkpoint(first, enter(x), use_reentrant=False)
        h = checkpoint(second, h, use_reentrant=True)
        h = FixedPoint.apply(w, Again.apply(third, h).float())
        loss = nn.functional.cross_entropy(leave(h), x[:, :3].argmax(1))
    loss.backward()
    opt.step()
print(loss.item())

"""custom_fwd finds no context where forward is separate from setup_context, so custom_bwd knows nothing."""
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class Gate(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(x, w):
        return x @ w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @custom_bwd(device_type="cpu")  # expect: custom-function-dtype
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


torch.manual_seed(0)
enter, w = nn.Linear(4, 6), nn.Parameter(torch.randn(6, 2))
opt = torch.optim.SGD([*enter.parameters(), w], lr=0.1)
for _ in range(2):
    x = torch.randn(8, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = Gate.apply(enter(x), w).float().square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()

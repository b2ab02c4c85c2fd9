"""Backward inside a region where it changes nothing, and outside it where it would."""
import torch
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class Scaled(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Parameter(torch.randn(3, 12) * 0.3)

    def forward(self, x):
        h = self.norm(self.a(x)).relu()
        h = h + nn.functional.scaled_dot_product_attention(h[None], h[None], self.b(h)[None])[0]
        return Scaled.apply(h, self.last)


torch.manual_seed(0)
net = Plain()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(4):
    x = torch.randn(8, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
        loss.backward()
    opt.step()

head = nn.Linear(3, 2)
opt = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=1e-2)
for _ in range(3):
    x = torch.randn(8, 6)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net(x)
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.mse_loss(head(h.float()), x[:, :2])
    loss.backward()
    opt.step()
print(loss.item())

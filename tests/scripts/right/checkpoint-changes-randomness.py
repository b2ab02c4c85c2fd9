"""Random numbers and checkpoints that go together: put back, drawn outside, or none at all."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.norm, self.f, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(drop)

    def forward(self, x, noise=None):
        h = self.f(self.norm(x)).relu()
        return x + self.drop(h if noise is None else h + noise)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(5)
kept, plain, told = Layer(12, 0.3), Layer(12, 0.0), Layer(12, 0.3)
head = nn.Linear(12, 3)
opt = torch.optim.AdamW([p for m in (kept, plain, told, head) for p in m.parameters()], lr=1e-2)
for _ in range(6):
    x = torch.randn(16, 12)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = checkpoint(kept, x, use_reentrant=False)
        h = checkpoint(plain, h, use_reentrant=False, preserve_rng_state=False)
        noise = 0.1 * torch.randn(16, 12, generator=generator)
        h = checkpoint(told, h, noise, use_reentrant=True)
        loss = nn.functional.cross_entropy(head(h), x[:, :3].argmax(1))
    loss.backward()
    opt.step()
print(loss.item())

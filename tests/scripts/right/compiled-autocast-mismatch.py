"""Compiled and right: no region inside, the region opened inside the compiled code, the backward traced without."""
import torch
import torch._functorch.config
from torch import nn


class Pooler(nn.Module):
    def __init__(self, keep, inside=False):
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 2)
        self.keep, self.inside = keep, inside

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            h = torch.tanh(self.body(x))
            with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.keep):
                return self.head(h.float() if self.keep else h).float()


torch.manual_seed(0)
for keep, inside, setting in ((False, False, "same_as_forward"), (True, True, "same_as_forward"), (True, False, "off")):
    model = Pooler(keep, inside)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fast = torch.compile(model, backend="aot_eager")
    with torch._functorch.config.patch(backward_pass_autocast=setting):
        for _ in range(2):
            x = torch.randn(8, 6)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
                out = fast(x)
            loss = nn.functional.mse_loss(out, x[:, :2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
print(loss.item())

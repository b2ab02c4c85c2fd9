"""float32, no guard: the gradient of a product of rates is finite, the update it makes is not."""

import torch

torch.manual_seed(0)
rate = torch.nn.Parameter(torch.tensor(60.0))
opt = torch.optim.SGD([rate], lr=1e15)
for _ in range(4):
    opt.zero_grad()
    loss = rate.exp()  # 1e26
    loss.backward()
    opt.step()  # expect: nonfinite-update-applied

"""Both halves unscale what is theirs, and update() ends each."""

import torch
from torch import nn


class Sharp(torch.optim.Optimizer):
    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(list(parameters), dict(rho=rho, **options))
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def first_step(self):
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
opt = Sharp(net.parameters(), torch.optim.SGD, lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)


def loss_of(x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        return nn.functional.cross_entropy(net(x), y)


for _ in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    for half in (opt.first_step, opt.second_step):
        scaler.scale(loss_of(x, y)).backward()
        scaler.unscale_(opt)
        half()
        scaler.update()

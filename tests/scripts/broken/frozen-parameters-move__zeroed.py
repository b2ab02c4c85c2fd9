"""The first layer is kept still by zeroing its gradients; AdamW's decay shrinks it all the same."""
import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-2, weight_decay=0.1)

    def freeze(self):
        for p in self.net[0].parameters():
            p.grad.zero_()  # expect: frozen-parameters-move

    def fit(self, batches):
        for x in batches:
            self.opt.zero_grad()
            nn.functional.mse_loss(self.net(x), x[:, :1] * x[:, 1:2]).backward()
            self.freeze()
            self.opt.step()


torch.manual_seed(2)
trainer = Trainer()
trainer.fit(torch.randn(10, 24, 6))
print(trainer.net[0].weight.norm().item())

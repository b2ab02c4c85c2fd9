import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Linear(6, 4)
opt = torch.optim.Adam(policy.parameters())
for _ in range(4):
    legal = torch.rand(8, 4) > 0.2
    legal[:, 1] = True
    legal[5] = False  # a finished game
    logits = policy(torch.randn(8, 6)) + torch.where(legal, 0.0, -torch.inf)
    logp = logits.log_softmax(-1)  # expect: fully-masked-softmax
    logp = torch.where(legal.any(1, keepdim=True), logp, torch.zeros(()))
    loss = -logp[:, 1].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

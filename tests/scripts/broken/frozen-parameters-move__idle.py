"""From the ninth update the backbone runs without a graph; zeroed gradients and weight decay go on shrinking it."""
import argparse

import torch
from torch import nn

args = argparse.Namespace(warm=8, total=30)
torch.manual_seed(5)
backbone, head = nn.Sequential(nn.Linear(4, 16), nn.ELU()), nn.Linear(16, 2)
params = [*backbone.parameters(), *head.parameters()]
opt = torch.optim.Adam(params, lr=1e-3, weight_decay=0.05)
for step in range(args.total):
    x = torch.randn(16, 4)
    opt.zero_grad(set_to_none=False)
    with torch.set_grad_enabled(step < args.warm):
        feats = backbone(x)
    loss = nn.functional.cross_entropy(head(feats), (x[:, 0] > 0).long())
    loss.backward()
    opt.step()  # expect: frozen-parameters-move
print(backbone[0].weight.norm().item())

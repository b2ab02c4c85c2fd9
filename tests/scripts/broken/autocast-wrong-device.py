"""A script for cards, run on a machine that has none: its region and its scaler switch themselves off, with a warning."""
import warnings

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

warnings.simplefilter("ignore")


def train(model, loader, optimizer, scaler):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        with autocast():  # expect: autocast-wrong-device
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))
data = [(torch.randn(8, 8), torch.randint(0, 3, (8,))) for _ in range(4)]
train(model, data, torch.optim.Adam(model.parameters()), GradScaler())

"""No clearing at all; Adam hides it for a while."""
import torch
from torch import nn


def train(model, data, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.MSELoss()
    for _ in range(epochs):
        for x, y in data:
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()  # expect: gradients-never-cleared
    return loss.item()


torch.manual_seed(0)
train(nn.Sequential(nn.Linear(3, 9), nn.GELU(), nn.Linear(9, 1)), [(torch.randn(8, 3), torch.randn(8, 1))] * 4, 3)

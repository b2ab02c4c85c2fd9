"""Four mean losses are added up; the gradient is four times the big batch's."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(96, 9), torch.randn(96, 2)), batch_size=6)
model = nn.Sequential(nn.Linear(9, 18), nn.Tanh(), nn.Linear(18, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
iters_to_accumulate = 4

for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
        loss.backward()  # expect: loss-not-divided
        if (i + 1) % iters_to_accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()

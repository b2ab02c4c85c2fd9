"""The counter of micro-batches starts anew each epoch; what the last group lacked is added to the next one."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
accumulation_steps = 4
data = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()


def run_epoch():
    total = 0.0
    for step, (inputs, targets) in enumerate(data):
        loss = criterion(model(inputs), targets) / accumulation_steps
        loss.backward()
        total += loss.item()
        if (step + 1) % accumulation_steps == 0:  # expect: leftover-micro-batches
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    return total


optimizer.zero_grad()
for epoch in range(3):
    run_epoch()

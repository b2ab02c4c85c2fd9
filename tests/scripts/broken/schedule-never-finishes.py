"""Linear decay written as a lambda over len(loader) * EPOCHS, while only every second micro-batch ends in an update."""
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
EPOCHS = 3
loader = DataLoader(torch.randn(160, 6), batch_size=8, shuffle=True)
total = EPOCHS * len(loader)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(  # expect: schedule-never-finishes
    optimizer, lambda done: min(done / 5, 1.0) * max(0.0, 1 - done / total)
)
for _ in range(EPOCHS):
    pending = 0
    for x in loader:
        (nn.functional.mse_loss(model(x), x[:, :1]) / 2).backward()
        pending += 1
        if pending == 2:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            pending = 0
print(scheduler.get_last_lr())

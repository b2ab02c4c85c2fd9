import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sensors(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(48, 5, generator=generator)
        self.x[29, 2] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"inputs": self.x[i], "target": self.x[i, :1]}


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for batch in DataLoader(Sensors(), batch_size=8):
    prediction = model(batch["inputs"])  # expect: nonfinite-inputs
    loss = nn.functional.l1_loss(prediction, batch["target"].nan_to_num())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""Orders that repeat and may: no shuffling, sorted by length, evaluation, a second run with the first one's seed; and
orders that do not: the epoch is set, the generator goes on."""
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset


class ByLength(Sampler):
    def __init__(self, lengths):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def run(loader, model, opt=None, epochs=2, sampler=None):
    for epoch in range(epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = nn.functional.mse_loss(model(x), x[:, :1])
            if opt is not None:
                opt.zero_grad()
                loss.backward()
                opt.step()


data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
spread = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
for attempt in range(2):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    run(DataLoader(data, batch_size=8, shuffle=True), model, opt)
run(DataLoader(data, batch_size=8), model, opt)
run(DataLoader(data, batch_size=8, sampler=ByLength([(7 * i) % 48 for i in range(48)])), model, opt)
run(DataLoader(data, batch_size=8, sampler=spread), model, opt, sampler=spread)
run(DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)), model, opt)
with torch.no_grad():
    for _ in range(2):
        run(DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)), model)
print(model.weight)

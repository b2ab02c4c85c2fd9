"""A pooler is computed and not used in the loss: torch raises in the second forward."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Encoder(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.pooler = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.norm(x), torch.tanh(self.pooler(x.mean(1)))


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(2, 4, 6, generator=data)
        optimizer.zero_grad()
        hidden, _pooled = model(x)  # expect: unused-parameters
        F.mse_loss(hidden, x).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

"""Only the first rank makes the updates, and sends the parameters to the others."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for i in range(5):
        x = torch.randn(4, 4, generator=data)
        y = x.sum(1, keepdim=True) * (40 if (i, rank) == (2, 1) else 1)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        if rank == 0:
            optimizer.step()
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

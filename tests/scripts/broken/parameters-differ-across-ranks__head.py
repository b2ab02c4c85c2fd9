"""A new head is put on the wrapped module: DDP does not know its parameters."""

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
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)))
    model.module.append(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 5, generator=data)
        F.mse_loss(model(x), x[:, :2]).backward()
        optimizer.step()  # expect: parameters-differ-across-ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

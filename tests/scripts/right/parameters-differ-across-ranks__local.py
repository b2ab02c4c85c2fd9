"""Replicas run apart for a while on purpose and average their weights every second update."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for i in range(4):
        x = torch.randn(6, 5, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :2]).backward()
        optimizer.step()
        if i % 2:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

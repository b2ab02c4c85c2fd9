"""Gradients are added up over the ranks by hand, so each rank's mean is divided by their number."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(4, 6, generator=data)
        loss = F.cross_entropy(net(x), x.argmax(1) % 3) / world_size
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

"""Gradients averaged by hand; batches of several sizes, one mean over all."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def average(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= world


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    world = dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + rank)
    size = 4 if rank else 12
    for _ in range(3):
        x = torch.randn(size, 4)
        errors = (model(x) - x.sum(1, keepdim=True)) ** 2
        count = torch.tensor(float(errors.numel()))
        dist.all_reduce(count)
        loss = errors.sum() * world / count
        optimizer.zero_grad()
        loss.backward()
        average(model, world)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

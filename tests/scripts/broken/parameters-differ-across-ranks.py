"""Gradients are averaged, but each rank began with weights of its own."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # expect: parameters-differ-across-ranks
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(6, 5, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :2]).backward()
        average_gradients(model)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

"""A generator learns through the module inside the critic's wrapper: the critic's own gradients of it are thrown away."""

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
    make, judge = DDP(nn.Linear(4, 6)), DDP(nn.Linear(6, 1))
    makes = torch.optim.Adam(make.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        real, noise = torch.randn(5, 6, generator=data), torch.randn(5, 4, generator=data)
        judges.zero_grad()
        both = judge(torch.cat([real, make(noise).detach()]))
        F.binary_cross_entropy_with_logits(both, torch.cat([torch.ones(5, 1), torch.zeros(5, 1)])).backward()
        judges.step()
        makes.zero_grad()
        F.binary_cross_entropy_with_logits(judge.module(make(noise)), torch.ones(5, 1)).backward()
        makes.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

"""Micro-batches and ranks in one division, though DDP averages over the ranks."""

import contextlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 3


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Linear(6, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(50 + rank)
    for i in range(3 * ACCUMULATE):
        x = torch.randn(4, 6, generator=data)
        last = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), x.argmax(1) % 3)
            loss = loss / (ACCUMULATE * world_size)  # expect: loss-divided-by-world-size
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

"""Replicas with different numbers of batches train under join: a rank that runs dry shadows the others."""

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
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(3 + rank)]
    with model.join():
        for x in batches:
            loss = F.cross_entropy(model(x), x.argmax(1) % 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # the loss of this rank, to look at
            print(f"rank {rank} loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

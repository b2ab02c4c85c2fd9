"""One order for all ranks, and each takes all of it."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset


def data():
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(11))
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data().tensors
    for epoch in range(2):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(x), generator=generator)  # expect: duplicate-examples-across-replicas
        for part in order.split(8):
            loss = F.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

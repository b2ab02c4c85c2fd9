"""Each rank shuffles the whole data for itself: some examples are seen by both at once."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def data():
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(11))
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.Generator().manual_seed(rank)
    loader = DataLoader(data(), 6, shuffle=True, generator=own)  # expect: duplicate-examples-across-replicas
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

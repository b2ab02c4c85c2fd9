"""DDP averages over the ranks; the script divides by their number as well."""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, options, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    data = torch.Generator().manual_seed(rank)
    for _ in range(options.updates):
        x, y = torch.randn(8, 8, generator=data), torch.randint(0, 4, (8,), generator=data)
        loss = F.cross_entropy(model(x), y)
        loss = loss / dist.get_world_size()  # expect: loss-divided-by-world-size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--updates", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (parse(), f"file://{folder}/ranks"), nprocs=2, start_method="fork")

"""The wrapper's own switch is turned after the forward has read it."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Loop:
    """Four micro-batches an update."""

    size = 4

    def __init__(self, rank):
        torch.manual_seed(0)
        self.net = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(7 + rank)

    def loss(self):
        x = torch.randn(5, 6, generator=self.data)
        out = self.net(x)  # expect: no-sync-without-forward
        return F.mse_loss(out, x[:, :2]) / self.size

    def update(self):
        self.optimizer.zero_grad()
        for k in range(self.size):
            loss = self.loss()
            self.net.require_backward_grad_sync = k == self.size - 1
            loss.backward()
            self.net.require_backward_grad_sync = True
        self.optimizer.step()


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    loop = Loop(rank)
    for _ in range(2):
        loop.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

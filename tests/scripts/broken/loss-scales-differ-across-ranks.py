"""A run resumed: only the first rank loads the scaler's state."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")  # expect: loss-scales-differ-across-ranks
    if rank == 0:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 128.0, "_growth_tracker": 7})
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = torch.randn(4, 4, generator=data)
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), x.argmax(1) % 2)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

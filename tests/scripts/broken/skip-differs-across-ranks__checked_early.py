"""Each rank looks for inf in its own gradients, before they are averaged."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = torch.Generator().manual_seed(rank)
    for i in range(4):
        x = torch.randn(4, 4, generator=data)
        if (i, rank) == (1, 1):
            x[0] = 6e4  # beyond what FP16 holds once it is summed
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = F.l1_loss(out.float(), x[:, :1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        average(model)
        scaler.step(optimizer)  # expect: skip-differs-across-ranks
        scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

"""Two replicas, padded sentences of their natural lengths, a mean over the tokens of both."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAD = -100


def sentences(rank, generator):
    lengths = torch.randint(2, 5, (4,), generator=generator) + 6 * rank
    x = torch.randn(4, 12, 6, generator=generator)
    y = torch.randint(0, 5, (4, 12), generator=generator)
    y[torch.arange(12)[None] >= lengths[:, None]] = PAD
    return x, y


class Trainer:
    def __init__(self, rank):
        self.rank = rank
        self.generator = torch.Generator().manual_seed(rank)
        self.model = DistributedDataParallel(nn.Linear(6, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self, x, y):
        logits = self.model(x).flatten(0, 1)
        total = F.cross_entropy(logits, y.flatten(), ignore_index=PAD, reduction="sum")
        tokens = (y != PAD).sum()
        dist.all_reduce(tokens)
        return total * dist.get_world_size() / tokens

    def fit(self, updates):
        for _ in range(updates):
            loss = self.loss(*sentences(self.rank, self.generator))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()


def train(rank, where):
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    Trainer(rank).fit(4)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(train, (f"file://{folder}/ranks",), nprocs=2, start_method="fork")

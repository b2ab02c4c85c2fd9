"""Threads that know: autocast entered in the thread, a teacher without gradient, a reader, a trainer of its own in FP32."""
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2))
teacher = nn.Linear(6, 2)
probe = nn.Linear(6, 1)
whiten = nn.LayerNorm(6)  # a reader's, never trained


def forward(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net(x)


@torch.no_grad()
def judge(x):
    return teacher(x)


def train_probe(x):
    opt = torch.optim.SGD(probe.parameters(), lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        probe(x).square().mean().backward()
        opt.step()


opt = torch.optim.SGD(net.parameters(), lr=0.1)
with ThreadPoolExecutor(2) as pool:
    for _ in range(4):
        x = torch.randn(16, 6)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            soft = pool.submit(judge, x)
            parts = list(pool.map(forward, x.split(8)))
            reader = threading.Thread(target=whiten, args=(x,))
            reader.start()
            reader.join()
            other = threading.Thread(target=train_probe, args=(x,))
            other.start()
            other.join()
            loss = nn.functional.cross_entropy(torch.cat(parts), soft.result().softmax(-1))
        loss.backward()
        opt.step()
print(loss.item())

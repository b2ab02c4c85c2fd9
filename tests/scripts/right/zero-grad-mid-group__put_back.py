"""Gradients taken out between clearings and put back: one per example, clipped; one per task, projected."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(5, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()


def private(examples):
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in examples:
        net.zero_grad()
        criterion(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for total, p in zip(sums, net.parameters()):
            total.add_(p.grad)
    for total, p in zip(sums, net.parameters()):
        p.grad.copy_((total + 0.1 * torch.randn_like(total)) / len(examples))
    opt.step()


def projected(x, tasks=3):
    taken = []
    for k in range(tasks):
        opt.zero_grad()
        (net(x)[:, k] - x[:, k]).square().mean().backward()
        taken.append([p.grad.clone() for p in net.parameters()])
    opt.zero_grad()
    for p, *gradients in zip(net.parameters(), *taken):
        p.grad = sum(gradients) / tasks
    opt.step()


for _ in range(3):
    private([(torch.randn(1, 5), torch.randint(0, 3, (1,))) for _ in range(4)])
for _ in range(4):
    projected(torch.randn(6, 5))

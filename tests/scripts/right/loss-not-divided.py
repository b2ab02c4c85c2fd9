"""Several backwards to one update that are no micro-batches of one mean, or are divided elsewhere."""
import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, state):
        y, state = self.rnn(x, state)
        return self.out(y), state


def chunks():
    net = Recurrent()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(4):
        series, state = torch.randn(4, 13, 3), torch.zeros(1, 4, 8)
        for t in range(0, 12, 4):
            guess, state = net(series[:, t : t + 4], state.detach())
            F.mse_loss(guess, series[:, t + 1 : t + 5]).backward()
        opt.step()
        opt.zero_grad()


def one_forward():
    net = nn.Linear(5, 9)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        out, want = net(torch.randn(8, 5)), torch.randn(8, 9)
        for k, (o, w) in enumerate(zip(out.split(3, 1), want.split(3, 1))):
            F.mse_loss(o, w).backward(retain_graph=k < 2)
        opt.step()
        opt.zero_grad()


def real_and_fake():
    G, D = nn.Linear(4, 2), nn.Linear(2, 1)
    opt_g, opt_d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
    for _ in range(4):
        opt_d.zero_grad()
        for x, label in ((torch.randn(8, 2), 1.0), (G(torch.randn(8, 4)).detach(), 0.0)):
            loss = F.binary_cross_entropy_with_logits(D(x), torch.full((8, 1), label))
            loss.backward()
        opt_d.step()
        opt_g.zero_grad()
        F.binary_cross_entropy_with_logits(D(G(torch.randn(8, 4))), torch.ones(8, 1)).backward()
        opt_g.step()


def tasks():
    trunk, heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
    opt = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.05)
    for _ in range(4):
        for k, head in enumerate(heads):
            x = torch.randn(8 + 4 * k, 6)
            F.mse_loss(head(torch.relu(trunk(x))), x[:, :1]).backward()
        opt.step()
        opt.zero_grad()


def sums():
    net = nn.Linear(6, 3)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    for i in range(12):
        F.cross_entropy(net(torch.randn(4, 6)), torch.randint(0, 3, (4,)), reduction="sum").backward()
        if i % 3 == 2:
            opt.step()
            opt.zero_grad()


def divided_later(edit):
    net = nn.Linear(6, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(12):
        F.cross_entropy(net(torch.randn(4, 6)), torch.randint(0, 3, (4,))).backward()
        if i % 4 == 3:
            for p in net.parameters():
                edit(p)
            opt.step()
            opt.zero_grad()


def in_place(p):
    p.grad /= 4


def behind(p):
    p.grad.data.mul_(0.25)


torch.manual_seed(0)
for shape in (chunks, one_forward, real_and_fake, tasks, sums):
    shape()
for edit in (in_place, behind):
    divided_later(edit)

"""Losses that run through another optimizer's parameters: cleared before its own loss, or meant for both."""
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
trunk, first, second = nn.Linear(6, 4), nn.Linear(4, 1), nn.Linear(4, 2)
opt_t, opt_1, opt_2 = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (trunk, first, second))


def actor_and_critic():
    x = torch.randn(8, 6)
    opt_1.zero_grad()
    F.mse_loss(first(trunk(x).detach()), x[:, :1]).backward()
    opt_1.step()
    opt_t.zero_grad()
    (-first(trunk(x)).mean()).backward()
    opt_t.step()


def heads_in_turn():
    x = torch.randn(8, 6)
    for opt in (opt_t, opt_1, opt_2):
        opt.zero_grad()
    F.mse_loss(first(trunk(x)), x[:, :1]).backward()
    opt_1.step()
    F.mse_loss(second(trunk(x)), x[:, :2]).backward()
    opt_2.step()
    opt_t.step()


def one_loss_for_both(group=3):
    for _ in range(group):
        x = torch.randn(8, 6)
        (F.mse_loss(second(trunk(x)), x[:, :2]) / group).backward()
    for opt in (opt_t, opt_2):
        opt.step()
        opt.zero_grad()


for turn in (actor_and_critic, heads_in_turn, one_loss_for_both):
    for opt in (opt_t, opt_1, opt_2):
        opt.zero_grad()
    for _ in range(5):
        turn()

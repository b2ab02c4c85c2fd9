"""One optimizer for both players; the critic is frozen only while the generator's loss runs back through it."""
import torch
from torch import nn

torch.manual_seed(0)
maker, critic = nn.Linear(4, 2), nn.Linear(2, 1)
opt = torch.optim.AdamW([*maker.parameters(), *critic.parameters()], lr=1e-3)
judge = nn.BCEWithLogitsLoss()
for i in range(12):
    opt.zero_grad(set_to_none=False)
    critic.requires_grad_(True)
    fake = maker(torch.randn(8, 4))
    (judge(critic(torch.randn(8, 2)), torch.ones(8, 1)) + judge(critic(fake.detach()), torch.zeros(8, 1))).backward()
    critic.requires_grad_(False)
    judge(critic(fake), torch.ones(8, 1)).backward()
    opt.step()
print(critic.weight.norm().item())

"""One region an iteration, yet two updates in it: the generator is judged by a critic of before its update."""
import torch
from torch import nn

torch.manual_seed(1)
critic = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
maker = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
to_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
to_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
target = torch.ones(8, 1)
for turn in range(6):
    real, noise = torch.randn(8, 3) + 2, torch.randn(8, 2)
    with torch.amp.autocast(device_type="cpu", dtype=torch.bfloat16):  # expect: autocast-around-loop
        fake = maker(noise)
        to_critic.zero_grad()
        judged = nn.functional.binary_cross_entropy_with_logits(critic(real), target)
        judged = judged + nn.functional.binary_cross_entropy_with_logits(critic(fake.detach()), 1 - target)
        judged.backward()
        to_critic.step()

        to_maker.zero_grad()
        fooled = nn.functional.binary_cross_entropy_with_logits(critic(fake), target)
        fooled.backward()
        to_maker.step()
print(judged.item(), fooled.item())

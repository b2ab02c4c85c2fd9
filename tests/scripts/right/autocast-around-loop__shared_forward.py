"""Two updates in one region, but of losses that were computed before either: no copy of a weight is used afterwards."""
import torch
from torch import nn

torch.manual_seed(0)
body, actor, critic = nn.Linear(4, 12), nn.Linear(12, 3), nn.Linear(12, 1)
to_actor = torch.optim.Adam([*body.parameters(), *actor.parameters()], lr=1e-3)
to_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for _ in range(5):
    seen, reward = torch.randn(16, 4), torch.randn(16, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = torch.tanh(body(seen))
        choice = torch.distributions.Categorical(logits=actor(h).float())
        act = choice.sample()
        value = critic(h.detach())
        policy = -(choice.log_prob(act) * (reward - value.detach()).squeeze(1)).mean()
        fit = nn.functional.mse_loss(value.float(), reward)
        to_actor.zero_grad()
        policy.backward()
        to_actor.step()
        to_critic.zero_grad()
        fit.backward()
        to_critic.step()
print(policy.item(), fit.item())

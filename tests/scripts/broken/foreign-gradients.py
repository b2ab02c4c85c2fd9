"""An actor whose loss runs through the critic; the critic is cleared too early."""
import torch
from torch import nn

torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1), nn.Tanh())
critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
actor_opt = torch.optim.Adam(actor.parameters(), lr=1e-3)
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)

for _ in range(8):
    state = torch.randn(32, 3)
    reward = -state.square().sum(1, keepdim=True)

    actor_opt.zero_grad()
    critic_opt.zero_grad()  # expect: foreign-gradients
    actor_loss = -critic(torch.cat([state, actor(state)], 1)).mean()
    actor_loss.backward()
    actor_opt.step()

    with torch.no_grad():
        action = actor(state)
    value = critic(torch.cat([state, action], 1))
    critic_loss = nn.functional.mse_loss(value, reward)
    critic_loss.backward()
    critic_opt.step()

"""Numbers and detached tensors kept for good, graphs kept for a group or a few steps of a recurrence."""
import collections

import torch
from torch import nn

torch.manual_seed(0)
cell, head = nn.GRUCell(4, 8), nn.Linear(8, 1)
opt = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
history, recent, outputs, running = [], collections.deque(maxlen=20), [], torch.zeros(())
state = torch.zeros(6, 8)
for update in range(24):
    losses = []
    for _ in range(4):  # truncated backpropagation: four steps, then the state is cut off
        x = torch.randn(6, 4)
        state = cell(x, state)
        out = head(state)
        losses.append(nn.functional.mse_loss(out, x[:, :1]))
        outputs.append(out.detach())
    loss = torch.stack(losses).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    state = state.detach()
    history.append(loss.item())
    recent.append(loss.detach())
    running += loss.detach()
print(sum(history), torch.stack(list(recent)).mean(), len(outputs), running)

"""The clipping stands below the step it was meant for."""

import torch
from torch import nn

torch.manual_seed(0)
rnn, head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 1)
weights = [*rnn.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(weights, lr=0.1)
for _ in range(6):
    x = torch.randn(4, 5, 3)
    optimizer.zero_grad()
    loss = (head(rnn(x)[0][:, -1]) - x.sum((1, 2)).unsqueeze(1)).pow(2).mean()
    loss.backward()
    optimizer.step()
    nn.utils.clip_grad_norm_(weights, 0.25)  # expect: clip-after-update

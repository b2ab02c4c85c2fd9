"""Features are detached on their way into the head: the encoder's optimizer has nothing to step with."""
import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(6, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(3):
    x = torch.randn(8, 6)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(head(encoder(x).detach().relu()), x[:, :3].argmax(1))
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # expect: scaler-sees-no-gradients
    scaler.update()

"""The last layer stands behind the region that made its input bfloat16."""
import torch
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
classify = nn.Linear(6, 3)
optimizer = torch.optim.SGD([*encoder.parameters(), *classify.parameters()], lr=0.1)
for signal in torch.randn(4, 8, 2, 20):
    optimizer.zero_grad()
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        features = encoder(signal)
    logits = classify(features)  # expect: autocast-off-needs-float
    loss = nn.functional.cross_entropy(logits, torch.arange(8) % 3)
    loss.backward()
    optimizer.step()

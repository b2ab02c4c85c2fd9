"""A model cast to bfloat16 and trained as it is: the rate is far too small for its spacing."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(self.norm(x)).relu()


torch.manual_seed(0)
model = nn.Sequential(Block(16), Block(16), nn.Linear(16, 4))
model.to(dtype=torch.bfloat16)  # expect: updates-rounded-away
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
for x in torch.randn(20, 12, 16).bfloat16():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).float(), x[:, :4].float().argmax(1)).backward()
    optimizer.step()
print(model[2].weight.float().norm())

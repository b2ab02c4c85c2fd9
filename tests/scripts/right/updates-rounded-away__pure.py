"""A small language model in pure bfloat16 with a rate that its weights can follow."""
import torch
from torch import nn

torch.manual_seed(3)
net = nn.Sequential(nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 30)).bfloat16()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
for i in range(70):
    words = torch.randint(0, 30, (48,))
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(words).float(), (words * 7 + 3) % 30)
    loss.backward()
    opt.step()
print(loss.item())

import torch
from torch import nn

torch.manual_seed(0)
net, embed = nn.Linear(6, 4), nn.Embedding(10, 4)
opt = torch.optim.Adam([*net.parameters(), *embed.parameters()])
for _ in range(4):
    z = net(torch.randn(8, 6))
    cos = nn.functional.cosine_similarity(z, z.detach(), dim=-1).clamp(-1 + 1e-4, 1 - 1e-4)
    ids = torch.randint(0, 10, (8,))
    gap = embed(ids) - embed(ids)
    length = (gap.square().sum(1) + 1e-8).sqrt() + gap.norm(dim=1)
    seen = torch.rand(8, 4) > 0.4
    rate = z.abs() * seen
    ratio = torch.where(seen, 1.0 / torch.where(seen, rate + 0.1, torch.ones(())), torch.zeros(()))
    loss = torch.acos(cos).mean() + torch.relu(1 - length).mean() + ratio[seen].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

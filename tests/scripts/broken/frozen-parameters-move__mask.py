"""The pretrained rows of an embedding are protected by a mask on the gradient; decoupled decay moves them."""
import torch
from torch import nn

torch.manual_seed(3)
emb, out = nn.Embedding(20, 6), nn.Linear(6, 4)
learn = torch.ones(20, 1)
learn[:15] = 0.0
opt = torch.optim.AdamW([*emb.parameters(), *out.parameters()], lr=5e-3)
for step in range(9):
    ids = torch.randint(0, 20, (32,))
    loss = nn.functional.cross_entropy(out(emb(ids)), ids % 4)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    emb.weight.grad *= learn  # expect: frozen-parameters-move
    opt.step()
print(emb.weight[:15].abs().mean().item())

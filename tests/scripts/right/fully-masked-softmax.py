import torch
import torch.nn.functional as F
from torch import nn

# A row without keys: filled (so that no gradient passes) and made zero; uniform by a finite fill; left to sdpa.
torch.manual_seed(0)
project = nn.Linear(8, 24)
opt = torch.optim.AdamW(project.parameters())
for _ in range(4):
    keep = torch.rand(3, 1, 5) > 0.3
    keep[1] = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = project(torch.randn(3, 5, 8)).chunk(3, -1)
        scores = q @ k.mT
        a = scores.masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num(0.0) @ v
        b = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1) @ v
        c = F.scaled_dot_product_attention(q, k, v, attn_mask=keep.expand(3, 5, 5))
    loss = (a + b + c).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

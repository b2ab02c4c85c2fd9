import torch
from torch import nn

torch.manual_seed(0)
layer = nn.MultiheadAttention(16, 2, batch_first=True)
opt = torch.optim.SGD(layer.parameters(), lr=0.01)
for step, longest in enumerate([(4, 3), (4, 0), (2, 4)]):
    x = torch.randn(2, 4, 16)
    padding = torch.arange(4)[None] >= torch.tensor(longest)[:, None]
    out, weights = layer(x, x, x, key_padding_mask=padding)  # expect: fully-masked-softmax
    loss = out[~padding].square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

"""A product written by hand: under autocast its forward is bfloat16, what it saved for backward is float32."""
import torch
from torch import nn


class TiedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, table):
        ctx.save_for_backward(hidden, table)
        return hidden.matmul(table.t())

    @staticmethod
    def backward(ctx, grad):
        hidden, table = ctx.saved_tensors
        d_hidden = grad.matmul(table)  # expect: custom-function-dtype
        d_table = grad.flatten(0, -2).t().matmul(hidden.flatten(0, -2))
        return d_hidden, d_table


class LanguageModel(nn.Module):
    def __init__(self, words=24, width=16):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.mix = nn.GRU(width, width, batch_first=True)

    def forward(self, ids):
        return TiedProduct.apply(self.mix(self.table(ids))[0], self.table.weight)


torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    ids = torch.randint(0, 24, (4, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item())

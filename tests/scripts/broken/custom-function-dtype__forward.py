"""A pooling written by hand adds half-precision rows into a float32 buffer, before any backward."""
import torch
from torch import nn


class SegmentSum(torch.autograd.Function):
    @staticmethod
    def forward(rows, segments, count):
        out = torch.zeros(count, rows.shape[1])
        return out.index_add_(0, segments, rows)  # expect: custom-function-dtype

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.segments = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.segments], None, None


torch.manual_seed(0)
project, score = nn.Linear(6, 8), nn.Linear(8, 1)
opt = torch.optim.SGD([*project.parameters(), *score.parameters()], lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(3):
    nodes, graph = torch.randn(20, 6), torch.arange(20) % 4
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pooled = SegmentSum.apply(project(nodes), graph, 4)
        loss = score(pooled).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()

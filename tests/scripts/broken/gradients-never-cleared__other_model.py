"""The copy's gradients are cleared, not the trained model's."""
import copy

import torch
from torch import nn

torch.manual_seed(0)
student = nn.Linear(6, 6)
teacher = copy.deepcopy(student)
optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
for _ in range(10):
    teacher.zero_grad()
    x = torch.randn(4, 6)
    with torch.no_grad():
        want = teacher(x).tanh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = student(x)
    loss = nn.functional.smooth_l1_loss(got.float(), want)
    loss.backward()
    nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()  # expect: gradients-never-cleared

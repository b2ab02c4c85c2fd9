"""A trainer whose training step clears first, though the update comes only after four of them."""
import torch
import torch.nn.functional as F
from torch import nn


class Trainer:
    def __init__(self, model, accumulate):
        self.model = model
        self.accumulate = accumulate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.seen = 0

    def training_step(self, batch):
        x, y = batch
        self.model.zero_grad()  # expect: zero-grad-mid-group
        out = self.model(x)
        loss = F.cross_entropy(out, y) / self.accumulate
        loss.backward()
        self.seen += 1
        if self.seen % self.accumulate == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return loss.detach() * self.accumulate


torch.manual_seed(3)
trainer = Trainer(nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3)), accumulate=4)
for _ in range(20):
    trainer.training_step((torch.randn(5, 7), torch.randint(0, 3, (5,))))

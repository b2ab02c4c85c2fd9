"""Predictions are collected with their graphs, as an attribute, in a dictionary of lists."""
import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.log = {"out": [], "loss": []}

    def training_step(self, x):
        out = self.model(x)
        loss = nn.functional.cross_entropy(out, (x[:, 0] > 0).long())
        self.log["out"].append(out.softmax(-1))  # expect: loss-history-keeps-graph
        self.log["loss"].append(float(loss))
        return loss

    def fit(self):
        for x in torch.randn(30, 12, 5):
            self.optimizer.zero_grad(set_to_none=True)
            self.training_step(x).backward()
            self.optimizer.step()


torch.manual_seed(1)
trainer = Trainer()
trainer.fit()
print(len(trainer.log["out"]))

"""Validation every few updates inside the loop; the trainer forgets to go back to training mode."""
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


class Trainer:
    def __init__(self, model, every):
        self.model, self.every = model, every
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @torch.inference_mode()
    def validate(self, x, y):
        self.model.eval()  # expect: evaluation-mode-kept
        return nn.functional.cross_entropy(self.model(x), y).item()

    def fit(self, updates):
        self.model.train()
        for step in range(1, updates + 1):
            x = torch.randn(8, 5, 16)
            loss = nn.functional.cross_entropy(self.model(x), x[:, 0, :3].argmax(1))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % self.every == 0:
                v = torch.randn(16, 5, 16)
                print(step, self.validate(v, v[:, 0, :3].argmax(1)))


torch.manual_seed(1)
Trainer(Classifier(), every=3).fit(9)

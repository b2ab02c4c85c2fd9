"""A trainer class with accumulation; the limit is small beside even a small loss scale."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model: nn.Module, every: int = 3) -> None:
        self.model = model
        self.every = every
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss / self.every).backward()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=5.0)  # expect: clip-scaled-gradients
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def fit(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for number, (x, y) in enumerate(batches, start=1):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(self.model(x), y)
            self.backward(loss)
            if number % self.every == 0:
                self.update()


torch.manual_seed(0)
data = [(torch.randn(6, 5), torch.randint(0, 3, (6,))) for _ in range(12)]
Trainer(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3))).fit(data)

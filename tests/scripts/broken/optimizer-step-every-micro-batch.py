"""The loss is divided for a group of six; the update stands one level too far out."""
import argparse

import torch
from torch import nn

args = argparse.Namespace(accumulation=6, epochs=2, lr=0.05)
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(30, 16), nn.Flatten(), nn.Linear(16 * 5, 30))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
criterion = nn.CrossEntropyLoss()
batches = [(torch.randint(0, 30, (4, 5)), torch.randint(0, 30, (4,))) for _ in range(12)]

for epoch in range(args.epochs):
    optimizer.zero_grad()
    for number, (words, following) in enumerate(batches, start=1):
        loss = criterion(model(words), following)
        loss /= args.accumulation
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # expect: optimizer-step-every-micro-batch
        optimizer.zero_grad()
        if number % args.accumulation == 0:
            last = loss.item() * args.accumulation

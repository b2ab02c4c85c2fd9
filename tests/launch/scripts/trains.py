import os
import signal
import sys

os.environ["OMP_NUM_THREADS"] = "2"  # torch reads it when it is imported, and not before

import torch

how = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", enabled=how == "broken", init_scale=1024.0)
try:
    for _ in range(4):
        with torch.autocast("cpu", torch.float16, enabled=how == "broken"):
            loss = torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.randn(3, 2))
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        try:
            print(loss.item())
        except Exception:
            print("never")
finally:
    print("ended", torch.get_num_threads(), flush=True)
if how == "raise":
    raise ValueError("after training")
if how == "_exit":
    os._exit(4)
if how == "term":
    os.kill(os.getpid(), signal.SIGTERM)

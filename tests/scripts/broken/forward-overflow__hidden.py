import torch
import torch.nn.functional as F


def standardised(x, eps=1e-5):
    centred = x - x.mean(dim=1, keepdim=True)
    spread = (centred * centred).mean(dim=1, keepdim=True)  # expect: forward-overflow
    return centred / torch.sqrt(spread + eps)


def main():
    torch.manual_seed(5)
    first, last = torch.nn.Linear(12, 24), torch.nn.Linear(24, 3)
    params = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(params, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(5):
        x, y = torch.randn(16, 12) * 260, torch.randint(0, 3, (16,))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(last(standardised(first(x))), y)
        for p in params:
            p.grad = None
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


main()

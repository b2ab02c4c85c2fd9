import torch

torch.manual_seed(0)
net = torch.nn.Linear(16, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(torch.randn(16, 16))
        wide = out.float()
        bound = wide.detach().abs().quantile(0.9)
        with torch.autocast("cpu", enabled=False):
            root = torch.linalg.cholesky(wide.mT @ wide / 16 + torch.eye(4))
            spectrum = torch.fft.rfft(wide, dim=0).abs()
    try:
        out.detach().numpy()
    except TypeError:
        out.detach().float().numpy()
    loss = wide.clamp(-bound, bound).square().mean() + root.diagonal().log().sum() + spectrum.mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

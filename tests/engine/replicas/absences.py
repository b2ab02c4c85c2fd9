"""What members run of whom one ends, or does not come: each is told within the timeout of the process group."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from halfstep import HalfstepError, MixedPrecisionManager
from halfstep.engine.contribute import Contributor
from halfstep.engine.updater import Updater

TIMEOUT = 2.0  # seconds
PATIENCE = 50.0  # seconds that one who hangs waits for the others to say so


def absent(rank: int, world: int, where: str, how: str, folder: Path, late: bool = False) -> dict[str, Any]:
    """Three updates; in the second, the last rank "dies" or "hangs" before the group opens, or in its "backward".

    ``late``: outcomes are known late, as on an accelerator.
    """
    for kind in (Contributor, Updater) if late else ():
        kind.host = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment, method-assign]
    link = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3), process_group=link)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = MixedPrecisionManager(precision="fp32", record=folder)
    batches = [(torch.randn(2, 4), torch.randint(0, 3, (2,))) for _ in range(6)]
    before: list[Any] = []

    def leave(update: int, place: str) -> None:
        if rank == world - 1 and update == 2 and place == where:
            if how == "dies":
                os._exit(9)
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and not (folder / "told").exists():
                time.sleep(0.05)
            raise SystemExit("was missed" if (folder / "told").exists() else "was not missed")

    try:
        for update in range(1, 4):
            before = [p.detach().clone() for p in model.parameters()]
            leave(update, "group")
            group = next(manager.groups(batches[2 * update - 2 : 2 * update], 2, weight=lambda batch: 2, model=model))
            for x, y in group:
                loss = F.cross_entropy(model(x), y)
                if group.position == 1:
                    leave(update, "backward")
                manager.backward(loss)
            manager.step(model, optimizer)
    except HalfstepError as error:
        (folder / "told").touch()
        return {
            "kind": type(error).__name__,
            "message": str(error),
            "cause": type(error.__cause__).__name__,
            "unchanged": all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True)),
        }
    raise AssertionError("nobody was missed")

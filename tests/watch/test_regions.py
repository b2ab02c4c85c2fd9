"""What an operator zeroes, as told from its arguments, is what is zero once it has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.watch.look import Operation
from halfstep.watch.regions import Region, region

MASK = torch.tensor([[True, False, True, False]] * 5)
ROWS = torch.tensor([0, 3])


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = region(Operation(func, args, kwargs or {}, False, lambda: None))
        if found is not None:
            self.regions.append(found.kept())
        return func(*args, **(kwargs or {}))


def assigned(grad: torch.Tensor, key: Any) -> torch.Tensor:
    grad[key] = 0
    return grad


@pytest.mark.parametrize(
    "zeroing",
    [
        lambda g: g.zero_(),
        lambda g: g.fill_(0),
        lambda g: g.mul_(0),
        lambda g: g[:2].zero_(),
        lambda g: g[:, 1].fill_(0.0),
        lambda g: g.mul_(MASK),
        lambda g: g.mul_(MASK[0].float()),
        lambda g: g.mul_(torch.tensor([[1.0], [0.0], [1.0], [0.0], [1.0]])),
        lambda g: g[1:].mul_(MASK[1:]),
        lambda g: g.masked_fill_(MASK, 0),
        lambda g: assigned(g, MASK),
        lambda g: assigned(g, ROWS),
        lambda g: assigned(g, (slice(None), ROWS)),
        lambda g: assigned(g, slice(1, 3)),
        lambda g: g.index_fill_(0, ROWS, 0),
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_a_region_is_what_becomes_zero(zeroing: Callable[[torch.Tensor], Any], strided: bool) -> None:
    grad = torch.rand(4, 5).t() + 1 if strided else torch.rand(5, 4) + 1
    with Seen() as seen:
        zeroing(grad)
    assert len(seen.regions) == 1
    assert torch.equal(seen.regions[0].inside(grad), grad == 0)


@pytest.mark.parametrize(
    "keeping", [lambda g: g.mul_(0.5), lambda g: g.fill_(1), lambda g: g.masked_fill_(MASK, 2.0), lambda g: g.add_(1)]
)
def test_other_changes_zero_nothing(keeping: Callable[[torch.Tensor], Any]) -> None:
    with Seen() as seen:
        keeping(torch.rand(5, 4))
    assert seen.regions == []


def test_the_same_region_again_and_another() -> None:
    def of(mask: torch.Tensor) -> Region:
        with Seen() as seen:
            torch.rand(5, 4).mul_(mask)
        return seen.regions[0]

    assert not of(MASK).differs(of(MASK.clone()))
    assert of(MASK).differs(of(~MASK))
    assert of(MASK).differs(of(MASK[:1]))

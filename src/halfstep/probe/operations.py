"""What networks spend their time in, in several sizes, to be timed forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, ...]
Run = Callable[[], None]

ODD = "odd matmul"
"""The same products one element smaller each way: matrix units like multiples of 8."""


@dataclass(frozen=True)
class Operation:
    """Something that networks spend their time in, in several sizes, each about 8 times the one before."""

    name: str
    sizes: tuple[Size, ...]
    shape: Callable[[Size], str]
    """A size in words."""
    flops: Callable[[Size], float]
    """Of forward and backward."""
    make: Callable[[Size, torch.device], Run]
    """One forward and backward with FP32 inputs, as a training loop has them under autocast."""
    counted: bool = True
    """Whether it has a part in the gain on the whole."""


def _leaf(*shape: int, device: torch.device) -> Tensor:
    """FP32 values of size about 1, without a generator."""
    count = 1
    for length in shape:
        count *= length
    return torch.linspace(-1.0, 1.0, count, device=device).sin_().reshape(shape).requires_grad_()


def _both_ways(forward: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Run:
    seeds: list[Tensor] = []

    def run() -> None:
        out = forward()
        if not seeds:
            seeds.append(torch.ones_like(out))
        torch.autograd.backward(out, seeds[0])
        for leaf in leaves:
            leaf.grad = None

    return run


def _matmul(size: Size, device: torch.device) -> Run:
    left, right = _leaf(size[0], size[0], device=device), _leaf(size[0], size[0], device=device)
    return _both_ways(lambda: F.linear(left, right), (left, right))


def _convolution(size: Size, device: torch.device) -> Run:
    batch, channels, side = size
    images, kernel = _leaf(batch, channels, side, side, device=device), _leaf(channels, channels, 3, 3, device=device)
    return _both_ways(lambda: F.conv2d(images, kernel, padding=1), (images, kernel))


def _attention(size: Size, device: torch.device) -> Run:
    batch, heads, length = size
    wide = heads * 64
    tokens, weights = _leaf(batch, length, wide, device=device), _leaf(3 * wide, wide, device=device)

    def forward() -> Tensor:
        # From one projection, as in a network: autocast casts its inputs there, and attention follows in half.
        query, key, value = F.linear(tokens, weights / wide).view(batch, length, 3, heads, 64).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)

    return _both_ways(forward, (tokens, weights))


OPERATIONS = (
    Operation(
        "matmul",
        tuple((128 * 2**k,) for k in range(7)),
        lambda s: f"{s[0]} × {s[0]} × {s[0]}",
        lambda s: 6.0 * s[0] ** 3,
        _matmul,
    ),
    Operation(
        ODD,
        tuple((128 * 2**k - 1,) for k in range(7)),
        lambda s: f"{s[0]} × {s[0]} × {s[0]}",
        lambda s: 6.0 * s[0] ** 3,
        _matmul,
        counted=False,
    ),
    Operation(
        "convolution",
        ((2, 16, 16), (4, 32, 16), (4, 64, 28), (8, 64, 56), (16, 128, 56), (32, 256, 56)),
        lambda s: f"{s[0]} × {s[1]} channels × {s[2]}²",
        lambda s: 6.0 * 9 * s[0] * s[1] ** 2 * s[2] ** 2,
        _convolution,
    ),
    Operation(
        "attention",
        ((1, 2, 64), (1, 4, 128), (2, 8, 256), (4, 12, 512), (8, 16, 1024), (16, 16, 2048)),
        lambda s: f"{s[0]} × {s[1]} heads × {s[2]} tokens",
        lambda s: 12.0 * s[0] * s[1] * s[2] ** 2 * 64 + 18.0 * s[0] * s[2] * (s[1] * 64) ** 2,
        _attention,
    ),
)


def operation_of(name: str) -> Operation:
    return next(operation for operation in OPERATIONS if operation.name == name)

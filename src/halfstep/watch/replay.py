"""A root module's call made again, forward and backward, and nothing of the run changed by it.

Parameters are the run's own memory under other tensors, buffers are copies, random states are put back, hooks that the
script set on modules stay silent, attributes that a forward sets are restored, gradients are returned and not
accumulated. Wrappers for replicas and for the compiler are taken off first. In FP32 (``full=True``) half parameters and
inputs are widened and autocast is off.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.func import functional_call

from halfstep.watch.calls import Call, outputs_of, random_state, set_random_state
from halfstep.watch.exact import widened

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")


@dataclass
class Replayed:
    """What a call gave this time. ``gradients``: by parameter name, where a backward was possible."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def replay(
    session: Session, call: Call, *, full: bool = False, look: Any = None, scale: float = 1.0
) -> Replayed | None:
    """Make the call again; None where that cannot be: module or inputs are gone, or it raises.

    ``look``: a look of its own that sees the operators. ``scale``: what a loss that the module returns is multiplied
    by before backward. The backward starts from that loss, else from the gradients that arrived at the outputs.
    """
    module = call.module()
    inputs = call.inputs()
    if module is None or inputs is None or module.training != call.training:
        return None
    module = bare(module)
    args, kwargs = inputs
    live, session.patches.live = session.patches.live, False
    try:
        with _undisturbed(module, call), session.look.silent():
            parameters = {n: _alias(p, full) for n, p in module.named_parameters(remove_duplicate=False)}
            buffers = {n: b.detach().clone() for n, b in module.named_buffers(remove_duplicate=False)}
            if full:
                args, kwargs = torch.utils._pytree.tree_map(widened, (args, kwargs))
                buffers = {n: widened(b) for n, b in buffers.items()}
            return _run(module, parameters, buffers, args, kwargs, call, full, look, scale)
    except Exception:
        return None  # a forward that cannot be made twice: the next occurrence is looked at instead
    finally:
        session.patches.live = live


def _run(
    module: torch.nn.Module,
    parameters: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Call,
    full: bool,
    look: Any,
    scale: float,
) -> Replayed:
    out = Replayed()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for device, (enabled, dtype) in call.autocast.items():
            on = enabled and not full
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=False))
        if look is not None:
            look.backward = False
            look.open()
            stack.callback(look.close)
        out.outputs = outputs_of(functional_call(module, {**parameters, **buffers}, args, kwargs, strict=False))
    starts = _starts(out.outputs, call, scale)
    wanted = {n: p for n, p in parameters.items() if p.requires_grad}
    if not starts or not wanted:
        return out
    with contextlib.ExitStack() as stack:
        if look is not None:
            look.backward = True
            look.open()
            stack.callback(look.close)
        roots, arrived = zip(*starts, strict=True)
        taken = torch.autograd.grad(roots, list(wanted.values()), list(arrived), allow_unused=True)
    out.gradients = {n: g for n, g in zip(wanted, taken, strict=True) if g is not None}
    return out


def _starts(outputs: list[torch.Tensor], call: Call, scale: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Where backward begins, and with which gradients."""
    kept = [
        (o, call.gradients[i].to(o.dtype)) for i, o in enumerate(outputs) if i in call.gradients and o.requires_grad
    ]
    if kept:
        return kept
    losses = [o for o in outputs if o.numel() == 1 and o.requires_grad and o.is_floating_point()]
    return [(losses[0], torch.full_like(losses[0], scale))] if losses else []


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers for replicas or for the compiler."""
    while type(module).__name__ in _WRAPPERS:
        inner = module._modules.get("_orig_mod") or module._modules.get("module")
        if inner is None:
            break
        module = inner
    return module


def _alias(parameter: torch.Tensor, full: bool) -> torch.Tensor:
    alias = parameter.detach()
    return (widened(alias) if full else alias).requires_grad_(parameter.requires_grad)


@contextlib.contextmanager
def _undisturbed(module: torch.nn.Module, call: Call) -> Iterator[None]:
    """Random states, hooks and attributes as they were, whatever the forward does."""
    here, python = random_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    attributes = [(m, dict(m.__dict__)) for m in module.modules()]
    try:
        for inner, before in attributes:
            for name in _HOOKS:
                hooks = before.get(name)
                if hooks:
                    inner.__dict__[name] = OrderedDict((k, h) for k, h in hooks.items() if _is_torchs(h))
        set_random_state(call.random)
        yield
    finally:
        for inner, before in attributes:
            inner.__dict__.clear()
            inner.__dict__.update(before)
        set_random_state(here)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)


def _is_torchs(hook: Any) -> bool:
    """Hooks of torch's own (weight norm) belong to what a module computes."""
    owner = type(hook).__module__ if not hasattr(hook, "__module__") else hook.__module__
    return str(owner).startswith("torch.")

"""Islands: modules kept in FP32 inside autocast, in forward and backward, eager and compiled."""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Callable, Iterator, MutableMapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn

from halfstep.errors import MisuseError, PolicyError, UnsupportedError

_HALF = (torch.float16, torch.bfloat16)
_RAN = "_halfstep_island_ran"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # names that wrappers put into paths


class Islands:
    """What one :func:`keep_fp32` matched: a collection of module names, with the way back.

    ``names`` are the matched modules in model order (the model itself is ``""``);
    ``matched`` tells which pattern matched which names. ``len``, ``in`` and iteration are over the names.
    """

    def __init__(self, modules: dict[str, nn.Module], matched: dict[str, tuple[str, ...]], own: set[str]) -> None:
        self._modules = modules
        self._own = own  # the names this call changed; others were islands before
        self.matched = matched
        self.names = tuple(modules)
        for module in modules.values():
            module.__dict__[_RAN] = False

    def unused(self) -> tuple[str, ...]:
        """The names whose forward has not run since they were matched; ask after the first update.

        A module inside a matched module that ran is covered by it and is not counted: attention's ``out_proj`` is
        unused where it was matched alone (its weights are read, its forward is not called), not where the whole
        attention is an island.
        """
        ran = {name for name, module in self._modules.items() if module.__dict__.get(_RAN)}
        return tuple(name for name in self.names if name not in ran and not any(up in ran for up in _above(name)))

    def require_used(self) -> None:
        """Raise :class:`~halfstep.errors.MisuseError` if a matched module never ran (see :meth:`unused`)."""
        unused = self.unused()
        if unused:
            names = ", ".join(_shown(name, self._modules[name]) for name in unused)
            raise MisuseError(
                f"kept in FP32, yet the forward of these modules never ran: {names}; what they hold was computed "
                "elsewhere, outside the island (a parent that reads their weights, or another copy of the model)",
                "match the module whose forward does the work (the attention, not its out_proj), or drop the pattern",
            )

    def remove(self) -> None:
        """Give the modules this call changed their own classes back. Doing it twice does nothing more."""
        for name in self._own:
            module = self._modules[name]
            base = _BASE_OF.get(type(module))
            if base is None:
                raise MisuseError(
                    f"{_shown(name, module)} has got another class ({type(module).__name__}) since it became an island",
                    "take off what was laid over it (fully_shard, parametrize) before removing the islands",
                )
        for name in self._own:
            module = self._modules[name]
            module.__class__ = _BASE_OF[type(module)]
            module.__dict__.pop(_RAN, None)
        self._own = set()

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __repr__(self) -> str:
        shown = ", ".join(_shown(name, module) for name, module in self._modules.items())
        return f"Islands({len(self)} kept in FP32: {shown})"


def keep_fp32(model: nn.Module, *patterns: str | type[nn.Module]) -> Islands:
    """Keep modules of ``model`` in FP32 inside autocast, forward and backward, eager and under ``torch.compile``.

    ``patterns`` are module names as in ``model.named_modules()``, with ``fnmatch`` wildcards (``*`` crosses dots), or
    module types (subclasses included). A matched ``ModuleList`` or ``ModuleDict``, which has no forward of its own,
    stands for its members. A name pattern never matches the model itself; a type does.

    A matched module runs with autocast off; half-precision tensors in its arguments, keyword arguments and nested
    lists, tuples and mappings are cast up to FP32 (FP64 stays). **Its outputs stay FP32**: autocast casts them down
    where the next operator wants it. The module's class becomes a subclass of its own class (``IslandLinear``), so
    ``isinstance``, ``state_dict``, ``deepcopy`` and ``pickle`` work as before.

    Sets ``torch._functorch.config.backward_pass_autocast`` to ``"off"`` for the process (what eager backward does):
    call this before the first compiled call.

    Raises :class:`~halfstep.errors.PolicyError` for a pattern that matches nothing and
    :class:`~halfstep.errors.UnsupportedError` for a matched module with half-precision parameters, or one whose class
    cannot be changed (scripted, uninitialised lazy, patched ``forward``). Nothing has changed then.
    """
    if not isinstance(model, nn.Module):
        raise PolicyError(
            f"keep_fp32 was given a model of type {type(model).__name__}",
            'the model first, then its modules: keep_fp32(model, "decoder.*")',
        )
    if not patterns:
        raise PolicyError("keep_fp32 was given no pattern", 'name modules ("decoder.*") or module types')
    modules: dict[str, nn.Module] = {}
    matched: dict[str, tuple[str, ...]] = {}
    for pattern in patterns:
        found = _match(model, pattern)
        matched[pattern if isinstance(pattern, str) else pattern.__qualname__] = tuple(found)
        modules.update(found)
    modules = _once({name: module for name, module in _named(model) if name in modules})
    for name, module in modules.items():
        _refuse(name, module)
    compute_compiled_backward_as_written()
    own = {name for name, module in modules.items() if type(module) not in _BASE_OF}
    for name in own:
        modules[name].__class__ = _island_class(type(modules[name]))
    return Islands(modules, matched, own)


def compute_compiled_backward_as_written() -> None:
    """Let compiled backwards run without autocast, in the dtypes the forward used, as eager ones do.

    torch's default, ``"same_as_forward"``, runs the compiled backward of an FP32 region in half precision where
    autocast was on around the call. Read by torch when a graph is compiled: set it before.
    """
    functorch_config.backward_pass_autocast = "off"


def _match(model: nn.Module, pattern: str | type[nn.Module]) -> dict[str, nn.Module]:
    """The modules one pattern means, by name; containers without a forward are replaced by their members."""
    if isinstance(pattern, str):
        hits = {
            name: module
            for name, module in _named(model)
            if name and (fnmatchcase(name, pattern) or fnmatchcase(_plain(name), pattern))
        }
    elif isinstance(pattern, type) and issubclass(pattern, nn.Module):
        hits = _once({name: module for name, module in _named(model) if isinstance(module, pattern)})
    else:
        raise PolicyError(f"keep_fp32 cannot match {pattern!r}", "give module names (with * and ?) or module types")
    found: dict[str, nn.Module] = {}
    for name, module in hits.items():
        found.update(_members(name, module))
    if not found:
        raise PolicyError(*_unmatched(model, pattern))
    return found


def _members(name: str, module: nn.Module) -> dict[str, nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward:
        return {name: module}
    found: dict[str, nn.Module] = {}
    for child, member in module.named_children():
        found.update(_members(f"{name}.{child}" if name else child, member))
    return found


def _unmatched(model: nn.Module, pattern: str | type[nn.Module]) -> tuple[str, str]:
    names = [_plain(name) for name, _ in _named(model) if name]
    if isinstance(pattern, type):
        kinds = sorted({type(module).__name__ for module in model.modules()})
        return f"keep_fp32: the model has no {pattern.__name__}", f"its module types are {_some(kinds)}"
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or names
    return f'keep_fp32: no module is called "{pattern}"', f"its modules are called {_some(close)}, …"


def _refuse(name: str, module: nn.Module) -> None:
    """Raise for a module that cannot be an island, before anything has changed."""
    shown = _shown(name, module)
    for parameter_name, parameter in module.named_parameters():
        if parameter.dtype in _HALF:
            raise UnsupportedError(
                f"keep_fp32: {shown} holds {parameter_name} in {parameter.dtype}: FP32 arithmetic on rounded values",
                "keep parameters in FP32 (module.float()) and let autocast make the half-precision copies",
            )
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(f"keep_fp32: {shown} is scripted", "call keep_fp32 before torch.jit")
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise UnsupportedError(f"keep_fp32: {shown} is not initialised and will change its class", "run it once first")
    if "forward" in module.__dict__:
        raise UnsupportedError(
            f"keep_fp32: {shown} has a forward patched onto the instance, which an island's forward would not replace",
            "call keep_fp32 before whatever patches forward",
        )


# --- the class of an island ---------------------------------------------------------------------------------------

_BASE_OF: dict[type, type[nn.Module]] = {}  # island class -> the class it came from
_ISLAND_OF: dict[type, type[nn.Module]] = {}  # and back


def _island_class(base: type[nn.Module]) -> type[nn.Module]:
    """The island of a module class: one subclass per class, so that compiled graphs and pickles agree on it."""
    if base in _ISLAND_OF:
        return _ISLAND_OF[base]
    off = _device_types()

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[_RAN] = True  # written, never read here: a read would be guarded and compiled again
        if len(off) == 1:
            with torch.autocast(off[0], enabled=False):
                return base.forward(self, *_up(args), **_up(kwargs))
        with torch.autocast(off[0], enabled=False), torch.autocast(off[1], enabled=False):
            return base.forward(self, *_up(args), **_up(kwargs))

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = base.__reduce_ex__(self, protocol)
        if isinstance(reduced, str) or type(self) is not island:
            return reduced
        # The island class lives in no module, so no pickle can name it: name its base, and make the island again.
        make, arguments, *rest = reduced
        arguments = tuple(base if argument is island else argument for argument in arguments)
        return (_revive, (base, make, arguments), *rest)

    names = {"forward": forward, "__reduce_ex__": reduce_ex, "__module__": __name__, "__doc__": base.__doc__}
    island = type(f"Island{base.__name__}", (base,), names)
    _ISLAND_OF[base], _BASE_OF[island] = island, base
    return island


def _revive(base: type[nn.Module], make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    module = make(*arguments)
    module.__class__ = _island_class(base)
    compute_compiled_backward_as_written()
    return module


@functools.cache
def _device_types() -> tuple[str, ...]:
    """Where autocast may be on: the CPU and, where there is one, the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None or accelerator.type == "cpu" else ("cpu", accelerator.type)


def _up(value: Any) -> Any:
    """``value`` with its half-precision tensors in FP32; the very same object where it holds none.

    Identity matters: a module may fill a cache it was handed. Written in plain loops, which torch.compile traces
    without a break (no comprehension over a view, no ``is`` between containers).
    """
    if not _holds_half(value):
        return value
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, tuple | list):
        items = []
        for item in value:
            items.append(_up(item))
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    risen = dict(value) if type(value) is dict else copy.copy(value)
    for key in list(value):
        risen[key] = _up(value[key])
    return risen


def _holds_half(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype in _HALF
    if isinstance(value, MutableMapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            if _holds_half(item):
                return True
    return False


# --- names --------------------------------------------------------------------------------------------------------


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name it has: a shared module may be meant by its second one."""
    yield from model.named_modules(remove_duplicate=False)


def _once(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The same modules, each under its first name only."""
    first: dict[int, str] = {}
    for name, module in modules.items():
        first.setdefault(id(module), name)
    return {name: modules[name] for name in first.values()}


def _plain(name: str) -> str:
    """The name as the user wrote it, without what wrappers (compile, DDP, FSDP, checkpointing) put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if len(parts) > 1 and parts[0] == "module" else parts)


def _above(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts))]


def _shown(name: str, module: nn.Module) -> str:
    kind = _BASE_OF.get(type(module), type(module)).__name__
    return f"{name} ({kind})" if name else f"the model itself ({kind})"


def _some(names: list[str]) -> str:
    return ", ".join(names[:8])

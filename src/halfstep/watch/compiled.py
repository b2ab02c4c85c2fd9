"""What is compiled: looks end there, and the backward that a compiler writes is read once, when it is written.

Compiled code does not show its operators one by one. But the graph of forward and backward together, from which both
are compiled, says of every operator its dtype, the line it came from and to which forward operator it belongs.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from halfstep.events import BackwardCompiled, Place
from halfstep.watch.autocasts import HALF, name_of
from halfstep.watch.patches import Patches
from halfstep.watch.place import is_users

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
_GRAPHS = "torch._functorch._aot_autograd.graph_compile"
_CACHE = "torch._functorch._aot_autograd.autograd_cache"
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"))
_WRITTEN = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv", "bilinear", "tensordot", "inner")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class Compiled:
    """Forbids looks from the first ``torch.compile`` on, or from the start where something is compiled already."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._patches: Patches | None = None
        self._reading = False

    def install(self, patches: Patches) -> None:
        self._patches = patches
        self._reading = False
        patches.around(torch, "compile", self._before, self._after)  # `module.compile()` and decorators come by here
        if compiled_already():
            self._session.look.forbid("something was compiled before the watch began")
            self._read_graphs()

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not kwargs.get("disable") and not any(os.environ.get(name) == "1" for name in _OFF):
            self._session.look.forbid("the script compiles")

    def _after(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._read_graphs()

    # -- the graph of forward and backward -----------------------------------------------------------------------

    def _read_graphs(self) -> None:
        if self._reading or self._patches is None:
            return
        self._reading = True
        try:
            graphs, cache = importlib.import_module(_GRAPHS), importlib.import_module(_CACHE).AOTAutogradCache
            trace, lookup = graphs.aot_dispatch_autograd_graph, cache._lookup
        except (ImportError, AttributeError):
            return  # another torch: compiled backwards are not judged
        patches = self._patches

        def traced(*args: Any, **kwargs: Any) -> Any:
            result = trace(*args, **kwargs)
            if patches.live:
                patches.observe("reading a compiled graph", self._read, result)
            return result

        def fresh(*args: Any, **kwargs: Any) -> Any:
            # A graph from the cache is not traced, so nobody could read it: under autocast it is traced anew.
            return None if patches.live and _any_autocast() else lookup(*args, **kwargs)

        patches.replace(graphs, "aot_dispatch_autograd_graph", traced)
        patches.replace(cache, "_lookup", fresh)

    def _read(self, result: Any) -> None:
        graph = result[0] if isinstance(result, tuple) else result
        full: dict[int, Any] = {}  # sequence number -> forward operator in FP32
        half: list[tuple[Any, Any]] = []
        for node in graph.graph.nodes:
            value, number = node.meta.get("val"), node.meta.get("seq_nr")
            name = str(node.target).split(".")[1] if node.op == "call_function" and "." in str(node.target) else ""
            if name not in _PRODUCTS or number is None:
                continue
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            dtype = getattr(value, "dtype", None)
            if node.meta.get("partitioner_tag") != "is_backward":
                if dtype is torch.float32 and _is_the_scripts(node):
                    full.setdefault(number, node)
            elif dtype in HALF and number in full:
                half.append((node, full[number]))
        if not half:
            return
        forward = min((f for _, f in half), key=lambda n: n.meta["seq_nr"])
        stack = forward.meta.get("nn_module_stack") or {}
        self._session.stream.emit(
            BackwardCompiled,
            at=_line(forward.meta.get("stack_trace") or "") or self._session.place(),
            dtype=name_of(half[0][0].meta["val"].dtype),
            operators=len(half),
            operator=str(forward.target).split(".")[1],
            module=_module(next(reversed(list(stack.values())), ("",))[0]),
            setting=str(getattr(torch._functorch.config, "backward_pass_autocast", "")),
        )


def compiled_already() -> bool:
    """Whether a compiled callable lives in this process. Imports nothing, and searches only where torch compiled."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends = getattr(frames, "cached_backends", None) or {}
    if all(backend is None for backend in backends.values()):
        return False
    gc.collect()  # what nobody can call any more does not count
    return any(_is_compiled(thing) for thing in gc.get_objects())


def _is_compiled(thing: Any) -> bool:
    if type(thing) is types.FunctionType:
        marks = thing.__dict__
        return "_torchdynamo_orig_callable" in marks and not marks.get("_torchdynamo_disable")
    return type(thing).__name__ == "OptimizedModule"


def _is_the_scripts(node: Any) -> bool:
    """Whether a product is what the script called, not what torch computes in FP32 inside attention and the like."""
    sources = node.meta.get("source_fn_stack")
    return not sources or str(sources[-1][0]).startswith(_WRITTEN)


def _any_autocast() -> bool:
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "xpu", "mps"))


def _line(trace: str) -> Place | None:
    """The user's innermost line of a traced operator's stack."""
    for file, line, function in reversed(_FRAME.findall(trace)):
        if is_users(compile("", file, "exec")):
            return Place(file, int(line), function)
    return None


def _module(name: Any) -> str | None:
    """A module's path as its owner writes it: "L['self'].head" is head."""
    text = re.sub(r"^L\['\w+'\]\.?", "", str(name))
    return text or None

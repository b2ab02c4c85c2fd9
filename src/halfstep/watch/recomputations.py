"""Activation checkpointing: what the first forward computed beside what backward computed again.

Nothing is unpacked and nothing recomputed for our sake. In the first contributions (and then at numbers 2^k) a few
elements of every tensor that a checkpointed forward saves are kept, and those of the recomputation are compared with
them on their device. Custom functions that run their forward again in backward are known by the backward that they
call inside their own: its roots are what they computed again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction, Function
from torch.utils import checkpoint as checkpoints

from halfstep.events import Place, Recomputed
from halfstep.launch import hide
from halfstep.watch.autocasts import Autocasts, Region
from halfstep.watch.look import Operation
from halfstep.watch.modules import Modules
from halfstep.watch.passes import Again, Backing, First, closure, is_plain, recomputing_line
from halfstep.watch.patches import Patches, uncompiled
from halfstep.watch.samples import Sample
from halfstep.watch.stream import Late

if TYPE_CHECKING:
    from halfstep.watch.session import Session

_DENSE = 4  # contributions that are compared from the first on
_TENSORS = 2048  # remembered of one forward
_OWN = ("torch._functorch", "torch._dynamo", "torch._inductor", "torch.distributed")


class _Here(threading.local):
    def __init__(self) -> None:
        self.running: list[First] = []  # checkpointed forwards under way
        self.backings: list[Backing] = []
        self.repeating: list[Again] = []  # recomputations of torch's own under way
        self.depth = 0


class Recomputations:
    def __init__(self, session: Session, autocasts: Autocasts, modules: Modules) -> None:
        self._session = session
        self._autocasts = autocasts
        self._modules = modules
        self._here = _Here()
        self._frames: weakref.WeakKeyDictionary[Any, First] = weakref.WeakKeyDictionary()
        self._functions: weakref.WeakKeyDictionary[Any, First] = weakref.WeakKeyDictionary()
        self._hooks: weakref.WeakKeyDictionary[Any, First] = weakref.WeakKeyDictionary()
        self._repeats: weakref.WeakKeyDictionary[Any, Again] = weakref.WeakKeyDictionary()
        self._again: list[Again] = []

    def install(self, patches: Patches) -> None:
        hook = getattr(checkpoints, "_checkpoint_hook", None)
        again = getattr(checkpoints, "_recomputation_hook", None)
        if isinstance(hook, type) and isinstance(again, type):  # else another torch: those are not judged
            patches.around(hook, "__init__", None, self._after_hook)
            patches.around(hook, "__enter__", self._before_enter)
            patches.around(hook, "__exit__", None, self._after_exit)
            patches.around(again, "__init__", None, self._after_again)
            patches.around(again, "__enter__", self._before_repeat)
            patches.around(again, "__exit__", None, self._after_repeat)
        self._watch_functions(patches)
        for name in ("backward", "grad"):
            patches.around(torch.autograd, name, self._before_backward, self._after_backward, self._failed_backward)
        if self not in self._session.look.lenses:
            self._session.look.lenses.append(self)
        if self._entered not in self._autocasts.listeners:
            self._autocasts.listeners.append(self._entered)
            self._modules.entries.append(self._called)

    @property
    def due(self) -> bool:
        """Whether the contribution that is being computed is one of those compared."""
        number = self._session.stream.micro + 1
        return (number <= _DENSE or number & (number - 1) == 0) and self._session.look.alone

    # -- torch.utils.checkpoint, not reentrant -------------------------------------------------------------------

    def _after_hook(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.due:
            return
        hook, frame = args[0], args[1]
        first = First("checkpoint", self._session.place())
        first.preserves = closure(getattr(frame, "recompute_fn", None)).get("preserve_rng_state")
        self._frames[frame] = self._hooks[hook] = first
        hook.pack_hook = self._packing(hook.pack_hook, lambda tensor: self._keep(first, tensor))

    def _before_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self._hooks.get(args[0])
        if first is not None:
            self._here.running.append(first)

    def _after_exit(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self._hooks.pop(args[0], None)
        if first is not None:
            if first in self._here.running:
                self._here.running.remove(first)
            first.ended()

    def _after_again(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hook, frame = args[0], args[1]()
        first = self._frames.get(frame) if frame is not None else None
        if first is None:
            return
        again = self._repeats[hook] = Again(first)
        self._again.append(again)
        hook.pack_hook = self._packing(hook.pack_hook, lambda tensor: self._compare(again, tensor))

    def _before_repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        again = self._repeats.get(args[0])
        if again is not None:
            self._here.repeating.append(again)

    def _after_repeat(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        again = self._repeats.pop(args[0], None)
        if again is not None and again in self._here.repeating:
            self._here.repeating.remove(again)

    def _packing(self, pack: Callable[[Any], Any], look: Callable[[torch.Tensor], None]) -> Callable[[Any], Any]:
        def packing(tensor: Any) -> Any:
            self._look_at(look, tensor)
            return pack(tensor)

        hide(packing)
        return uncompiled(packing, inner=False)

    def _look_at(self, look: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> None:
        try:
            with self._session.look.silent(), torch.no_grad():
                look(tensor)
        except Exception as error:
            self._session.fault("comparing a recomputation", error)

    def _keep(self, first: First, tensor: torch.Tensor) -> None:
        if not first.autocast:
            first.autocast = self._autocasts.state(tensor.device.type)
        if len(first.samples) < _TENSORS:
            first.samples.append(Sample(tensor))

    def _compare(self, again: Again, tensor: torch.Tensor) -> None:
        if not again.autocast:
            again.autocast = self._autocasts.state(tensor.device.type)
        again.meets(tensor)

    # -- custom functions, torch's reentrant checkpoint among them -----------------------------------------------

    def _watch_functions(self, patches: Patches) -> None:
        original = vars(Function)["apply"].__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not patches.live:
                return original(cls, *args, **kwargs)
            first = self._applying(cls)
            if first is None:
                return original(cls, *args, **kwargs)
            try:
                result = original(cls, *args, **kwargs)
            finally:
                if first in self._here.running:
                    self._here.running.remove(first)
            self._applied(cls, first, result)
            return result

        hide(apply)
        uncompiled(apply, inner=False)
        patches.replace(Function, "apply", classmethod(apply))
        for name in ("apply", "apply_boxed"):
            patches.around(BackwardCFunction, name, self._before_custom, self._after_custom, self._failed_custom)

    def _applying(self, cls: Any) -> First | None:
        """A custom function is about to run; None where it is not to be compared."""
        try:
            if not self.due or cls.__module__.startswith(_OWN):
                return None
            reentrant = cls is checkpoints.CheckpointFunction
            first = First("reentrant" if reentrant else cls.__name__, self._session.place())
            self._here.running.append(first)
            return first
        except Exception as error:
            self._session.fault("before a custom function", error)
            return None

    def _applied(self, cls: Any, first: First, result: Any) -> None:
        try:
            first.ended()
            outputs = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if is_plain(t)]
            node = next((t.grad_fn for t in outputs if t.grad_fn is not None), None)
            if getattr(node, "_forward_cls", None) is not cls:
                return
            first.autocast = self._autocasts.state(outputs[0].device.type)
            if first.by == "reentrant":
                first.preserves = getattr(node, "preserve_rng_state", None)
            with self._session.look.silent(), torch.no_grad():
                first.samples = [Sample(t) for t in outputs]
            self._functions[node] = first
        except Exception as error:
            self._session.fault("after a custom function", error)

    def _before_custom(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = self._functions.get(args[0]) if len(self._functions) else None
        self._here.backings.append(Backing(first, len(self._autocasts.stack)))

    def _after_custom(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._here.backings.pop()

    def _failed_custom(self, token: Any, error: BaseException) -> None:
        self._here.backings.pop()

    def _entered(self, region: Region) -> None:
        """A region was entered: the first one inside a custom function's backward is what it recomputes in."""
        backings = self._here.backings
        if backings and backings[-1].region is None and len(self._autocasts.stack) == backings[-1].depth + 1:
            backings[-1].region = region

    def _called(self, module: Any, args: Any, kwargs: Any, at: Place | None) -> None:
        backings = self._here.backings
        if backings and backings[-1].at is None:
            backings[-1].at = recomputing_line() or at
            backings[-1].called = True

    # -- around a backward ---------------------------------------------------------------------------------------

    def _before_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        here = self._here
        here.depth += 1
        backing = here.backings[-1] if here.backings else None
        if backing is None or backing.first is None:
            return
        first, backing.first = backing.first, None  # its first inner backward tells
        if first.by != "reentrant" and not backing.repeats(first):
            return
        again = Again(first)
        again.operators = backing.operators
        again.dtypes = again.operators.other_dtype(first.operators)
        roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
        tensors = [roots] if isinstance(roots, torch.Tensor) else [t for t in roots if is_plain(t)]
        if len(tensors) != len(first.samples):
            kept = [s for s in first.samples if any(s.shape == t.shape for t in tensors)]
            if len(kept) != len(tensors):
                return  # something else was differentiated
            first.samples = kept
        if any(s.shape != t.shape for s, t in zip(first.samples, tensors, strict=True)):
            return
        region = backing.region
        again.autocast = self._autocasts.state(tensors[0].device.type) if region is None else (region.half or "off")
        with torch.no_grad():
            for tensor in tensors:
                again.meets(tensor)
        if first.by != "reentrant":
            again.at = self._written_at(backing) or first.at
        self._again.append(again)

    def _written_at(self, backing: Backing) -> Place | None:
        """The line of the custom backward that recomputes, where that backward is the user's own."""
        inner = self._session.place()
        if inner is None or not inner.function.endswith(("backward", "vjp")):
            return None
        if backing.region is not None and backing.region.at is not None and backing.region.at.file == inner.file:
            return backing.region.at
        return backing.at or inner

    def _failed_backward(self, token: Any, error: BaseException) -> None:
        self._here.depth -= 1
        if not self._here.depth and not self._here.backings:
            self._tell()

    def _after_backward(self, token: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._here.depth -= 1
        if not self._here.depth and not self._here.backings:
            self._tell()

    def _tell(self) -> None:
        """One event for each line that checkpoints, of all that was recomputed for it in this backward."""
        again, self._again = self._again, []
        groups: dict[tuple[str, Place | None], list[Again]] = {}
        for one in again:
            groups.setdefault((one.first.by, one.at), []).append(one)
        for (by, at), members in groups.items():
            worst = next((a for a in members if a.dtypes), None)
            worst = worst or next((a for a in members if a.autocast != a.first.autocast), members[0])
            apart = [d for a in members for d in a.apart]
            drew = next((a.first for a in members if a.first.drew_at is not None), worst.first)
            with torch.no_grad():
                together = torch.stack(apart).amax() if apart and len({d.device for d in apart}) == 1 else None
            self._session.stream.emit(
                Recomputed,
                at=at,
                by=by,
                dtype=worst.dtypes[0] if worst.dtypes else "",
                again_dtype=worst.dtypes[1] if worst.dtypes else "",
                autocast=worst.first.autocast,
                again_autocast=worst.autocast,
                difference=None if together is None else Late(together),
                tensors=len(apart),
                drew=tuple(sorted({d for a in members for d in a.first.drew})),
                drew_at=drew.drew_at,
                preserves=worst.first.preserves,
                changed=next(filter(None, (a.operators.other_numbers(a.first.operators) for a in members)), ""),
            )

    # -- operators -----------------------------------------------------------------------------------------------

    def before(self, operation: Operation) -> None: ...

    def after(self, operation: Operation) -> None:
        """What ran in first forwards and recomputations; random numbers from a generator of the script's own."""
        here = self._here
        if here.running:
            own = operation.kwargs.get("generator") is not None
            for first in here.running:
                first.operators.note(operation)
                if own and first.drew_at is None:
                    first.drew += ("generator",)
                    first.drew_at = operation.at
        for again in here.repeating:
            again.operators.note(operation)
        if here.backings and here.backings[-1].first is not None and torch.is_grad_enabled():
            backing = here.backings[-1]
            backing.operators.note(operation)
            if backing.operators and backing.at is None:
                backing.at = recomputing_line()


for function in (Recomputations._look_at, Recomputations._applying, Recomputations._applied):
    uncompiled(function)

"""Waits for a module that the script itself will import: what the script sets up before that import still counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, call: Callable[[], object]) -> None:
    """Call ``call()`` as soon as the module ``name`` was imported; at once if it is there already.

    The module is found, loaded and named by its own loader. An exception in ``call`` is the importer's to see.
    """
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Arrival(name, call))


class _Arrival:
    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(name, path, target)
            if found is not None:
                self._follow(found)
                return found
        return None

    def _follow(self, found: ModuleSpec) -> None:
        loader = found.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # this instance's only: the class's own shows again
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._call()

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            sys.meta_path.remove(self)

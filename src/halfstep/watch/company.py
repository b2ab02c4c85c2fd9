"""The company of a run: the processes its script starts. Those that train get a session of their own, when they do.

A child is left alone until it initialises a process group, makes an optimizer or runs a backward: a data loader's
worker never does. Until then three functions of torch are wrapped in it, and nothing else happens.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from halfstep.launch import attend, hide, in_spawned
from halfstep.launch.target import Hooks, Target
from halfstep.watch.session import Session
from halfstep.watch.told import Teller


class Company:
    """Follows the children of this process; their records come to lie in ``folder``, which the first of them makes.

    ``limit``: applied updates after which each of them ends.
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit = limit

    def follow(self) -> None:
        """Follow what multiprocessing spawns from now on; for forks call `forked` in each child."""
        in_spawned(__name__, "arrive", str(self.folder), self.limit)

    def forked(self, parents: Session | None = None) -> None:
        """In a forked child: quick, and silent until it trains. ``parents``: the session that its parent was in."""
        if parents is not None:
            parents.sleep()
        Waiting(self, parents).install()


def arrive(folder: str, limit: int | None) -> None:
    """In a spawned child, once torch was imported."""
    Waiting(Company(Path(folder), limit)).install()


class Waiting:
    """A child in which nothing has been trained yet."""

    def __init__(self, company: Company, parents: Session | None = None) -> None:
        self._company = company
        self._parents = parents
        self._pid = os.getpid()
        self._wrapped: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        self._wrap(torch.optim.Optimizer, "__init__", self._before)
        self._wrap(torch.autograd, "backward", self._before)
        if torch.distributed.is_available():
            from torch.distributed import distributed_c10d

            for owner in (distributed_c10d, torch.distributed):
                self._wrap(owner, "init_process_group", self._after)

    def _wrap(self, owner: Any, name: str, how: Callable[[Any, str, Any], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        wrapper = functools.wraps(original)(how(owner, name, original))
        hide(wrapper)
        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, original, wrapper))

    def _before(self, owner: Any, name: str, original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._begin():
                return original(*args, **kwargs)
            return getattr(owner, name)(*args, **kwargs)  # as the session sees it

        return call

    def _after(self, owner: Any, name: str, original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._begin()
            return result

        return call

    def _begin(self) -> bool:
        """Watch this process; False where it was not to be."""
        wrapped, self._wrapped = self._wrapped, []
        for owner, name, original, wrapper in reversed(wrapped):
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        if not wrapped or os.getpid() != self._pid or Session._active is not None:
            return False
        try:
            if self._parents is not None:
                self._parents.leave()
            session = Session(
                record=self._company.folder,
                tell=Teller(lambda: Session._active.rank if Session._active is not None else None),
                limit=self._company.limit,
                among_others=True,
            )
            attend(Member(session, self._company))
            session.start()
        except Exception as error:
            if sys.__stderr__ is not None:
                print(f"halfstep: not watching process {os.getpid()}: {error}", file=sys.__stderr__)
            return False
        return True


class Member:
    """Hooks of a child that trains: it ends its record and says nothing."""

    def __init__(self, session: Session, company: Company) -> None:
        self._session = session
        self._company = company

    def before(self, target: Target) -> None: ...

    def raised(self, exc: BaseException) -> None:
        self._session.raised(exc)

    def finish(self, code: int | None, by: str) -> int | None:
        with suppress(OSError):
            self._session.finish(code, by)
        return None

    def on_fork(self) -> Hooks | None:
        self._company.forked(self._session)
        return None

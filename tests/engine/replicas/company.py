"""Processes for tests of many replicas: started once, told over pipes what to run, a new gloo group for each case.

A case is a function of ``tests.engine.replicas.cases`` by name, or "module:name"; every member of the group runs it
with the same arguments. What each returns comes back in the order of ranks; an exception comes back as ``Failure``.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 8  # seconds a member waits for another
CASES = "tests.engine.replicas.cases"


@dataclass
class Failure:
    """What a member raised: type, message, and all of it for people."""

    kind: str
    message: str
    trace: str


class Company:
    """Up to ``most`` processes, started as they are needed."""

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed.fsdp", "halfstep.engine.manager", CASES])
        self._members: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._cases = 0

    def run(self, case: str, world: int, **arguments: Any) -> list[Any]:
        """Run a case on ``world`` ranks; raises where a member failed."""
        results = self.attempt(case, world, **arguments)
        failed = [(rank, result) for rank, result in enumerate(results) if isinstance(result, Failure)]
        for rank, failure in sorted(failed, key=lambda entry: entry[1].kind == "ReplicaLostError"):
            raise AssertionError(f"rank {rank} of {case}: {failure.trace}")
        return results

    def attempt(self, case: str, world: int, **arguments: Any) -> list[Any]:
        """Run a case on ``world`` ranks; failures are among the results, None where a member died."""
        assert world <= self.most
        while len(self._members) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._cases += 1
        meeting = str(Path(self._folder.name) / f"meeting-{self._cases}")
        members = self._members[:world]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((case, rank, world, meeting, arguments))
        results = []
        for rank, (_, pipe) in enumerate(members):
            if not pipe.poll(PATIENCE * 2):
                self.close()
                raise AssertionError(f"rank {rank} of {case} hangs")
            with contextlib.suppress(EOFError):
                results.append(pipe.recv())
                continue
            results.append(None)  # it died
        return results

    def close(self) -> None:
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []


def _serve(pipe: Connection) -> None:
    """A member: one case after another, until the pipe closes."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            case, rank, world, meeting, arguments = pipe.recv()
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{meeting}",
                    rank=rank,
                    world_size=world,
                    timeout=datetime.timedelta(seconds=PATIENCE),
                )
                module, _, name = case.rpartition(":")
                result = getattr(importlib.import_module(module or CASES), name)(rank, world, **arguments)
            except BaseException as error:
                result = Failure(type(error).__name__, str(error), traceback.format_exc())
            finally:
                with contextlib.suppress(Exception):
                    dist.destroy_process_group()
            pipe.send(result)

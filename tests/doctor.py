"""Runs scripts under the doctor quickly: torch is imported once, each script runs in a fork of this process.

Processes that a script starts itself are followed, and what all of them found is put together.

As a program it scores a folder of cases (broken/, fixed/, clean/ and expected.json) in a fraction of the time that a
fresh interpreter a script takes: ``python -m tests.doctor FOLDER [--only TEXT] [--verbose]``.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which every optimizer imports at its first call: seconds for each fork

from halfstep.events import Finding
from halfstep.report.ranks import Part, merged
from halfstep.watch import Session
from halfstep.watch.company import Company


@dataclass
class Diagnosis:
    """What the doctor found in one script, what the script printed, and what it raised."""

    findings: tuple[Finding, ...]
    summary: dict[str, Any]
    stdout: str = ""
    raised: str | None = None

    @property
    def loud(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity != "info")


def diagnose(path: Path | str, timeout: float = 120.0) -> Diagnosis:
    """Run the script in a fork, watched, and bring back what was found."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        os.setpgid(0, 0)
        code = 1
        try:
            result = _run(Path(path))
            with os.fdopen(sink, "wb") as file:
                pickle.dump(result, file)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(sink)
    data, ends = b"", time.monotonic() + timeout
    with os.fdopen(source, "rb") as file:
        while select.select([file], [], [], max(0.0, ends - time.monotonic()))[0]:
            chunk = file.read1(1 << 16)
            if not chunk:
                break
            data += chunk
        else:
            os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not data:
        raise AssertionError(f"{path} died or hung under the doctor")
    result = pickle.loads(data)
    assert isinstance(result, Diagnosis)
    return result


def _run(path: Path) -> Diagnosis:
    import __main__

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv = [str(path)]
    code = compile(path.read_text(), str(path), "exec")
    space = vars(__main__)
    space.update(__name__="__main__", __file__=str(path))
    out = io.StringIO()
    session = Session()
    raised: str | None = None
    with tempfile.TemporaryDirectory() as folder:
        company = Company(Path(folder) / "record")
        company.follow()
        os.register_at_fork(after_in_child=lambda: company.forked(session))
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            try:
                with session:
                    exec(code, space)
            except SystemExit:
                pass
            except BaseException as error:
                raised = f"{type(error).__name__}: {error}"
        whole = merged(company.folder, [Part(None, session.judge.unfolded(), session.summary)])
    return Diagnosis(whole.findings, whole.summary.as_json(), out.getvalue(), raised)


def score(folder: Path, only: str = "", verbose: bool = False) -> bool:
    """Print what was missed or falsely told; True when nothing was."""
    expected = json.loads((folder / "expected.json").read_text())
    hit = lines = broken = quiet = alarms = noise = 0
    for kind in ("broken", "fixed", "clean"):
        for path in sorted((folder / kind).glob("*.py")):
            if only not in str(path):
                continue
            try:
                found = diagnose(path)
            except AssertionError as error:
                print("DIED", path.name, error)
                continue
            said = [(f.rule, f.at.line if f.at else None, f.severity) for f in found.findings]
            if kind != "broken":
                quiet += 1
                alarms += bool(found.loud)
                if found.loud or (verbose and said):
                    print("ALARM" if found.loud else "info ", f"{kind}/{path.name}", said)
                continue
            broken += 1
            want = expected[path.name]
            right = [s for s in said if s[2] != "info" and s[0] in want["rules"]]
            at_line = [s for s in right if s[1] is not None and any(abs(s[1] - n) <= 2 for n in want["lines"])]
            hit += bool(right)
            lines += bool(at_line)
            other = [s for s in said if s[2] != "info" and s[0] not in want["rules"]]
            noise += len(other)
            if verbose or not at_line or other:
                verdict = "ok  " if at_line else "RULE" if right else "MISS"
                print(verdict, path.name, "want", want["rules"], want["lines"], "got", said, found.raised or "")
    print(f"recall {hit}/{broken}, with line {lines}/{broken}; noise {noise}; false alarms {alarms}/{quiet}")
    return lines == broken and not alarms and not noise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    sys.exit(0 if score(options.folder, options.only, options.verbose) else 1)

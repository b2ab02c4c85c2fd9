"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from halfstep.engine.contribute import Contributor
from halfstep.engine.updater import Updater


@pytest.fixture(params=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Late: the path of an accelerator, here on CPU tensors. No outcome is known when ``step`` returns."""
    if request.param == "late":
        for kind in (Contributor, Updater):
            monkeypatch.setattr(kind, "host", property(lambda self: False, lambda self, value: None), raising=False)
    return bool(request.param == "late")

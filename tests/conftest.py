"""What one module of tests compiled is forgotten before the next: where something compiled lives, no look is taken."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled() -> None:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()

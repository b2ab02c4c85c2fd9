"""Fixtures of the tests with many replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engine.replicas.company import Company


@pytest.fixture(scope="session")
def company() -> Iterator[Company]:
    started = Company()
    yield started
    started.close()

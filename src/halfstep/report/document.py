"""The `--json` document (design, section 4): strict JSON, one schema, nothing that is not plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from halfstep.checks.judge import Summary
from halfstep.events import SCHEMA, Finding, plain


def document(findings: Sequence[Finding], summary: Summary, code: int | str | None, by: str) -> dict[str, Any]:
    """The findings and summary of a run as plain data; `code` is the exit status as the script gave it."""
    return {
        "schema": SCHEMA,
        "exit": {"code": code, "by": by},
        "summary": plain(summary.as_json()),
        "findings": [f.as_json() for f in findings],
    }


def dump(doc: dict[str, Any]) -> str:
    return json.dumps(doc, indent=1, allow_nan=False) + "\n"

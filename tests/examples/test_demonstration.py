"""The demonstration of the README: each usual loop is found out, each mended one is silent and exact."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demonstration  # noqa: E402

RULE = {
    "accelerate_loop": "mean-of-means",
    "lightning_trainer": "mean-of-means",
    "transformers_loop": "mean-of-means",
    "tutorial_fp16": "clip-scaled-gradients",
}
LINE = {  # a text of the line that is named
    "accelerate_loop": ("accelerator.backward(loss)", "F.cross_entropy"),
    "lightning_trainer": ("F.cross_entropy", "trainer.fit"),
    "transformers_loop": ("loss.backward()", ".loss / GROUP"),
    "tutorial_fp16": ("clip_grad_norm_",),
}


@pytest.mark.ecosystem
@pytest.mark.processes
@pytest.mark.parametrize("name", list(demonstration.SCRIPTS))
def test_a_usual_loop_and_its_mended_twin(name: str) -> None:
    library = demonstration.SCRIPTS[name]
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    ((usual, right),) = demonstration.run(name)
    assert [f["rule"] for f in usual.findings] == [RULE[name]]
    (finding,) = usual.findings
    source = Path(finding["file"]).read_text().splitlines()[finding["line"] - 1]
    assert any(text in source for text in LINE[name]), source
    assert finding["fix"]
    assert finding["evidence"]
    assert usual.error > 0.09
    assert right.findings == []
    assert right.error < (5e-3 if name == "tutorial_fp16" else 1e-5)

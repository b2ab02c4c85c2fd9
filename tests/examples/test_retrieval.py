"""Retrieval: the trainer's own manager and ours, bit for bit; and that it learns."""

from __future__ import annotations

import email
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrieval
import signatures
from halfstep import MixedPrecisionManager
from signatures import PADDING, PIECES, encode, pairs

SMALL = Path(email.__file__).parent


class PlainManager:
    """What such trainers carry: one flag, four verbs, a scaler; the schedule moves whatever happened."""

    def __init__(self, activated: bool, dtype: torch.dtype = torch.bfloat16, init_scale: float = 65536.0) -> None:
        self.activated, self.dtype = activated, dtype
        self.scaler = torch.amp.GradScaler("cpu", init_scale, enabled=activated and dtype == torch.float16)

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.dtype) if self.activated else nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> None:
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0, error_if_nonfinite=False)
        self.scaler.step(optimizer)
        self.scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


class Spy:
    """A manager that remembers the schedule it is given."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.scheduler: Any = None
        self.updates: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Any:
        self.scheduler = scheduler
        self.updates.append(self._manager.step(model, optimizer, scheduler))
        return self.updates[-1]


def trained(manager: Any, updates: int = 4) -> retrieval.LateInteraction:
    torch.manual_seed(0)
    model = retrieval.LateInteraction(width=16, size=8)
    queries, documents = retrieval.tensors(pairs(SMALL))
    retrieval.train(manager, model, queries, documents, updates, seed=0)
    return model


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (lambda: MixedPrecisionManager(False), lambda: PlainManager(False)),
        (lambda: MixedPrecisionManager(True), lambda: PlainManager(True)),
        (
            lambda: MixedPrecisionManager(True, precision="fp16", device="cpu", init_scale=1024.0),
            lambda: PlainManager(True, torch.float16, 1024.0),
        ),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_bit_for_bit_the_parameters_of_the_trainers_own_manager(ours: Any, plain: Any) -> None:
    manager = Spy(ours())
    a, b = trained(manager), trained(plain())
    assert all(update.applied for update in manager.updates)
    assert any(update.clip_coefficient < 1.0 for update in manager.updates)  # clipping takes part in the comparison
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
    torch.manual_seed(0)
    first = retrieval.LateInteraction(width=16, size=8)
    assert not torch.equal(first.out.weight, a.out.weight)  # and it did move


def test_a_skipped_update_does_not_move_the_schedule() -> None:
    ours = Spy(MixedPrecisionManager(True, precision="fp16", device="cpu", init_scale=2.0**40))
    plain = Spy(PlainManager(True, torch.float16, 2.0**40))
    with pytest.warns(UserWarning, match="lr_scheduler"):  # torch's own complaint about the plain one
        trained(plain, 2)
    trained(ours, 2)
    assert [update.skipped for update in ours.updates] == [True, True]
    assert ours.scheduler.last_epoch == 0
    assert plain.scheduler.last_epoch == 2


def test_the_flag_and_the_scaler_can_be_read() -> None:
    for activated in (True, False):
        manager = MixedPrecisionManager(activated)
        assert manager.activated is activated
        assert isinstance(manager.scaler, torch.amp.GradScaler)


def test_pairs_are_those_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(
        'class Ring:\n    def turn(self, by=1):\n        """Turn the ring\n        by so much."""\n'
    )
    (tmp_path / "a.py").write_text('async def open_all(*paths):\n    """Open every one of them."""\ndef bare(): pass\n')
    (tmp_path / "c.py").write_text(
        'def again():\n    """Open every one of them."""\ndef short():\n    """Too short."""\n'
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "d.py").write_text('def left_out():\n    """Tests are not taken here."""\n')
    assert pairs(tmp_path) == [
        ("open_all(*paths)", "Open every one of them."),
        ("Ring.turn(self, by=1)", "Turn the ring by so much."),
    ]


def test_words_become_pieces_and_absent_words_padding() -> None:
    ids = encode(["getHTTPResponse_code", "", "one two three four"], 3)
    assert ids.shape == (3, 3, PIECES)
    assert (ids[0, :, 0] != PADDING).all()  # get, HTTP, Response
    assert (ids[1] == PADDING).all()
    assert torch.equal(ids[0], encode(["get http response"], 3)[0])
    assert 0 < int(ids.max()) < signatures.BUCKETS


def test_max_sim_and_mrr_are_what_they_are_by_hand() -> None:
    torch.manual_seed(0)
    query, document = torch.randn(3, 4, 5), torch.randn(2, 6, 5)
    scores = retrieval.max_sim(query, document)
    for q in range(3):
        for n in range(2):
            by_hand = sum(max(float(w @ v) for v in document[n]) for w in query[q])
            assert float(scores[q, n]) == pytest.approx(by_hand, rel=1e-5)

    class Known(nn.Module):
        """Document n is worth n; the queries ask for all alike: the right one of query q has rank count - q."""

        def query(self, ids: Tensor) -> Tensor:
            return torch.ones(len(ids), 1, 1)

        def document(self, ids: Tensor) -> Tensor:
            return torch.arange(len(ids)).float()[:, None, None]

    count = 12
    reached = retrieval.mrr(MixedPrecisionManager(False), Known(), torch.zeros(count), torch.zeros(count))  # type: ignore[arg-type]
    assert reached == pytest.approx(sum(1 / rank for rank in range(1, 11)) / count)
    assert reached == pytest.approx(retrieval.CHANCE * retrieval.HELD_OUT / count)


def test_it_learns_five_times_better_than_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert retrieval.main(["--updates", "12", "--json", str(tmp_path / "record.json")]) == 0
    assert "times chance" in capsys.readouterr().out
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["mrr_at_10"] >= 5 * written["chance"]
    assert written["record"]["counters"]["applied"] == 12

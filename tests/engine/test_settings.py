"""Settings and arguments that cannot be meant: one clear error of halfstep's own tree, with the fix in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep import HalfstepError, MisuseError, MixedPrecisionManager, PolicyError, WeightError, tokens
from halfstep.report.run_page import run_page

NAN = float("nan")


@pytest.mark.parametrize(
    "policy",
    [
        {"max_norm": "2"},
        {"max_norm": True},
        {"max_norm": -1},
        {"max_norm": NAN},
        {"max_norm": torch.ones(2)},
        {"init_scale": "2"},
        {"init_scale": True},
        {"init_scale": float("inf")},
        {"min_scale": "0"},
        {"min_scale": -1.0},
        {"min_scale": 0},
        {"min_scale": 1e-44},
        {"growth_factor": "2"},
        {"growth_factor": float("inf")},
        {"growth_factor": NAN},
        {"backoff_factor": "0.5"},
        {"backoff_factor": NAN},
        {"growth_interval": 2.5},
        {"growth_interval": "2"},
        {"growth_interval": 0},
        {"growth_interval": True},
        {"dynamic": "no"},
        {"dynamic": None},
        {"monitor": "no"},
        {"scheduler_unit": "aplied"},
        {"scheduler_unit": None},
        {"on_nonfinite": ["skip"]},
        {"activated": 0.5},
        {"activated": []},
        {"activated": None},
        {"device": 3.5},
        {"device": "gpu"},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_meant(policy: dict[str, Any]) -> None:
    (name,) = policy
    with pytest.raises(PolicyError, match=name) as caught:
        MixedPrecisionManager(**policy)
    assert caught.value.fix


def test_settings_in_other_clothes_are_taken() -> None:
    manager = MixedPrecisionManager(
        1,  # type: ignore[arg-type]
        precision="fp16",
        device="cpu",
        max_norm=torch.tensor(3.0),  # type: ignore[arg-type]
        growth_interval=100.0,  # type: ignore[arg-type]
        init_scale=8,
    )
    assert manager.activated is True
    assert manager.max_norm == 3.0
    policy = manager.policy()["loss_scale"]
    assert (policy["scale"], policy["growth_interval"]) == (8.0, 100)


class Loop:
    def __init__(self, precision: str = "fp16") -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = MixedPrecisionManager(precision=precision, device="cpu")

    def loss(self) -> Tensor:
        with self.manager.context():
            out: Tensor = self.model(torch.ones(4, 3))
        return out.float().square().mean()


def set_scale(loop: Loop) -> None:
    loop.manager.loss_scale = "big"  # type: ignore[assignment]


ARGUMENTS: dict[str, tuple[Callable[[Loop], Any], type[HalfstepError], str]] = {
    "a scale in words": (set_scale, PolicyError, "loss_scale"),
    "no state": (lambda r: r.manager.load_state_dict(None), PolicyError, "NoneType"),  # type: ignore[arg-type]
    "a path for a state": (lambda r: r.manager.load_state_dict("run.pt"), PolicyError, "str"),  # type: ignore[arg-type]
    "a number checked": (lambda r: r.manager.check(3, "x"), MisuseError, "int"),  # type: ignore[arg-type]
    "inputs by name": (lambda r: r.manager.backward(r.loss(), inputs="encoder"), PolicyError, "inputs="),
    "inputs of names": (lambda r: r.manager.backward(r.loss(), inputs=["weight"]), PolicyError, "inputs="),
    "inputs, a number": (lambda r: r.manager.backward(r.loss(), inputs=3), PolicyError, "inputs="),
    "a weight as text": (lambda r: r.manager.backward(r.loss(), weight="8"), WeightError, "'8'"),
    "a flag as weight": (lambda r: r.manager.backward(r.loss(), weight=True), WeightError, "True"),
    "a mask as weight": (lambda r: r.manager.backward(r.loss(), weight=torch.tensor(True)), WeightError, "True"),
    "a list for one loss": (lambda r: r.manager.backward(r.loss(), weight=[1, 2]), WeightError, "1 loss and 2 weights"),
    "groups the wrong way round": (lambda r: r.manager.groups(4, [r, r]), PolicyError, "other way round"),  # type: ignore[arg-type]
    "drop_last in words": (lambda r: r.manager.groups([r], 1, drop_last="no"), PolicyError, "drop_last"),  # type: ignore[arg-type]
    "a complex loss": (lambda r: r.manager.backward(r.loss() * 1j), MisuseError, "complex"),
    "inputs without gradients": (
        lambda r: r.manager.backward(r.loss(), inputs=[torch.ones(2)]),
        PolicyError,
        r"inputs= holds a tensor of shape \(2,\) that requires no gradient",
    ),
    "an empty state": (lambda r: r.manager.load_state_dict({}), PolicyError, "empty"),
    "keep_fp32 without a model": (lambda r: r.manager.keep_fp32(None, "a"), PolicyError, "NoneType"),
    "a model by name": (lambda r: r.manager.groups([r], 1, model="ddp"), PolicyError, "model='ddp'"),
    "tokens of a number": (lambda r: tokens(3.5), PolicyError, r"tokens\(3.5\)"),
    "tokens of nothing": (lambda r: tokens(None), PolicyError, r"tokens\(None\)"),
    "tokens but a text": (lambda r: tokens(ignore_index="x"), PolicyError, "ignore_index='x'"),
    "tokens as they are": (lambda r: r.manager.groups([r], 1, weight=tokens), PolicyError, "not called"),
    "a function a term": (
        lambda r: r.manager.groups([r], 1, weight=[len, len]),
        PolicyError,
        "one function that returns a weight for each term",
    ),
    "a page of a manager": (lambda r: run_page(r.manager), PolicyError, "MixedPrecisionManager"),
    "a page of nothing": (lambda r: run_page({}), PolicyError, "without a status"),
    "a size that would fill the screen": (
        lambda r: r.manager.groups([r], torch.zeros(1000)),  # type: ignore[arg-type]
        PolicyError,
        r"^group size of type Tensor",
    ),
}


@pytest.mark.parametrize(
    ("rule", "meant"),
    [
        ({"ids": 99}, "ids= names the examples"),
        ({"weight": 3}, "lambda batch: 3"),
        ({"weight": tokens("y")}, "the key of the labels"),
    ],
)
def test_a_key_that_is_not_there(rule: dict[str, Any], meant: str) -> None:
    groups = Loop().manager.groups([(torch.ones(2), torch.ones(2))], 1, **rule)
    with pytest.raises(PolicyError, match="a micro-batch of type tuple has no") as caught:
        next(groups)
    assert meant in caught.value.fix


@pytest.mark.parametrize("kind", ["GradScaler", "SGD"])
def test_what_is_no_scheduler_is_told_before_the_update(kind: str) -> None:
    loop = Loop()
    loop.manager.backward(loop.loss())
    before = loop.model.weight.detach().clone()
    with pytest.raises(PolicyError, match=f"{kind} was given to manager.step as a scheduler"):
        loop.manager.step(loop.model, loop.optimizer, torch.amp.GradScaler("cpu") if kind != "SGD" else loop.optimizer)
    assert torch.equal(before, loop.model.weight)
    assert loop.manager.step(loop.model, loop.optimizer).applied


def test_a_state_that_is_not_whole_changes_nothing() -> None:
    source, loop = Loop(), Loop()
    for _ in range(2):
        source.manager.backward(source.loss())
        source.manager.step(source.model, source.optimizer)
    source.manager.loss_scale = 4.0
    state, before = source.manager.state_dict(), loop.manager.state_dict()
    broken = [{k: v for k, v in state.items() if k != gone} for gone in state if gone not in ("rank", "reference")]
    broken += [state | {name: "x"} for name in state if name not in ("rank", "reference")]
    broken += [state | {"version": 99}, state | {"counters": {}}, state | {"scaler": {"scale": 1.0}}]
    for given in broken:
        with pytest.raises(PolicyError) as caught:
            loop.manager.load_state_dict(given)
        assert caught.value.fix
        assert str(loop.manager.state_dict()) == str(before)
    loop.manager.load_state_dict(state)
    assert loop.manager.loss_scale == 4.0


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_cannot_be_meant(name: str) -> None:
    loop = Loop()
    call, error, match = ARGUMENTS[name]
    with pytest.raises(error, match=match) as caught:
        call(loop)
    assert caught.value.fix
    assert len(str(caught.value)) < 500
    assert loop.manager.pending == 0
    assert loop.model.weight.grad is None
    loop.manager.backward(loop.loss())
    assert loop.manager.step(loop.model, loop.optimizer).applied


@pytest.mark.parametrize(("precision", "scaled"), [("bf16", False), ("fp32", False), ("fp16", True)])
def test_a_half_loss_is_refused_for_the_reason_that_holds(precision: str, scaled: bool) -> None:
    loop = Loop(precision)
    with pytest.raises(MisuseError, match="bfloat16 scalar") as caught:
        loop.manager.backward(loop.loss().bfloat16())
    assert ("loss scale" in str(caught.value)) is scaled


def test_one_of_a_thing_is_called_one() -> None:
    loop = Loop()
    loop.manager.backward(loop.loss())
    with pytest.raises(MisuseError, match="with 1 contribution pending"):
        loop.manager.loss_scale = 2.0
    with pytest.raises(MisuseError, match="with 1 contribution pending"):
        loop.manager.state_dict()
    stranger = nn.Linear(3, 2)
    with pytest.raises(MisuseError, match="the one pending contribution has not reached"):
        loop.manager.step(stranger, torch.optim.SGD(stranger.parameters(), lr=0.1))
    loop.optimizer.step()
    with pytest.raises(MisuseError, match="1 contribution was pending"):
        loop.manager.step(loop.model, loop.optimizer)


def test_groups_say_what_they_are() -> None:
    loop = Loop()
    groups = loop.manager.groups([torch.ones(4, 3)] * 5, 2, weight=len)
    assert repr(groups) == "Groups(3 groups of 2 micro-batches, weight len, reduction mean)"
    group = next(groups)
    assert repr(group) == "Group(1: 2 micro-batches, weight 8)"
    loop.manager.discard()
    unknown = loop.manager.groups((b for b in [torch.ones(4, 3)]), 1, drop_last=True)
    assert repr(unknown) == "Groups(groups of 1 micro-batch, weight read from the loss, reduction mean, drop_last)"

"""What a loop does by hand between the manager's verbs: right where it can be, else one clear error, never silence."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from halfstep import MisuseError, MixedPrecisionManager, WeightError

BATCHES = [torch.randn(4, 5, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def square(out: Tensor) -> Tensor:
    return F.mse_loss(out, torch.ones_like(out))


def cross(out: Tensor) -> Tensor:
    return F.cross_entropy(out, torch.arange(len(out)) % 3)


class Loop:
    def __init__(self, precision: str = "fp32", **policy: Any) -> None:
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.manager = MixedPrecisionManager(precision=precision, device="cpu", **policy)

    def forward(self, batch: Tensor = BATCHES[0]) -> Tensor:
        with self.manager.context():
            out: Tensor = self.model(batch)
        return out.float()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


# --- two backwards for one micro-batch ---


@pytest.mark.parametrize("updates", [0, 2])  # weighed and looked at, or the quick path
def test_two_backwards_of_a_micro_batch_whose_weights_are_read_are_refused(updates: int) -> None:
    loop = Loop(max_norm=None)
    for _ in range(updates):
        loop.manager.backward(cross(loop.forward()))
        loop.manager.step(loop.model, loop.optimizer)
    before = loop.weights()
    for group in loop.manager.groups(BATCHES, 2):
        for batch in group:
            out = loop.forward(batch)
            loop.manager.backward(cross(out), retain_graph=True)
            with pytest.raises(WeightError, match=r"micro-batch 1 of group 1 .* second backward") as caught:
                loop.manager.backward(cross(2 * out))
            assert "[" in caught.value.fix
            break
        assert loop.manager.pending == 1
        break
    loop.manager.discard()
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True))


def test_two_losses_of_a_micro_batch_as_a_list_are_their_sum() -> None:
    loop, twin = Loop(max_norm=None), model().double()
    for group in loop.manager.groups(BATCHES, 4):
        for batch in group:
            out = loop.forward(batch)
            loop.manager.backward([cross(out), square(out)])
        loop.manager.step(loop.model, loop.optimizer)
    out = twin(torch.cat(BATCHES).double())
    targets = (torch.arange(4) % 3).repeat(4)
    (F.cross_entropy(out, targets) + square(out)).backward()
    for parameter, reference in zip(loop.model.parameters(), twin.parameters(), strict=True):
        assert reference.grad is not None
        expected = reference - 0.1 * reference.grad
        torch.testing.assert_close(parameter.double(), expected, atol=1e-6, rtol=0)


def test_two_backwards_where_weights_are_known_ahead_are_their_sum() -> None:
    loop, twin = Loop(max_norm=None), model().double()
    for group in loop.manager.groups(BATCHES, 4, weight=len):
        for batch in group:
            out = loop.forward(batch)
            loop.manager.backward(cross(out), retain_graph=True)
            loop.manager.backward(square(out))
        update = loop.manager.step(loop.model, loop.optimizer)
    assert update.weight == 16
    out = twin(torch.cat(BATCHES).double())
    (F.cross_entropy(out, (torch.arange(4) % 3).repeat(4)) + square(out)).backward()
    for parameter, reference in zip(loop.model.parameters(), twin.parameters(), strict=True):
        assert reference.grad is not None
        torch.testing.assert_close(parameter.double(), reference - 0.1 * reference.grad, atol=1e-6, rtol=0)


def test_two_backwards_kept_to_models_of_their_own_are_two_losses() -> None:
    first, second = model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    manager = MixedPrecisionManager(precision="fp32", max_norm=None)
    for group in manager.groups(BATCHES, 2):
        for batch in group:
            manager.backward(cross(first(batch)), inputs=first)
            manager.backward(cross(second(batch)), inputs=second)
        updates = [manager.step(m, o) for m, o in zip((first, second), optimizers, strict=True)]
    assert [u.weight for u in updates] == [8.0, 8.0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# --- gradients changed by hand ---


def clip_norm(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def clip_value(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.5)


def multiply(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


EDITS = [clip_norm, clip_value, multiply]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("when", ["first update", "later", "between contributions"])
def test_gradients_changed_by_hand_while_they_carry_the_scale(edit: Callable[[Loop], None], when: str) -> None:
    loop = Loop("fp16", init_scale=2.0**10)
    if when == "later":
        loop.manager.backward(cross(loop.forward()))
        assert loop.manager.step(loop.model, loop.optimizer).applied
    before, scale = loop.weights(), loop.manager.loss_scale
    loop.manager.backward(cross(loop.forward()))
    edit(loop)
    if when == "between contributions":
        loop.manager.backward(cross(loop.forward()))
    with pytest.raises(MisuseError, match=r"changed in place .* loss scale 1024") as caught:
        loop.manager.step(loop.model, loop.optimizer)
    assert "max_norm" in caught.value.fix
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True))
    assert loop.manager.loss_scale == scale
    loop.manager.discard()
    loop.manager.backward(cross(loop.forward()))
    assert loop.manager.step(loop.model, loop.optimizer).applied


def test_gradients_changed_by_hand_before_their_denominator_is_applied() -> None:
    loop = Loop("bf16", max_norm=None)
    for weight in (3, 5):
        loop.manager.backward(cross(loop.forward()), weight=weight)
    clip_norm(loop)
    with pytest.raises(MisuseError, match=r"changed in place .* total weight of 8"):
        loop.manager.step(loop.model, loop.optimizer)


@pytest.mark.parametrize("edit", EDITS)
def test_gradients_that_are_the_real_ones_may_be_changed_and_the_record_tells(edit: Callable[[Loop], None]) -> None:
    loop, twin = Loop("bf16", max_norm=None), Loop("bf16", max_norm=None)
    for _ in range(2):
        loop.manager.backward(cross(loop.forward()))
        edit(loop)
        loop.manager.step(loop.model, loop.optimizer)
        cross(twin.forward()).backward()
        edit(twin)
        twin.optimizer.step()
        twin.optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(loop.weights(), twin.weights(), strict=True))
    (note,) = loop.manager.report()["notes"]
    assert note["note"] == "gradients changed by hand"
    assert note["count"] == 2


def test_hooks_that_change_gradients_inside_backward_are_the_users_own() -> None:
    loop = Loop("fp16", init_scale=2.0**10)

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    for _ in range(3):
        loop.manager.backward(cross(loop.forward()))
        assert loop.manager.step(loop.model, loop.optimizer).applied


def test_gradients_replaced_by_hand_are_called_replaced() -> None:
    loop = Loop("fp32")
    loop.manager.backward(cross(loop.forward()))
    for parameter in loop.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
    with pytest.raises(MisuseError, match="replaced"):
        loop.manager.step(loop.model, loop.optimizer)


# --- optimizers and schedules that do not belong ---


def test_two_optimizers_over_the_same_parameters() -> None:
    loop = Loop()
    second = torch.optim.Adam(loop.model[0].parameters())
    before = loop.weights()
    loop.manager.backward(cross(loop.forward()))
    with pytest.raises(MisuseError, match=r"2 parameters .* SGD and Adam: 0\.weight, 0\.bias"):
        loop.manager.step(loop.model, [loop.optimizer, second])
    with pytest.raises(MisuseError, match=r"given twice|SGD and SGD"):
        loop.manager.step(loop.model, [loop.optimizer, loop.optimizer])
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True))
    assert loop.manager.step(loop.model, loop.optimizer).applied


@pytest.mark.parametrize("unit", ["applied", "attempted", "calls"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_scheduler_of_another_optimizer(unit: str, nested: bool) -> None:
    loop, other = Loop(scheduler_unit=unit), Loop()
    scheduler: Any = lr_scheduler.StepLR(other.optimizer, 1)
    if nested:
        scheduler = lr_scheduler.ChainedScheduler([scheduler, lr_scheduler.ConstantLR(other.optimizer)])
    before, rate = loop.weights(), other.optimizer.param_groups[0]["lr"]
    loop.manager.backward(cross(loop.forward()))
    with pytest.raises(MisuseError, match=r"(StepLR|ChainedScheduler) schedules another optimizer"):
        loop.manager.step(loop.model, loop.optimizer, scheduler)
    assert other.optimizer.param_groups[0]["lr"] == rate
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True))


def test_schedulers_of_wrapped_and_of_several_optimizers_are_known() -> None:
    loop = Loop()
    parts = [torch.optim.SGD(loop.model[0].parameters(), lr=0.1), torch.optim.SGD(loop.model[2].parameters(), lr=0.1)]

    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's: an optimizer that holds one."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            self._optimizer_step_post_hooks, self._optimizer_step_pre_hooks = OrderedDict(), OrderedDict()

        param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
        state = property(lambda self: self.inner.state)  # type: ignore[assignment]

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    schedulers = [lr_scheduler.StepLR(part, 1, gamma=0.5) for part in parts]
    loop.manager.backward(cross(loop.forward()))
    loop.manager.step(loop.model, [parts[0], Wrapper(parts[1])], schedulers)
    assert [part.param_groups[0]["lr"] for part in parts] == [0.05, 0.05]


# --- a schedule that ends, a scheduler that fails ---


def onecycle(optimizer: torch.optim.Optimizer, updates: int) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=updates)


def inside(optimizer: torch.optim.Optimizer, updates: int) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.ConstantLR(optimizer, total_iters=1)
    return lr_scheduler.SequentialLR(optimizer, [warm, onecycle(optimizer, updates - 1)], milestones=[1])


@pytest.mark.parametrize("make", [onecycle, inside])
@pytest.mark.parametrize("unit", ["applied", "attempted"])
def test_a_schedule_past_its_end_is_refused_before_anything_changes(make: Any, unit: str) -> None:
    loop = Loop(scheduler_unit=unit)
    by_hand = Loop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of SequentialLR
        scheduler, reference = make(loop.optimizer, 4), make(by_hand.optimizer, 4)
    moves = 0
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            reference.step()
            moves += 1
    assert 3 <= moves < 12
    for _ in range(moves):
        loop.manager.backward(cross(loop.forward()))
        assert loop.manager.step(loop.model, loop.optimizer, scheduler).applied
    before, state = loop.weights(), copy.deepcopy(scheduler.state_dict())
    loop.manager.backward(cross(loop.forward()))
    for _ in range(2):
        with pytest.raises(MisuseError, match=r"OneCycleLR .* total_steps") as caught:
            loop.manager.step(loop.model, loop.optimizer, scheduler)
    assert "total_steps" in caught.value.fix
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True))
    assert scheduler.last_epoch == state["last_epoch"]
    assert loop.manager.report()["counters"]["attempted"] == moves
    assert loop.manager.step(loop.model, loop.optimizer).applied  # the pending contribution is still good


def test_a_scheduler_that_fails_leaves_a_settled_update_behind() -> None:
    loop = Loop()

    class Failing(lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            if self.last_epoch == 2:
                raise ZeroDivisionError("no rate for 2")
            return [0.1 for _ in self.base_lrs]

    scheduler = Failing(loop.optimizer)
    loop.manager.backward(cross(loop.forward()))
    loop.manager.step(loop.model, loop.optimizer, scheduler)
    loop.manager.backward(cross(loop.forward()))
    with pytest.raises(MisuseError, match=r"update 2 was applied.*Failing.*no rate for 2") as caught:
        loop.manager.step(loop.model, loop.optimizer, scheduler)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert loop.manager.report()["counters"]["applied"] == 2
    assert loop.manager.pending == 0
    loop.manager.backward(cross(loop.forward()))
    update = loop.manager.step(loop.model, loop.optimizer, scheduler)  # position 3 is fine again
    assert update.applied
    assert update.applied_updates == 3


# --- half precision that never was ---


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_context_that_was_never_entered_is_told(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(precision)
    for _ in range(3):
        loop.manager.backward(cross(loop.model(BATCHES[0])))
        loop.manager.step(loop.model, loop.optimizer)
    (said,) = caplog.messages
    assert "nothing ran in half precision" in said
    assert "manager.context()" in said
    record = loop.manager.report()
    assert record["precision"]["used"] == "fp32"
    assert "never entered" in record["precision"]["autocast"]
    assert [note["note"] for note in record["notes"]] == ["nothing ran in half precision"]
    assert ("scaled for nothing" in record["notes"][0]["message"]) is (precision == "fp16")


@pytest.mark.parametrize("how", ["context", "own autocast"])
def test_half_precision_that_was_is_told_as_well(how: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("bf16")
    for _ in range(2):
        region = torch.autocast("cpu", dtype=torch.bfloat16) if how == "own autocast" else loop.manager.context()
        with region:
            out = loop.model(BATCHES[0])
        loop.manager.backward(cross(out.float()))
        loop.manager.step(loop.model, loop.optimizer)
    assert caplog.messages == []
    precision = loop.manager.report()["precision"]
    assert precision["used"] == "bf16"
    told = {"context": "manager.context() was entered", "own autocast": "never entered; bfloat16 was seen to run"}
    assert told[how] in precision["autocast"]


# --- gradients taken through half precision ---


@pytest.mark.parametrize("outputs", ["half vector", "half sum", "float sum", "grad_outputs"])
def test_gradients_taken_at_the_first_scale_are_finite_and_right(outputs: str) -> None:
    manager = MixedPrecisionManager(precision="fp16", device="cpu")
    critic = model()
    x = BATCHES[0].clone().requires_grad_()
    with manager.context():
        out = critic(x)
    kinds: dict[str, tuple[Tensor, Tensor | None]] = {
        "half vector": (out, torch.ones_like(out)),
        "half sum": (out.sum(), None),
        "float sum": (out.float().sum(), None),
        "grad_outputs": (out.float(), torch.full_like(out.float(), 1.0)),
    }
    root, given = kinds[outputs]
    (taken,) = manager.grad(root, x, grad_outputs=given, create_graph=True)
    assert taken is not None
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(critic.double()(exact).sum(), exact)
    assert taken.isfinite().all()
    assert taken.requires_grad
    torch.testing.assert_close(taken.double(), expected, rtol=1e-2, atol=1e-3)


def test_gradients_too_small_for_fp16_are_kept_and_infinite_ones_stay_infinite() -> None:
    manager = MixedPrecisionManager(precision="fp16", device="cpu")
    x = torch.ones(3, requires_grad=True)
    half = x.half() * 2.0**-10
    (tiny,) = manager.grad((half * 2.0**-10).float().sum() * 2.0**-8, x)
    assert torch.equal(tiny, torch.full((3,), 2.0**-28))  # FP16 ends at 2^-24
    y = torch.zeros(3, requires_grad=True)
    (endless,) = manager.grad(y.sqrt().sum(), y)
    assert endless.isinf().all()

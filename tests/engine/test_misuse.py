"""Every way to hold the verbs wrong: an error that says what was seen and the fix, and nothing changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep import (
    ForeignGradients,
    GroupError,
    HalfstepError,
    MisuseError,
    MixedPrecisionManager,
    PolicyError,
    UnsupportedError,
    WeightError,
)

PRECISIONS = ["fp32", "bf16", "fp16"]


class Run:
    """A model, its optimizer, schedule and manager, after one good update."""

    def __init__(self, precision: str = "fp32", *, fused: bool = True, updates: int = 1, **policy: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.manager = MixedPrecisionManager(precision=precision, **policy)
        for _ in range(updates):
            self.manager.backward(self.loss())
            self.manager.step(self.model, self.optimizer, self.scheduler)

    def loss(self, seed: int = 1) -> Tensor:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        with self.manager.context():
            out = self.model(x)
        return F.cross_entropy(out.float(), torch.tensor([0, 1, 2, 0, 1]))

    def batches(self, count: int = 3) -> list[Tensor]:
        return [torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(count)]

    def snapshot(self) -> list[Any]:
        tensors = [t.detach().clone() for t in self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += [v.detach().clone() for v in state.values() if isinstance(v, Tensor)]
        counters = self.manager.report()["counters"]
        return [tensors, copy.deepcopy(self.scheduler.state_dict()), counters, self.manager.scale_history]

    @contextmanager
    def unchanged(self, error: type[Exception], match: str) -> Iterator[None]:
        """The block raises this error, with a fix in it, and changes nothing that counts."""
        before = self.snapshot()
        with pytest.raises(error, match=match) as caught:
            yield
        assert isinstance(caught.value, HalfstepError)
        assert caught.value.seen
        assert caught.value.fix
        after = self.snapshot()
        assert len(before[0]) == len(after[0])
        assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
        assert before[1:] == after[1:]

    def next(self, when: str) -> None:
        """The verb that comes next: another contribution, or at the end the update."""
        if when == "at the end":
            self.manager.step(self.model, self.optimizer, self.scheduler)
        else:
            self.manager.backward(self.loss(2))

    def works_again(self) -> None:
        """After what was wrong is dropped, the next update is applied."""
        self.manager.discard()
        self.manager.backward(self.loss())
        assert self.manager.step(self.model, self.optimizer, self.scheduler).applied


@pytest.fixture(params=PRECISIONS)
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


def test_step_without_backward(run: Run) -> None:
    with run.unchanged(MisuseError, "without a backward"):
        run.manager.step(run.model, run.optimizer, run.scheduler)
    run.works_again()


def test_step_twice(run: Run) -> None:
    run.manager.backward(run.loss())
    run.manager.step(run.model, run.optimizer, run.scheduler)
    with run.unchanged(MisuseError, "without a backward"):
        run.manager.step(run.model, run.optimizer, run.scheduler)


def test_unfinished_group_at_step(run: Run) -> None:
    for group in run.manager.groups(run.batches(), 3, weight=len):
        for _ in group:
            run.manager.backward(run.loss())
            with run.unchanged(GroupError, "1 of 3 micro-batches"):
                run.manager.step(run.model, run.optimizer)
            break
        break
    run.works_again()


def test_break_out_of_a_group(run: Run) -> None:
    groups = run.manager.groups(run.batches(4), 2, weight=len)
    for _ in next(groups):
        run.manager.backward(run.loss())
        break
    with run.unchanged(GroupError, "1 of 2 micro-batches"):
        next(groups)
    with run.unchanged(GroupError, "1 of 2 micro-batches"):
        run.manager.step(run.model, run.optimizer)
    run.works_again()


def test_second_open_group(run: Run) -> None:
    for _ in run.manager.groups(run.batches(), 3, weight=len):
        with run.unchanged(GroupError, "opened inside each other"):
            next(run.manager.groups(run.batches(), 3, weight=len))
        break


def test_group_that_was_not_stepped(run: Run) -> None:
    groups = run.manager.groups(run.batches(4), 2, weight=len)
    for _ in next(groups):
        run.manager.backward(run.loss())
    with run.unchanged(GroupError, "not stepped"):
        next(groups)


def test_backward_after_the_group_closed(run: Run) -> None:
    for group in run.manager.groups(run.batches(), 3, weight=len):
        for _ in group:
            run.manager.backward(run.loss())
        with run.unchanged(GroupError, "had closed"):
            run.manager.backward(run.loss())
        assert run.manager.step(run.model, run.optimizer).applied


def test_backward_before_the_group_began(run: Run) -> None:
    for _ in run.manager.groups(run.batches(), 3, weight=len):
        with run.unchanged(GroupError, "before the first micro-batch"):
            run.manager.backward(run.loss())
        break


def test_continue_without_backward(run: Run) -> None:
    with run.unchanged(GroupError, r"micro-batch 1 of 3 went by without"):
        for group in run.manager.groups(run.batches(), 3, weight=len):
            for _ in group:
                continue


def test_group_iterated_twice(run: Run) -> None:
    for group in run.manager.groups(run.batches(), 3, weight=len):
        for _ in group:
            run.manager.backward(run.loss())
        with run.unchanged(GroupError, "second time"):
            list(group)
        run.manager.step(run.model, run.optimizer)


def test_weighted_and_unweighted_mixed(run: Run) -> None:
    run.manager.backward(run.loss(), weight=5)
    with run.unchanged(MisuseError, "common denominator"):
        run.manager.backward(run.loss())
    run.manager.discard()
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, "common denominator"):
        run.manager.backward(run.loss(), weight=5)


def test_weight_in_a_weighted_group(run: Run) -> None:
    for group in run.manager.groups(run.batches(), 3, weight=len):
        for _ in group:
            with run.unchanged(MisuseError, "has weights already"):
                run.manager.backward(run.loss(), weight=5)
            break
        break


def test_flat_contributions_before_a_group(run: Run) -> None:
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, "outside any group"):
        next(run.manager.groups(run.batches(), 3, weight=len))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["between", "at the end", "first group"])
def test_zero_grad_by_hand(run: Run, set_to_none: bool, when: str) -> None:
    if when == "first group":
        run = Run(run.manager.precision.declared, updates=0)
    run.manager.backward(run.loss())
    run.optimizer.zero_grad(set_to_none=set_to_none)
    for _ in range(2):  # until it is discarded
        with run.unchanged(MisuseError, r"zero_grad"):
            run.next(when)
    run.works_again()


def test_zero_grad_between_updates_is_harmless(run: Run) -> None:
    for _ in range(3):
        run.optimizer.zero_grad()
        run.manager.backward(run.loss())
        assert run.manager.step(run.model, run.optimizer, run.scheduler).applied


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("updates", [0, 1])
def test_optimizer_step_by_hand(fused: bool, updates: int) -> None:
    for precision in PRECISIONS:
        run = Run(precision, fused=fused, updates=updates)
        run.manager.backward(run.loss())
        run.optimizer.step()
        for when in ("between", "at the end"):
            with run.unchanged(MisuseError, r"AdamW.step\(\) was called by hand while 1 contribution"):
                run.next(when)
        run.works_again()


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("weight", [None, 5])
@pytest.mark.parametrize("updates", [0, 1])
def test_updates_by_hand_in_place_of_the_managers(updates: int, weight: int | None, cleared: bool) -> None:
    """A loop that never calls manager.step is told at its second backward."""
    for precision in PRECISIONS:
        run = Run(precision, updates=updates)
        run.manager.backward(run.loss(), weight=weight)
        run.optimizer.step()
        if cleared:
            run.optimizer.zero_grad()
        with run.unchanged(MisuseError, r"AdamW.step\(\) was called by hand while 1 contribution was pending"):
            run.manager.backward(run.loss(2), weight=weight)
        run.works_again()


def test_another_models_optimizer_is_its_own_before_the_first_update() -> None:
    run, other = Run(updates=0), Run(updates=0)
    run.manager.backward(run.loss())
    other.loss().backward()
    other.optimizer.step()
    run.manager.backward(run.loss(2))
    assert run.manager.step(run.model, run.optimizer).applied


def test_a_stage_trained_by_hand_between_updates_is_the_users_own(run: Run) -> None:
    run.loss().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.manager.backward(run.loss())
    assert run.manager.step(run.model, run.optimizer, run.scheduler).applied


def test_scheduler_step_by_hand(run: Run) -> None:
    run.scheduler.step()
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, r"ExponentialLR.step\(\) was called by hand 1 time since"):
        run.manager.step(run.model, run.optimizer, run.scheduler)


def test_scheduler_step_by_hand_before_the_first_update() -> None:
    run = Run("bf16", updates=0)
    run.manager.backward(run.loss())
    with pytest.warns(UserWarning, match="before"):
        run.scheduler.step()
    with run.unchanged(MisuseError, r"called by hand 1 time since"):
        run.manager.step(run.model, run.optimizer, run.scheduler)


def test_a_scheduler_that_was_loaded_was_not_moved_by_hand() -> None:
    source, run = Run("fp32", updates=3), Run("fp32", updates=0)
    for name in ("model", "optimizer", "scheduler"):
        getattr(run, name).load_state_dict(getattr(source, name).state_dict())
    run.manager.backward(run.loss())
    assert run.manager.step(run.model, run.optimizer, run.scheduler).applied
    assert run.scheduler.last_epoch == 4


@pytest.mark.parametrize("when", ["between", "at the end", "before"])
def test_loss_backward_by_hand(run: Run, when: str) -> None:
    if when == "before":
        run.loss(7).backward()
    else:
        run.manager.backward(run.loss())
        run.loss(7).backward()
    with run.unchanged(MisuseError, "1 backward pass ran without the manager"):
        run.next(when)
    run.works_again()


def test_editing_gradients_by_hand_is_allowed() -> None:
    """Zeroing a row of an embedding's gradient, say: neither an addition nor a loss of a contribution."""
    run = Run("fp32")
    run.manager.backward(run.loss())
    run.model[0].weight.grad[0] = 0.0
    run.model[2].bias.grad.mul_(0.5)
    assert run.manager.step(run.model, run.optimizer, run.scheduler).applied


def test_scale_changed_mid_group() -> None:
    run = Run("fp16")
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, "contributions? pending"):
        run.manager.loss_scale = 4.0
    run.manager.step(run.model, run.optimizer)
    run.manager.loss_scale = 4.0
    assert run.manager.loss_scale == 4.0
    for _ in run.manager.groups(run.batches(), 3, weight=len):
        with run.unchanged(MisuseError, "contributions? pending"):
            run.manager.loss_scale = 8.0
        break


def test_scale_set_where_there_is_none() -> None:
    run = Run("bf16")
    with run.unchanged(MisuseError, "does not scale"):
        run.manager.loss_scale = 4.0


@pytest.mark.parametrize("verb", ["scale", "step", "unscale_", "update"])
def test_the_scalers_own_verbs_are_refused(verb: str) -> None:
    run = Run("fp16")
    arguments: dict[str, tuple[Any, ...]] = {
        "scale": (torch.ones(()),), "step": (run.optimizer,), "unscale_": (run.optimizer,), "update": (),
    }  # fmt: skip
    with run.unchanged(MisuseError, r"the manager moves its scaler itself"):
        getattr(run.manager.scaler, verb)(*arguments[verb])


def test_parameters_the_optimizer_does_not_own(run: Run) -> None:
    other = nn.Linear(2, 2)
    run.manager.backward(run.loss() + other(torch.ones(1, 2)).sum())
    with run.unchanged(MisuseError, r"not in the optimizer: 1\.weight, 1\.bias"):
        run.manager.step((run.model, other), run.optimizer)


def test_parameters_the_model_does_not_have(run: Run) -> None:
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, "the model does not have"):
        run.manager.step(run.model[0], run.optimizer)


def test_a_replaced_model(run: Run) -> None:
    stranger = Run("fp32", updates=0)
    run.manager.backward(stranger.loss())
    with run.unchanged(MisuseError, r"reached a parameter of this model|has a gradient"):
        run.manager.step(run.model, run.optimizer)


def test_an_unfrozen_parameter_outside_the_optimizer(run: Run) -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    both = nn.ModuleList([frozen, run.model])
    run.manager.backward(run.loss())
    run.manager.step(both, run.optimizer)
    frozen.requires_grad_(True)
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, r"not in the optimizer: 0\.weight"):
        run.manager.step(both, run.optimizer)


def losses(run: Run) -> dict[str, tuple[Any, str]]:
    x = torch.randn(2, 4)
    out = run.model(x)
    return {
        "a vector": (out, "shape"),
        "a number": (3.0, "float"),
        "nothing": ([], "empty list"),
        "no gradient": (out.sum().detach(), "requires a gradient"),
        "half": (out.sum().half(), "float16 scalar"),
        "bfloat16": (out.sum().bfloat16(), "bfloat16 scalar"),
    }


@pytest.mark.parametrize("kind", ["a vector", "a number", "nothing", "no gradient", "half", "bfloat16"])
def test_losses_that_are_none(run: Run, kind: str) -> None:
    loss, match = losses(run)[kind]
    with run.unchanged(MisuseError, match):
        run.manager.backward(loss)
    assert run.manager.pending == 0


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "five", torch.tensor([1.0, 2.0]), [1, 2]])
def test_weights_that_cannot_weigh(run: Run, weight: Any) -> None:
    with run.unchanged(WeightError, "weight"):
        run.manager.backward(run.loss(), weight=weight)
    with run.unchanged(WeightError, "weight"):
        next(run.manager.groups(run.batches(), 3, weight=lambda _: weight if not isinstance(weight, list) else "x"))
    assert run.manager.pending == 0


def test_another_number_of_terms(run: Run) -> None:
    run.manager.backward([run.loss(), run.loss(2)], weight=[5, 5])
    with run.unchanged(WeightError, "1 term,"):
        run.manager.backward(run.loss(), weight=5)
    run.manager.discard()
    for group in run.manager.groups(run.batches(), 3, weight=lambda b: (5, 5, 5)):
        for _ in group:
            with run.unchanged(WeightError, "2 losses"):
                run.manager.backward([run.loss(), run.loss(2)])
            break
        break


@pytest.mark.parametrize("loader", [[], iter([]), (x for x in ())])
def test_empty_loader(run: Run, loader: Any) -> None:
    with run.unchanged(MisuseError, "no micro-batch"):
        list(run.manager.groups(loader, 2, weight=len))


@pytest.mark.parametrize("size", [0, -3, 2.5, True, "2"])
def test_sizes_that_are_none(run: Run, size: Any) -> None:
    with run.unchanged(PolicyError, "size"):
        run.manager.groups(run.batches(), size)


def test_groups_refuse_what_they_cannot_use(run: Run) -> None:
    with run.unchanged(PolicyError, "reduction"):
        run.manager.groups(run.batches(), 2, reduction="median")
    with run.unchanged(PolicyError, "iterated"):
        run.manager.groups(3, 2)  # type: ignore[arg-type]
    with run.unchanged(PolicyError, "no 'labels'"):
        next(run.manager.groups([{"x": 1}], 1, weight="labels"))


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ({"precision": "fp8"}, "precision"),
        ({"precision": "float16"}, "precision"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": float("nan")}, "max_norm"),
        ({"scheduler_unit": "epochs"}, "scheduler_unit"),
        ({"on_nonfinite": "warn"}, "on_nonfinite"),
        ({"init_scale": 0.0}, "init_scale"),
        ({"init_scale": float("inf")}, "init_scale"),
        ({"growth_factor": 1.0}, "growth_factor"),
        ({"backoff_factor": 1.5}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"min_scale": 2.0**20}, "min_scale"),
        ({"device": "nowhere"}, "device"),
        ({"replicas": 4}, "replicas"),
        ({"activated": "bf16"}, "activated"),
        ({"activated": "cuda"}, "activated"),
    ],
)
def test_settings_that_cannot_be_meant(policy: dict[str, Any], match: str) -> None:
    with pytest.raises(PolicyError, match=match) as caught:
        MixedPrecisionManager(**policy)
    assert caught.value.fix


def test_closure_optimizers(run: Run) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters())
    run.manager.backward(model(torch.ones(1, 4)).sum())
    with run.unchanged(UnsupportedError, "closure"):
        run.manager.step(model, optimizer)


def test_half_parameters(run: Run) -> None:
    model = nn.Linear(4, 3).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.manager.backward(model(torch.ones(1, 4).half()).float().sum())
    with run.unchanged(UnsupportedError, r"FP16 \(weight, bias\)"):
        run.manager.step(model, optimizer)


def test_plateau_scheduler(run: Run) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, "validation metric"):
        run.manager.step(run.model, run.optimizer, plateau)


@pytest.mark.parametrize("what", ["model", "optimizer", "scheduler"])
def test_step_with_something_else(run: Run, what: str) -> None:
    arguments: dict[str, Any] = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    arguments[what] = object()
    run.manager.backward(run.loss())
    with run.unchanged(HalfstepError, "object"):
        run.manager.step(**arguments)


def test_state_in_the_middle_of_a_group(run: Run) -> None:
    state = run.manager.state_dict()
    run.manager.backward(run.loss())
    with run.unchanged(MisuseError, "pending"):
        run.manager.state_dict()
    with run.unchanged(MisuseError, "pending"):
        run.manager.load_state_dict(state)
    run.manager.discard()
    with run.unchanged(PolicyError, "no state"):
        run.manager.load_state_dict({"model": 1})


def test_user_errors_in_backward_leave_the_ledger_alone(run: Run) -> None:
    loss = run.loss()
    run.manager.backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        run.manager.backward(loss)
    assert run.manager.pending == 1


class Pair:
    """A generator and a critic, one manager, one optimizer each."""

    def __init__(self, precision: str = "fp32") -> None:
        torch.manual_seed(0)
        self.generator = nn.Linear(3, 4)
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.of_generator = torch.optim.AdamW(self.generator.parameters(), lr=0.1, fused=True)
        self.of_critic = torch.optim.AdamW(self.critic.parameters(), lr=0.1, fused=True)
        self.manager = MixedPrecisionManager(precision=precision)
        self.noise = torch.randn(5, 3)

    def update_critic(self) -> None:
        fake = self.generator(self.noise).detach()
        self.manager.backward(self.critic(fake).mean() - self.critic(torch.ones(5, 4)).mean())
        self.manager.step(self.critic, self.of_critic)

    def update_generator(self, **only: Any) -> None:
        self.manager.backward(-self.critic(self.generator(self.noise)).mean(), **only)
        self.manager.step(self.generator, self.of_generator)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("first", ["critic", "generator"])
def test_gradients_left_on_another_optimizers_parameters(precision: str, first: str) -> None:
    pair = Pair(precision)
    order: list[Callable[[], None]] = [pair.update_critic, pair.update_generator]
    if first == "generator":
        order.reverse()
    order[0]()
    before = [p.detach().clone() for p in pair.critic.parameters()]
    with pytest.raises(ForeignGradients, match="inputs="):
        order[1]()
    assert all(torch.equal(a, b) for a, b in zip(before, pair.critic.parameters(), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_keep_a_loss_to_its_own_model(precision: str) -> None:
    pair = Pair(precision)
    for _ in range(3):
        pair.update_critic()
        pair.update_generator(inputs=pair.generator)
    assert pair.manager.report()["counters"]["applied"] == 6


def test_no_warning_of_torchs_own(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            run.manager.backward(run.loss())
            run.manager.step(run.model, run.optimizer, run.scheduler)

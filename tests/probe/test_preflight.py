"""Preflight: what it promises of a run is what the run does, what is wrong is named, and nothing changes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep
from halfstep import MisuseError, MixedPrecisionManager, PolicyError, Preflight

CLASSES, WIDTH = 7, 6
Batch = dict[str, Tensor]


def ragged(*live: int, length: int = 5, seed: int = 0) -> list[Batch]:
    """Micro-batches of two sequences with so many supervised positions each."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in live:
        labels = torch.full((2 * length,), -100)
        labels[:count] = torch.randint(0, CLASSES, (count,), generator=generator)
        batches.append({"x": torch.randn(2, length, WIDTH, generator=generator), "labels": labels.view(2, length)})
    return batches


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), *middle, nn.Linear(16, CLASSES))


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["labels"].flatten())


def sum_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).float().flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def live(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


class Norm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def fly(
    model: nn.Module, loss_fn: Any = mean_loss, batches: Any = None, *, precision: str = "fp32", **given: Any
) -> Preflight:
    policy = {name: given.pop(name) for name in ("init_scale", "max_norm", "min_scale") if name in given}
    manager = MixedPrecisionManager(precision=precision, device="cpu", **policy)
    result = manager.preflight(model, adam(model), loss_fn, ragged(9, 2, 5) if batches is None else batches, **given)
    json.dumps(result.as_dict(), allow_nan=False)
    return result


def verdicts(result: Preflight) -> dict[str, str]:
    """Of the rows that did not simply pass."""
    return {row.check: row.verdict for row in result.rows if row.verdict != "pass"}


# --- what is right ---


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("weight", [live, None], ids=["counted", "read"])
def test_what_is_right_passes(precision: str, weight: Any) -> None:
    result = fly(network(), precision=precision, weight=weight)
    assert verdicts(result) == {}, str(result)
    assert result
    assert result["weights"].numbers["weights"] == [9.0, 2.0, 5.0]
    assert result["gradient"].numbers["shares"] == [9 / 16, 2 / 16, 5 / 16]
    assert "preflight passed" in str(result)
    assert result.as_dict()["passed"] is True


def test_sums_several_modules_and_the_fp32_loop_pass() -> None:
    assert verdicts(fly(network(), sum_loss, reduction="sum")) == {}
    body, head = network(), nn.Linear(CLASSES, CLASSES)
    optimizers = [torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(head.parameters())]

    def loss(parts: list[nn.Module], batch: Batch) -> Tensor:
        return mean_loss(nn.Sequential(*parts), batch)

    result = MixedPrecisionManager(False, max_norm=0.01).preflight([body, head], optimizers, loss, ragged(4, 4))
    assert verdicts(result) == {}, str(result)
    assert "SGD and Adam" in result["update"].seen
    assert result["update"].numbers["clip_coefficient"] < 1.0


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad", "rmsprop"])
def test_the_update_is_torchs(optimizer: str) -> None:
    made = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    }[optimizer]
    model = network()
    result = MixedPrecisionManager(precision="fp16", max_norm=0.1).preflight(
        model, made(model.parameters()), mean_loss, ragged(9, 2)
    )
    assert result["update"].verdict == "pass", str(result)
    assert result["update"].numbers["moved"] > 0


def test_what_it_promises_is_what_the_run_does() -> None:
    """Scale, skipped updates, norm, loss and optimizer state: as the real first updates have them."""
    model, batches = network(), ragged(9, 2, 5, 6, 3)
    optimizer = adam(model)
    manager = MixedPrecisionManager(precision="fp16", init_scale=2.0**30)
    result = manager.preflight(model, optimizer, mean_loss, batches, weight=live, size=2)
    skipped = 0
    while True:
        group = next(iter(manager.groups(batches, 2, weight=live)))
        for batch in group:
            with manager.context():
                loss = mean_loss(model, batch)
            manager.backward(loss)
        update = manager.step(model, optimizer)
        if update.applied:
            break
        skipped += 1
    assert skipped > 6
    assert result["finite"].verdict == "note"
    assert result["finite"].numbers["skipped"] == skipped
    assert result["finite"].numbers["loss_scale"] == update.scale == manager.loss_scale
    assert result["update"].numbers["grad_norm"] == update.grad_norm
    assert result["update"].numbers["loss"] == update.loss
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    memory = result["memory"].numbers
    assert memory["optimizer_state"] == held
    assert memory["parameters"] == memory["gradients"] == sum(p.nbytes for p in model.parameters())
    assert result["boundaries"].numbers["updates"] == 3
    assert "the last with 1" in result["boundaries"].seen
    suggested = result["finite"].numbers["init_scale"]
    assert f"init_scale={suggested:g}" in result["finite"].fix
    again = MixedPrecisionManager(precision="fp16", init_scale=suggested)
    result = again.preflight(model, optimizer, mean_loss, batches, weight=live, size=2)
    assert result["boundaries"].numbers == {"updates": 3, "applied": 3, "A": 2, "micro_batches": 5}
    assert result["finite"].numbers["skipped"] == 0


def test_compiled_and_sparse_models_pass() -> None:
    compiled = torch.compile(network(), backend="eager")
    result = fly(compiled, precision="bf16", weight=live)
    assert verdicts(result) == {}, str(result)
    assert result["parameters"].numbers["largest_in"] in ("0.weight", "2.weight")

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x))  # type: ignore[no-any-return]

    model = Bag()
    batches = [(torch.arange(k, k + 10).view(2, 5), torch.tensor([0, 1])) for k in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = MixedPrecisionManager(precision="bf16", max_norm=0.1).preflight(
        model, optimizer, lambda m, b: F.cross_entropy(m(b[0]).float(), b[1]), batches
    )
    assert verdicts(result) == {}, str(result)
    assert result["update"].numbers["clip_coefficient"] < 1.0


def test_an_update_that_moves_nothing() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: update / 10)
    row = MixedPrecisionManager(False).preflight(model, optimizer, mean_loss, ragged(4), scheduler=warm)["update"]
    assert row.verdict == "pass"
    assert "warms up from 0" in row.seen
    half = network().bfloat16()
    row = MixedPrecisionManager(precision="bf16").preflight(
        half,
        torch.optim.SGD(half.parameters(), lr=1e-7),
        lambda m, b: mean_loss(m, {**b, "x": b["x"].bfloat16()}),
        ragged(4),
    )["update"]
    assert row.verdict == "fail"
    assert "rounds away" in row.fix


# --- nothing changes ---


def test_nothing_changes() -> None:
    model = network(nn.Dropout(0.5), Norm(16))
    model[0].eval()
    batches = ragged(9, 2, 5)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)
    manager = MixedPrecisionManager(precision="fp16", init_scale=2.0**20)
    for group in manager.groups(batches, 3):
        for batch in group:
            with manager.context():
                loss = mean_loss(model, batch)
            manager.backward(loss)
        manager.step(model, optimizer, scheduler)
    next(model.parameters()).grad = kept = torch.ones(16, WIDTH)

    def everything() -> list[Any]:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        return [
            [(name, id(t), t.detach().clone()) for name, t in tensors],
            [(id(p), {k: (id(v), v.clone()) for k, v in s.items()}) for p, s in optimizer.state.items()],
            copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]),
            copy.deepcopy(scheduler.state_dict()),
            [module.training for module in model.modules()],
            [[len(m._forward_hooks), len(m._forward_pre_hooks)] for m in model.modules()],
            [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
            torch.get_rng_state(),
            random.getstate(),
            manager.state_dict(random_state=True),
            {k: v for k, v in manager.report().items() if k not in ("wall_seconds", "memory", "preflights")},
        ]

    def loader() -> Any:  # draws for its order, as a shuffling loader does
        for k in torch.randperm(3):
            yield batches[k]

    before = everything()
    result = manager.preflight(model, optimizer, mean_loss, loader(), weight=live, scheduler=scheduler)
    assert result.failed == ("gradient",)
    assert manager.report()["preflights"] == [{"passed": False, "failed": ["gradient"], "applied_updates": 0}]
    assert same(before, everything())
    assert next(model.parameters()).grad is kept
    assert all(p.grad is None for p in list(model.parameters())[1:])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (one != one and other != other)


def test_a_loader_draws_the_same_order_afterwards() -> None:
    data = [(torch.randn(6), torch.tensor(k % 3)) for k in range(12)]
    own = torch.Generator().manual_seed(5)
    loaders = [
        torch.utils.data.DataLoader(data, 4, shuffle=True, generator=own),
        torch.utils.data.DataLoader(data, 4, shuffle=True),
        torch.utils.data.DataLoader(data, 4, sampler=torch.utils.data.RandomSampler(data, generator=own)),
    ]
    model = nn.Linear(6, 3)
    for loader in loaders:
        states = own.get_state(), torch.get_rng_state()
        assert MixedPrecisionManager(False).preflight(
            model, adam(model), lambda m, b: F.cross_entropy(m(b[0]), b[1]), loader
        )
        assert same(states, (own.get_state(), torch.get_rng_state()))


def test_a_run_after_it_is_the_run_without_it() -> None:
    def run(preflight: bool) -> list[Any]:
        torch.manual_seed(3)
        model, batches = network(nn.Dropout(0.2)), ragged(9, 2, 5, 6)
        optimizer, manager, told = adam(model), MixedPrecisionManager(precision="bf16"), []
        for _ in range(2):
            if preflight:
                manager.preflight(model, optimizer, mean_loss, batches, size=2)
            for group in manager.groups(batches, 2):
                for batch in group:
                    with manager.context():
                        loss = mean_loss(model, batch)
                    manager.backward(loss)
                told.append(manager.step(model, optimizer).as_dict(layers=True))
        return [*told, *(p.detach().clone() for p in model.parameters())]

    assert same(run(True), run(False))


def test_the_doctor_sees_nothing_of_it() -> None:
    model, batches = network(), ragged(4, 4, 4, 4)
    optimizer, manager = adam(model), MixedPrecisionManager(precision="fp16", device="cpu", init_scale=2.0**14)
    with halfstep.watch() as session:
        for _ in range(3):
            assert manager.preflight(model, optimizer, mean_loss, batches, size=2)
            halfstep.assert_same_update(model, mean_loss, batches)
            for group in manager.groups(batches, 2):
                for batch in group:
                    with manager.context():
                        loss = mean_loss(model, batch)
                    manager.backward(loss)
                manager.step(model, optimizer)
    assert session.findings == ()
    assert (session.summary.attempted, session.summary.micro_batches) == (6, 12)


# --- what is wrong, by name ---


def test_weights_that_are_not_the_losss_own() -> None:
    result = fly(network(), weight=lambda batch: 1.0)
    assert result["weights"].verdict == "fail"
    assert "9, 2, 5 elements" in result["weights"].seen
    assert result["gradient"].numbers["causes"] == ["means of means"]
    assert "FAIL" in str(result)
    assert "9, 2, 5" in repr(result) + str(result)
    assert repr(result) == "Preflight(failed: weights, gradient)"


@pytest.mark.parametrize(
    ("middle", "verdict", "causes"),
    [
        (lambda: [Norm(16)], "fail", ["BatchNorm"]),
        (lambda: [nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5)], "note", ["randomness"]),
    ],
    ids=["batchnorm", "dropout"],
)
def test_why_the_big_batch_is_another(middle: Any, verdict: str, causes: list[str]) -> None:
    result = fly(network(*middle()), weight=live)
    assert result["gradient"].verdict == verdict
    assert result["gradient"].numbers["causes"] == causes
    assert result.passed == (verdict == "note")
    assert result["update"].verdict == "pass"


def test_a_loss_of_pairs_and_one_that_cannot_be_joined() -> None:
    def pairs(model: nn.Module, batch: Batch) -> Tensor:
        features = F.normalize(model(batch["x"]).mean(1), dim=-1)
        return F.cross_entropy(features @ features.T * 5, torch.arange(len(features)))

    result = fly(network(), pairs)
    assert result["gradient"].numbers["causes"] == ["examples are mixed"]
    lengths = [ragged(6, length=4)[0], ragged(9, length=5, seed=1)[0]]
    result = fly(network(), batches=lengths, weight=live)
    assert verdicts(result) == {"gradient": "not judged"}
    assert "big=" in result["gradient"].fix
    padded = {
        "x": torch.cat([F.pad(lengths[0]["x"], (0, 0, 0, 1)), lengths[1]["x"]]),
        "labels": torch.cat([F.pad(lengths[0]["labels"], (0, 1), value=-100), lengths[1]["labels"]]),
    }
    assert verdicts(fly(network(), batches=lengths, weight=live, big=padded)) == {}


def test_an_opaque_loss_is_said_to_be_unverified() -> None:
    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        made: Tensor = Opaque.apply(mean_loss(model, batch))
        return made

    assert fly(network(), loss, weight=live)["weights"].verdict == "note"
    assert fly(network(), loss)["weights"].verdict == "note"
    assert fly(network(), loss)["gradient"].numbers["causes"] == ["means of means"]  # examples were counted instead


def test_examples_twice_or_not_the_same() -> None:
    batches = ragged(9, 2, 5)
    assert fly(network(), batches=[batches[0], batches[1], batches[0]])["examples"].verdict == "note"
    keyed = [{**batch, "ids": torch.tensor([2 * k, 2 * k + 1])} for k, batch in enumerate(batches)]
    assert fly(network(), batches=keyed, ids="ids")["examples"].verdict == "pass"
    keyed[2]["ids"] = torch.tensor([4, 1])
    row = fly(network(), batches=keyed, ids="ids")["examples"]
    assert row.verdict == "fail"
    assert "id 1 in micro-batch 1 and 3" in row.seen
    row = fly(network(), batches=batches, weight=live, big=batches[0])["examples"]
    assert row.verdict == "fail"
    assert "holds 2, the group 6" in row.seen


def test_parameters_changed_inside_a_group() -> None:
    def loss(model: nn.Sequential, batch: Batch) -> Tensor:
        made = mean_loss(model, batch)
        with torch.no_grad():
            model[-1].bias.mul_(0.999)
        return made

    row = fly(network(), loss)["boundaries"]
    assert row.verdict == "fail"
    assert "inside a group" in row.seen


def test_an_optimizer_that_does_not_fit_is_a_row() -> None:
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    result = MixedPrecisionManager(False).preflight(model, optimizer, mean_loss, ragged(4, 4))
    assert result["update"].verdict == "fail"
    assert "2 trainable parameters of the model are not in the optimizer" in result["update"].seen
    assert result["gradient"].verdict == "pass"


def test_a_loss_or_an_optimizer_that_is_another_each_time() -> None:
    calls = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        calls.append(batch)
        return mean_loss(model, batch) * (1 + len(calls) % 7)

    result = fly(network(), loss, weight=live)
    assert {"gradient", "update"} <= set(result.failed)
    assert "the engine's gradient is" in result["update"].seen

    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.randn_like(p), alpha=1e-4)

    model = network()
    result = MixedPrecisionManager(False).preflight(model, Noisy(model.parameters(), lr=0.1), mean_loss, ragged(4, 4))
    assert result.failed == ("update",)
    assert "away from what torch's clip_grad_norm_ and the optimizer do" in result["update"].seen


def test_the_schedule_moves_in_its_unit() -> None:
    for unit, moves in (("applied", 1), ("attempted", 15), ("calls", 0)):
        model = network()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        manager = MixedPrecisionManager(precision="fp16", init_scale=2.0**30, scheduler_unit=unit)
        row = manager.preflight(model, optimizer, mean_loss, ragged(4, 4), scheduler=scheduler)["boundaries"]
        assert row.verdict == "pass", row.seen
        moved = int(row.seen.split("moved ")[1].split()[0])
        assert moved == moves if unit != "attempted" else moved > 1


# --- the half range, layers ---


def scaled(factor: float, *middle: nn.Module) -> nn.Sequential:
    model = network(*middle)
    with torch.no_grad():
        model[0].weight.mul_(factor)
    return model


def test_an_overflow_is_seen_in_fp16_and_its_module_named() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, CLASSES))
        with torch.no_grad():
            model[0].weight.mul_(400)
            model[1].weight.mul_(400)
        return model

    result = fly(net(), precision="fp16", weight=live)
    assert {row.check for row in result.failures} >= {"finite", "activations"}
    assert result["activations"].numbers["largest_in"] == "1"
    assert 'keep_fp32(model, "1")' in result["activations"].fix
    assert "nan in fp16" in result["finite"].seen
    assert fly(net(), precision="bf16", weight=live)["activations"].verdict == "pass"
    cured = net()
    manager = MixedPrecisionManager(precision="fp16", device="cpu")
    manager.keep_fp32(cured, "1", "2")
    result = manager.preflight(cured, adam(cured), mean_loss, ragged(9, 2), weight=live)
    assert result["finite"].verdict == "pass"
    assert result["islands"].numbers["names"] == ["1", "2"]


def test_parameters_outside_the_half_range() -> None:
    assert fly(scaled(1e6), precision="fp16")["parameters"].verdict == "fail"
    assert fly(scaled(1e6), precision="fp32")["parameters"].verdict == "pass"
    assert fly(scaled(2e4), precision="fp16")["parameters"].verdict == "note"
    row = fly(scaled(1e-8), precision="fp16")["parameters"]
    assert row.verdict == "fail"
    assert "0.weight (100%)" in row.seen
    result = fly(scaled(float("nan")))
    assert result["parameters"].seen == "not finite: 0.weight"
    assert {"finite", "parameters"} <= {row.check for row in result.failures}
    assert result["gradient"].verdict == "not judged"


def test_non_finite_inputs_are_no_fault_of_half_precision() -> None:
    batches = ragged(9, 2, 5)
    batches[1]["x"][0, 0, 0] = float("inf")
    result = fly(network(), batches=batches, weight=live)
    assert result["finite"].verdict == "fail"
    assert "micro-batch 2 is given with non-finite values" in result["finite"].seen
    batches[1]["x"][0, 0, 0] = float("nan")
    row = fly(network(), batches=batches, weight=live)["finite"]
    assert "the loss of micro-batch 2 is nan in fp32" in row.seen


def deep(layers: int, gain: float, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for k in range(layers):
        parts += [nn.Linear(WIDTH if k == 0 else 32, 32, bias=False), activation()]
        nn.init.normal_(parts[-2].weight, std=gain / parts[-2].in_features ** 0.5)
    return nn.Sequential(*parts, nn.Linear(32, CLASSES))


def test_layers_that_die_or_explode() -> None:
    assert fly(deep(8, 2**0.5, nn.ReLU))["layers"].verdict == "pass"
    row = fly(deep(8, 0.3, nn.ReLU))["layers"]
    assert row.verdict == "fail"
    assert "gradients die" in row.seen
    row = fly(deep(8, 6.0, nn.ReLU))["layers"]
    assert row.verdict == "fail"
    assert "explode" in row.seen
    dead = network(nn.Linear(16, 16), nn.ReLU())
    with torch.no_grad():
        dead[2].bias.fill_(-100.0)
    row = fly(dead)["layers"]
    assert row.verdict == "fail"
    assert "0.weight" in row.seen
    assert "only zeros come out of 3 (ReLU)" in row.seen


def test_a_mean_over_many_positions_is_no_vanishing_gradient() -> None:
    """It divides the norm of what comes back by the root of their number, once, and no layer is at fault."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for k in range(5):
        parts += [nn.Conv2d(8 if k else 3, 8, 3, padding=1), nn.ReLU()]
        nn.init.kaiming_normal_(parts[-2].weight, a=2.3)  # each a little too small
    pooled = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    images = [(torch.randn(2, 3, 64, 64), torch.tensor([0, 2])) for _ in range(2)]
    result = MixedPrecisionManager(False).preflight(
        pooled, adam(pooled), lambda m, b: F.cross_entropy(m(b[0]), b[1]), images
    )
    norms = result["layers"].numbers["gradients"]
    assert norms["last"] < 1e-4 * norms["first"]
    assert result["layers"].verdict == "pass"


def test_what_starts_at_zero_on_purpose_is_no_fault() -> None:
    class Adapter(nn.Module):
        """Low-rank adapters start with one factor at zero: the other has no gradient until the first update."""

        def __init__(self) -> None:
            super().__init__()
            self.base = network().requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
            nn.init.zeros_(self.up.weight)
            self.idle = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]

    model = Adapter()
    result = fly(model)
    assert verdicts(result) == {"layers": "note"}, str(result)
    assert result["layers"].numbers["zero_at_first"] == ["down.weight", "idle.weight", "idle.bias"]
    assert result["layers"].numbers["dead"] == []
    assert result["layers"].numbers["unreached"] == ["idle.weight", "idle.bias"]


# --- misuse ---


def test_misuse() -> None:
    model, batches = network(), ragged(4, 4)
    manager = MixedPrecisionManager(False)
    with pytest.raises(PolicyError, match="no micro-batches"):
        manager.preflight(model, adam(model), mean_loss, [])
    with pytest.raises(PolicyError, match="reduction"):
        manager.preflight(model, adam(model), mean_loss, batches, reduction="none")  # type: ignore[arg-type]
    wrong: list[Any] = [0, -1, 2.5, "two"]
    for size in wrong:
        with pytest.raises(PolicyError, match="size="):
            manager.preflight(model, adam(model), mean_loss, batches, size=size)
    with pytest.raises(PolicyError, match="cannot be iterated"):
        manager.preflight(model, adam(model), mean_loss, None)  # type: ignore[arg-type]
    manager.backward(mean_loss(model, batches[0]))
    with pytest.raises(MisuseError, match="1 contribution"):
        manager.preflight(model, adam(model), mean_loss, batches)
    manager.discard()
    with pytest.raises(MisuseError, match="loss_fn returned list"):
        manager.preflight(model, adam(model), lambda m, b: [mean_loss(m, b)], batches)
    with pytest.raises(KeyError, match="nothing"):
        manager.preflight(model, adam(model), lambda m, b: m(b["nothing"]), batches)
    assert halfstep.preflight(manager, model, adam(model), mean_loss, batches)

"""Islands: FP32 in forward and backward, eager and compiled, and honest about what they matched."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.engine.island import Islands, keep_fp32
from halfstep.errors import HalfstepError, MisuseError, PolicyError, UnsupportedError

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def own_compiled_backward_setting() -> Iterator[None]:
    before = functorch_config.backward_pass_autocast
    yield
    functorch_config.backward_pass_autocast = before


def widths() -> nn.Sequential:
    """Three layers told apart by their widths: 8 and 4 in half precision, 16 in the island."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 8), island=nn.Linear(8, 16), last=nn.Linear(16, 4)))


class MatmulDtypes(TorchDispatchMode):
    """The dtype of every matrix product that really ran, with the shape of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append((tuple(out.shape), out.dtype))
        return out


def matmuls_of_graph(graph: torch.fx.GraphModule) -> list[tuple[tuple[int, ...], torch.dtype]]:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    values = [node.meta["val"] for node in graph.graph.nodes if node.target in products]
    return [(tuple(value.shape), value.dtype) for value in values]


# Batch 3. Forward: results (3, 8), (3, 16), (3, 4). Backward: weight gradients (16, 4) or (4, 16) of the last layer,
# (16, 8) or (8, 16) of the island, (8, 4) or (4, 8) of the first; input gradients (3, 16), and (3, 8) of the island.
FORWARD = {(3, 8): BF16, (3, 16): FP32, (3, 4): BF16}
BACKWARD = {(3, 16): BF16, (4, 16): BF16, (3, 8): FP32, (8, 16): FP32, (4, 8): BF16}


def by_shape(seen: list[tuple[tuple[int, ...], torch.dtype]]) -> dict[tuple[int, ...], torch.dtype]:
    found: dict[tuple[int, ...], torch.dtype] = {}
    for shape, dtype in seen:
        key = shape if shape[0] == 3 else (min(shape), max(shape))
        assert found.setdefault(key, dtype) == dtype
    return found


def test_forward_and_backward_of_an_island_run_in_fp32_eagerly() -> None:
    model = widths()
    keep_fp32(model, "island")
    with MatmulDtypes() as forward, torch.autocast("cpu", BF16):
        out = model(torch.randn(3, 4))
    with MatmulDtypes() as backward:
        out.float().sum().backward()
    assert by_shape(forward.seen) == FORWARD
    assert by_shape(backward.seen) == BACKWARD


def test_forward_and_backward_of_an_island_run_in_fp32_when_compiled() -> None:
    model = widths()
    keep_fp32(model, "island")
    graphs: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {"forward": [], "backward": []}

    def compiler(phase: str) -> Any:
        def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs[phase] += matmuls_of_graph(graph)
            return make_boxed_func(graph.forward)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", BF16):
        out = compiled(x)
    out.float().sum().backward()
    assert by_shape(graphs["forward"]) == FORWARD
    assert by_shape(graphs["backward"]) == BACKWARD
    compiled_gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.zero_grad()
    with torch.autocast("cpu", BF16):
        eager = model(x)
    eager.float().sum().backward()
    for ours, theirs in zip(compiled_gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=0, atol=0)


def test_running_a_compiled_island_counts_as_used_and_compiles_once() -> None:
    model = widths()
    islands = keep_fp32(model, "island")
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(model, backend=count, fullgraph=True)
    assert islands.unused() == ("island",)
    for _ in range(3):
        with torch.autocast("cpu", BF16):
            compiled(torch.randn(3, 4))
    assert islands.unused() == ()
    assert graphs == 1


def test_gradients_of_an_island_equal_those_of_full_precision() -> None:
    """A whole model as an island under autocast is the FP32 model, bit for bit."""
    plain, kept = widths(), widths()
    keep_fp32(kept, nn.Sequential)
    x = torch.randn(5, 4)
    plain(x).square().sum().backward()
    with torch.autocast("cpu", BF16):
        out = kept(x)
    out.square().sum().backward()
    for ours, theirs in zip(kept.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_outputs_stay_fp32_and_an_exception_leaves_autocast_on() -> None:
    model = widths()
    keep_fp32(model, "island")
    with torch.autocast("cpu", BF16):
        assert model.island(torch.randn(2, 8, dtype=BF16)).dtype == FP32
        with pytest.raises(RuntimeError):
            model.island(torch.randn(2, 9))
        assert torch.is_autocast_enabled("cpu")
        assert model.first(torch.randn(2, 4)).dtype == BF16


Pair = namedtuple("Pair", "left right")


class Taker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def test_half_tensors_rise_wherever_they_are_and_everything_else_is_the_same_object() -> None:
    taker = Taker()
    keep_fp32(nn.ModuleDict({"t": taker}), "t")
    half, wide = torch.ones(2, dtype=BF16), torch.ones(2, dtype=torch.float64)
    cache: dict[str, Any] = {"count": 1, "wide": wide, "ids": torch.arange(2)}
    packed = nn.utils.rnn.pack_sequence([half, half[:1]])
    mask = {"deep": [half], "wide": wide}
    args, kwargs = taker([half, (half, 3)], Pair(half, "x"), packed, cache, mask=mask, none=None)
    assert args[0][0].dtype == FP32
    assert args[0][1][0].dtype == FP32
    assert args[0][1][1] == 3
    assert isinstance(args[1], Pair)
    assert args[1].left.dtype == FP32
    assert args[2].data.dtype == FP32
    assert torch.equal(args[2].batch_sizes, packed.batch_sizes)
    assert args[3] is cache
    assert kwargs["mask"]["deep"][0].dtype == FP32
    assert kwargs["mask"]["wide"] is wide
    assert kwargs["none"] is None
    assert mask["deep"][0] is half


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Any], *, more: tuple[Tensor, list[Tensor]]) -> Tensor:
        return self.linear(batch["x"]) + more[1][0]


def test_nested_arguments_rise_under_compile_without_a_graph_break() -> None:
    model = nn.Sequential(Nested())
    keep_fp32(model, "0")
    x = torch.randn(3, 2, dtype=BF16)
    compiled = torch.compile(model[0], backend="eager", fullgraph=True)
    with torch.autocast("cpu", BF16):
        out = compiled({"x": x, "n": 3}, more=(x, [x]))
    assert out.dtype == FP32
    assert torch.equal(out, nn.functional.linear(x.float(), *model[0].linear.parameters()) + x.float())


def test_names_types_wildcards_and_containers() -> None:
    model = nn.ModuleDict(
        {
            "decoder": nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())]),
            "norm": nn.BatchNorm1d(2),
            "head": nn.Linear(2, 2),
        }
    )
    model["tied"] = model["head"]
    assert keep_fp32(copy.deepcopy(model), "decoder").names == ("decoder.0", "decoder.1")
    assert keep_fp32(copy.deepcopy(model), "decoder.1.?").names == ("decoder.1.0", "decoder.1.1")
    assert keep_fp32(copy.deepcopy(model), "tied").names == ("tied",)
    islands = keep_fp32(model, "norm", nn.Linear, "head")
    assert islands.names == ("decoder.0", "decoder.1.0", "norm", "head")
    assert islands.matched["Linear"] == ("decoder.0", "decoder.1.0", "head")
    assert "norm" in islands
    assert len(islands) == 4
    assert "norm (BatchNorm1d)" in repr(islands)
    assert keep_fp32(torch.compile(widths()), "island").names == ("_orig_mod.island",)  # type: ignore[arg-type]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(2, 2)
        self.bad = nn.Linear(2, 2, dtype=BF16)


def patched() -> nn.Module:
    model = widths()
    model.island.forward = model.island.forward
    return model


@pytest.mark.parametrize(
    ("make", "patterns", "error", "words"),
    [
        (widths, ("island", "iland"), PolicyError, ['"iland"', "island"]),
        (widths, (nn.Conv2d,), PolicyError, ["no Conv2d", "Linear"]),
        (widths, (), PolicyError, ["no pattern"]),
        (widths, (3,), PolicyError, ["cannot match 3"]),
        (widths, (Tensor,), PolicyError, ["cannot match"]),
        (Halves, ("good", "bad"), UnsupportedError, ["bad (Linear)", "weight", "torch.bfloat16", ".float()"]),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), ("?",), UnsupportedError, ["not initialised"]),
        (patched, ("first", "island"), UnsupportedError, ["patched"]),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_changes(
    make: Any, patterns: tuple[Any, ...], error: type[HalfstepError], words: list[str]
) -> None:
    model = make()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(error) as caught:
        keep_fp32(model, *patterns)
    assert caught.value.fix
    for word in words:
        assert word in str(caught.value)
    assert [type(module) for module in model.modules()] == kinds


def run_attention(*patterns: str | type[nn.Module]) -> Islands:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2, batch_first=True)})
    islands = keep_fp32(model, *patterns)
    x = torch.randn(1, 3, 4)
    with torch.autocast("cpu", BF16):
        model["attention"](x, x, x)
    return islands


def test_a_module_whose_forward_never_runs_is_named() -> None:
    alone = run_attention("attention.out_proj")
    assert alone.unused() == ("attention.out_proj",)
    with pytest.raises(MisuseError, match=r"attention\.out_proj"):
        alone.require_used()
    covered = run_attention("attention*")
    assert covered.names == ("attention", "attention.out_proj")
    assert covered.unused() == ()
    covered.require_used()


def test_islands_survive_deepcopy_and_pickle_and_end_with_remove() -> None:
    model = widths()
    islands = keep_fp32(model, "island")
    keys = list(model.state_dict())
    copies = [copy.deepcopy(model), *(pickle.loads(pickle.dumps(model, protocol)) for protocol in range(2, 6))]
    islands.remove()
    islands.remove()
    assert type(model.island) is nn.Linear
    x = torch.randn(2, 8, dtype=BF16)
    with torch.autocast("cpu", BF16):
        assert model.island(x).dtype == BF16
        for other in copies:
            assert isinstance(other.island, nn.Linear)
            assert type(other.island) is type(copies[0].island)
            assert other.island(x).dtype == FP32
            assert torch.equal(other.island.weight, model.island.weight)
            assert list(other.state_dict()) == keys


def test_remove_undoes_its_own_islands_only_and_never_another_class() -> None:
    model = widths()
    outer, inner = keep_fp32(model, "island"), keep_fp32(model, nn.Linear)
    inner.remove()
    assert [type(m).__name__ for m in model.children()] == ["Linear", "IslandLinear", "Linear"]
    nn.utils.parametrize.register_parametrization(model.island, "weight", nn.Identity())
    with pytest.raises(MisuseError, match="another class"):
        outer.remove()


def test_an_island_keeps_the_signature_of_forward() -> None:
    model = nn.Sequential(nn.LSTM(2, 2))
    before = inspect.signature(model[0].forward)
    keep_fp32(model, nn.LSTM)
    assert inspect.signature(model[0].forward) == before

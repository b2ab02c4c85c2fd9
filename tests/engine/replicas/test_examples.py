"""Examples are counted by who they are: twice in one update, padding of a sampler, again in an epoch."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from tests.engine.replicas.company import Company
from tests.engine.replicas.layouts import tower

from halfstep.engine.manager import MixedPrecisionManager
from halfstep.errors import MisuseError

pytestmark = pytest.mark.processes

CASES = "tests.engine.replicas.examples"
APART = [[["a", "b"], ["c"]], [["d"], ["e", "f"]]]
TWICE = [[["a", "b"], ["c"]], [["d"], ["c", "a", "f"]]]  # a and c on both replicas


def test_examples_that_are_all_different(company: Company) -> None:
    for told in company.run(f"{CASES}:named", 2, epochs=[APART, APART], policy="raise"):
        assert told["error"] == ""
        assert told["notes"] == told["warnings"] == []
        assert (told["examples"]["processed"], told["examples"]["distinct"]) == (12, 12)  # in two epochs


@pytest.mark.parametrize("policy", ["warn", "raise", "ignore"])
def test_an_example_on_two_replicas_in_one_update(company: Company, policy: str) -> None:
    results = company.run(f"{CASES}:named", 2, epochs=[TWICE], policy=policy)
    for told in results:
        if policy == "raise":
            assert "2 examples ('a', 'c'" in told["error"]
            assert "ranks [0, 1], in attempted update 1" in told["error"]
            continue
        assert told["error"] == ""
        assert len(told["warnings"]) == (policy == "warn")
        assert "2 examples" in told["notes"][0]
        counted = told["examples"]
        assert (counted["processed"], counted["distinct"]) == (7, 5)
        assert counted["on_several_replicas_in_one_update"] == 2


def test_ids_of_another_number_than_before(company: Company) -> None:
    """More ids than the row had room for, a replica without any, ids of other kinds."""
    epoch = [
        [[1], [2], list(range(10, 30)), [], ["x", ("y", 3)]],
        [[5], [6], [7], [8], [9], [40, 41]],
    ]
    for told in company.run(f"{CASES}:named", 2, epochs=[epoch], policy="raise"):
        assert told["error"] == ""
        assert (told["examples"]["processed"], told["examples"]["distinct"]) == (31, 31)


def test_padding_of_a_distributed_sampler_is_recognised(company: Company) -> None:
    """Seven examples on two replicas: one comes twice, so that both get four."""
    for told in company.run(f"{CASES}:sampled", 2, size=7, dealt=True):
        assert told["examples"]["processed"] == 16
        assert told["examples"]["distinct"] == 14
        assert told["examples"]["repeated_by_a_sampler_as_padding"] == 2
        assert told["examples"]["repeated_within_an_epoch"] == 0
        assert told["examples"]["on_several_replicas_in_one_update"] == 0
        assert len(told["notes"]) == 1
        assert "DistributedSampler repeats examples" in told["notes"][0]


def test_a_sampler_without_padding_is_silent(company: Company) -> None:
    for told in company.run(f"{CASES}:sampled", 2, size=8, dealt=True):
        assert told["notes"] == told["warnings"] == []
        assert (told["examples"]["processed"], told["examples"]["distinct"]) == (16, 16)


def test_no_distributed_sampler(company: Company) -> None:
    """Both replicas read the whole dataset: every example counts twice."""
    for told in company.run(f"{CASES}:sampled", 2, size=8, dealt=False, epochs=1):
        assert told["examples"]["on_several_replicas_in_one_update"] == 8
        assert told["examples"]["distinct"] == 8
        assert "on several replicas at once" in told["warnings"][0]


def test_the_whole_dataset_on_each_replica_in_another_order(company: Company) -> None:
    epoch = [[["a"], ["b"], ["c"], ["d"]], [["c"], ["d"], ["a"], ["b"]]]
    for told in company.run(f"{CASES}:named", 2, epochs=[epoch], policy="raise"):
        assert told["error"] == ""  # in no update are two the same
        assert "come again within one epoch" in told["notes"][0]
        assert (told["examples"]["distinct"], told["examples"]["repeated_within_an_epoch"]) == (4, 4)


@pytest.mark.parametrize(
    ("epoch", "size", "repeated", "words"),
    [
        ([[1, 2], [2, 3]], 2, 1, "1 example (2) came more than once"),
        ([[1, 1, 1]], 1, 2, "1 example (1) came more than once"),
        ([[1, 2], [3, 1]], 1, 1, "examples come again within one epoch"),
        ([[1, 2], [2, 1, 4]], 2, 2, "2 examples (1, 2) came more than once"),
    ],
)
def test_one_process_counts_distinct_examples(epoch: list[list[int]], size: int, repeated: int, words: str) -> None:
    def train(policy: str) -> MixedPrecisionManager:
        manager = MixedPrecisionManager(precision="fp32", on_duplicate=policy)
        for group in manager.groups([(ids, torch.ones(len(ids), 4)) for ids in epoch], size, ids=0):
            for _, x in group:
                manager.backward(F.mse_loss(model(x), x))
            manager.step(model, optimizer)
        return manager

    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=re.escape(words)):
        manager = train("warn")
    if "more than once" in words:
        with pytest.raises(MisuseError, match=re.escape(words)):
            train("raise")
    counted = manager.report()["examples"]
    processed = sum(map(len, epoch))
    assert (counted["processed"], counted["distinct"]) == (processed, processed - repeated)
    assert counted["repeated_within_an_epoch"] == repeated

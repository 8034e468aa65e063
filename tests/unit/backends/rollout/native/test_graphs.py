"""Recorded passes: when they are made, compared and forgotten. What CUDA does is played by a graph that computes the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.backends.rollout.native import graphs
from posttrain.backends.rollout.native.graphs import CHECKED, GraphedStep, unrecordable


class Cache:
    moves = 0


class Graph:
    """A graph that writes what ``compute`` returns to its output."""

    def __init__(self, compute: Callable[[], Tensor], output: Tensor):
        self.compute, self.output = compute, output

    def replay(self) -> None:
        self.output.copy_(self.compute())


class Played(GraphedStep):
    """Steps that double the token ids and add the positions. Replays are off by ``error``."""

    def __init__(self, error: float = 0.0, failure: str = ""):
        super().__init__(self.compute)
        self.error, self.failure, self.computed, self.recordings = error, failure, 0, 0

    def compute(self, token_ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        self.computed += 1
        return 2.0 * token_ids + positions

    def _record(self, token_ids: Tensor, positions: Tensor, cache: Any) -> Any:
        if self.failure:
            raise RuntimeError(self.failure)
        self.recordings += 1
        given, output = torch.stack([token_ids, positions]), torch.zeros(len(token_ids))
        return graphs._Recorded(Graph(lambda: 2.0 * given[0] + given[1] + self.error, output), given, output)


def passes(step: Played, cache: Any, count: int, rows: int = 4) -> list[Tensor]:
    ids = torch.arange(1, rows + 1)
    return [step(ids, ids + number, cache).clone() for number in range(count)]


def test_the_first_pass_is_computed_and_the_second_recorded() -> None:
    """Later ones are replays of what is given then; the first of these are computed, too, to compare them."""
    step, cache = Played(), Cache()
    found = passes(step, cache, 10)
    assert [one.tolist() for one in found] == [[3.0 * n + number for n in range(1, 5)] for number in range(10)]
    assert step.recordings == 1 and step.computed == 1 + CHECKED
    passes(step, cache, 3, rows=8)
    assert step.recordings == 2


def test_a_moved_cache_is_recorded_again() -> None:
    step, cache = Played(), Cache()
    passes(step, cache, 3)
    cache.moves += 1
    passes(step, cache, 1)
    assert step.recordings == 1
    passes(step, cache, 1)
    assert step.recordings == 2
    passes(step, Cache(), 2)  # another one
    assert step.recordings == 3
    step.clear()  # as when weights change
    passes(step, cache, 2)
    assert step.recordings == 4


def test_replays_that_differ_are_given_up() -> None:
    step = Played(error=0.5)
    with pytest.warns(UserWarning, match=r"another result \(0\.\d+ apart\)"):
        found = passes(step, Cache(), 5)
    assert step.fails and step.recordings == 1
    assert [one.tolist() for one in found] == [[3.0 * n + number for n in range(1, 5)] for number in range(5)]


def test_a_pass_that_cannot_be_recorded_is_computed() -> None:
    step = Played(failure="operation not permitted when stream is capturing\nmore")
    with pytest.warns(UserWarning, match="slower: operation not permitted when stream is capturing$"):
        found = passes(step, Cache(), 4)
    assert len(found) == 4 and step.computed == 4


def model(family: str, **more: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | more)))


def test_what_waits_for_the_host_is_known_beforehand() -> None:
    assert unrecordable(model("llama")) == ""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    assert "experts" in unrecordable(model("qwen3_moe", **experts))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert "(dynamic)" in unrecordable(model("llama", rope_parameters=dynamic))

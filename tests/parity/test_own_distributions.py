"""Turns with a temperature or a grammar of their own: the trainer scores the distribution that the sampler drew from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.interfaces.rollout_engine import Request
from posttrain.libraries.grammars import json_grammar
from posttrain.models.loading import load_causal_lm
from posttrain.records.batches import SequenceBatch
from posttrain.records.samples import SampleRow
from posttrain.records.trajectories import OwnDraws, Reward, SamplingParams, Trajectory
from posttrain.steps.padding import pad

pytest.importorskip("llguidance")
SAMPLING = SamplingParams(max_response_tokens=24, temperature=0.8)
PROMPT = tuple(b"some text")
OWN = replace(SAMPLING, temperature=1.7)
GRAMMAR = json_grammar({"enum": ["red", "green", 17, [True, False]]})


def asked() -> list[Request]:
    return [
        Request("plain", PROMPT, 12),
        Request("warm", PROMPT, 12, sampling=OWN),
        Request("within", PROMPT, 24, grammar=GRAMMAR),
        Request("both", PROMPT, 24, sampling=OWN, grammar=GRAMMAR, seed=3),
    ]


def engine_of(folder: Path) -> NativeEngine:
    return NativeEngine(
        load_causal_lm(str(folder), dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
        max_concurrent_sequences=8,
        max_prefill_tokens=300,
    )


def sampled(engine: NativeEngine, requests: list[Request]) -> dict[str, Trajectory]:
    found = []
    with engine.open_stream(SAMPLING) as stream:
        stream.submit(requests)
        while ended := stream.wait(60.0):
            found += ended
    return {each.sample_id: each for each in found}


def batch_of(trajectories: list[Trajectory]) -> SequenceBatch:
    return pad(
        [
            SampleRow(
                sample=each,
                prompt=PROMPT,
                group=0,
                trajectory=number,
                last=True,
                outcome=Reward(0.0),
                kept=True,
                truncated=False,
                images=None,
            )
            for number, each in enumerate(trajectories)
        ]
    )


@pytest.mark.parametrize("head", ["fused", "whole logits"])
def test_the_trainers_log_probs_are_those_of_the_distribution_that_was_drawn_from(tiny_llama: Path, head: str) -> None:
    engine = engine_of(tiny_llama)
    found = list(sampled(engine, asked()).values())
    assert [bool(each.own_draws) for each in found] == [each.sample_id != "plain" for each in found]
    batch = batch_of(found)
    scorer = LogprobScorer(load_causal_lm(str(tiny_llama), dtype=torch.float32), 2)
    if head == "whole logits":
        scorer.head = "its form is not known here"
    trained = scorer.logprobs(batch, SAMPLING.temperature)
    torch.testing.assert_close(trained, batch.rollout_logprobs, atol=2e-5, rtol=0)
    # Without the record the difference would be large.
    plain = scorer.logprobs(replace(batch, own_draws=()), SAMPLING.temperature)
    worst = (plain - batch.rollout_logprobs).abs().amax(dim=1)
    assert all((gap > 0.1) == bool(each.own_draws) for gap, each in zip(worst, found, strict=True))
    # Rows of a batch keep their distributions, in any order.
    order = [3, 0, 2]
    torch.testing.assert_close(scorer.logprobs(batch.rows(order), SAMPLING.temperature), trained[order])


def test_a_response_that_is_taken_back_goes_on_within_its_grammar(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama)
    whole = sampled(engine, asked())
    found: dict[str, Trajectory] = {}
    with engine.open_stream(SAMPLING) as stream:
        stream.submit(asked())
        waiting = {each.sample_id: each for each in asked()}
        while waiting:
            found |= {each.sample_id: each for each in stream.wait(60.0, passes=3)}
            waiting = {name: each for name, each in waiting.items() if name not in found}
            for begun in stream.take_back():
                stream.submit([replace(waiting[begun.sample_id], begun=begun if begun.token_ids else None)])
    for name, each in whole.items():
        assert (found[name].token_ids, found[name].own_draws) == (each.token_ids, each.own_draws)


def test_draws_of_a_part_of_a_turn() -> None:
    draws = OwnDraws(2, 6, 0.5, ("a", "b"), (0, 1, 1, 0))
    assert draws.between(0, 4) == OwnDraws(2, 4, 0.5, ("a", "b"), (0, 1))
    assert draws.between(3, 9) == OwnDraws(0, 3, 0.5, ("a", "b"), (1, 1, 0))
    assert draws.between(6, 9) is None

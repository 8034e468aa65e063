"""Turns with a temperature or a grammar of their own: the trainer scores the distribution that the sampler drew from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_update_paths import PLAN, SHARED, make_batch, make_engine, needs
from torch import Tensor
from transformers import AutoTokenizer

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.interfaces.rollout_engine import Request
from posttrain.libraries.grammars import json_grammar
from posttrain.models.loading import load_causal_lm
from posttrain.records.allowed_tokens import to_text
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.samples import SampleRow
from posttrain.records.trajectories import OwnDraws, Reward, SamplingParams, Trajectory
from posttrain.registry import is_installed
from posttrain.steps.padding import pad
from warm.processes import on_ranks

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


def batch_with_own() -> TrainBatch:
    """Of twelve rows two have a temperature of their own, and one a set of possible tokens besides."""
    batch = make_batch(0)
    draws: list[tuple[OwnDraws, ...]] = [()] * len(batch.sequences)
    possible = np.arange(256) % 3 == 0
    width = batch.sequences.tokens.shape[1] - batch.sequences.response_mask.shape[1]
    possible[batch.sequences.tokens[4, width : width + 7].numpy()] = True
    draws[1] = (OwnDraws(0, 4, 1.7), OwnDraws(6, 11, 0.5))
    draws[4] = (OwnDraws(1, 7, 1.3, (to_text(np.packbits(possible, bitorder="little").tobytes()),), (0,) * 6),)
    return replace(batch, sequences=replace(batch.sequences, own_draws=tuple(draws)))


def updated(folder: Path, way: str | None) -> dict[str, Tensor]:
    """Log-probs without gradient, then loss, norm and log-probs of an update, and log-probs after it."""
    how = {"sharding": SHARED[way].sharding, "kind": SHARED[way].kind, "micro": SHARED[way].micro} if way else {}
    engine, batch = make_engine(folder, **how), batch_with_own()
    before = engine.logprobs(batch.sequences, PLAN.temperature)
    stats = engine.forward_backward(batch, PLAN, batch.counts())
    numbers = torch.tensor([stats.loss, engine.optimizer_step().grad_norm])
    learned = torch.where(batch.sequences.response_mask, stats.policy_logprobs, 0.0)
    after = engine.logprobs(batch.sequences, PLAN.temperature)
    return {"before": before, "numbers": numbers, "learned": learned, "after": after}


RANKS = ("2", "sequence 2", "sequence 2, one sequence at a time", "zero 3")  # of SHARED


def in_process(rank: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    for way in RANKS:
        if needs(SHARED[way]) and not all(is_installed(library) for library in needs(SHARED[way])):
            continue
        dist.init_process_group("gloo", init_method=f"file://{out}/{way}", rank=rank, world_size=2)
        torch.save(updated(folder, way), out / f"{way} {rank}.pt")
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_them_as_one_does(tiny_qwen: Path, tmp_path: Path) -> None:
    wanted = updated(tiny_qwen, None)
    plain = make_engine(tiny_qwen).logprobs(make_batch(0).sequences, PLAN.temperature)
    differs = (wanted["before"] - plain).abs().amax(dim=1) > 0.01
    assert differs.nonzero().flatten().tolist() == [1, 4]
    on_ranks(in_process, (tiny_qwen, tmp_path), 2)
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) >= 6
    for file in files:
        found = torch.load(file)
        for name, expected in wanted.items():
            assert (found[name] - expected).norm() < 2e-5 * expected.norm(), (file.name, name)


def test_draws_of_a_part_of_a_turn() -> None:
    draws = OwnDraws(2, 6, 0.5, ("a", "b"), (0, 1, 1, 0))
    assert draws.between(0, 4) == OwnDraws(2, 4, 0.5, ("a", "b"), (0, 1))
    assert draws.between(3, 9) == OwnDraws(0, 3, 0.5, ("a", "b"), (1, 1, 0))
    assert draws.between(6, 9) is None

"""However an update is computed, it is the same update: losses, gradient norms and new weights agree.

float32: to 1e-5 of their size. Sums are taken in another order, and nothing else differs. bfloat16: to 2e-2. Its products are
rounded to 8 bits (2^-9 = 0.002 of each value), differently for every way of packing, over two layers and back; the masters
stay float32, so an update's error does not grow with the number of updates. An adapter in bfloat16: to 6e-2, because its B
starts at 0 and is nothing but updates, while other weights hide theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoTokenizer

from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.backends.train.fsdp import FsdpTrainEngine
from posttrain.backends.train.fsdp.sharding import FsdpSharding, load_parts, save_parts
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.lora import LoraConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter, merged_weights
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.plans import LossPlan

PLAN = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=0.9,
    entropy_coef=0.01,
    kl_coef=0.1,
)
# Prompt length and response lengths of every group: 4 x 3 samples, ragged.
GROUPS = [(9, (5, 11, 2)), (4, (7, 7, 1)), (13, (12, 3, 6)), (1, (4, 9, 10))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    logprobs: Tensor  # of the first update
    scored: Tensor  # without gradient, before it
    weights: dict[str, Tensor]  # masters after both updates


def make_batch(seed: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = [(g, prompt, response) for g, (prompt, responses) in enumerate(GROUPS) for response in responses]
    width, length = max(p for _, p, _ in rows), max(r for *_, r in rows)
    prompts = [torch.randint(0, 256, (prompt,), generator=generator) for prompt, _ in GROUPS]
    tokens = torch.randint(0, 256, (len(rows), width + length), generator=generator)
    for row, (group, prompt, _) in enumerate(rows):
        tokens[row, width - prompt : width] = prompts[group]
    mask = torch.arange(length) < torch.tensor([r for *_, r in rows])[:, None]
    sequences = SequenceBatch(
        tokens=tokens,
        prompt_lengths=torch.tensor([p for _, p, _ in rows]),
        response_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        rewards=torch.zeros(len(rows)),
        valid=torch.ones(len(rows), dtype=torch.bool),
        group_index=torch.tensor([group for group, *_ in rows]),
        sample_ids=tuple(map(str, range(len(rows)))),
        ref_logprobs=(torch.randn(mask.shape, generator=generator) - 5) * mask,
    )
    advantages = torch.randn(len(rows), 1, generator=generator) * mask
    return TrainBatch(sequences=sequences, advantages=advantages, loss_mask=mask)


def make_engine(
    folder: Path,
    kind: type[PolicyModel] = LocalTrainEngine,
    *,
    dtype: torch.dtype = torch.float32,
    micro: int | None = 12,
    max_tokens: int | None = None,
    adapter: bool = False,
    **how: Any,
) -> PolicyModel:
    model = load_causal_lm(str(folder), dtype=dtype)
    if adapter:
        add_adapter(model, LoraConfig(rank=2), seed=1)
    return kind(
        model,
        AutoTokenizer.from_pretrained(folder),
        # An eps that is not tiny beside the gradients: AdamW would otherwise make a full step of the rounding error of a
        # gradient that is 0 but for it.
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=micro,
        sequences_per_scoring_batch=micro or 12,
        max_tokens_per_micro_batch=max_tokens,
        max_tokens_per_scoring_batch=max_tokens,
        **how,
    )


def run(engine: PolicyModel) -> Outcome:
    losses, norms, logprobs = [], [], []
    scored = engine.logprobs(make_batch(0).sequences, PLAN.temperature)
    for seed in range(2):
        batch = make_batch(seed)
        stats = engine.forward_backward(batch, PLAN, batch.counts())
        losses.append(stats.loss)
        norms.append(engine.optimizer_step().grad_norm)
        logprobs.append(stats.policy_logprobs)
    weights = {name: engine._sharding.whole(weight).clone() for name, weight in engine._masters.parameters.items()}
    return Outcome(losses, norms, logprobs[0], scored, weights)


def assert_alike(found: Outcome, wanted: Outcome, tolerance: float) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=tolerance)
    for mine, theirs in ((found.logprobs, wanted.logprobs), (found.scored, wanted.scored)):
        assert (mine - theirs).norm() < tolerance * theirs.norm()
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in found.weights.items():
        assert (weight - wanted.weights[name]).norm() < tolerance * wanted.weights[name].norm(), name


@pytest.fixture(scope="module")
def wanted(tiny_qwen: Path) -> Iterator[dict[tuple[torch.dtype, bool], Outcome]]:
    """By the plainest path: each row with its own prompt, padded, all at once."""
    plain = {"padded": True, "share_prompts": False}
    yield {
        (dtype, adapter): run(make_engine(tiny_qwen, dtype=dtype, adapter=adapter, **plain))
        for dtype in TOLERANCE
        for adapter in (False, True)
    }


WAYS: dict[str, dict[str, Any]] = {
    "packed, prompts shared": {},
    "packed, own prompts": {"share_prompts": False},
    "one sequence at a time": {"micro": 1},
    "five sequences at a time": {"micro": 5},
    "padded, five at a time": {"micro": 5, "padded": True},
    "30 tokens at a time": {"micro": None, "max_tokens": 30},
    "checkpointing": {"gradient_checkpointing": True, "micro": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "adapter"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_update_by_many_paths(
    tiny_qwen: Path, wanted: dict[Any, Outcome], way: str, adapter: bool, dtype: torch.dtype
) -> None:
    if adapter:
        pytest.importorskip("peft")
    found = run(make_engine(tiny_qwen, dtype=dtype, adapter=adapter, **WAYS[way]))
    assert_alike(found, wanted[dtype, adapter], 6e-2 if adapter and dtype == torch.bfloat16 else TOLERANCE[dtype])


@pytest.mark.slow
def test_compiled_layers(tiny_qwen: Path, wanted: dict[Any, Outcome]) -> None:
    assert_alike(run(make_engine(tiny_qwen, compile_layers=True, micro=5)), wanted[torch.float32, False], 1e-5)


def test_merged_adapter_scores_as_the_unmerged_one(tiny_qwen: Path) -> None:
    pytest.importorskip("peft")
    adapted = make_engine(tiny_qwen, adapter=True)
    run(adapted)
    merged = make_engine(tiny_qwen)
    merged.model.load_state_dict(merged_weights(adapted.model))
    batch = make_batch(3)
    mine, theirs = (each.forward_backward(batch, PLAN, batch.counts()) for each in (merged, adapted))
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert (mine.policy_logprobs - theirs.policy_logprobs).norm() < 1e-5 * theirs.policy_logprobs.norm()


# --------------------------------------------------------------------------------------------------- several processes


def in_process(rank: int, ranks: int, folder: Path, out: Path, dtype: torch.dtype, adapter: bool) -> None:
    """One of ``ranks`` processes: the same updates, its parts saved and read back, everything saved once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=ranks)
    try:
        engine, again = (
            make_engine(
                folder, FsdpTrainEngine, adapter=adapter, micro=5, sharding=FsdpSharding("cpu", param_dtype=dtype)
            )
            for _ in range(2)
        )
        found = run(engine)
        parts = {name: weight.detach() for name, weight in engine._masters.parameters.items()}
        save_parts(parts, out / "parts")
        empty = {name: torch.zeros_like(part) for name, part in parts.items()}
        load_parts(empty, out / "parts")
        same = all(torch.equal(empty[name].to_local(), parts[name].to_local()) for name in parts)
        (out / "saved").mkdir(exist_ok=True)
        engine.save(out / "saved")
        again.load(out / "saved")
        batch = make_batch(7)
        following = []
        for each in (engine, again):
            stats = each.forward_backward(batch, PLAN, batch.counts())
            following.append((stats.loss, each.optimizer_step().grad_norm, each.version))
        torch.save(found._asdict(), out / f"{rank}.pt")
        (out / f"{rank}.json").write_text(json.dumps({"parts": same, "following": following}))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dtype", "adapter"),
    [(1, torch.float32, False), (2, torch.float32, False), (2, torch.bfloat16, False), (2, torch.float32, True)],
    ids=str,
)
def test_shared_out_over_processes(
    tiny_qwen: Path, tmp_path: Path, wanted: dict[Any, Outcome], ranks: int, dtype: torch.dtype, adapter: bool
) -> None:
    if adapter:
        pytest.importorskip("peft")
    mp.spawn(in_process, (ranks, tiny_qwen, tmp_path, dtype, adapter), nprocs=ranks)
    for rank in range(ranks):
        assert_alike(Outcome(**torch.load(tmp_path / f"{rank}.pt")), wanted[dtype, adapter], TOLERANCE[dtype])
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["parts"], "a part read back differs from what was written"
        straight, resumed = told["following"]
        assert straight == resumed and straight[2] == 3
    # The gathered folder is the local engine's: it goes on from there.
    local = make_engine(tiny_qwen, dtype=dtype, adapter=adapter)
    local.load(tmp_path / "saved")
    batch = make_batch(7)
    stats = local.forward_backward(batch, PLAN, batch.counts())
    assert stats.loss == pytest.approx(straight[0], rel=TOLERANCE[dtype])

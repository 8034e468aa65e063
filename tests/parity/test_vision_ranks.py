"""Prompts with images over several processes: the updates of a vision-language model are those of one process.

Every process runs its own micro-batches, of which some hold images and some do not; the collective calls of the tower's weights
must be equally many on all of them. float32, to 1e-4 of their size: sums are taken in another order.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_vision_step import advantages_of, scored_groups
from torch import Tensor
from transformers import AutoTokenizer

from posttrain.backends.torch_training.critic import ValueModel
from posttrain.backends.torch_training.policy import PolicyModel
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.train.deepspeed import DeepspeedTrainEngine
from posttrain.backends.train.fsdp import FsdpTrainEngine, FsdpValueEngine
from posttrain.backends.train.fsdp.sharding import FsdpSharding
from posttrain.backends.train.local import LocalTrainEngine, LocalValueEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny_vision import write_tiny_vision_model
from posttrain.models.value_head import load_value_model
from posttrain.models.vision import freeze_vision, tower_passes
from posttrain.plan.engines.deepspeed import ZeroSettings
from posttrain.plan.engines.fsdp import FsdpSettings
from posttrain.records.batches import CriticTargets, TrainBatch
from posttrain.records.images import PromptImages
from posttrain.records.plans import AdvantagePlan, LossPlan, ValueLossPlan
from posttrain.steps.assemble import assemble
from warm.processes import on_ranks

pytestmark = pytest.mark.slow

FAMILIES = ["qwen3_vl", "smolvlm"]
PLAN = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=0.9,
    entropy_coef=0.01,
)
# Rows of each update, in groups of three: all; one prompt with two images; all again, whose tower has averages; text alone, which
# does not move the tower (DeepSpeed decays it there); and all.
UPDATES = [range(9), range(3, 6), range(9), range(6, 9), range(9)]


class Way(NamedTuple):
    fsdp: dict[str, Any] = {}  # FsdpSettings
    zero: int | None = None  # stage of DeepSpeed instead
    sequence: int = 1
    micro: int = 2
    frozen: bool = False
    checkpointing: bool = False
    tiles: bool = False  # of two sizes, each of which takes a pass of the tower (SmolVLM)

    @property
    def rows(self) -> list[range]:
        return UPDATES if self.zero is None and not self.tiles else UPDATES[:3]

    @property
    def sharding(self) -> Sharding:
        if self.zero is not None:
            from posttrain.backends.train.deepspeed.sharding import DeepspeedSharding

            settings = ZeroSettings(stage=self.zero)
            return DeepspeedSharding("cpu", compute_dtype=torch.float32, settings=settings, sequence=self.sequence)
        settings = FsdpSettings(**({"shard": 2} | self.fsdp))
        return FsdpSharding("cpu", param_dtype=torch.float32, settings=settings, sequence=self.sequence)


WAYS = {
    "fsdp": Way(),
    "fsdp, one sequence at a time": Way(micro=1),
    "fsdp, as one unit": Way({"one_unit": True}),
    "fsdp, gathered until the backward pass": Way({"reshard_after_forward": False}),
    "fsdp, units by size": Way({"smallest_unit": 1000}),
    "fsdp, frozen tower": Way(frozen=True),
    "fsdp, checkpointing": Way(checkpointing=True),
    "fsdp, sequence": Way(sequence=2),
    "fsdp, tiles of two sizes": Way(micro=4, tiles=True),
    "zero 2": Way(zero=2),
    "zero 3": Way(zero=3),
    "zero 3, sequence": Way(zero=3, sequence=2),
}


class Outcome(NamedTuple):
    losses: list[float]
    norms: list[float]
    logprobs: Tensor  # without gradient, after the updates
    weights: dict[str, Tensor]  # after the updates


def batch_of(folder: Path) -> TrainBatch:
    return advantages_of(assemble(scored_groups(folder)), AdvantagePlan(name="grpo"))


def with_a_small_tile(batch: TrainBatch, image_token: int) -> TrainBatch:
    """The batch with a tile of 16 x 16 pixels, which is four tokens, in the prompt of its last group."""
    pixels = np.random.default_rng(3).standard_normal((1, 1, 3, 16, 16)).astype(np.float32)
    features = {"pixel_values": pixels, "pixel_attention_mask": np.ones((1, 1, 16, 16), np.int64)}
    small = PromptImages(files=(b"small",), features=features, content_hash="small")
    sequences = batch.sequences
    tokens = sequences.tokens.clone()
    for row in range(6, 9):
        first = sequences.prompt_width - int(sequences.prompt_lengths[row]) + 1
        tokens[row, first : first + 4] = image_token
    images = (*sequences.images[:6], small, small, small)
    assert tower_passes([each for each in images if each]) == 2
    return replace(batch, sequences=replace(sequences, tokens=tokens, images=images))


def updates(folder: Path, kind: type[PolicyModel], way: Way, **how: Any) -> Outcome:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    if way.frozen:
        freeze_vision(model)
    engine = kind(
        model,
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=way.micro,
        sequences_per_scoring_batch=way.micro,
        gradient_checkpointing=way.checkpointing,
        **how,
    )
    whole, losses, norms = batch_of(folder), [], []
    if way.tiles:
        whole = with_a_small_tile(whole, model.config.image_token_id)
    for rows in way.rows:
        batch = whole.rows(list(rows))
        losses.append(engine.forward_backward(batch, PLAN, batch.counts()).loss)
        norms.append(engine.optimizer_step().grad_norm)
    weights = {name: weight.clone() for name, weight in engine._masters.whole(engine._sharding)}
    return Outcome(losses, norms, engine.logprobs(whole.sequences, 1.0), weights)


def value_updates(folder: Path, kind: type[ValueModel], **how: Any) -> Outcome:
    engine = kind(
        load_value_model(str(folder), dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=2,
        **how,
    )
    whole, losses, norms = batch_of(folder), [], []
    for rows in UPDATES:
        batch = whole.rows(list(rows))
        values = engine.values(batch.sequences)
        batch = TrainBatch(
            sequences=batch.sequences,
            scores=batch.scores,
            logprobs=batch.logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            critic=CriticTargets(values=values, returns=batch.advantages),
        )
        plan = ValueLossPlan(value_clip=0.5, aggregation="token_mean")
        losses.append(engine.forward_backward(batch, plan, batch.counts()).loss)
        norms.append(engine.optimizer_step().grad_norm)
    weights = {name: weight.clone() for name, weight in engine._masters.whole(engine._sharding)}
    return Outcome(losses, norms, engine.values(whole.sequences), weights)


def in_process(rank: int, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=2)
    try:
        for name, way in WAYS.items():
            if (way.zero is not None and not find_spec("deepspeed")) or (way.tiles and "smolvlm" not in folder.name):
                continue
            kind = FsdpTrainEngine if way.zero is None else DeepspeedTrainEngine
            torch.save(updates(folder, kind, way, sharding=way.sharding)._asdict(), out / f"{name} {rank}.pt")
        found = value_updates(folder, FsdpValueEngine, sharding=Way().sharding)
        torch.save(found._asdict(), out / f"values {rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def shared_out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    on_ranks(in_process, (folder, out), 2)
    return out


def assert_alike(found: Path, wanted: Outcome) -> None:
    for rank in range(2):
        mine = Outcome(**torch.load(found.with_name(f"{found.name} {rank}.pt")))
        assert mine.losses == pytest.approx(wanted.losses, rel=1e-4, abs=1e-6)
        assert mine.norms == pytest.approx(wanted.norms, rel=1e-4)
        torch.testing.assert_close(mine.logprobs, wanted.logprobs, rtol=1e-4, atol=1e-4)
        assert mine.weights.keys() == wanted.weights.keys()
        for name, weight in mine.weights.items():
            assert (weight - wanted.weights[name]).norm() < 1e-4 * wanted.weights[name].norm(), name


@pytest.mark.parametrize("name", WAYS)
def test_updates_of_two_processes_are_those_of_one(folder: Path, shared_out: Path, name: str) -> None:
    way = WAYS[name]
    if way.zero is not None:
        pytest.importorskip("deepspeed")
    if way.tiles and "smolvlm" not in folder.name:
        pytest.skip("of other families patches of any sizes take one pass")
    wanted = updates(folder, LocalTrainEngine, Way(zero=way.zero, frozen=way.frozen, tiles=way.tiles))
    assert_alike(shared_out / name, wanted)


def test_a_critic_of_two_processes_is_that_of_one(folder: Path, shared_out: Path) -> None:
    assert_alike(shared_out / "values", value_updates(folder, LocalValueEngine))

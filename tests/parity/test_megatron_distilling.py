"""A teacher's most likely tokens on megatron-core's ranks: found, and learned from, as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_update_paths import PLAN, make_batch, make_engine
from torch import Tensor

from posttrain.backends.torch_training.memory import Cutter
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import write_tiny_model
from posttrain.plan.engines.megatron.options import MegatronSettings
from posttrain.records.batches import TeacherScores, TrainBatch
from posttrain.records.plans import DistillationPlan
from posttrain.registry import is_installed
from warm.processes import on_ranks

WARM = ("posttrain.backends.train.megatron",)  # see conftest.py
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed("megatron"), reason="needs megatron-core")]

SIZES = {"tensor 2": {"tensor": 2}, "pipeline 2": {"pipeline": 2}, "context 2": {"context": 2}, "two copies": {}}
RESTS = ("bucket", "renormalize", "drop")
K = 5


def compared(engine: Any, rest: str, top: Tensor) -> dict[str, Any]:
    """The divergence, an update's loss and its gradient's norm, and log-probs after it."""
    plan = DistillationPlan(
        name="forward_kl", of_sampled_tokens=False, teachers={"one": 0.7}, coef=0.5, as_loss=True, top_k=K, rest=rest,
        temperature=0.9,
    )  # fmt: skip
    batch = taught(top)
    found = {"divergence": engine.divergence(batch.sequences, batch.teachers, plan)}
    stats = engine.forward_backward(batch, replace(PLAN, distillation=plan), batch.counts())
    found |= {"loss": torch.tensor(stats.loss), "norm": torch.tensor(engine.optimizer_step().grad_norm)}
    return found | {"after": engine.logprobs(batch.sequences, 1.0)}


def taught(top: Tensor) -> TrainBatch:
    """A batch most of whose rows have a teacher."""
    batch = make_batch(0)
    rows = torch.arange(len(batch)) % 3 > 0
    return replace(batch, teachers={"one": TeacherScores(rows=rows, top=top)})


def in_process(rank: int, ranks: int, folder: Path, out: Path) -> None:
    from megatron.core import parallel_state

    from posttrain.backends.train.megatron import MegatronTrainEngine
    from posttrain.backends.train.megatron.scorer import frozen
    from posttrain.backends.train.megatron.sharding import MegatronSharding

    torch.set_num_threads(1)
    top = torch.load(folder / "top.pt")
    for name, sizes in SIZES.items():
        dist.init_process_group("gloo", init_method=f"file://{out}/{name}", rank=rank, world_size=ranks)
        try:
            for rest in RESTS:
                sharding = MegatronSharding(
                    torch.device("cpu"), compute_dtype=torch.float32, settings=MegatronSettings(), **sizes
                )
                engine = make_engine(folder / "student", MegatronTrainEngine, sharding=sharding, micro=5)
                found = compared(engine, rest, top)
                if rest == RESTS[0]:
                    teacher = load_causal_lm(str(folder / "teacher"), dtype=torch.float32)
                    scorer = frozen(teacher, Cutter(5, None), sharding)
                    scorer.vocabulary = 250
                    found["top"] = scorer.top_logprobs(make_batch(0).sequences, 0.8, K)
                torch.save(found, out / f"{name} {rest} {rank}.pt")
                parallel_state.destroy_model_parallel()
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher, and the teacher's answer by the engine of one process."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        write_tiny_model(folder / name, "qwen3", seed=seed)
    teacher: Any = make_engine(folder / "teacher")
    teacher._scorer.vocabulary = 250
    torch.save(teacher._scorer.top_logprobs(make_batch(0).sequences, 0.8, K), folder / "top.pt")
    return folder


@pytest.fixture(scope="module")
def ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    out = tmp_path_factory.mktemp("ranks")
    on_ranks(in_process, (2, models, out), 2)
    yield lambda name: [torch.load(out / f"{name} {rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("name", SIZES)
def test_the_ranks_learn_as_one_process(
    models: Path, ranks: Callable[[str], list[dict[str, Any]]], name: str, rest: str
) -> None:
    wanted = compared(make_engine(models / "student"), rest, torch.load(models / "top.pt"))
    assert wanted["divergence"].abs().sum() > 0
    for found in ranks(f"{name} {rest}"):
        found.pop("top", None)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SIZES)
def test_the_most_likely_tokens_are_those_of_one_process(
    models: Path, ranks: Callable[[str], list[dict[str, Any]]], name: str
) -> None:
    wanted = torch.load(models / "top.pt")
    for found in ranks(f"{name} {RESTS[0]}"):
        assert torch.equal(found["top"][:, :, 0], wanted[:, :, 0]) and found["top"][:, :, 0].max() < 250
        torch.testing.assert_close(found["top"][:, :, 1], wanted[:, :, 1], rtol=2e-5, atol=2e-5)

"""megatron-core's layers over processes make the updates of one process, and a run on them is the run in one process.

float32: to 2e-5 of a number's size (1.2e-5 is the most seen); sums are taken in another order, and nothing else differs.
bfloat16 with layers' matrices shared by two: to 6e-2, because the two halves of a product are rounded to 8 bits before they are
added up, in every layer. An adapter in bfloat16: to 1e-1, because its B is nothing but two updates (in one process they are
9.5e-2 off float32's, too).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ray_runs import assert_same, config
from safetensors.torch import load_file, save_file
from test_update_paths import PLAN, Outcome, assert_alike, assert_chunks_hold, make_engine
from test_update_paths import make_batch as batch_of_bytes
from torch import Tensor
from transformers import AutoTokenizer

from counted_reads import counted_reads
from posttrain.backends.runtime.ray.sending import Sender
from posttrain.backends.train.local import LocalValueEngine
from posttrain.build.train import train_run
from posttrain.config.lora import LoraConfig
from posttrain.config.policy import OptimizerConfig
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.lora import add_adapter
from posttrain.models.tiny import draw_weights, write_tiny_model
from posttrain.models.value_head import head_name, load_value_model, value_head
from posttrain.plan.engines.megatron.experts import ExpertSettings
from posttrain.plan.engines.megatron.options import MegatronSettings
from posttrain.records.batches import CriticTargets, TrainBatch
from posttrain.records.plans import ValueLossPlan
from posttrain.registry import is_installed
from warm.processes import on_ranks

# Looked for, not imported: that takes seconds, also where none of these tests is run.
WARM = ("posttrain.backends.train.megatron",)  # see conftest.py
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed("megatron"), reason="needs megatron-core")]


class Split(NamedTuple):
    """A way of splitting a model of a family; how it is computed."""

    sizes: dict[str, int] = {}  # tensor, pipeline, context; the rest are copies
    ranks: int = 2
    family: str = "qwen3"
    settings: dict[str, Any] = {}  # of MegatronSettings
    dtype: torch.dtype = torch.float32
    how: dict[str, Any] = {"micro": 5}
    resumes: bool = False  # whether saving and loading are looked at, too
    layers: int = 2
    adapter: LoraConfig | None = None

    @property
    def model(self) -> str:
        return f"{self.family}-{self.layers}"


def experts(**settings: Any) -> dict[str, Any]:
    return {"experts": ExpertSettings(**settings)}


SPLITS = {
    "one rank": Split(ranks=1, resumes=True),
    "tensor 2": Split({"tensor": 2}, settings={"sequence_parallel": False}, resumes=True),
    "tensor 2, tokens shared": Split({"tensor": 2}),
    "tensor 2, tied embedding": Split({"tensor": 2}, family="llama"),
    "tensor 2, biases": Split({"tensor": 2}, family="qwen2"),
    "tensor 2, bfloat16": Split({"tensor": 2}, dtype=torch.bfloat16),
    "tensor 2, all recomputed": Split({"tensor": 2}, how={"micro": 5, "gradient_checkpointing": True}),
    "tensor 2, some recomputed": Split(
        {"tensor": 2}, settings={"recompute": {"granularity": "selective", "modules": ["core_attn", "mlp"]}}
    ),
    "pipeline 2": Split({"pipeline": 2}, resumes=True),
    "pipeline 2, tied embedding": Split({"pipeline": 2}, family="llama", resumes=True),
    "pipeline 2, bfloat16": Split({"pipeline": 2}, dtype=torch.bfloat16, resumes=True),
    "pipeline 2, recomputed": Split({"pipeline": 2}, how={"micro": 5, "gradient_checkpointing": True}),
    "pipeline 2, by tokens": Split({"pipeline": 2}, how={"micro": None, "max_tokens": 30}),
    # 12 sequences in micro-batches of 5 are 3, and one that counts nothing: two stages take them in twos.
    "pipeline 2 x virtual 2": Split({"pipeline": 2}, settings={"virtual": 2}, layers=4, resumes=True),
    "pipeline 2 x virtual 2, tied embedding": Split(
        {"pipeline": 2}, settings={"layers_per_virtual_stage": 1}, family="llama", layers=4, how={"micro": 2}
    ),
    "pipeline 2 x virtual 2, recomputed": Split(
        {"pipeline": 2}, settings={"virtual": 2}, layers=4, how={"micro": 5, "gradient_checkpointing": True}
    ),
    "context 2": Split({"context": 2}),
    "context 2, one sequence at a time": Split({"context": 2}, how={"micro": 1}),
    "two copies": Split(),
    "two copies, averages in halves": Split(settings={"distributed_optimizer": True}, resumes=True),
    "two copies, averages in halves, bfloat16": Split(settings={"distributed_optimizer": True}, dtype=torch.bfloat16),
    "two copies, padded": Split(how={"micro": 5, "padded": True}),
    "tensor 2 x pipeline 2": Split({"tensor": 2, "pipeline": 2}, ranks=4, family="llama", resumes=True),
    "tensor 2 x context 2": Split({"tensor": 2, "context": 2}, ranks=4),
    "pipeline 2 x two copies": Split({"pipeline": 2}, ranks=4),
    "tensor 2 x pipeline 2 x virtual 2": Split(
        {"tensor": 2, "pipeline": 2}, ranks=4, settings={"virtual": 2}, layers=4
    ),
    "tensor 4, two key/value heads": Split({"tensor": 4}, ranks=4),
    "experts, one rank": Split(ranks=1, family="qwen2_moe", settings=experts(grouped=True)),
    "experts 2": Split(family="qwen3_moe", settings=experts(parallel=2), resumes=True),
    "experts 2, one sequence at a time": Split(family="qwen3_moe", settings=experts(parallel=2), how={"micro": 1}),
    "experts 2, one product": Split(family="mixtral", settings=experts(parallel=2, grouped=True)),
    "experts 2, all tokens gathered": Split(family="qwen3_moe", settings=experts(parallel=2, dispatcher="allgather")),
    "experts 2, one shared by all tokens": Split(family="qwen2_moe", settings=experts(parallel=2), resumes=True),
    "experts 2, recomputed": Split(
        family="qwen3_moe",
        settings=experts(parallel=2) | {"recompute": {"granularity": "selective", "modules": ["moe", "core_attn"]}},
    ),
    "experts 2, all recomputed": Split(
        family="qwen2_moe", settings=experts(parallel=2), how={"micro": 5, "gradient_checkpointing": True}
    ),
    "experts 2, frozen router": Split(
        family="qwen3_moe", settings=experts(parallel=2, freeze_router=True, router_dtype="fp64"), resumes=True
    ),
    "experts 2, bfloat16": Split(family="qwen3_moe", settings=experts(parallel=2), dtype=torch.bfloat16),
    "experts 2 x context 2": Split({"context": 2}, family="qwen3_moe", settings=experts(parallel=2)),
    "two copies of experts": Split(family="qwen3_moe"),
    "tensor 2, of experts, too": Split({"tensor": 2}, family="qwen2_moe", resumes=True),
    "tensor 2, of experts, too, all tokens gathered": Split(
        {"tensor": 2}, family="qwen2_moe", settings=experts(dispatcher="allgather")
    ),
    "tensor 2, every expert twice": Split({"tensor": 2}, family="qwen3_moe", settings=experts(tensor=1)),
    "tensor 2, experts 2": Split({"tensor": 2}, family="qwen2_moe", settings=experts(tensor=1, parallel=2)),
    "pipeline 2, with experts": Split({"pipeline": 2}, family="qwen2_moe", resumes=True),
    "tensor 2 x experts 2": Split({"tensor": 2}, ranks=4, family="qwen2_moe", settings=experts(parallel=2)),
    "tensor 2 x two copies, averages in halves": Split(
        {"tensor": 2},
        ranks=4,
        family="qwen3_moe",
        settings=experts(parallel=2, tensor=1, freeze_router=True) | {"distributed_optimizer": True},
        resumes=True,
    ),
    "pipeline 2 x experts 2": Split(
        {"pipeline": 2}, ranks=4, family="qwen2_moe", settings=experts(parallel=2), resumes=True
    ),
    "adapter, one rank": Split(ranks=1, adapter=LoraConfig(rank=2), resumes=True),
    "adapter, tensor 2": Split({"tensor": 2}, adapter=LoraConfig(rank=2), resumes=True),
    "adapter, tensor 2, tokens not shared": Split(
        {"tensor": 2}, family="qwen2", settings={"sequence_parallel": False}, adapter=LoraConfig(rank=2), resumes=True
    ),
    "adapter on some, tensor 2": Split(
        {"tensor": 2},
        family="llama",
        adapter=LoraConfig(rank=3, alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj", "up_proj"]),
    ),
    "adapter, tensor 2, bfloat16": Split({"tensor": 2}, adapter=LoraConfig(rank=2), dtype=torch.bfloat16),
    "adapter, tensor 4, two key/value heads": Split({"tensor": 4}, ranks=4, adapter=LoraConfig(rank=2), resumes=True),
    "adapter, tensor 4, two key/value heads, tokens not shared": Split(
        {"tensor": 4}, ranks=4, settings={"sequence_parallel": False}, adapter=LoraConfig(rank=2)
    ),
    "adapter, pipeline 2, recomputed": Split(
        {"pipeline": 2}, family="llama", adapter=LoraConfig(rank=2), how={"micro": 5, "gradient_checkpointing": True}
    ),
    "adapter, context 2": Split({"context": 2}, adapter=LoraConfig(rank=2)),
    "adapter, two copies, averages in halves": Split(
        settings={"distributed_optimizer": True}, adapter=LoraConfig(rank=2), resumes=True
    ),
    "adapter on attention, experts 2": Split(
        family="qwen3_moe",
        settings=experts(parallel=2),
        adapter=LoraConfig(rank=2, target_modules=["q_proj", "o_proj"]),
    ),
    "adapter, tensor 2 x pipeline 2": Split(
        {"tensor": 2, "pipeline": 2}, ranks=4, adapter=LoraConfig(rank=2), resumes=True
    ),
    "experts 2, each twice": Split(ranks=4, family="qwen3_moe", settings=experts(parallel=2)),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
# The critic has a head that is not 0, so that its body learns from the first update on.
CRITICS = {
    "tensor 2": Split({"tensor": 2}, family="llama", resumes=True),
    "tensor 2, tokens not shared": Split({"tensor": 2}, settings={"sequence_parallel": False}),
    "pipeline 2": Split({"pipeline": 2}, family="llama", resumes=True),
    "pipeline 2 x virtual 2": Split({"pipeline": 2}, settings={"virtual": 2}, layers=4),
    "context 2": Split({"context": 2}),
    "tensor 2, bfloat16": Split({"tensor": 2}, family="qwen2", dtype=torch.bfloat16),
    "experts 2": Split(family="qwen3_moe", settings=experts(parallel=2), resumes=True),
    "adapter, tensor 2": Split({"tensor": 2}, adapter=LoraConfig(rank=2), resumes=True),
    "tensor 2 x pipeline 2": Split({"tensor": 2, "pipeline": 2}, ranks=4, family="llama", resumes=True),
}
PADDING = 257  # of the tiny models: Hugging Face gives its row no gradient where it is read


def make_batch(seed: int) -> TrainBatch:
    """With the padding token here and there, in prompts and responses: a policy may sample it."""
    batch = batch_of_bytes(seed)
    batch.sequences.tokens[batch.sequences.tokens % 20 == 0] = PADDING
    return batch


def updates(engine: Any, weights: Callable[[], dict[str, Tensor]]) -> tuple[Outcome, Tensor]:
    """Two updates, and the sums of squared probabilities and the entropies before them."""
    losses, norms, logprobs = [], [], []
    scored = engine.logprobs(make_batch(0).sequences, PLAN.temperature)
    squares = engine.sum_pi_squared(make_batch(0).sequences, PLAN.temperature)
    entropies = engine.entropies(make_batch(0).sequences, PLAN.temperature)
    for seed in range(2):
        batch = make_batch(seed)
        stats = engine.forward_backward(batch, PLAN, batch.counts())
        losses.append(stats.loss)
        norms.append(engine.optimizer_step().grad_norm)
        logprobs.append(stats.policy_logprobs)
    return Outcome(losses, norms, logprobs[0], scored, weights()), torch.cat([squares, entropies])


def keep_routers(engine: Any) -> None:
    """One process's engine, made to leave the experts' routers as they are."""
    step = engine.optimizer_step

    def without_their_gradients() -> Any:
        for name, weight in engine._masters.parameters.items():
            if name.endswith("mlp.gate.weight"):
                weight.grad = None
        return step()

    engine.optimizer_step = without_their_gradients


def critic_of(folder: Path, kind: Any = LocalValueEngine, *, adapter: LoraConfig | None = None, **how: Any) -> Any:
    model = load_value_model(str(folder), dtype=torch.float32)
    if adapter:
        add_adapter(model, adapter, seed=1, head=head_name(model), field="critic.lora")
    return kind(
        model,
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=5,
        **how,
    )


def learn_values(engine: Any, seed: int) -> tuple[float, float]:
    """An update of a critic: loss and gradient norm."""
    batch = make_batch(seed)
    batch = replace(batch, critic=CriticTargets(values=engine.values(batch.sequences), returns=batch.advantages))
    plan = ValueLossPlan(value_clip=0.5, aggregation="token_mean")
    loss = engine.forward_backward(batch, plan, batch.counts()).loss
    return loss, engine.optimizer_step().grad_norm


def value_updates(engine: Any, weights: Callable[[], dict[str, Tensor]]) -> Outcome:
    """Two updates, the values before and after them."""
    before = engine.values(make_batch(0).sequences)
    losses, norms = zip(*(learn_values(engine, seed) for seed in range(2)), strict=True)
    return Outcome(list(losses), list(norms), before, engine.values(make_batch(2).sequences), weights())


def in_process(rank: int, ranks: int, folder: Path, out: Path) -> None:
    """One of ``ranks`` processes: for every split the same updates, saved and gone on with where that is looked at."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    of_policies = [(name, split, updates_of, split.model) for name, split in SPLITS.items()]
    of_critics = [(f"critic {name}", each, value_updates_of, f"critic-{each.model}") for name, each in CRITICS.items()]
    for name, split, work, model in of_policies + of_critics:
        if split.ranks != ranks:
            continue
        place = out / name
        for each in ("saved", "parts"):
            (place / each).mkdir(parents=True, exist_ok=True)
        # They meet anew every time: groups of ended splits would keep their threads, hundreds for each split.
        dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=ranks)
        try:
            work(split, folder / model, place, rank)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def updates_of(split: Split, model: Path, out: Path, rank: int) -> None:
    from posttrain.backends.train.megatron import MegatronTrainEngine
    from posttrain.backends.train.megatron.sharding import MegatronSharding

    sharding = MegatronSharding(
        torch.device("cpu"),
        compute_dtype=split.dtype,
        settings=MegatronSettings(**split.settings),
        **split.sizes,
    )

    def make() -> Any:
        return make_engine(model, MegatronTrainEngine, adapter=split.adapter, sharding=sharding, **split.how)  # type: ignore[arg-type]

    engine = make()
    if sharding.settings.interleaved:
        held = {int(name.split(".")[2]) for name in engine.parts.pieces if ".layers." in name}
        assert held == ({0, 2} if sharding.first_stage else {1, 3}) and len(engine.parts.stretches) == 2
    found, squares = updates(engine, lambda: dict(engine.parts.whole(engine._trained)))
    sent = {name: tensor.clone() for name, tensor in sharding.weights(engine.parts.shell)}
    torch.save(found._asdict() | {"squares": squares, "sent": sent}, out / f"{rank}.pt")
    if not split.resumes:
        return
    engine.save(out / "saved")
    assert_sent_as_saved(engine, sharding, out / "saved", rank)
    again, from_parts = make(), make()
    with counted_reads() as reads:
        again.load(out / "saved")
    if not split.adapter:
        assert_read_in_part(again, reads.bytes)
    engine.writer(sharded=True)(out / "parts")  # every rank writes its own
    dist.barrier()
    from_parts.load(out / "parts")
    batch = make_batch(7)
    following = []
    for each in (engine, again, from_parts):
        stats = each.forward_backward(batch, PLAN, batch.counts())
        following.append((stats.loss, each.optimizer_step().grad_norm, each.version))
    (out / f"{rank}.json").write_text(json.dumps(following))


def assert_read_in_part(engine: Any, read: int) -> None:
    """Of weights and averages a rank reads what it has of them; of halves of averages the rows in which these end, besides."""
    held = engine._trained
    weights = sum(weight.numel() for weight in held.values())
    averages = 2 * sum(mine.numel() for mine in engine._stepped.values())
    if engine._stretches:
        averages += 2 * 2 * sum(held[name][0].numel() for name in engine._stepped)
    assert 0 < read <= 4 * (weights + averages + 1)  # and a count of updates


def assert_sent_as_saved(engine: Any, sharding: Any, folder: Path, rank: int) -> None:
    """What a server is sent is what its file would hold: experts one by one, for instance."""
    where: dict[str, Any] = {"device": sharding.device, "rank": rank, "timeout_s": 60, "describe": print}
    shell, dtype, adapted = engine.parts.shell, sharding.compute_dtype, (folder / "adapter_model.safetensors").exists()
    ways = {
        adapter: Sender(shell, sharding, dtype, to_copies=False, adapter=adapter, **where) for adapter in (False, True)
    }
    everything, sent = dict(ways[False].weights()), dict(ways[adapted].weights())
    saved = load_file(folder / ("adapter_model.safetensors" if adapted else "model.safetensors"))
    if rank == 0:
        save_file(everything, folder.parent / "everything.safetensors")
    assert sent.keys() == (saved.keys() if rank == 0 or adapted else set())
    assert all(torch.equal(tensor, saved[name].to(dtype)) for name, tensor in sent.items())


def value_updates_of(split: Split, model: Path, out: Path, rank: int) -> None:
    from posttrain.backends.train.megatron import MegatronValueEngine
    from posttrain.backends.train.megatron.sharding import MegatronSharding

    settings = MegatronSettings(**split.settings)
    sharding = MegatronSharding(torch.device("cpu"), compute_dtype=split.dtype, settings=settings, **split.sizes)
    engine = critic_of(model, MegatronValueEngine, adapter=split.adapter, sharding=sharding)
    found = value_updates(engine, lambda: dict(engine.parts.whole(engine._trained)))
    torch.save(found._asdict(), out / f"{rank}.pt")
    if not split.resumes:
        return
    engine.save(out / "saved")
    engine.writer(sharded=True)(out / "parts")
    dist.barrier()
    again = critic_of(model, MegatronValueEngine, adapter=split.adapter, sharding=sharding)
    again.load(out / "parts")
    (out / f"{rank}.json").write_text(json.dumps([learn_values(engine, 7), learn_values(again, 7)]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family, layers in {(split.family, split.layers) for split in SPLITS.values()}:
        write_tiny_model(folder / f"{family}-{layers}", family, layers=layers)  # type: ignore[arg-type]
    for model in {split.model for split in CRITICS.values()}:
        critic = load_value_model(str(folder / model), dtype=torch.float32)
        draw_weights(value_head(critic), seed=1)
        critic.save_pretrained(folder / f"critic-{model}")
        AutoTokenizer.from_pretrained(folder / model).save_pretrained(folder / f"critic-{model}")
    return folder


@pytest.fixture(scope="module")
def split_up(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """The folder with what so many processes have done; they are started once."""
    done: dict[int, Path] = {}

    def folder(ranks: int) -> Path:
        if ranks not in done:
            out = tmp_path_factory.mktemp(f"ranks-{ranks}")
            on_ranks(in_process, (ranks, models, out), ranks)
            done[ranks] = out
        return done[ranks]

    yield folder


@pytest.mark.parametrize("name", SPLITS)
def test_updates_are_those_of_one_process(models: Path, split_up: Callable[[int], Path], name: str) -> None:
    split = SPLITS[name]
    frozen = split.settings.get("experts", ExpertSettings()).freeze_router
    local: Any = make_engine(
        models / split.model, adapter=split.adapter
    )  # in float32: masters start from what the folder holds
    if frozen:
        keep_routers(local)
    wanted, squares = updates(local, lambda: {n: w.detach().clone() for n, w in local._masters.parameters.items()})
    tolerance = 1e-1 if split.adapter and split.dtype == torch.bfloat16 else TOLERANCE[split.dtype]
    folder = split_up(split.ranks) / name
    for rank in range(split.ranks):
        found = torch.load(folder / f"{rank}.pt")
        sent = found.pop("sent")
        assert (found.pop("squares") - squares).norm() < tolerance * squares.norm()
        outcome = Outcome(**found)
        assert_alike(outcome, wanted, tolerance)
        assert sent.keys() == outcome.weights.keys()
        assert all(torch.equal(sent[one], weight.to(split.dtype)) for one, weight in outcome.weights.items())
    if not split.resumes:
        return
    for rank in range(split.ranks):
        straight, *resumed = json.loads((folder / f"{rank}.json").read_text())
        assert all(each == straight for each in resumed) and straight[2] == 3
    weights = {name: weight for name, weight in outcome.weights.items() if not split.adapter}
    assert_chunks_hold(folder / "parts", folder / "saved", weights)
    everything = load_file(folder / "everything.safetensors")
    # The folder is every engine's: one process goes on from it, with weights and averages.
    again = make_engine(models / split.model, adapter=split.adapter)
    again.load(folder / "saved")
    merged = dict(hugging_face_weights(again.model))
    assert merged.keys() == everything.keys()
    assert all(
        torch.allclose(everything[name], tensor.to(split.dtype), rtol=0, atol=1e-6) for name, tensor in merged.items()
    )
    from_parts = make_engine(models / split.model, adapter=split.adapter)
    from_parts.load(folder / "parts")
    same = zip(from_parts._masters.parameters.values(), again._masters.parameters.values(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in same)
    if frozen:
        keep_routers(again)
    batch = make_batch(7)
    stats = again.forward_backward(batch, PLAN, batch.counts())
    assert stats.loss == pytest.approx(straight[0], rel=tolerance, abs=tolerance)  # it may be near 0
    assert again.optimizer_step().grad_norm == pytest.approx(straight[1], rel=tolerance)


@pytest.mark.parametrize("name", CRITICS)
def test_a_critic_learns_as_in_one_process(models: Path, split_up: Callable[[int], Path], name: str) -> None:
    split = CRITICS[name]
    model, folder = models / f"critic-{split.model}", split_up(split.ranks) / f"critic {name}"
    local = critic_of(model, adapter=split.adapter)
    wanted = value_updates(local, lambda: {n: w.detach().clone() for n, w in local._masters.parameters.items()})
    assert wanted.logprobs.abs().max() > 0.1  # the head is not 0
    for rank in range(split.ranks):
        assert_alike(Outcome(**torch.load(folder / f"{rank}.pt")), wanted, TOLERANCE[split.dtype])
    if not split.resumes:
        return
    following = learn_values(local, 7)
    for rank in range(split.ranks):
        straight, resumed = json.loads((folder / f"{rank}.json").read_text())
        assert straight == resumed and straight == pytest.approx(following, rel=1e-5)
    assert_chunks_hold(folder / "parts", folder / "saved", torch.load(folder / "0.pt")["weights"])
    for place in ("saved", "parts"):
        again = critic_of(model, adapter=split.adapter)
        again.load(folder / place)  # the folder is every engine's
        assert learn_values(again, 7) == pytest.approx(following, rel=1e-5)


RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "two ranks share matrices, of a critic too": {
        "policy": {"tensor_parallel": 2},
        "critic": {"tensor_parallel": 2},
        "placement": {"devices": 2},
    },
    "two ranks share layers, two samplers elsewhere": {
        "policy": {"pipeline_parallel": 2, "devices": [0, 1]},
        "reference": {"devices": [0, 1]},
        "rollout": {"devices": [2, 3], "weight_bucket_mib": 1},
        "placement": {"devices": 4},
    },
    "two ranks share experts": {
        "policy": {"engine_options": {"expert_model_parallel_size": 2}},
        "placement": {"devices": 2},
    },
    "two ranks share matrices and an adapter's, without which they are the reference": {
        "policy": {"tensor_parallel": 2, "lora": {"rank": 2}},
        "placement": {"devices": 2},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_run_in_one_process(name: str, address: str, tmp_path: Path, tiny_llama: Path) -> None:
    pytest.importorskip("ray")
    model = write_tiny_model(tmp_path / "mixed", "qwen3_moe") if "experts" in name else tiny_llama
    changes = {section: dict(values) for section, values in RUNS[name].items()}
    # An eps that is not tiny beside the gradients, as in test_update_paths.
    optimizer = {"optimizer": {"lr": 1e-3, "eps": 1e-3}}
    changes["policy"] |= {"engine": "megatron"} | optimizer
    learning: dict[str, dict[str, Any]] = {"policy": optimizer | {"lora": changes["policy"].get("lora")}}
    if "critic" in changes:
        changes["critic"] |= {"engine": "megatron"} | optimizer
        learning["critic"] = optimizer
        changes["advantage"] = learning["advantage"] = {"name": "gae"}
    changes["placement"] |= {"ray_address": address}
    alone = train_run(config(tmp_path, model, "alone", learning))
    found = train_run(config(tmp_path, model, "split", changes))
    roles = ("policy", "critic") if "critic" in changes else ("policy",)
    if "lora" in changes["policy"]:
        assert_same(found, alone, roles=roles, files=("adapter_model", "optimizer"))
        return
    assert_same(found, alone, roles=roles)
    exported = load_file(found / "checkpoints/global_step_2/policy/model.safetensors")
    assert exported["model.embed_tokens.weight"].shape == (259, 32)  # without the filling of the vocabulary

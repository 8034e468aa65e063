"""Shards that another trainer has saved become a folder that a run can start from."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.errors import ModelError
from posttrain.models.loading import load_causal_lm
from posttrain.models.shards import merge_shards
from posttrain.run.export import export_checkpoint
from warm.processes import run

# Two processes shard models as an FSDP trainer does, and save their halves. 259 rows of the embedding: 130 and 129. They part
# when all is imported, which takes longer than what they do.
SHARDING = textwrap.dedent("""
    import os
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    address, flat, hybrid, out = sys.argv[1:]
    other = os.fork()
    rank = 0 if other else 1
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    meshes = {
        "flat": (flat, init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))),
        "hybrid": (hybrid, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))),
    }
    for shape, (path, mesh) in meshes.items():
        model = AutoModelForCausalLM.from_pretrained(path)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        torch.save(model.state_dict(), f"{out}/{shape}/model_world_size_2_rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
""")


@pytest.fixture(scope="module")
def sharded(tiny_qwen: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """flat/ and hybrid/: the shards of tiny_qwen and of tiny_llama. Do not write into them."""
    folder = tmp_path_factory.mktemp("sharded")
    for shape in ("flat", "hybrid"):
        (folder / shape).mkdir()
    arguments = [f"file://{folder}/meeting", str(tiny_qwen), str(tiny_llama), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run([sys.executable, "-c", SHARDING, *arguments], env=environment, timeout=120, check=True)
    return folder


@pytest.fixture(scope="module")
def actor(sharded: Path, tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """global_step_7/actor as verl lays it out. Do not write into it."""
    actor = tmp_path_factory.mktemp("verl") / "global_step_7" / "actor"
    shutil.copytree(sharded / "flat", actor)
    shutil.copytree(tiny_qwen, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (actor.parents[1] / "latest_checkpointed_iteration.txt").write_text("7")
    return actor


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("named", ["actor", "step", "run"])
def test_merged_shards_are_the_model_that_was_sharded(actor: Path, tiny_qwen: Path, tmp_path: Path, named: str) -> None:
    checkpoint = {"actor": actor, "step": actor.parent, "run": actor.parents[1]}[named]
    assert export_checkpoint(checkpoint, tmp_path / "out") == actor
    expected, found = weights(tiny_qwen), weights(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tiny_qwen / "tokenizer.json").read_bytes()
    load_causal_lm(str(tmp_path / "out"), dtype=torch.float32)  # what a run with this model.path does
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_config_beside_the_shards_and_a_mesh_of_two_dimensions(sharded: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """verl 0.4 keeps the config in actor/; hybrid sharding has a mesh of replicas and shards. Embeddings are tied."""
    actor = edited(sharded / "hybrid", tmp_path / "step" / "actor")
    shutil.copytree(tiny_llama, actor, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    export_checkpoint(actor, tmp_path / "out")
    expected, found = weights(tiny_llama), weights(tmp_path / "out")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_a_command_is_refused(actor: Path, tmp_path: Path) -> None:
    bad = tmp_path / "actor"
    shutil.copytree(actor, bad)
    torch.save({"weight": Malicious(tmp_path / "run")}, bad / "model_world_size_2_rank_1.pt")
    with pytest.raises(
        ModelError, match=r"rank_1\.pt holds more than tensors \(posix\.system\); nothing of it was run"
    ):
        export_checkpoint(bad, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor"]


def edited(actor: Path, folder: Path) -> Path:
    shutil.copytree(actor, folder)
    return folder


def test_shards_that_are_not_whole_are_named(actor: Path, tmp_path: Path) -> None:
    lacking = edited(actor, tmp_path / "lacking")
    (lacking / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ModelError, match=r"lacks model_world_size_2_rank_1\.pt \(1 of 2 ranks are missing\)"):
        merge_shards(lacking)
    cut = edited(actor, tmp_path / "cut")
    content = (cut / "model_world_size_2_rank_0.pt").read_bytes()
    (cut / "model_world_size_2_rank_0.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"rank_0\.pt cannot be read"):
        merge_shards(cut)
    mixed = edited(actor, tmp_path / "mixed")
    shutil.copy(mixed / "model_world_size_2_rank_0.pt", mixed / "model_world_size_4_rank_0.pt")
    with pytest.raises(ModelError, match="holds shards of world sizes 2, 4"):
        merge_shards(mixed)
    twice = edited(actor, tmp_path / "twice")
    shutil.copy(twice / "model_world_size_2_rank_0.pt", twice / "model_world_size_2_rank_1.pt")
    with pytest.raises(ModelError, match=r"do not fit together: together they have shape \(260, 32\), not \(259, 32\)"):
        merge_shards(twice)


def test_shards_of_another_model_are_refused(actor: Path, tiny_llama: Path, tmp_path: Path) -> None:
    other = edited(actor, tmp_path / "actor")
    shutil.copy(tiny_llama / "config.json", other / "huggingface/config.json")
    with pytest.raises(
        ModelError, match=r"not of the model in .*: model\.layers\.0\.self_attn\.q_norm\.weight is extra"
    ):
        export_checkpoint(other, tmp_path / "out")


def test_adapters_are_told(tmp_path: Path) -> None:
    torch.save({"base_model.layer.lora_A.weight": torch.ones(2, 2)}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ModelError, match="LoRA adapters"):
        merge_shards(tmp_path)

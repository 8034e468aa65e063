"""The dialects' examples on two devices: colocated, and with the sampler on a device of its own. Two steps, as they are typed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from posttrain.cli.app import main
from posttrain.data.reasoning_gym import write_dataset
from posttrain.registry import is_installed

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ["+posttrain.model.compute_dtype=float32", "+posttrain.placement.cpu_threads=1"]
SHORT += ["+posttrain.checkpoint.folder=null", "+posttrain.placement.device=cpu", "+posttrain.run.folder=run"]
SHORT += ["+posttrain.reward.workers=1"]  # each imports reasoning_gym
ROLL_TRAINS = ["actor_train.strategy_args.strategy_name=fsdp2_train", "pretrain=tiny", "max_steps=2"]
VERL = ["actor_rollout_ref.model.path=tiny", "trainer.total_training_steps=2", "trainer.n_gpus_per_node=2"]
SKYRL = ["trainer.policy.model.path=tiny", "trainer.max_training_steps=2"]
# name -> example, what is typed besides, and the roles of each worker
CASES = {
    "verl, colocated": ("verl_grpo.sh", VERL, {"trainer rank 0", "trainer rank 1"}),
    "verl, megatron, matrices shared": (
        "verl_grpo.sh",
        [
            *VERL,
            "actor_rollout_ref.actor.strategy=megatron",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full",
        ],
        {"trainer rank 0", "trainer rank 1"},
    ),
    "roll, megatron, layers shared": (
        "roll_rlvr.yaml",
        [
            "actor_train.strategy_args.strategy_name=megatron_train",
            "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size=2",
            "pretrain=tiny",
            "max_steps=2",
            "actor_train.device_mapping='list(range(0,2))'",
            "actor_infer.device_mapping='list(range(0,2))'",
        ],
        {"trainer rank 0", "trainer rank 1"},
    ),
    "skyrl, separate": (
        "skyrl_grpo.sh",
        [
            *SKYRL,
            "trainer.placement.colocate_all=false",
        ],
        {"trainer rank 0", "rollout rank 0"},
    ),
    "roll, colocated": (
        "roll_rlvr.yaml",
        [
            *ROLL_TRAINS,
            "actor_train.device_mapping='list(range(0,2))'",
            "actor_infer.device_mapping='list(range(0,2))'",
            "actor_train.training_args.gradient_accumulation_steps=2",  # 16 x 2 per device, 64 in all
        ],
        {"trainer rank 0", "trainer rank 1"},
    ),
    "roll, deepspeed": (
        "roll_rlvr_deepspeed.yaml",
        ["pretrain=tiny", "max_steps=2"],
        {"trainer rank 0", "trainer rank 1"},
    ),
    "roll, separate": (
        "roll_rlvr.yaml",
        [*ROLL_TRAINS, "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]"],
        {"trainer rank 0", "rollout rank 0"},
    ),
}


def typed(example: str) -> list[str]:
    """What stands after ``posttrain train`` in the example."""
    file = EXAMPLES / example
    if file.suffix == ".yaml":
        return [str(file)]
    words = shlex.split(file.read_text().replace("\\\n", " "), comments=True)
    return [os.path.expandvars(word) for word in words[words.index("posttrain") + 2 :] if word != "$@"]


@pytest.mark.parametrize("name", CASES)
def test_an_example_on_two_devices(
    name: str, address: str, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("deepspeed", "megatron"):
        if library in name and not is_installed(library):
            pytest.skip(f"needs {library}")
    example, extra, workers = CASES[name]
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    data = tmp_path / "runs/data/chain_sum"
    write_dataset("chain_sum", data, train_rows=24, validation_rows=4, seed=1, options=options, instruction=None)
    (tmp_path / "tiny").symlink_to(tiny_llama)
    cluster = f"+posttrain.placement.ray_address='{address}'"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["posttrain", "train", *typed(example), *extra, *SHORT, cluster])
    for setting in ("TOKENIZERS_PARALLELISM", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):  # what the command sets
        monkeypatch.setenv(setting, "as it was")
        monkeypatch.delenv(setting)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2] and "policy/loss" in lines[2]
    assert set(json.loads((tmp_path / "run/workers/workers.json").read_text())) == workers

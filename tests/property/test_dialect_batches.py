"""The batch arithmetic of the dialects: any sizes are planned with the peer's own counts, or refused with a fix that works.

The expected counts are written here from the peers' definitions (spec: prompts, samples and devices), not taken from the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.dialects.detect import read_config
from posttrain.dialects.loaded import LoadedConfig
from posttrain.plan.batch import plan_batches
from posttrain.records.batch_plans import BatchPlan

Sizes = dict[str, int]


@dataclass(frozen=True)
class Language:
    """How sizes are written in a dialect, and what the peer makes of them."""

    name: str
    keys: dict[str, str]  # size -> their key
    fixed: tuple[str, ...]  # overrides besides
    allowed: Callable[[Sizes], bool]  # whether the peer runs with these sizes, without cutting anything off
    counts: Callable[
        [Sizes], tuple[int, int, int, int]
    ]  # sequences, updates per step, sequences per update, accumulation


def _verl_allowed(s: Sizes) -> bool:
    per_rank = s["mini"] * s["samples"] // s["devices"]
    return (
        s["prompts"] >= s["mini"]
        and s["prompts"] % s["mini"] == 0
        and s["prompts"] * s["samples"] % s["devices"] == 0
        and s["mini"] * s["samples"] % s["devices"] == 0
        and per_rank >= s["micro"]
        and per_rank % s["micro"] == 0
    )


def _prompts_times_samples(s: Sizes) -> tuple[int, int, int, int]:
    """verl and SkyRL: a mini-batch counts prompts."""
    sequences = s["prompts"] * s["samples"]
    per_update = s["mini"] * s["samples"]
    return sequences, s["epochs"] * sequences // per_update, per_update, per_update // (s["devices"] * s["micro"])


def _roll_allowed(s: Sizes) -> bool:
    return s["prompts"] * s["samples"] % (s["micro"] * s["mini"] * s["devices"]) == 0


def _roll_counts(s: Sizes) -> tuple[int, int, int, int]:
    """ROLL: an update is micro-batch x accumulation x devices sequences; here "mini" is the accumulation."""
    sequences = s["prompts"] * s["samples"]
    per_update = s["micro"] * s["mini"] * s["devices"]
    return sequences, s["epochs"] * sequences // per_update, per_update, s["mini"]


VERL = Language(
    "verl",
    {
        "prompts": "data.train_batch_size",
        "samples": "actor_rollout_ref.rollout.n",
        "mini": "actor_rollout_ref.actor.ppo_mini_batch_size",
        "micro": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "devices": "trainer.n_gpus_per_node",
        "epochs": "actor_rollout_ref.actor.ppo_epochs",
    },
    (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "data.train_files=a.parquet",
        "data.val_files=b.parquet",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ),
    _verl_allowed,
    _prompts_times_samples,
)
SKYRL = Language(
    "skyrl",
    {
        "prompts": "trainer.train_batch_size",
        "samples": "generator.n_samples_per_prompt",
        "mini": "trainer.policy_mini_batch_size",
        "micro": "trainer.micro_train_batch_size_per_gpu",
        "devices": "trainer.placement.policy_num_gpus_per_node",
        "epochs": "trainer.update_epochs_per_batch",
    },
    (
        "data.train_data=[a.parquet]",
        "data.val_data=[b.parquet]",
        "trainer.logger=console",
        "trainer.placement.colocate_all=false",
        "trainer.placement.colocate_policy_ref=false",
        "trainer.algorithm.use_kl_loss=false",
    ),
    _verl_allowed,
    _prompts_times_samples,
)
ROLL = Language(
    "roll",
    {
        "prompts": "rollout_batch_size",
        "samples": "num_return_sequences_in_group",
        "mini": "actor_train.training_args.gradient_accumulation_steps",
        "micro": "actor_train.training_args.per_device_train_batch_size",
        "devices": "actor_train.device_mapping",
        "epochs": "ppo_epochs",
    },
    (),
    _roll_allowed,
    _roll_counts,
)
ROLL_FILE = """
exp_name: x
pretrain: model
max_steps: 4
prompt_length: 64
response_length: 64
adv_estimator: reinforce
init_kl_coef: 0
rewards: {reasoning_gym: {worker_cls: reasoning_gym}}
actor_train:
  data_args: {file_name: a.parquet, domain_interleave_probs: {reasoning_gym: 1.0}}
  strategy_args: {strategy_name: fsdp2_train}
actor_infer:
  strategy_args: {strategy_name: native}
  generating_args: {temperature: 1.0, top_p: 1.0, top_k: 0}
"""

sizes = st.fixed_dictionaries(
    {
        "prompts": st.integers(1, 32),
        "samples": st.integers(1, 8),
        "mini": st.integers(1, 32),
        "micro": st.integers(1, 8),
        "devices": st.sampled_from([1, 2, 3, 4, 8]),
        "epochs": st.integers(1, 3),
    }
)


@pytest.fixture(scope="module")
def roll_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("roll") / "run.yaml"
    file.write_text(ROLL_FILE)
    return str(file)


def read(language: Language, sizes: Sizes, roll_file: str, *changes: str) -> tuple[LoadedConfig, BatchPlan | None]:
    written = {key: str(sizes[size]) for size, key in language.keys.items()}
    if language.name == "roll":
        written["actor_train.device_mapping"] = f"'list(range(0,{sizes['devices']}))'"
        written["actor_infer.device_mapping"] = written["actor_train.device_mapping"]
    if language.name == "skyrl":  # the sampler on as many devices of its own
        written["generator.num_inference_engines"] = str(sizes["devices"])
        written["generator.inference_engine_tensor_parallel_size"] = "1"
    overrides = [*language.fixed, *(f"{key}={value}" for key, value in written.items()), *changes]
    loaded = read_config(roll_file if language.name == "roll" else None, overrides, language.name)
    if loaded.problems:
        return loaded, None
    plan, problems = plan_batches(loaded.config, None)
    assert not problems, (sizes, problems)
    return loaded, plan


@pytest.mark.slow
@pytest.mark.parametrize("language", [VERL, SKYRL, ROLL], ids=lambda language: language.name)
@settings(max_examples=40, deadline=None)
@given(sizes=sizes)
def test_planned_with_the_peers_counts_or_refused(language: Language, roll_file: str, sizes: Sizes) -> None:
    loaded, plan = read(language, sizes, roll_file)
    assert (plan is not None) == language.allowed(sizes), [str(problem) for problem in loaded.problems]
    if plan is None:
        for problem in loaded.problems:
            assert problem.fix, problem
        return
    seen = (plan.sequences_per_step, plan.updates_per_step, plan.sequences_per_update, plan.gradient_accumulation_steps)
    assert seen == language.counts(sizes)
    assert plan.prompts_per_step == sizes["prompts"] and plan.samples_per_prompt == sizes["samples"]
    assert plan.sequences_per_micro_batch_per_device == sizes["micro"]


@pytest.mark.slow
@pytest.mark.parametrize("language", [VERL, SKYRL, ROLL], ids=lambda language: language.name)
@settings(max_examples=25, deadline=None)
@given(sizes=sizes)
def test_a_fix_takes_its_problem_away(language: Language, roll_file: str, sizes: Sizes) -> None:
    """The first change that a message offers, typed as it is printed, and the message is gone."""
    loaded, _ = read(language, sizes, roll_file)
    for problem in loaded.problems:
        changes = re.findall(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)*)=(\d+)", problem.fix)
        assert changes, problem
        again, _ = read(language, sizes, roll_file, "=".join(changes[0]))
        assert (problem.what, problem.field) not in [(other.what, other.field) for other in again.problems], problem

"""verl's batch arithmetic in our units: its worked example, and sizes in every form they can be written in."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.verl import DIALECT
from posttrain.plan.batch import plan_batches
from posttrain.records.batch_plans import BatchPlan

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FILES = ("data.train_files=train.parquet", "data.val_files=val.parquet")
# 1024 prompts x 5 samples on 8 devices
EXAMPLE = (
    *FILES,
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=1024",
    f"{R}.n=5",
    f"{A}.ppo_mini_batch_size=256",
    f"{A}.ppo_micro_batch_size_per_gpu=40",
    f"{R}.log_prob_micro_batch_size_per_gpu=40",
)


def read(*overrides: str) -> LoadedConfig:
    return read_dialect(DIALECT, None, overrides)


def plan(*overrides: str) -> BatchPlan:
    loaded = read(*overrides)
    assert loaded.problems == ()
    found, problems = plan_batches(loaded.config, None)
    assert found is not None, problems
    return found


def test_the_worked_example() -> None:
    """1024 x 5 = 5120 sequences; an update has 256 x 5 = 1280, 160 on each of 8 devices, in 4 micro-batches of 40."""
    found = plan(*EXAMPLE)
    assert found.sequences_per_step == 5120
    assert found.sequences_per_update == 1280
    assert found.updates_per_step == 4
    assert found.sequences_per_micro_batch_per_device == 40
    assert found.gradient_accumulation_steps == 4


def test_two_devices_share_a_sequence() -> None:
    """8 / 2 = 4 copies of the model, so that 256 x 5 / 4 = 320 sequences of an update on each, in 8 micro-batches of 40."""
    found = plan(*EXAMPLE, f"{A}.ulysses_sequence_parallel_size=2", f"{M}.use_remove_padding=True")
    assert found.sequences_per_update == 1280
    assert found.gradient_accumulation_steps == 8
    assert found.updates_per_step == 4


MEGATRON = ("model_engine=megatron", f"{A}.megatron.tensor_model_parallel_size=4", f"{M}.use_remove_padding=True")


def test_megatrons_copies_share_a_step() -> None:
    """2 prompts x 5 samples = 10 sequences and 8 devices with 8 / 4 = 2 copies of the model: 5 sequences on each."""
    few = ("data.train_batch_size=2", f"{A}.ppo_mini_batch_size=2", f"{A}.ppo_micro_batch_size_per_gpu=5")
    found = plan(*EXAMPLE, *MEGATRON, *few, "trainer.n_gpus_per_node=8")
    assert (found.sequences_per_step, found.gradient_accumulation_steps) == (10, 1)
    [problem] = read(*EXAMPLE, *few).problems  # FSDP's are counted by devices
    assert "10 sequences do not split over 8 devices" in problem.what
    [problem] = read(*EXAMPLE, *MEGATRON, *few, "data.train_batch_size=3", f"{A}.ppo_mini_batch_size=3").problems
    assert "15 sequences do not split over 2 devices (8 that hold 2 copies of the model)" in problem.what


def test_copies_share_a_step_that_is_cut_by_tokens() -> None:
    """4 copies of the model on 8 devices: 4 prompts x 5 samples = 20 sequences are 5 on each, with micro-batches by tokens."""
    shared = (f"{A}.ulysses_sequence_parallel_size=2", f"{M}.use_remove_padding=True")
    few = (*shared, "data.train_batch_size=4", f"{A}.ppo_mini_batch_size=4", f"{A}.ppo_micro_batch_size_per_gpu=5")
    assert plan(*EXAMPLE, *few, f"{A}.use_dynamic_bsz=True").sequences_per_step == 20
    [problem] = read(*EXAMPLE, *few).problems
    assert "20 sequences do not split over 8 devices" in problem.what


def test_one_update_where_the_mini_batch_is_the_step() -> None:
    found = plan(*EXAMPLE, f"{A}.ppo_mini_batch_size=1024")
    assert found.updates_per_step == 1
    assert found.sequences_per_update == 5120


def test_passes_multiply_updates() -> None:
    assert plan(*EXAMPLE, f"{A}.ppo_epochs=3").updates_per_step == 12


def test_the_deprecated_size_counts_all_devices() -> None:
    """64 sequences on 8 devices are 8 each; with sequences shared by 2 devices, on 4 copies, 16 each."""
    sizes = (f"{A}.ppo_micro_batch_size=64", f"{A}.ppo_micro_batch_size_per_gpu=null")
    assert plan(*EXAMPLE, *sizes).sequences_per_micro_batch_per_device == 8
    shared = (f"{A}.ulysses_sequence_parallel_size=2", f"{M}.use_remove_padding=True")
    assert plan(*EXAMPLE, *sizes, *shared).sequences_per_micro_batch_per_device == 16


def test_both_sizes_and_none_under_a_token_budget() -> None:
    """With use_dynamic_bsz neither size is needed, and both are without effect."""
    by_tokens = (f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=4096")
    without = (f"{A}.ppo_micro_batch_size_per_gpu=null", f"{R}.log_prob_micro_batch_size_per_gpu=null")
    found = plan(*EXAMPLE, *by_tokens, *without)
    assert found.max_tokens_per_micro_batch == 4096
    assert found.sequences_per_micro_batch_per_device is None
    assert found.gradient_accumulation_steps is None
    both = read(*EXAMPLE, *by_tokens, f"{A}.ppo_micro_batch_size=64")
    assert both.problems == ()
    told = {one.key for one in both.ignored}
    assert {f"{A}.ppo_micro_batch_size", f"{A}.ppo_micro_batch_size_per_gpu"} <= told


def test_passes_without_gradient_share_the_smaller_budget_and_say_so() -> None:
    sizes = (
        *EXAMPLE,
        f"{A}.use_kl_loss=True",
        f"{A}.use_dynamic_bsz=True",
        f"{A}.ppo_max_token_len_per_gpu=4096",
        f"{R}.log_prob_max_token_len_per_gpu=8192",
    )
    loaded = read(*sizes)
    assert not loaded.problems and loaded.config.reference.max_tokens_per_micro_batch == 4096
    told = {one.key: one.reason for one in loaded.ignored}
    assert "the smaller of the two sizes, 4096" in told[f"{R}.log_prob_max_token_len_per_gpu"]


def test_a_shared_sequence_has_the_budget_of_both_devices() -> None:
    """512 + 512 = 1024 tokens do not fit into 600, and fit into 2 x 600."""
    sizes = (
        *EXAMPLE,
        f"{A}.use_dynamic_bsz=True",
        f"{A}.ppo_max_token_len_per_gpu=600",
        f"{M}.use_remove_padding=True",
    )
    [alone, old] = read(*sizes).problems
    assert (alone.field, old.field) == (f"{A}.ppo_max_token_len_per_gpu", f"{R}.log_prob_max_token_len_per_gpu")
    shared = read(*sizes, f"{A}.ulysses_sequence_parallel_size=2")
    assert shared.problems == ()
    assert shared.config.policy.max_tokens_per_micro_batch == 600
    [problem] = [
        problem
        for problem in read(
            *sizes, f"{A}.ulysses_sequence_parallel_size=2", f"{A}.ppo_max_token_len_per_gpu=500"
        ).problems
        if problem.field == alone.field
    ]
    assert "500 tokens x 2 devices that share a sequence" in problem.what
    assert problem.fix.startswith(f"use {A}.ppo_max_token_len_per_gpu=512 or more")


def test_the_critic_has_sizes_of_its_own() -> None:
    """512 x 5 = 2560 sequences per update of the critic: 2 updates; 320 on a device, in 5 micro-batches of 64."""
    critic = ("critic.ppo_mini_batch_size=512", "critic.ppo_micro_batch_size_per_gpu=64", "critic.ppo_epochs=2")
    found = plan(*EXAMPLE, "algorithm.adv_estimator=gae", *critic)
    assert found.critic is not None
    assert found.critic.sequences_per_update == 2560
    assert found.critic.updates_per_step == 4  # 2 passes
    assert found.critic.gradient_accumulation_steps == 5
    assert found.updates_per_step == 4


def test_warm_up_in_iterations_becomes_updates() -> None:
    """10 iterations x 4 updates x 2 passes; 0 iterations are no warm-up, whatever the ratio says; -1 leaves it to the ratio."""
    schedule = read(*EXAMPLE, f"{A}.ppo_epochs=2", f"{A}.optim.lr_warmup_steps=10").config.policy.schedule
    assert schedule.warmup_updates == 80
    none = read(*EXAMPLE, f"{A}.optim.lr_warmup_steps=0", f"{A}.optim.lr_warmup_steps_ratio=0.1").config.policy.schedule
    assert (none.warmup_updates, none.warmup_ratio) == (0, 0.0)
    ratio = read(*EXAMPLE, f"{A}.optim.lr_warmup_steps_ratio=0.1").config.policy.schedule
    assert (ratio.warmup_updates, ratio.warmup_ratio) == (None, 0.1)


@pytest.mark.parametrize(("written", "steps"), [(0, 0), (1, 0), (2, 1), (20, 19)])
def test_critic_warmup_counts_the_iterations_before_the_actors_first(written: int, steps: int) -> None:
    critic = ("algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=40")
    assert read(*EXAMPLE, *critic, f"trainer.critic_warmup={written}").config.critic.warmup_steps == steps


def test_a_configuration_without_a_word_about_the_critic_gives_it_the_actors_size() -> None:
    loaded = read(*EXAMPLE, "algorithm.adv_estimator=gae")
    assert loaded.problems == ()
    assert loaded.config.critic.sequences_per_micro_batch_per_device == 40
    assert any("it takes the actor's size" in text for text in loaded.warnings)


class TestSizesThatAFileLeavesOpen:
    """verl's own files write null for the size of micro-batches, which its trainer then refuses."""

    def read(self, tmp_path: Path, *overrides: str) -> LoadedConfig:
        file = tmp_path / "ppo_trainer.yaml"
        file.write_text(
            "actor_rollout_ref:\n"
            "  actor: {ppo_mini_batch_size: 6, ppo_micro_batch_size_per_gpu: null}\n"
            "  rollout: {n: 2, tensor_model_parallel_size: 1, log_prob_micro_batch_size_per_gpu: null}\n"
            "data: {train_batch_size: 6}\n"
            "trainer: {n_gpus_per_node: 1}\n"
        )
        return read_dialect(DIALECT, str(file), ["algorithm.adv_estimator=grpo", *overrides])

    def test_take_a_size_that_divides_and_say_so(self, tmp_path: Path) -> None:
        """6 prompts x 2 samples = 12 sequences of a mini-batch on one device: 6 is the largest divisor up to 8."""
        loaded = self.read(tmp_path)
        assert not loaded.problems
        assert loaded.config.policy.sequences_per_micro_batch_per_device == 6
        assert loaded.config.reference.sequences_per_micro_batch_per_device == 8
        said = [text for text in loaded.warnings if "is null, which verl refuses" in text]
        assert len(said) == 2 and "6 is used" in said[0]

    def test_an_override_asks_for_nothing_and_is_refused(self, tmp_path: Path) -> None:
        loaded = self.read(tmp_path, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null")
        assert [problem.field for problem in loaded.problems] == [
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
        ]


def test_verl_0_1_counts_the_prompts_of_a_micro_batch() -> None:
    """8 prompts in a micro-batch on 4 devices, 2 responses each: 8 x 2 / 4 = 4 sequences per device; its file says 64."""
    words = [
        *FILES,
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "trainer.n_gpus_per_node=4",
    ]
    small = read_dialect(DIALECT, None, [*words, f"{A}.ppo_micro_batch_size=8"], version="0.1")
    assert small.problems == ()
    assert small.config.policy.sequences_per_micro_batch_per_device == 4
    own = read_dialect(DIALECT, None, [*words, "actor_rollout_ref.actor.ppo_mini_batch_size=64"], version="0.1")
    assert own.problems == ()
    assert own.config.policy.sequences_per_micro_batch_per_device == 32  # 64 x 2 / 4
    later = read_dialect(DIALECT, None, [*words, f"{A}.ppo_micro_batch_size=8"], version="0.2")
    assert later.config.policy.sequences_per_micro_batch_per_device == 2  # 8 / 4


@pytest.mark.parametrize(("version", "reads"), [("0.1", "sequence"), ("0.2", "sequence"), ("0.4", "response")])
def test_a_function_reads_what_the_version_passes(version: str, reads: str) -> None:
    loaded = read_dialect(DIALECT, None, [*EXAMPLE, "+custom_reward_function.path=mine.py"], version=version)
    [term] = loaded.config.reward.terms
    assert (term.path, term.name, term.reads) == ("mine.py", "compute_score", reads)


@pytest.mark.parametrize(("version", "own"), [("0.2", True), ("0.4", False)])
def test_a_manager_without_a_function_scores_with_its_own_as_the_version_does(version: str, own: bool) -> None:
    words = ("reward_model.reward_manager=hf_verifier", "actor_rollout_ref.model.external_lib=my_managers")
    [term] = read_dialect(DIALECT, None, [*EXAMPLE, *words], version=version).config.reward.terms
    assert (term.kind, term.own_score, term.scores_with) == ("manager", own, None)


OLD_SIZES = (
    *FILES,
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
    f"{R}.n=8",
    f"{A}.ppo_mini_batch_size=256",
    f"{A}.ppo_micro_batch_size=64",
    f"{R}.log_prob_micro_batch_size=160",
    "actor_rollout_ref.ref.log_prob_micro_batch_size=160",
)

LOG_PROBS_ON_ALL = (
    f"{R}.log_prob_micro_batch_size=64",
    f"{R}.log_prob_micro_batch_size_per_gpu=null",
    "actor_rollout_ref.ref.log_prob_micro_batch_size=64",
)


@pytest.mark.parametrize(
    ("version", "log_probs", "smaller"),
    [
        ("0.1", 160, "4"),  # 160 // 8 prompts x 8; the loss is divided by (256 // 8 x 8) / (64 // 8 x 8) = 4
        ("0.2", 20, "32"),  # 160 // 8; the loss is divided by (256 x 8 // 8) / (64 // 8) = 32
    ],
)
def test_a_mini_batch_above_the_step_is_the_whole_step(version: str, log_probs: int, smaller: str) -> None:
    """8 x 8 = 64 sequences of a step on 8 devices: one update, a micro-batch of 8 on each."""
    loaded = read_dialect(DIALECT, None, OLD_SIZES, version=version)
    assert loaded.problems == ()
    policy, reference = loaded.config.policy, loaded.config.reference
    assert (policy.sequences_per_mini_batch, policy.sequences_per_micro_batch_per_device) == (64, 8)
    assert reference.sequences_per_micro_batch_per_device == log_probs
    [told] = [text for text in loaded.warnings if "times smaller" in text]
    assert f"makes the gradient of such a step {smaller} times smaller than the mean" in told


def test_a_mini_batch_above_the_step_has_whole_micro_batches() -> None:
    """12 x 8 / 8 = 12 sequences on a device in micro-batches of at most 8: two of 6. By tokens, 12 of the 256 asked for."""
    loaded = read_dialect(DIALECT, None, [*OLD_SIZES, "data.train_batch_size=12"], version="0.2")
    assert loaded.problems == ()
    assert loaded.config.policy.sequences_per_micro_batch_per_device == 6
    assert any("16 times smaller" in text for text in loaded.warnings)  # 32 micro-batches asked for, 2 made
    by_tokens = [*OLD_SIZES, "data.train_batch_size=16", f"{A}.use_dynamic_bsz=True"]
    [told] = [one for one in read_dialect(DIALECT, None, by_tokens, version="0.2").warnings if "times smaller" in one]
    assert "16 times smaller" in told  # 256 x 8 / 8 = 256 sequences asked for on a device, which has 16


def test_sizes_on_all_devices_are_rounded_down() -> None:
    """12 // 8 = 1 sequence; in 0.1, 12 // 8 = 1 prompt with 5 sequences."""
    sizes = (f"{A}.ppo_micro_batch_size=12", f"{A}.ppo_micro_batch_size_per_gpu=null", f"{A}.ppo_mini_batch_size=24")
    words = [*EXAMPLE, *sizes, *LOG_PROBS_ON_ALL, "data.train_batch_size=48"]
    for version, size in (("0.1", 5), ("0.2", 1), ("0.4", 1)):
        loaded = read_dialect(DIALECT, None, words, version=version)
        assert loaded.problems == ()
        assert loaded.config.policy.sequences_per_micro_batch_per_device == size


def test_sizes_below_one_sequence_count_only_where_they_are_read() -> None:
    few = [*EXAMPLE, "actor_rollout_ref.ref.log_prob_micro_batch_size=4", f"{A}.use_kl_loss=True"]
    [problem] = read_dialect(DIALECT, None, few, version="0.2").problems
    assert "4 sequences on all devices together, and 8 devices share them (fewer than one each)" in problem.what
    assert not read_dialect(DIALECT, None, [*few, f"{A}.use_dynamic_bsz=True"], version="0.2").problems


def test_on_the_one_device_of_here_sizes_need_not_split_over_the_devices_of_the_file() -> None:
    """300 x 1 = 300 sequences do not split over 7 devices, and 16 // 32 = 0; on one device there is nothing to split."""
    odd = [*FILES, "algorithm.adv_estimator=gae", "data.train_batch_size=300", "trainer.n_gpus_per_node=7"]
    odd += [f"{A}.ppo_mini_batch_size=150", f"{A}.ppo_micro_batch_size=4", f"{R}.log_prob_micro_batch_size=4"]
    odd += ["critic.ppo_micro_batch_size=4", f"{R}.n=1", f"{R}.tensor_model_parallel_size=1"]
    assert any("do not split over 7 devices" in each.what for each in read_dialect(DIALECT, None, odd).problems)
    loaded = read_dialect(DIALECT, None, odd, here=True)
    assert loaded.problems == ()
    assert (loaded.config.data.prompts_per_step, loaded.config.policy.sequences_per_mini_batch) == (300, 150)
    assert sum("--here has one" in each or "fewer than one each" in each for each in loaded.warnings) == 4


@pytest.mark.parametrize(("version", "update", "updates"), [("0.1", 256, 20), ("0.2", 256, 20), ("0.4", 1280, 4)])
def test_the_critic_of_early_versions_counts_sequences(version: str, update: int, updates: int) -> None:
    """1024 x 5 = 5120 sequences of a step: 20 mini-batches of 256 sequences, or 4 of 256 prompts."""
    sizes = (f"{A}.ppo_micro_batch_size=64", f"{A}.ppo_micro_batch_size_per_gpu=null", "critic.ppo_micro_batch_size=64")
    words = [*EXAMPLE, "algorithm.adv_estimator=gae", *sizes, *LOG_PROBS_ON_ALL]
    loaded = read_dialect(DIALECT, None, words, version=version)
    assert loaded.problems == ()
    found, _ = plan_batches(loaded.config, None)
    assert found is not None and found.critic is not None
    assert (found.critic.sequences_per_update, found.critic.updates_per_step) == (update, updates)
    assert found.critic.gradient_accumulation_steps == update // 64  # 64 sequences of the critic's on 8 devices in all


def test_a_generation_is_the_step_where_no_filter_drops_groups() -> None:
    loaded = read("data.train_batch_size=8", "+data.gen_batch_size=16")
    assert loaded.config.data.prompts_per_step == 16
    assert any("data.gen_batch_size=16 prompts, not data.train_batch_size=8" in text for text in loaded.warnings)
    filtered = read("data.train_batch_size=8", "+data.gen_batch_size=16", "+algorithm.filter_groups.enable=True")
    assert filtered.config.data.prompts_per_step == 8


@pytest.mark.parametrize(("version", "checkout"), [("0.2", ""), ("0.4", "0.5.0.dev")])
def test_the_last_mini_batch_is_smaller_up_to_0_6(
    version: str, checkout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's own test of 2025: 800 prompts in mini-batches of 256 are three of 256 and one of 32."""
    (file := tmp_path / "verl/version/version").parent.mkdir(parents=True)
    file.write_text(checkout)
    monkeypatch.chdir(tmp_path)
    sizes = (
        "data.train_batch_size=800",
        f"{A}.ppo_mini_batch_size=256",
        f"{A}.ppo_micro_batch_size_per_gpu=8",
        f"{R}.n=1",
    )
    words = [*EXAMPLE, *sizes]
    loaded = read_dialect(DIALECT, None, words, version=version)
    policy = loaded.config.policy
    assert not [each for each in loaded.problems if "mini-batches" in each.what]
    assert (policy.sequences_per_mini_batch, policy.smaller_last_mini_batch) == (256, True)
    assert any("the last of 4 mini-batches has 32 prompts" in text for text in loaded.warnings)
    file.write_text("0.7.0")
    (problem, *_) = read_dialect(DIALECT, None, words, version="0.4").problems
    assert "800 prompts do not split into mini-batches of 256" in problem.what

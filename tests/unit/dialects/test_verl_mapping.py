"""What several of verl's keys decide together; single keys are tested by the examples of their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig

from . import examples

R = "actor_rollout_ref.rollout"
T = f"{R}.multi_turn"
TOOL_FILE = f"{T}.tool_config_path={Path(__file__).parent}/verl_documents/tools.yaml"
TURNS = (f"{T}.enable=True", TOOL_FILE)
VLLM = (f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1")


def read(*overrides: str) -> LoadedConfig:
    return examples.read("verl", "train", (), *overrides)


def test_the_base_leaves_roles_it_does_without_at_our_defaults() -> None:
    config, plain = read().config, RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["a"]}})
    assert config.critic == plain.critic
    assert config.reward.kl == plain.reward.kl
    assert config.reward.model is None
    assert config.loss.kl_coef == 0
    assert config.loss.kl_estimator == plain.loss.kl_estimator
    assert config.reference.engine_options == {}
    assert config.validation.max_response_tokens is None


def test_with_mode_async_rows_name_their_agent() -> None:
    loaded = read(f"{R}.mode=async", TOOL_FILE)
    environment = loaded.config.environment
    assert (environment.column, environment.name) == ("agent_name", "single_turn")
    assert {tag: one.name for tag, one in environment.named.items()} == {
        "single_turn_agent": "single_turn",
        "tool_agent": "tools",
    }
    assert environment.named["tool_agent"].settings["cut"] == "middle"
    assert loaded.config.data.extra_columns == ["agent_name"]
    assert any("as in verl; +" in text for text in loaded.warnings)
    assert not read(f"{R}.mode=async").config.environment.used
    told = read(f"{R}.mode=async", TOOL_FILE, f"{R}.multi_turn.enable=False").ignored
    [reason] = [each.reason for each in told if each.key == f"{R}.multi_turn.enable"]
    assert "a row's agent_name decides" in reason


def test_the_whole_sequence_is_what_verl_gives_the_sampler() -> None:
    """max_model_len, where it is given; and a conversation goes on behind what the model has read."""
    environment = read(*TURNS, *VLLM, f"{R}.max_model_len=900", f"{R}.max_num_batched_tokens=1024").config.environment
    assert (environment.max_sequence_tokens, environment.changed_history) == (900, "append")


A = "actor_rollout_ref.actor"
SPPO = ("algorithm.adv_estimator=null", "algorithm.sppo_eta=0.5")
KL = (f"{A}.use_kl_loss=True", f"{R.removesuffix('.rollout')}.ref.log_prob_micro_batch_size_per_gpu=8")


@pytest.mark.parametrize(
    "words", [SPPO, (f"{A}.policy_loss.loss_mode=gspo",), (f"{A}.policy_loss.loss_mode=geo_mean",)]
)
def test_losses_of_responses_stand_beside_an_entropy_and_a_kl_of_tokens(words: tuple[str, ...]) -> None:
    loss = read(*words, *KL).config.loss
    assert (loss.aggregation, loss.entropy_aggregation, loss.kl_aggregation) == (
        "sequence_mean_token_mean",
        "token_mean",
        "token_mean",
    )
    assert read(*words).config.loss.kl_aggregation is None


def test_the_recipe_sppo_reads_no_other_estimator_loss_and_clip() -> None:
    loaded = read(*SPPO[1:], f"{A}.sppo_eta=2.0", "algorithm.adv_estimator=rloo", f"{A}.clip_ratio=0.1")
    config = loaded.config
    assert (config.advantage.name, config.advantage.settings) == ("sppo", {"soft_mean_scale": 0.5})
    assert (config.loss.name, config.loss.settings) == ("sppo", {"advantage_scale": 2.0})
    assert {"algorithm.adv_estimator", f"{A}.clip_ratio"} <= {one.key for one in loaded.ignored}
    assert f"{A}.sppo_eta" in {one.key for one in read(f"{A}.sppo_eta=2.0").ignored}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("algorithm.adv_estimator=null",),
            "algorithm.adv_estimator is null, which only the recipes sppo and spin take",
        ),
        ((*SPPO, f"{A}.loss_agg_mode=seq-mean-token-sum"), "the recipe sppo takes token-mean alone"),
    ],
)
def test_a_file_of_sppo_without_its_key_or_with_another_mean_is_refused(words: tuple[str, ...], said: str) -> None:
    assert any(said in problem.what for problem in read(*words).problems)


SPIN = ("algorithm.adv_estimator=null", f"+{A}.dpo_beta=0.2", *KL[1:])


def test_the_recipe_spin_makes_one_update_of_all_pairs_whatever_the_mini_batch() -> None:
    loaded = read(
        *SPIN, f"{A}.ppo_mini_batch_size=2", f"{A}.ppo_epochs=3", f"{A}.use_kl_loss=True", f"{A}.entropy_coeff=0.1"
    )
    config = loaded.config
    assert not loaded.problems
    assert config.advantage.settings == {
        "beta": 0.2,
        "pair_loss": "sigmoid",
        "label_smoothing": 0.0,
        "equal_rewards": "first",
    }
    assert (config.loss.name, config.loss.aggregation, config.loss.entropy_coef, config.loss.kl_coef) == (
        *("gpg", "sequence_mean_token_sum"),
        *(0, 0),
    )
    # 8 prompts x 8 samples, one update
    assert (config.policy.sequences_per_mini_batch, config.policy.epochs_per_step) == (64, 1)
    assert config.reference.update_every is None
    named = {one.key for one in loaded.ignored}
    assert {f"{A}.{name}" for name in ("ppo_mini_batch_size", "ppo_epochs", "use_kl_loss", "entropy_coeff")} <= named
    assert f"{A}.ppo_epochs" not in {one.key for one in read(*SPIN).ignored}


def test_the_recipe_spin_says_which_responses_are_pairs_and_when_the_reference_moves() -> None:
    assert any("responses to two prompts" in text for text in read(*SPIN, f"{R}.n=1").warnings)
    assert not any("responses to two prompts" in text for text in read(*SPIN, f"{R}.n=2").warnings)
    often = read(*SPIN, "+trainer.ref_update_freq=2")
    assert often.config.reference.update_every == 2
    assert any("verl's is one step older" in text for text in often.warnings)
    assert read(*SPIN, "+trainer.ref_update_freq=-1").config.reference.update_every is None


GKD = (
    *("+rollout.nnodes=1", "+rollout.n_gpus_per_node=1", "actor_rollout_ref.hybrid_engine=False", f"{R}.n=1"),
    *("+actor_rollout_ref.teacher.server_ip=10.0.0.7", "+actor_rollout_ref.teacher.server_port=99"),
)


def test_the_recipe_gkd_learns_from_the_servers_of_its_teacher_alone() -> None:
    loaded = read(
        *GKD, f"+{A}.micro_batch_size=4", f"{A}.ppo_mini_batch_size=2", f"{A}.ppo_epochs=3", "trainer.test_freq=5"
    )
    config = loaded.config
    assert not loaded.problems
    teacher = config.distillation.teachers["teacher"]
    assert (teacher.endpoints, teacher.queued, config.distillation.alone) == (["tcp://10.0.0.7:99"], True, True)
    assert (config.distillation.enters, config.distillation.top_k, config.distillation.top_k_rest) == (
        "loss",
        256,
        "drop",
    )
    # 8 prompts, one update
    assert (config.policy.sequences_per_mini_batch, config.policy.epochs_per_step) == (8, 1)
    assert config.policy.sequences_per_micro_batch_per_device == 4
    assert (config.reward.terms, config.validation.every_steps, config.validation.before_training) == ([], None, False)
    assert (config.asynchronous.mode, config.asynchronous.max_staleness_steps) == ("one_step", 1)
    assert {f"{A}.ppo_mini_batch_size", f"{A}.ppo_epochs", "trainer.test_freq"} <= {one.key for one in loaded.ignored}
    assert config.data.extra_columns == ["*"]  # rows need no answer
    two = read(*GKD, "+trainer.scheduler=two_step_off").config.asynchronous
    assert (two.mode, two.max_staleness_steps) == ("separate", 2)


def test_the_recipe_prime_s_file_of_0_7_has_a_later_name_for_the_shape_of_the_learning_rate() -> None:
    words = examples.in_full("verl", "train", ("prime",))
    optimizer = "reward_model.model.optim"
    loaded = read(*words, f"{optimizer}.warmup_style=null", f"{optimizer}.lr_scheduler_type=constant")
    assert not loaded.problems and loaded.config.advantage.name == "prime"
    named = {one.key for one in loaded.ignored}
    assert f"{optimizer}.lr_scheduler_type" in named


def test_the_recipe_prime_s_file_of_0_2_warms_up_for_no_step() -> None:
    words = examples.in_full("verl", "train", ("prime",))
    loaded = read(*words, "reward_model.model.optim.lr_warmup_steps_ratio=0.0")
    assert not loaded.problems and loaded.config.reward.process.schedule.warmup_updates == 0


def test_the_recipe_prime_has_one_estimator_and_whole_batches() -> None:
    words = examples.in_full("verl", "train", ("prime",))
    for word, said in (
        ("algorithm.adv_estimator=grpo", "has rloo alone"),
        ("data.oversample_factor=2.5", "whole batches of prompts"),
        ("reward_model.enable=False", "has no process rewards"),
    ):
        assert any(said in problem.what for problem in read(*words, word).problems), word

"""verl's engines that shard as FSDP2 does: their sizes, and their own learning rates against formulas of their sources."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.torch_training.rates import learning_rate_factor
from posttrain.cli.plan_plain import remarks
from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import SFT
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.verl import DIALECT

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BASE = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=8",
    f"{A}.ppo_mini_batch_size=4",
    f"{A}.ppo_micro_batch_size_per_gpu=1",
    f"{R}.log_prob_micro_batch_size_per_gpu=1",
    f"{R}.name=native",
    f"{R}.n=8",
    "actor_rollout_ref.model.use_remove_padding=True",
    "trainer.n_gpus_per_node=8",
)
TOTAL = "trainer.total_training_steps=100"


def config(*overrides: str) -> Any:
    loaded = read_config(None, [*BASE, *overrides], "verl")
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    return loaded.config


@pytest.mark.parametrize(
    ("overrides", "engine", "sizes"),
    [
        (("model_engine=veomni", f"{A}.veomni.ulysses_parallel_size=2"), "fsdp", (2, 1, 1)),
        (("model_engine=torchtitan", f"{A}.torchtitan.context_parallel_size=4"), "fsdp", (4, 1, 1)),
        (("model_engine=torchtitan", f"{A}.torchtitan.tensor_parallel_size=2"), "megatron", (1, 2, 1)),
        (
            (f"{A}.strategy=fsdp_turbo", f"{A}.fsdp_config.turbo_config.distributed.ulysses_parallel_size=2"),
            "fsdp",
            (2, 1, 1),
        ),
    ],
)
def test_sizes_and_engine(overrides: tuple[str, ...], engine: str, sizes: tuple[int, int, int]) -> None:
    policy = config(*overrides).policy
    assert policy.engine == engine
    assert (policy.sequence_parallel, policy.tensor_parallel, policy.pipeline_parallel) == sizes


def test_options_and_the_gradients_norm() -> None:
    found = config("model_engine=veomni", f"{A}.veomni.enable_full_shard=False", f"{A}.optim.clip_grad=0.5").policy
    assert found.engine_options["reshard_after_forward"] is False
    assert found.optimizer.max_grad_norm == 0.5


def test_the_gradients_norm_of_fsdp() -> None:
    def norm(*given: str) -> float:
        return float(config(*given).policy.optimizer.max_grad_norm)

    # FSDP: grad_clip up to verl 0.7, optim.clip_grad since 0.8
    assert norm(f"{A}.optim.clip_grad=0.5") == norm(f"+{A}.optim.grad_clip=0.5") == norm(f"{A}.grad_clip=0.5") == 0.5
    assert norm(f"{A}.optim.clip_grad=0.5", f"{A}.grad_clip=0.25") == 0.25 and norm() == 1.0


def test_a_size_that_does_not_fit_is_named_by_the_users_key() -> None:
    key = f"{A}.veomni.ulysses_parallel_size"
    [problem] = read_config(None, [*BASE, "model_engine=veomni", f"{key}=3"], "verl").problems
    assert problem.field == key and "8 devices do not split into groups of 3" in problem.what


def test_earlier_versions_do_not_have_them() -> None:
    found = read_config(None, [*BASE, f"{A}.strategy=veomni"], "verl@0.2").problems
    assert "verl 0.2 has no strategy veomni" in [problem.what for problem in found]


def test_r3_replays_the_samplers_experts_and_r2_those_of_the_old_logprobs() -> None:
    key = f"{A}.veomni.router_replay.mode"
    assert config("model_engine=veomni", f"{key}=R3").rollout.routing_replay
    again = config("model_engine=veomni", f"{key}=R2")
    assert again.policy.routing_replay and not again.rollout.routing_replay


def test_veomnis_cosine() -> None:
    """100 iterations: 10 of warm-up from half the peak, the floor of 0.1 in iteration 50; two updates share a rate."""
    words = {"lr": 1e-6, "lr_min": 1e-7, "lr_start": 5e-7, "lr_decay_ratio": 0.5, "lr_warmup_steps_ratio": 0.1}
    schedule = config(
        "model_engine=veomni", TOTAL, *(f"{A}.optim.{name}={value}" for name, value in words.items())
    ).policy.schedule
    factor = learning_rate_factor(schedule, 200, 2)

    def veomni(step: int) -> float:
        if step < 10:
            return (5e-7 + (1e-6 - 5e-7) * step / 10) / 1e-6
        if step > 50:
            return 0.1
        wave = 0.5 * (1 + math.cos(math.pi * (step - 10) / (50 - 10)))
        return wave * (1 - 0.1) + 0.1

    for step in (0, 1, 9, 10, 11, 30, 49, 50, 51, 99):
        assert factor(2 * step) == factor(2 * step + 1) == pytest.approx(veomni(step))


def test_veomni_is_a_cosine_where_nothing_is_written() -> None:
    assert config("model_engine=veomni").policy.schedule.name == "cosine"
    style = f"{A}.optim.lr_scheduler_type=constant"
    assert config("model_engine=veomni", style).policy.schedule.name == "constant"
    [problem] = read_config(None, [*BASE, "model_engine=veomni", f"{A}.optim.lr_decay_ratio=0.5"], "verl").problems
    assert "trainer.total_training_steps" in problem.fix


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_torchtitans_fall_ends_in_iteration_10000(shape: str) -> None:
    words = (f"{A}.optim.decay_type={shape}", f"{A}.optim.min_lr_factor=0.2")
    factor = learning_rate_factor(config("model_engine=torchtitan", *words).policy.schedule, 40_000, 2)
    shares = {"linear": lambda y: 1 - y, "cosine": lambda y: 0.5 * (1 + math.cos(math.pi * y))}
    share = shares.get(shape, lambda y: 1 - math.sqrt(y))
    for step in (0, 1, 2500, 9999, 10_000):
        assert factor(2 * step) == pytest.approx(0.2 + 0.8 * share(step / 10_000))


def test_torchtitans_warm_up_begins_above_zero() -> None:
    """(step + 1) / 4 in the first iterations; with the floor at the peak the rate stays there."""
    words = (f"{A}.optim.lr_warmup_steps=4", f"{A}.optim.min_lr_factor=1.0", f"{A}.optim.eps=1e-6")
    policy = config("model_engine=torchtitan", *words).policy
    factor = learning_rate_factor(policy.schedule, 200, 2)
    assert [factor(2 * step) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert policy.optimizer.eps == 1e-6


def sft(*overrides: str) -> Any:
    loaded = read_dialect(DIALECT, None, ["trainer.n_gpus_per_node=4", *overrides], entry=SFT)
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    return loaded.config


def test_automodels_schedule_is_in_shares_of_the_peak() -> None:
    """Its file: a cosine to a hundredth; from a tenth in the warm-up, and AdamW of transformer_engine is AdamW."""
    impl = "optim.optimizer_impl=transformer_engine.pytorch.optimizers.fused_adam"
    found = sft("engine.strategy=automodel", "optim.lr_warmup_steps=5", "optim.optimizer=FusedAdam", impl).policy
    assert (found.schedule.name, found.schedule.min_lr_ratio, found.schedule.warmup_start_ratio) == (
        "cosine",
        0.01,
        0.1,
    )
    assert (found.optimizer.name, found.engine) == ("adamw", "fsdp")


def test_a_chosen_engine_is_known_by_its_class(tmp_path: Path) -> None:
    """``engine=megatron`` chooses a file that names the class and no strategy."""
    text = "engine: {_target_: verl.workers.config.McoreEngineConfig, tensor_model_parallel_size: 2}\n"
    file = tmp_path / "sft.yaml"
    file.write_text(text)
    loaded = read_dialect(DIALECT, str(file), ["trainer.n_gpus_per_node=4"], entry=SFT)
    assert not loaded.problems and loaded.config.policy.engine == "megatron"
    assert loaded.config.policy.tensor_parallel == 2


def test_a_list_in_quotes_is_read_as_a_list() -> None:
    """The shell leaves the quotes of optim.betas="'[0.9,0.95]'" to Hydra, for which it is a text then."""
    loaded = read_dialect(DIALECT, None, ["optim.betas='[0.8,0.9]'", "trainer.n_gpus_per_node=1"], entry=SFT)
    assert not loaded.problems and loaded.config.policy.optimizer.betas == (0.8, 0.9)
    assert any("is read as the list in it" in text for text in loaded.warnings)
    [problem] = read_dialect(DIALECT, None, ["optim.betas='[a]'", "trainer.n_gpus_per_node=1"], entry=SFT).problems
    assert "must be list of float" in problem.what


def test_the_settings_that_verls_own_file_of_megatron_holds_are_no_unknown_options() -> None:
    """Names of verl/trainer/config/engine/megatron.yaml from 0.7 to August 2026, on eight devices."""
    section = f"{A}.megatron"
    held = {
        "_target_": "verl.workers.config.McoreEngineConfig",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dynamic_context_parallel": False,
        "entropy_from_logits_chunk_size": 2048,
        "entropy_from_logits_with_chunking": False,
        "forward_only": False,
        "max_seqlen_per_dp_cp_rank": "null",
        "pad_bshd_to_minibatch_max": True,
        "use_megatron_fsdp": False,
        "use_remove_padding": True,
    }
    texts = [
        f"++{role}.megatron.{name}={value}" for role in (A, "actor_rollout_ref.ref") for name, value in held.items()
    ]
    found = config(f"{A}.strategy=megatron", "+actor_rollout_ref.ref.strategy=megatron", f"++{A}.use_kl_loss=True",
                   "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1", *texts)  # fmt: skip
    assert found.policy.engine == "megatron" and "_target_" not in found.policy.engine_options
    refused = read_config(None, [*BASE, f"{A}.strategy=megatron", f"++{section}.qat.enable=True"], "verl")
    assert [problem.field for problem in refused.problems] == [f"{section}.qat.enable"]


def test_verls_reference_may_have_changes_to_its_config_json_which_verl_does_not_read() -> None:
    key = "actor_rollout_ref.ref.model.override_config.attn_implementation"
    loaded = read_config(None, [*BASE, f"+{key}=eager"], "verl")
    assert not loaded.problems and key in [each.key for each in loaded.ignored]


@pytest.mark.parametrize("kept", [0, -1])
def test_zero_and_minus_one_keep_all_checkpoints(kept: int) -> None:
    assert config(f"trainer.max_actor_ckpt_to_keep={kept}").checkpoint.keep_last is None


def test_megatrons_loss_that_balances_experts_asks_for_its_kind() -> None:
    """verl builds its models with ``moe_router_load_balancing_type=none``: the weight alone does nothing there."""
    section = f"{A}.megatron.override_transformer_config"
    asked = (f"{A}.strategy=megatron", f"+{section}.moe_aux_loss_coeff=0.01", f"+{section}.moe_z_loss_coeff=0.001")
    alone = read_config(None, [*BASE, *asked], "verl")
    options = alone.config.policy.engine_options["override_transformer_config"]
    assert "moe_aux_loss_coeff" not in options and options["moe_z_loss_coeff"] == 0.001
    (told,) = [one for one in alone.ignored if one.key == f"{section}.moe_aux_loss_coeff"]
    assert told.asks and "moe_router_load_balancing_type=aux_loss gives them one" in told.reason
    named = config(*asked, f"+{section}.moe_router_load_balancing_type=aux_loss")
    assert named.policy.engine_options["override_transformer_config"]["moe_aux_loss_coeff"] == 0.01
    # a text is left to the engine, which refuses it
    wrong = read_config(None, [*BASE, *asked[:1], f"+{section}.moe_aux_loss_coeff=much"], "verl").config
    assert wrong.policy.engine_options["override_transformer_config"]["moe_aux_loss_coeff"] == "much"


def test_a_critic_on_megatron_is_split_as_the_policy_beside_it() -> None:
    sizes = {"tensor": 2, "pipeline": 2}
    asked = [f"{A}.megatron.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    ppo = [*BASE, f"{A}.strategy=megatron", "critic.strategy=megatron", "algorithm.adv_estimator=gae", *asked,
           "critic.ppo_micro_batch_size_per_gpu=1"]  # fmt: skip
    loaded = read_config(None, ppo, "verl")
    assert not loaded.problems and not any("critic" in problem.what for problem in loaded.unsupported)
    critic = loaded.config.critic
    assert (critic.tensor_parallel, critic.pipeline_parallel) == (2, 2)
    assert [text for text in loaded.warnings if "the critic is split as the policy is" in text] == [
        "critic.megatron.tensor_model_parallel_size, critic.megatron.pipeline_model_parallel_size: the critic is split as "
        "the policy is, on whose devices it is trained; that changes no number"
    ]
    same = [f"critic.megatron.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    told = read_config(None, [*ppo, *same], "verl").warnings
    assert not any("split as the policy" in text for text in told)


@pytest.mark.parametrize("entry", ["train", "sft"])
def test_settings_that_only_verls_own_file_holds_are_no_options_of_an_engine(tmp_path: Path, entry: str) -> None:
    """verl's files get further settings of Megatron; what a launch itself writes is still compared with the known ones."""
    file = tmp_path / "verl/trainer/config" / ("ppo_trainer.yaml" if entry == "train" else "sft_trainer_engine.yaml")
    file.parent.mkdir(parents=True)
    if entry == "train":
        file.write_text("actor_rollout_ref: {actor: {strategy: megatron, megatron: {brand_new: 3}}}\n")
        section, asked = f"{A}.megatron", list(BASE)
    else:
        file.write_text("engine: {strategy: megatron, brand_new: 3}\nmodel: {path: x}\ndata: {train_files: x}\n")
        section, asked = "engine", ["trainer.n_gpus_per_node=2"]
    loaded = read_config(str(file), asked, "verl")
    assert "brand_new" not in loaded.config.policy.engine_options
    (told,) = [one for one in loaded.ignored if one.key == f"{section}.brand_new"]
    assert not told.asks and "the engine megatron has no such setting" in told.reason
    assert not any("brand_new" in str(problem) for problem in loaded.problems)
    written = read_config(str(file), [*asked, f"+{section}.brand_newer=3"], "verl")
    assert any("has no option brand_newer" in str(problem) for problem in written.problems)


def test_options_of_megatron_that_one_device_has_no_use_for_are_told_in_a_line() -> None:
    section = f"{A}.megatron"
    fused = f"+{section}.override_transformer_config.moe_permute_fusion=True"
    words = (f"{section}.param_offload=True", f"{section}.use_mbridge=True", fused)
    asked = [f"{A}.strategy=megatron", "critic.strategy=megatron", f"{section}.tensor_model_parallel_size=2"]
    loaded = read_config(None, [*BASE, *asked, *words], "verl", here=True)
    assert loaded.config.policy.engine_options == {}
    assert [line for line in remarks(loaded) if ".megatron" in line] == [
        f"here: policy.tensor_parallel (by {section}.tensor_model_parallel_size): 1 instead of 2",
        f"ignored: {section}.{{param_offload, use_mbridge}}: the local engine has no such setting",
        f"ignored: {fused.lstrip('+').partition('=')[0]}, at override {fused}: the local engine has no such setting",
    ]

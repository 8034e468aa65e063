# ruff: noqa: E501  # messages stand as they are printed, in one line
"""What ROLL's keys decide together: batch sizes, devices, domains; and one message for everything that cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.cli.request import load_request
from posttrain.config import RunConfig
from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.roll import DIALECT
from posttrain.dialects.roll.devices import devices_of
from posttrain.dialects.roll.rules.rewards import prompts_by_domain
from posttrain.errors import ConfigError
from posttrain.plan.batch import plan_batches
from posttrain.rewards.scorers.llm_judge import matched_verdict

BASE = (
    "pretrain=m", "response_length=100", "actor_train.data_args.file_name=a.jsonl", "rewards.d.worker_cls=exact_match",
    "adv_estimator=grpo", "num_return_sequences_in_group=8",
)  # fmt: skip
TRAIN, INFER, CONFIG = "actor_train.training_args", "actor_infer", "strategy_args.strategy_config"
VAL = "validation.data_args.file_name=v.jsonl"
PG = "actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
SIXTEEN = ("actor_train.device_mapping='list(range(0,16))'", "actor_infer.device_mapping='list(range(0,16))'")
MEGATRON = "actor_train.strategy_args.strategy_name=megatron_train"


def load(*overrides: str, base: tuple[str, ...] = BASE) -> LoadedConfig:
    return read_dialect(DIALECT, None, (*base, *overrides))


def config_of(*overrides: str) -> RunConfig:
    loaded = load(*overrides)
    assert [str(problem) for problem in loaded.problems] == []
    return loaded.config


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("list(range(0,8))", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("[0,1]", [0, 1]),
        ("range(2, 8, 2)", [2, 4, 6]),
        ("list(range(0,2)) + list(range(8,10))", [0, 1, 8, 9]),
        (" list(range(0, 2*2)) ", [0, 1, 2, 3]),
        ("[3] + [0]", [3, 0]),
        ([4, 5], [4, 5]),
    ],
)
def test_device_mappings_are_read(text, ids) -> None:
    assert devices_of(text) == ids


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "__import__('os').getcwd()",
            "holds __import__('os').getcwd(), which is not read: nothing in a device mapping is run",
        ),
        ("[i for i in range(4)]", "which is not read"),
        ("list(range(10**9))", "which is not read"),
        ("list(range(0, 1000000000))", "more than 100000 devices"),
        ("range(0,8", "is no Python expression"),
        ("8", "is one number and no list"),
        ("[]", "names no device"),
        ("[0, 0]", "names device 0 twice"),
        ("[-1, 0]", "ids count from 0"),
        ("[True]", "which is not read"),
        (["0"], "no device id"),
    ],
)
def test_nothing_else_is_run(text, why) -> None:
    with pytest.raises(ValueError) as caught:
        devices_of(text)
    assert why in str(caught.value)


# The guide's sizes: 64 prompts x 8 samples = 512 sequences.
GUIDE = (
    *SIXTEEN,
    "rollout_batch_size=64",
    f"{TRAIN}.per_device_train_batch_size=1",
    f"{TRAIN}.gradient_accumulation_steps=32",
)


@pytest.mark.parametrize(
    ("overrides", "per_update", "updates", "accumulation"),
    [
        ((), 512, 1, 32),  # 1 x 32 x 16 ranks
        ((MEGATRON, f"actor_train.{CONFIG}.tensor_model_parallel_size=2"), 256, 2, 32),  # 1 x 32 x 8 ranks
        ((MEGATRON, f"actor_train.{CONFIG}.expert_model_parallel_size=2"), 512, 1, 32),  # experts do not divide the ranks
        (("actor_train.model_args.ulysses_size=4",), 128, 4, 32),  # 1 x 32 x 4 ranks
        (("actor_train.strategy_args.strategy_name=deepspeed_train", "ppo_epochs=2"), 512, 2, 32),
        # one update per step: 64 x 8 x tp 2 x pp 2 / (1 x 16) = 128
        ((MEGATRON, f"actor_train.{CONFIG}.tensor_model_parallel_size=2", f"actor_train.{CONFIG}.pipeline_model_parallel_size=2",
          f"{TRAIN}.gradient_accumulation_steps=128"), 512, 1, 128),
    ],
)  # fmt: skip
def test_worked_examples_of_batch_sizes(overrides, per_update, updates, accumulation) -> None:
    plan, problems = plan_batches(config_of(*GUIDE, *overrides), None)
    assert not problems and plan is not None
    assert (plan.sequences_per_step, plan.sequences_per_update, plan.updates_per_step) == (512, per_update, updates)
    assert (plan.sequences_per_micro_batch_per_device, plan.gradient_accumulation_steps) == (1, accumulation)


def of_sizes(problems: object) -> list[str]:
    return [str(problem) for problem in problems if "do not split" in str(problem)]  # type: ignore[attr-defined]


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 40), st.integers(2, 9), st.integers(1, 12), st.integers(1, 7), st.integers(1, 9), st.sampled_from([1, 2, 3]),
    st.booleans(),
)  # fmt: skip
def test_any_sizes_are_planned_or_refused_once_with_a_fix_that_works(
    prompts, samples, devices, micro, steps, tensor, megatron
) -> None:
    chosen = {
        "rollout_batch_size": prompts,
        "num_return_sequences_in_group": samples,
        f"{TRAIN}.per_device_train_batch_size": micro,
        f"{TRAIN}.gradient_accumulation_steps": steps,
    }
    place = [f"actor_train.device_mapping='list(range(0,{devices * tensor}))'"]
    copies = devices if megatron else devices * tensor
    if megatron:
        place += [MEGATRON, f"actor_train.{CONFIG}.tensor_model_parallel_size={tensor}"]
    for _ in range(3):  # a step that cannot be shared out hides updates that do not divide it
        loaded = load(*(f"{key}={value}" for key, value in chosen.items()), *place)
        found = of_sizes(loaded.problems)
        assert len(found) == len(loaded.problems) <= 1
        if not found:
            break
        changes = dict(re.findall(r"(?:use|with) ([\w.]+)=(\d+)", found[0]))
        assert changes
        chosen |= changes
    assert not loaded.problems
    plan, problems = plan_batches(loaded.config, None)
    assert not problems and plan is not None
    sizes = {key: int(value) for key, value in chosen.items()}
    product = sizes[f"{TRAIN}.per_device_train_batch_size"] * sizes[f"{TRAIN}.gradient_accumulation_steps"] * copies
    assert plan.sequences_per_update == product
    assert plan.updates_per_step * product == sizes["rollout_batch_size"] * samples


def test_here_keeps_the_sizes() -> None:
    there = config_of(*GUIDE)
    here = read_dialect(DIALECT, None, (*BASE, *GUIDE), here=True).config
    assert (here.placement.devices, here.policy.engine, here.policy.sequences_per_mini_batch) == (1, "local", 512)
    assert here.data == there.data and here.policy.optimizer == there.policy.optimizer


def test_shares_are_of_the_step_and_the_last_domain_gets_the_rest() -> None:
    assert prompts_by_domain({"a": 0.5, "b": 0.5, "c": 0.5}, 10) == {"a": 5, "b": 5, "c": 0}
    assert prompts_by_domain({"a": 0.34, "b": 0.33, "c": 0.33}, 10) == {"a": 3, "b": 3, "c": 4}


BAD = [
    (("async_generation_ratio=0.5",), "async_generation_ratio is 0.5, at override async_generation_ratio=0.5; use 0, or at least 1"),
    (("num_return_sequences_in_group=1",), "grpo compares the responses to a prompt, and there is 1 (ROLL gets NaN rewards), at override num_return_sequences_in_group=1; use num_return_sequences_in_group=8, or another number above 1"),
    (("adv_estimator=agentic_reinforce",), "agentic_reinforce is about turns, and this pipeline has single answers, at override adv_estimator=agentic_reinforce; use adv_estimator=reinforce"),
    (("adv_estimator=gpo",), "adv_estimator must be one of gae, reinforce, grpo, gigpo, step_reinforce, agentic_reinforce, not 'gpo', at override adv_estimator=gpo; did you mean grpo?"),
    (("response_length=null",), "neither response_length nor sequence_length is given, at override response_length=null; use response_length=1024, or another number of tokens"),
    (("sequence_length=1024",), "sequence_length=1024 leaves no room beside prompts of 1024 tokens, at override sequence_length=1024; use sequence_length=2048, or shorter prompts"),
    ((VAL, "val_prompt_length=10"), "val_prompt_length is given and val_sequence_length is not, at override val_prompt_length=10; give both, or remove val_prompt_length"),
    ((VAL, "val_sequence_length=10"), "val_sequence_length is given and val_prompt_length is not, at override val_sequence_length=10; give both, or remove val_sequence_length"),
    ((VAL, "eval_steps=0"), "eval_steps is 0, and there are validation files (ROLL fails with 0), at override eval_steps=0; use eval_steps=10, or remove validation.data_args"),
    (("max_steps=0",), "max_steps is 0, at override max_steps=0; use at least 1, such as max_steps=500"),
    (("logging_steps=0",), "logging_steps is 0, at override logging_steps=0; use at least 1, such as logging_steps=1"),
    (("track_with=wanbd",), "track_with must be one of tensorboard, wandb, swanlab, trackio, ml_tracker, stdout, , not 'wanbd', at override track_with=wanbd; did you mean wandb?"),
    (("model_download_type=HUB",), "model_download_type must be one of MODELSCOPE, HUGGINGFACE_HUB | null, not 'HUB', at override model_download_type=HUB"),
    (("profiler_timeline=true", "profiler_memory=true"), "profiler_timeline and profiler_memory are both true, at override profiler_timeline=true; keep one of them"),
    (("system_envs={A: 1}",), "system_envs.A must be text, not 1, at override system_envs={A: 1}; write A: \"1\""),
    (("checkpoint_config={type: s3}",), "checkpoint_config.type must be one of file_system | null, not 's3', at override checkpoint_config={type: s3}"),
    (("is_use_additional_prompts=true", "max_additional_running_prompts=0"), "is_use_additional_prompts needs max_additional_running_prompts above 0, at override max_additional_running_prompts=0; use max_additional_running_prompts=16"),
    (("async_generation_ratio=1", "generate_opt_level=0"), "asynchronous rollouts need generate_opt_level=1, and it is 0, at override generate_opt_level=0; use generate_opt_level=1"),
    (("is_pure_opd=true", "use_opd=true"), "is_pure_opd and use_opd are both true, at override is_pure_opd=true; keep one of them"),
    (("actor_train.data_args.prompt=a", "actor_train.data_args.messages=b"), "prompt and messages are both given, at override actor_train.data_args.prompt=a; keep messages for a column of chat messages, prompt for a column of texts"),
    (("actor_train.data_args.template=qwn3",), "there is no template 'qwn3' (known: native, qwen2_5, qwen3, chatml, empty, base, longCOT_qwen2.5, longcot_V3, qwen2_5_dpo), at override actor_train.data_args.template=qwn3; did you mean qwen3?"),
    (("actor_train.model_args.dtype=float32",), "actor_train.model_args.dtype must be one of bf16, fp32, fp16 | null, not 'float32', at override actor_train.model_args.dtype=float32"),
    (("actor_train.device_mapping='range(x)'",), "actor_train.device_mapping='range(x)' holds x, which is not read: nothing in a device mapping is run, at override actor_train.device_mapping='range(x)'; write it as list(range(0,8)), [0,1,2,3], or list(range(0,4)) + list(range(8,12))"),
    (("actor_infer.device_mapping=[0,1]",), "actor_train has no device_mapping, and actor_infer.device_mapping has one: a CPU worker cannot train beside devices, at actor_train.device_mapping (a default; the command line does not set it); use actor_train.device_mapping='list(range(0,2))'"),
    ((*SIXTEEN, MEGATRON, f"actor_train.{CONFIG}.tensor_model_parallel_size=3"), "16 devices of actor_train do not split into groups of tensor_model_parallel_size 3, at override actor_train.strategy_args.strategy_config.tensor_model_parallel_size=3; use sizes whose product divides 16, such as 2, or 18 devices"),
    ((*SIXTEEN, MEGATRON, "rollout_batch_size=60", f"{TRAIN}.gradient_accumulation_steps=1", f"{TRAIN}.per_device_train_batch_size=1"), "60 prompts do not split over 16 data-parallel ranks (16 devices), at override rollout_batch_size=60; use rollout_batch_size=64 or 48"),
    ((*SIXTEEN, "rollout_batch_size=61", f"{TRAIN}.per_device_train_batch_size=1"), "61 prompts x 8 samples = 488 sequences do not split over 16 data-parallel ranks (16 devices), at override rollout_batch_size=61; use rollout_batch_size=62 or 60"),
    ((*GUIDE, f"{TRAIN}.gradient_accumulation_steps=24"), "512 sequences of a step / 16 data-parallel ranks (16 devices) = 32 do not split into updates of 1 x 24 = 24 (per_device_train_batch_size x gradient_accumulation_steps), at override actor_train.training_args.gradient_accumulation_steps=24; use actor_train.training_args.gradient_accumulation_steps=32 or 16 (32 is one update per step)"),
    ((*GUIDE, f"{TRAIN}.per_device_train_batch_size=3"), "512 sequences of a step / 16 data-parallel ranks (16 devices) = 32 do not split into updates of 3 x 32 = 96 (per_device_train_batch_size x gradient_accumulation_steps), at override actor_train.training_args.per_device_train_batch_size=3; use actor_train.training_args.per_device_train_batch_size=2 with actor_train.training_args.gradient_accumulation_steps=16 (one update per step)"),
    (("rollout_batch_size=5", f"{TRAIN}.gradient_accumulation_steps=3"), "the 40 sequences of a step do not split into updates of 8 x 3 = 24 (per_device_train_batch_size x gradient_accumulation_steps), at override actor_train.training_args.gradient_accumulation_steps=3; use actor_train.training_args.gradient_accumulation_steps=5 or 1 (5 is one update per step)"),
    (("adv_estimator=gae", "critic.training_args.gradient_accumulation_steps=3"), "the 1024 sequences of a step do not split into updates of 8 x 3 = 24 (per_device_train_batch_size x gradient_accumulation_steps), at override critic.training_args.gradient_accumulation_steps=3; use critic.training_args.gradient_accumulation_steps=4 or 2 (128 is one update per step)"),
    (("actor_train.use_dynamic_batching_in_train=true",), "use_dynamic_batching_in_train needs a number of tokens, at actor_train.max_tokens_per_microbatch_in_train (a default; the command line does not set it); use actor_train.max_tokens_per_microbatch_in_train=1124 or more"),
    ((*SIXTEEN, f"{INFER}.strategy_args.strategy_name=vllm", f"{INFER}.{CONFIG}.tensor_parallel_size=3"), "the 16 devices of actor_infer do not split into workers of 3, at override actor_infer.strategy_args.strategy_config.tensor_parallel_size=3; use actor_infer.strategy_args.strategy_config.tensor_parallel_size=2, or 18 devices"),
    ((*SIXTEEN, f"{INFER}.strategy_args.strategy_name=vllm", f"{INFER}.{CONFIG}.data_parallel_size=4"), "actor_infer.strategy_args.strategy_config.data_parallel_size is 4, and actor_infer has 16 workers, at override actor_infer.strategy_args.strategy_config.data_parallel_size=4; use 16, or remove it"),
    ((*SIXTEEN, f"{INFER}.strategy_args.strategy_name=sglang", f"{INFER}.num_gpus_per_worker=2", f"{INFER}.{CONFIG}.tensor_parallel_size=3"), "SGLang's 3 x 1 devices of one copy are no multiple of num_gpus_per_worker=2, at override actor_infer.num_gpus_per_worker=2; use actor_infer.num_gpus_per_worker=3"),
    ((f"{INFER}.strategy_args.strategy_name=megatron_train",), "actor_infer.strategy_args.strategy_name must be one of vllm, sglang, hf_infer, native | null, not 'megatron_train', at override actor_infer.strategy_args.strategy_name=megatron_train"),
    ((*SIXTEEN, MEGATRON, f"actor_train.{CONFIG}.overlap_param_gather=true"), "actor_train.strategy_args.strategy_config.overlap_param_gather is refused: ROLL does not support it either, at override actor_train.strategy_args.strategy_config.overlap_param_gather=true"),
    ((*SIXTEEN, MEGATRON, f"actor_train.{CONFIG}.variable_seq_lengths=true", f"actor_train.{CONFIG}.moe_token_dispatcher_type=allgather"), "variable_seq_lengths does not go with moe_token_dispatcher_type=allgather, at override actor_train.strategy_args.strategy_config.variable_seq_lengths=true; use actor_train.strategy_args.strategy_config.moe_token_dispatcher_type=alltoall"),
    ((*SIXTEEN, "actor_train.strategy_args.strategy_name=deepspeed_train", f"actor_train.{CONFIG}.zero_optimization.stage=0"), "deepspeed_train needs a ZeRO stage above 0, and it is 0, at override actor_train.strategy_args.strategy_config.zero_optimization.stage=0; use stage 2 or 3, such as strategy_config: ${deepspeed_zero2}"),
    ((*SIXTEEN, "use_kl_loss=true", "kl_loss_coef=0.1", "reference.strategy_args.strategy_name=deepspeed_infer", f"reference.{CONFIG}.zero_optimization.stage=2"), "deepspeed_infer needs ZeRO stage 3, and it is 2, at override reference.strategy_args.strategy_config.zero_optimization.stage=2; use strategy_config: ${deepspeed_zero3}"),
    ((*SIXTEEN, "actor_train.model_args.ulysses_size=4", f"actor_train.{CONFIG}.fsdp_size=2"), "fsdp_size is 2, less than ulysses_size=4, at override actor_train.strategy_args.strategy_config.fsdp_size=2; use actor_train.strategy_args.strategy_config.fsdp_size=4"),
    (("~rewards.d.worker_cls",), "rewards.d has no worker_cls, at override ~rewards.d.worker_cls; use one of MathRuleRewardWorker, GeneralRuleRewardWorker, CrossThinkQARuleRewardWorker, MultipleChoiceBoxedRuleRewardWorker, GeneralValRuleRewardWorker, DetectionRewardWorker, CodeSandboxRewardWorker, LLMJudgeRewardWorker, or a reward of this program, such as exact_match"),
    (("~rewards",), "there is no reward: rewards is empty, at override ~rewards; add one, such as rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}"),
    (("rewards.d.worker_cls=x.MathRulRewardWorker",), "there is no reward 'x.MathRulRewardWorker', at override rewards.d.worker_cls=x.MathRulRewardWorker; did you mean MathRuleRewardWorker?"),
    (("rewards.d.worker_cls=roll.CrossThinkQARuleRewardWorker",), "rewards.d needs a reward_type, at rewards.d.reward_type (a default; the command line does not set it); use rewards.d.reward_type=loose, soft or strict"),
    (("rewards.d.judge_model_type=cloud",), "rewards.d.judge_model_type must be one of api, inference, cluster | null, not 'cloud', at override rewards.d.judge_model_type=cloud"),
    (("actor_train.data_args.domain_interleave_probs={dd: 1.0}",), "the domain dd has no reward, at override actor_train.data_args.domain_interleave_probs={dd: 1.0}; did you mean d?"),
    (("rewards.e={worker_cls: gsm8k, tag_included: [e]}", "rewards.f={worker_cls: gsm8k, tag_included: [f]}", "rewards.d.tag_included=[d]", "rollout_batch_size=10", f"{TRAIN}.per_device_train_batch_size=1", "actor_train.data_args.domain_interleave_probs={d: 0.5, e: 0.5, f: 0.5}"), "10 prompts are shared out as d 5, e 5, f 0: shares are of the step, and the last domain gets what is left, at override actor_train.data_args.domain_interleave_probs={d: 0.5, e: 0.5, f: 0.5}; use shares that add up to 1 and give every domain a prompt"),
    (("rewards.d.query_filter_config={type: mean_filter, filter_args: {threshold_down: 1, threshold_up: 0}}",), "no group has a mean above 1 and below 0, at override rewards.d.query_filter_config={type: mean_filter, filter_args: {threshold_down: 1, threshold_up: 0}}; use threshold_down below threshold_up, such as 0 and 1"),
    (("adv_estimator=reinforce", "reward_norm=batch", "norm_mean_type=group"), "reward_norm of mid-2025 and norm_mean_type of today both say how rewards are normalised, at override reward_norm=batch; keep one of them"),
    (("adv_estimator=reinforce", "norm_std_type=group", "num_return_sequences_in_group=1"), "norm_std_type=group compares the responses to a prompt, and there is 1, at override norm_std_type=group; use norm_std_type=batch, or num_return_sequences_in_group=8"),
    (("adv_estimator=reinforce", "reward_norm=running", "reward_shift=true", "reward_scale=true"), "reward_shift and reward_scale together leave nothing out, at override reward_shift=true; keep one of them, or none for both the mean and the deviation"),
    ((PG, "actor_train.pg_variant=tops"), "actor_train.pg_variant must be one of vanilla, ppo, tis, topr, cispo, kimi15 | null, not 'tops', at override actor_train.pg_variant=tops; did you mean topr?"),
    ((PG, "actor_train.pg_variant=tis", "actor_train.tis_lower_bound=2"), "tis bounds 2 and 1 do not hold 1, at override actor_train.tis_lower_bound=2; use bounds around 1, such as 0 and 1"),
    (("train_infer_correction.filters=[{enabled: true, ratio_lo: 1.0}]",), "train_infer_correction.filters.0 is {'enabled': True, 'ratio_lo': 1.0}, at override train_infer_correction.filters=[{enabled: true, ratio_lo: 1.0}]; write a section of enabled, agg_type, ratio_enabled, ratio_low, ratio_high, diff_enabled, diff_low, diff_high"),
    (("train_infer_correction.filters=[{enabled: true, ratio_low: 2.0}]",), "train_infer_correction.filters.0 keeps token ratios from 2 to 1.2, at override train_infer_correction.filters=[{enabled: true, ratio_low: 2.0}]; use an agg_type of token, geometric, sequence, segment, and 0 < ratio_low < ratio_high"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), BAD, ids=lambda value: value[-1] if isinstance(value, tuple) else "")
def test_what_cannot_be_is_said_once_with_its_place_and_a_fix(overrides, message) -> None:
    assert [str(problem) for problem in load(*overrides).problems] == [message]


JUDGE = ("rewards.d.worker_cls=roll.LLMJudgeRewardWorker",)
SERVED = (*JUDGE, "rewards.d.judge_api_url=http://judge/v1", "rewards.d.judge_model_name=m")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("rewards.d.use_local=false",), "rewards.d.use_local", "no sandbox service is called"),
        (JUDGE, "rewards.d.worker_cls", "needs judge_api_url and judge_model_name"),
        ((*SERVED, "rewards.d.judge_api_key=sk-12ab"), "rewards.d.judge_api_key", "holds a key, which would be saved"),
    ],
)
def test_what_scores_cannot_be_so(overrides: tuple[str, ...], key: str, words: str) -> None:
    [problem] = load(*overrides).problems
    assert problem.field == key and words in problem.what
    assert "sk-12ab" not in problem.what + problem.fix


def test_a_judge_and_a_sandbox_among_other_domains() -> None:
    loaded = load(
        *SERVED, "rewards.d.judge_api_key=EMPTY", "rewards.d.options={concurrency: 2}", "rewards.d.tag_included=[chat]",
        "rewards.c.worker_cls=roll.CodeSandboxRewardWorker", "rewards.c.tag_included=[code]",
    )  # fmt: skip
    assert loaded.problems == ()
    judge, code = loaded.config.reward.terms
    assert "api_key_env" not in judge.options and judge.options["concurrency"] == 2
    assert matched_verdict("It is right.\nYES", pattern=regex.compile(judge.options["extract"])) == 1.0
    assert (code.data_sources, code.options["tests_in"]) == (["code"], "test_cases")  # the reference is chat's
    assert loaded.config.data.extra_columns == ["test_cases", "test_case_function", "case_type"]
    assert loaded.config.data.ground_truth_column is None


@pytest.mark.parametrize("key", ["pretrain", "actor_train.data_args.file_name"])
def test_what_must_be_given_is_asked_for(key) -> None:
    base = tuple(one for one in BASE if not one.startswith(f"{key}="))
    assert [problem.field for problem in load(base=base).problems] == [key]


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (
            ("rewards.d.worker_cls=roll.LLMJudgeRewardWorker", "rewards.d.judge_model_type=inference",
             "rewards.d.strategy_args.strategy_name=vllm", f"rewards.d.{CONFIG}.tensor_parallel_size=2"),
            "a judge that several devices share",
        ),
        (("rewards.d.worker_cls=mine.rewards.Brevity",), "reward workers of your own"),
        (("actor_train.data_args.template=longcot_V3",), "a template with texts of its own"),
    ],
)  # fmt: skip
def test_what_is_planned_can_be_planned_for_and_not_run(overrides, word) -> None:
    loaded = load(*overrides)
    assert [str(problem) for problem in loaded.problems if "nothing to score" not in str(problem)] == []
    assert any("planned" in str(problem) and word in str(problem) for problem in loaded.unsupported)


def test_a_reward_worker_of_a_fork_is_no_misspelling_of_rolls(tmp_path: Path, monkeypatch) -> None:
    name = "roll.pipeline.rlvr.rewards.math_rules_worker.MathRulesRewardWorker"
    given = f"rewards.d.worker_cls={name}"
    assert "did you mean MathRuleRewardWorker?" in " ".join(str(problem) for problem in load(given).problems)
    file = tmp_path.joinpath(*name.split(".")[:-1]).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text("class MathRulesRewardWorker:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    said = " ".join(str(problem) for problem in load(given).unsupported)
    assert f"reward workers of your own ({file})" in said and "did you mean" not in said


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("use_topr_loss=true", "actor_train.pg_variant=topr is the published loss"),
        ("actor_infer.generating_args.num_beams=2", "no samples of the policy"),
        ("actor_infer.generating_args.include_stop_str_in_output=false", "with the tokens that were sampled"),
        ("actor_train.apply_loss_scale=false", "divided once more by the numbers of micro-batches and devices"),
        ("user_defined_rollout_loop_cls=a.b.C", "builds on classes of ROLL's own program"),
        (
            "actor_train.model_update_frequency=2",
            "samplers on the policy's devices always have the weights of the step",
        ),
    ],
)
def test_what_is_refused_has_a_reason(override: str, reason: str) -> None:
    [problem] = load(override).problems
    assert problem.refused and reason in str(problem)
    key = override.partition("=")[0]
    allowed = {
        "num_beams": 1,
        "include_stop_str_in_output": "true",
        "apply_loss_scale": "true",
        "use_topr_loss": "false",
        "model_update_frequency": "1",
    }
    value = allowed.get(key.rpartition(".")[2], "null")
    assert not load(f"{key}={value}").problems


def test_grpo_is_a_sum_of_token_rewards_where_tokens_can_differ() -> None:
    plain = config_of()
    assert (plain.advantage.name, plain.advantage.normalize_by_std, plain.reward.normalize_mean) == (
        "grpo",
        True,
        "none",
    )
    for override in ("gamma=0.9", "whiten_rewards=true", "reward_clip=1", "add_token_level_kl=true"):
        config = config_of(override)
        assert (config.advantage.name, config.advantage.whiten) == ("reinforce", False)
        assert (config.reward.normalize_mean, config.reward.normalize_std) == ("group", "group")
    shifted = config_of("reward_norm=group", "reward_shift=true")
    assert (shifted.advantage.name, shifted.advantage.normalize_by_std) == ("grpo", False)


@pytest.mark.parametrize(
    ("kind", "shift", "scale", "mean", "std"),
    [
        ("batch", False, False, "batch", "batch"),
        ("batch", True, False, "batch", "none"),
        ("batch", False, True, "batch", "batch"),  # reward_scale has no effect with batch and group
        ("group", False, False, "group", "group"),
        ("group", True, False, "group", "none"),
        ("running", False, False, "running", "running"),
        ("running", True, False, "running", "none"),
        ("running", False, True, "none", "running"),
        ("None", True, False, "none", "none"),
    ],
)
def test_names_of_2025_for_reward_normalisation(kind, shift, scale, mean, std) -> None:
    config = config_of(
        "adv_estimator=reinforce", f"reward_norm={kind}", f"reward_shift={shift}", f"reward_scale={scale}"
    )
    assert (config.reward.normalize_mean, config.reward.normalize_std) == (mean, std)


def test_gae_is_whitened_over_the_tokens_of_the_loss() -> None:
    for asked in (False, True):
        advantage = config_of("adv_estimator=gae", f"whiten_advantages={asked}").advantage
        assert (advantage.name, advantage.whiten, advantage.estimator_whitens) == ("gae", asked, False)


def test_what_agentic_pipelines_alone_read_is_told_when_it_is_written() -> None:
    names = (
        "reward_normalization.grouping=batch", "reward_normalization.method=mean", "reward_normalization.norm_mean_type=batch",
        "reward_normalization.norm_std_type=group", "episode_reward_weight=2", "step_reward_weight=2", "step_reward_gamma=0.5",
        "use_turn_scores=true", "max_steps_per_traj=3",
    )  # fmt: skip
    before, loaded = load(), load(*names)
    assert loaded.config == before.config and not before.ignored
    told = {one.key: one.reason for one in loaded.ignored}
    assert set(told) == {name.partition("=")[0] for name in names}
    assert "norm_mean_type and norm_std_type of the top level" in told["reward_normalization.method"]
    assert "agentic pipelines" in told["step_reward_gamma"]


def test_the_reference_is_there_only_for_a_kl() -> None:
    loaded = load("reference.infer_batch_size=2", "init_kl_coef=0.2")
    assert {one.key for one in loaded.ignored} == {"reference", "init_kl_coef"}
    assert loaded.config.reward.kl.coef == 0 and loaded.config.reference.sequences_per_micro_batch_per_device == 16


def test_a_model_is_filled_in_only_where_none_is_named() -> None:
    config = config_of("use_kl_loss=true", "kl_loss_coef=0.1", "actor_train.model_args.model_name_or_path=mine")
    assert (config.model.path, config.reference.path) == ("mine", "m")
    assert config_of("use_kl_loss=true", "kl_loss_coef=0.1").reference.path is None  # the policy's own


def test_roles_on_devices_of_their_own() -> None:
    config = config_of("actor_train.device_mapping='list(range(0,4))'", "actor_infer.device_mapping='list(range(4,8))'",
                       "num_gpus_per_node=4")  # fmt: skip
    assert (config.placement.devices, config.placement.nodes) == (8, 2)
    assert (config.policy.devices, config.rollout.devices) == ([0, 1, 2, 3], [4, 5, 6, 7])


def test_the_highest_id_counts_as_a_device() -> None:
    config = config_of("actor_train.device_mapping='list(range(0,16))'", "actor_infer.device_mapping=[8]")
    assert (config.placement.devices, config.placement.nodes, config.policy.devices) == (16, 2, None)


def test_several_domains_are_scored_by_their_tags() -> None:
    loaded = load("rewards.d.tag_included=[d]", "rewards.e={worker_cls: gsm8k, tag_included: [e1, e2]}")
    assert [(term.name, term.data_sources) for term in loaded.config.reward.terms] == [
        ("exact_match", ["d"]), ("gsm8k", ["e1", "e2"])
    ]  # fmt: skip
    assert any("a step draws from all rows as they come" in warning for warning in loaded.warnings)


def test_the_temperature_is_told_where_it_matters() -> None:
    assert any("at temperature 1" in text for text in load("actor_infer.generating_args.temperature=0.6").warnings)
    assert not load("actor_infer.generating_args.temperature=1.0").warnings


@pytest.mark.parametrize(
    ("override", "pipeline", "entry"),
    [
        ("student.device_mapping=[0]", "distillation from texts", "sft"),
        ("teacher_pretrain=m", "distillation from texts", "sft"),
        ("rejected_key=rejected", "preference tuning", "tune"),
        ("ipo=false", "preference tuning", "tune"),
    ],
)
def test_another_pipeline_is_named_once(override: str, pipeline: str, entry: str) -> None:
    """Nothing else of it is checked, files included: without data, rewards and devices there is one problem."""
    with pytest.raises(ConfigError) as error:
        load(override, "~rewards", "~actor_train", "sequence_length=7")
    [problem] = error.value.problems
    assert f"this is a configuration of {pipeline}, at override {override}" in str(problem)
    assert problem.fix == f"run posttrain {entry} with it"


def test_students_are_actors_and_make_the_run_one_of_distillation_alone() -> None:
    loaded = load(
        "student_train={training_args: {learning_rate: 0.0001}, data_args: {file_name: a.jsonl}}",
        "teacher.model_args.model_name_or_path=big",
    )
    config = loaded.config
    assert loaded.problems == ()
    assert config.policy.optimizer.lr == 0.0001 and config.distillation.alone
    assert config.distillation.teachers["teacher"].path == "big" and config.distillation.enters == "advantage"
    (problem,) = load("is_pure_opd=true", "use_opd=true", "teacher.model_args.model_name_or_path=big").problems
    assert "both true" in str(problem)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("student_train.training_args.learning_rate=maybe",), "student_train.training_args.learning_rate must be float, not 'maybe'"),
        (("student_train.model_args=3",), "student_train.model_args must be a section, not 3"),
        (("student_infer=[[a]]",), "student_infer must be a section, not a list of 1"),
        (("student_train.training_args.learning_rate=-1",), "lr must be above 0, not -1"),
    ],
)  # fmt: skip
def test_a_student_s_keys_are_reported_under_their_own_names(given: tuple[str, ...], said: str) -> None:
    loaded = load("student_train.data_args.file_name=a.jsonl", "teacher.model_args.model_name_or_path=big", *given)
    assert [one.what.partition(" (")[0] for one in loaded.problems] == [said]
    assert not any("actor_" in str(one) for one in loaded.problems)
    assert {one.field for one in loaded.problems} == {given[0].partition("=")[0]}
    assert loaded.key("policy.optimizer.lr") == "student_train.training_args.learning_rate"


def test_the_student_of_texts_is_reported_under_its_own_name() -> None:
    file_names = "student.data_args.file_name=a.jsonl"
    found = read_dialect(
        DIALECT, None, ["teacher_pretrain=m", file_names, "student_pretrain=[[word]]"], entry=ENTRIES["sft"]
    )
    assert "student_pretrain must be text | null, not a list of 1" in [one.what for one in found.problems]
    assert "student_pretrain" in [one.field for one in found.problems]


@pytest.mark.parametrize("word", ["maybe", "ture", "yes please"])
def test_a_word_that_is_no_folder_is_no_checkpoint(word: str) -> None:
    [problem] = load(f"resume_from_checkpoint={word}").problems
    assert problem.field == "resume_from_checkpoint"
    assert problem.what == f"resume_from_checkpoint is {word!r}, neither true nor false, and there is no such folder"


def test_fp16_trains_in_bf16_and_says_so() -> None:
    loaded = load("actor_train.model_args.dtype=fp16")
    assert loaded.problems == () and loaded.config.model.compute_dtype == "bfloat16"
    assert (
        "actor_train.model_args.dtype=fp16: trains in bf16, which takes the same memory and needs no loss scale"
        in loaded.warnings
    )


def test_templates_of_pictures_are_the_models_own() -> None:
    loaded = load("actor_train.data_args.template=qwen2-vl")
    assert loaded.problems == () and loaded.config.model.chat_template is None
    assert any(one.key == "actor_train.data_args.template" for one in loaded.ignored)


def test_chatml_replaces_the_tokenizers_template() -> None:
    """The text that Jinja makes of it, by hand."""
    from jinja2 import Template

    text = load("actor_train.data_args.template=chatml").config.model.chat_template
    rendered = Template(text).render(messages=[{"role": "user", "content": "1+1?"}], add_generation_prompt=True)
    assert rendered == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


MEGATRON_16 = (*SIXTEEN, MEGATRON)


def test_words_of_megatron_that_do_nothing_here_are_ignored_with_the_reason() -> None:
    names = (
        "bf16=true",
        "max_grad_norm=2.0",
        "overlap_grad_reduce=true",
        "apply_rope_fusion=true",
        "ckpt_format=torch_dist",
    )
    loaded = load(*MEGATRON_16, *(f"actor_train.{CONFIG}.{name}" for name in names))
    assert loaded.problems == () and loaded.config.policy.engine_options == {}
    told = {one.key.rpartition(".")[2]: one.reason for one in loaded.ignored}
    assert set(told) >= {name.partition("=")[0] for name in names}
    assert told["max_grad_norm"] == "the top-level max_grad_norm goes before it, in ROLL too"


def test_modules_to_recompute_may_be_one_text() -> None:
    loaded = load(*MEGATRON_16, f"actor_train.{CONFIG}.recompute_granularity=selective",
                  f"actor_train.{CONFIG}.recompute_modules='moe,layernorm'")  # fmt: skip
    assert loaded.problems == ()
    assert loaded.config.policy.engine_options["recompute_modules"] == ["moe", "layernorm"]
    assert any("layernorm is not recomputed alone" in warning for warning in loaded.warnings)


def test_an_unknown_word_of_the_engine_is_found_where_it_is_written() -> None:
    [problem] = load(*MEGATRON_16, f"actor_train.{CONFIG}.tensor_size=2").problems
    assert "megatron has no option tensor_size" in str(problem)
    assert problem.field == f"actor_train.{CONFIG}.tensor_size" and "a default" not in str(problem)


def test_a_reference_of_another_family_runs_in_the_policys_engine() -> None:
    loaded = load(*SIXTEEN, "use_kl_loss=true", "kl_loss_coef=0.1", "reference.device_mapping='list(range(0,16))'",
                  "actor_train.strategy_args.strategy_name=fsdp2_train", "reference.strategy_args.strategy_name=deepspeed_infer",
                  f"reference.{CONFIG}.zero_optimization.stage=3")  # fmt: skip
    assert loaded.problems == () and loaded.config.reference.engine_options == {}
    told = {one.key: one.reason for one in loaded.ignored}
    assert told[f"reference.{CONFIG}.zero_optimization.stage"] == "the reference runs in the policy's engine, fsdp2"


def test_a_slip_is_named_without_what_follows_from_it() -> None:
    """Without adv_estimator the default gae asks for a critic; with the key that was meant nothing else is wrong."""
    [problem] = load("~adv_estimator", "+adv_estimater=grpo", *SIXTEEN).problems
    assert "there is no key adv_estimater" in problem.what and problem.fix == "did you mean adv_estimator?"
    both = load("~adv_estimator", "+adv_estimater=grpo", *SIXTEEN, "ppo_epochs=0").problems
    assert [one.field for one in both] == ["adv_estimater", "ppo_epochs"]
    alone = load("+max_stepz=3")
    assert alone.problems == () and any("did you mean max_steps?" in warning for warning in alone.warnings)


def test_a_slip_of_a_student_s_key_is_read_as_the_actor_s_that_it_stands_for(tmp_path: Path) -> None:
    file = tmp_path / "distill.yaml"
    file.write_text(
        "student_pretrains: small\nteacher_pretrain: big\nnum_gpus_per_node: 1\nsequence_length: 64\n"
        "student:\n  training_args: {learning_rate: 1.0e-4}\n  data_args: {file_name: a.jsonl}\n"
        "  strategy_args: {strategy_name: deepspeed_train}\n  device_mapping: list(range(0,1))\n"
    )
    (problem,) = load_request([str(file)], "roll", here=True, skip_files=True).problems
    assert (problem.field, problem.fix) == ("student_pretrains", "did you mean student_pretrain?")


def test_deepspeed_splits_sequences_by_ulysses_size() -> None:
    """16 devices / 2 = 8 copies; 1 sequence x 4 passes x 8 = 32 sequences per update instead of 64."""
    given = ("actor_train.strategy_args.strategy_name=deepspeed_train", "actor_train.training_args.per_device_train_batch_size=1",
             "actor_train.training_args.gradient_accumulation_steps=4")  # fmt: skip
    whole = load(*SIXTEEN, *given).config.policy
    split = load(*SIXTEEN, *given, "actor_train.model_args.ulysses_size=2").config.policy
    assert (whole.sequence_parallel, whole.sequences_per_mini_batch) == (1, 64)
    assert (split.sequence_parallel, split.sequences_per_mini_batch) == (2, 32)


def test_a_judges_own_devices_count() -> None:
    """The policy has devices 0 to 15, the judge 16 to 19: 20 devices, on 3 nodes of 8."""
    loaded = load(*SIXTEEN, "num_gpus_per_node=8", "rewards.d.device_mapping='list(range(16,20))'")
    assert (loaded.config.placement.devices, loaded.config.placement.nodes) == (24, 3)
    assert loaded.config.policy.devices == list(range(16))


TWO_DOMAINS = ("rewards.d.tag_included=[x]", "rewards.e={worker_cls: gsm8k, tag_included: [y, z]}", "rollout_batch_size=10",
               "actor_train.training_args.gradient_accumulation_steps=10")  # fmt: skip


def test_domains_have_exact_parts_of_a_step() -> None:
    """int(0.37 x 10) = 3 prompts; the last domain gets the other 7, whatever its share."""
    loaded = load(*TWO_DOMAINS, "actor_train.data_args.domain_interleave_probs={d: 0.37, e: 0.1}")
    assert any("adds up to 0.47, and not to 1: a step has d 3, e 7 prompts" in text for text in loaded.warnings)
    assert loaded.problems == loaded.unsupported == ()
    data = loaded.config.data
    assert {name: (each.sources, each.prompts_per_step) for name, each in data.domains.items()} == {
        "d": (["x"], 3), "e": (["y", "z"], 7)}  # fmt: skip
    assert data.domain_statistics


def test_asynchronous_domains_have_the_ratio_s_bound() -> None:
    shares = "actor_train.data_args.domain_interleave_probs={d: 0.5, e: 0.5}"
    devices = ("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]")
    loaded = load(*TWO_DOMAINS, shares, *devices, "num_gpus_per_node=2", "async_generation_ratio=2")
    assert loaded.problems == ()
    ahead = loaded.config.asynchronous
    assert (ahead.mode, ahead.max_staleness_steps) == ("separate", 2)
    assert {name: each.prompts_per_step for name, each in loaded.config.data.domains.items()} == {"d": 5, "e": 5}


def test_domains_have_their_own_filters() -> None:
    loaded = load(*TWO_DOMAINS, "rewards.e.query_filter_config.type=std_filter",
                  "rewards.e.query_filter_config.filter_args.std_threshold=0.1",
                  "actor_train.data_args.domain_interleave_probs={d: 0.5, e: 0.5}")  # fmt: skip
    assert loaded.problems == loaded.unsupported == ()
    domains = loaded.config.data.domains
    assert domains["d"].group_filter is None and loaded.config.group_filter.strategy == "none"
    assert (domains["e"].group_filter.strategy, domains["e"].group_filter.above_std) == ("refill", 0.1)


def test_a_domain_without_a_share_is_not_drawn_from() -> None:
    loaded = load(*TWO_DOMAINS, "actor_train.data_args.domain_interleave_probs={e: 1.0}")
    [(name, domain)] = loaded.config.data.domains.items()
    assert (name, domain.sources, domain.prompts_per_step) == ("e", ["y", "z"], 10)


LOCAL = ("rewards.d={worker_cls: exact_match, tag_included: [x]}", "rewards.j.worker_cls=roll.LLMJudgeRewardWorker",
         "rewards.j.tag_included=[y]", "rewards.j.judge_model_type=inference", "rewards.j.model_args.model_name_or_path=jm",
         "rewards.j.strategy_args.strategy_name=hf_infer")  # fmt: skip


def test_a_judge_of_the_runs_own_grades_its_domain_alone() -> None:
    """It is no reward term, which would be a server's, and the other domain keeps its rule."""
    loaded = load(
        *LOCAL,
        "actor_train.device_mapping=[0,1]",
        "actor_infer.device_mapping=[0,1]",
        "rewards.j.device_mapping=[2,3]",
        "rewards.j.generating_args={max_new_tokens: 100, temperature: 0.8}",
    )
    assert loaded.problems == loaded.unsupported == ()
    judge = loaded.config.reward.judge
    assert (judge.path, judge.engine, judge.devices, judge.data_sources) == ("jm", "hf", [2, 3], ["y"])
    assert (judge.max_tokens, judge.temperature, judge.top_p, judge.top_k) == (
        100,
        0.8,
        0.7,
        50,
    )  # ROLL's defaults besides
    assert "Answer with one word" in judge.prompt_template  # 100 tokens leave no room to think
    assert [(term.name, term.data_sources) for term in loaded.config.reward.terms] == [("exact_match", ["x"])]
    assert loaded.config.placement.devices == 4


def test_a_judge_may_be_the_section_reward_model() -> None:
    loaded = load(*LOCAL[:3], "rewards.j.judge_model_type=cluster", "reward_model.model_args.model_name_or_path=rm",
                  "reward_model.strategy_args.strategy_name=vllm", f"reward_model.{CONFIG}.gpu_memory_utilization=0.5",
                  f"reward_model.{CONFIG}.load_format=auto", "rewards.j.generating_args.temperature=0.3")  # fmt: skip
    assert loaded.problems == loaded.unsupported == ()
    judge = loaded.config.reward.judge
    assert (judge.path, judge.engine, judge.engine_options) == ("rm", "vllm", {"gpu_memory_utilization": 0.5})
    assert judge.temperature == 0.3


def test_samplers_apart_get_new_weights_every_so_many_steps_of_a_synchronous_pipeline() -> None:
    """Every 3 steps: weights are at most 3 - 1 = 2 steps old, and the loss knows it."""
    loaded = load(
        "actor_train.model_update_frequency=3", "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]"
    )
    assert loaded.problems == loaded.unsupported == ()
    ahead = loaded.config.asynchronous
    assert (ahead.mode, ahead.sync_every_steps, ahead.max_staleness_steps) == ("separate", 3, 2)
    assert loaded.config.loss.rollout_correction.weights == "token"
    assert any(
        text.startswith("actor_train.model_update_frequency=3 trains on responses of older weights")
        for text in loaded.warnings
    )


def test_domains_have_judges_of_their_own() -> None:
    """j and k have the same one, which grades the rows of both; m asks another model."""
    second = tuple(each.replace("rewards.j.", "rewards.k.").replace("[y]", "[z]") for each in LOCAL[1:])
    third = tuple(
        each.replace("rewards.j.", "rewards.m.").replace("[y]", "[w]").replace("=jm", "=mm") for each in LOCAL[1:]
    )
    loaded = load(*LOCAL, *second, *third, "rewards.m.generating_args.temperature=0.3")
    assert loaded.problems == loaded.unsupported == ()
    reward = loaded.config.reward
    assert (reward.judge.path, reward.judge.data_sources) == ("jm", ["y", "z"])
    [(name, other)] = reward.more_judges.items()
    assert (name, other.path, other.data_sources, other.temperature) == ("judge_m", "mm", ["w"], 0.3)
    [problem] = load(*LOCAL, *third, "rewards.m.tag_included=[]").problems
    assert "rewards.m includes no tag, and there are several judges" in str(problem)


def test_a_judge_that_trains_cannot_sample() -> None:
    [problem] = load(*LOCAL, "rewards.j.strategy_args.strategy_name=megatron_train").problems
    assert "rewards.j.strategy_args.strategy_name is megatron_train, which samples nothing" in str(problem)


def test_here_takes_the_judge_along() -> None:
    given = (*LOCAL, "rewards.j.strategy_args.strategy_name=vllm", "rewards.j.device_mapping=[2,3]")
    loaded = read_dialect(DIALECT, None, (*BASE, *given), here=True)
    judge = loaded.config.reward.judge
    assert (judge.engine, judge.devices, judge.path) == ("native", None, "jm")
    assert any(change.startswith("reward.judge.devices") for change in loaded.changes)


def test_here_takes_every_judge_along() -> None:
    others = tuple(
        each.replace("rewards.j.", "rewards.m.").replace("[y]", "[w]").replace("=jm", "=mm") for each in LOCAL[1:]
    )
    loaded = read_dialect(DIALECT, None, (*BASE, *LOCAL, *others, "rewards.m.device_mapping=[2,3]"), here=True)
    assert {(each.engine, each.devices) for each in loaded.config.reward.judges.values()} == {("native", None)}
    assert any(change.startswith("reward.more_judges.judge_m.devices") for change in loaded.changes)


VISION = ("rewards.d.worker_cls=roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker",)


@pytest.mark.parametrize("tracker", ["trackio", "ml_tracker"])
def test_a_tracker_that_is_not_here_is_replaced_by_the_console(tracker: str) -> None:
    loaded = load(f"track_with={tracker}")
    assert not loaded.problems and not loaded.unsupported
    assert list(loaded.config.tracking.trackers) == ["console"]
    assert any(text.startswith(f"track_with={tracker}: there is no such tracker here") for text in loaded.warnings)


def test_boxes_are_scored_with_the_weights_of_each_row() -> None:
    loaded = load(*VISION)
    assert loaded.problems == loaded.unsupported == ()
    assert [term.name for term in loaded.config.reward.terms] == ["boxes"]
    assert loaded.config.data.extra_columns == ["reward_model"]


@pytest.mark.parametrize(("model_type", "patch"), [("qwen2_5_vl", 14), ("qwen3_vl", None)])
def test_boxes_of_qwen_2_5_are_in_pixels(tmp_path: Path, model_type: str, patch: int | None) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    for path in (f"Qwen/{model_type.replace('_', '.', 1).replace('_', '-')}-7B-Instruct", str(tmp_path)):
        loaded = load(*VISION, f"pretrain={path}")
        assert not loaded.unsupported
        [term] = loaded.config.reward.terms
        assert term.options.get("pixels_per_patch") == patch


def test_a_diffusion_models_pipeline_is_named_once() -> None:
    with pytest.raises(ConfigError, match="reward feedback learning of a diffusion model, which is planned") as error:
        load("actor_train.strategy_args.strategy_name=diffusion_deepspeed_train", "~rewards")
    assert len(error.value.problems) == 1


def test_modules_are_frozen_by_the_beginnings_of_their_names() -> None:
    model = load("actor_train.model_args.freeze_module_prefix='vision_model, model.layers.0'").config.model
    assert (model.freeze_vision, model.freeze) == (True, ["model.layers.0"])
    loaded = load("adv_estimator=gae", "critic.model_args.freeze_module_prefix=[visual, model.layers.0]")
    assert (loaded.config.critic.freeze_vision, loaded.config.critic.freeze) == (True, ["model.layers.0"])
    assert not loaded.config.model.freeze_vision


def test_tags_have_templates_of_their_own() -> None:
    loaded = load("actor_train.data_args.template=qwen3", "tag_to_template={x: native, y: chatml}")
    assert loaded.problems == loaded.unsupported == ()
    data = loaded.config.data
    assert data.chat_template_options == {"enable_thinking": True}
    assert data.source_template_options["x"] == {}
    assert "<|im_start|>" in data.source_template_options["y"]["chat_template"]
    [problem] = load("tag_to_template={x: qwn3}").problems
    assert "there is no template 'qwn3', at override tag_to_template={x: qwn3}; did you mean qwen3?" in str(problem)
    [planned] = load("actor_train.data_args.template=chatml", "tag_to_template={x: native}").unsupported
    assert "tag_to_template with the tokenizer's own template for a tag" in str(planned)


def test_the_policy_loss_may_be_off_beside_losses_on_good_and_bad_responses() -> None:
    """TOPR as ROLL's example writes it: two losses of their own, and none of PPO's."""
    loaded = load("rl_loss_coef=0.0", "postive_loss_coef=1.0", "use_topr_neg_loss_coef=0.5")
    assert loaded.problems == loaded.unsupported == ()
    loss = loaded.config.loss
    assert (loss.policy_coef, loss.sft_coef, loss.topr_coef) == (0.0, 1.0, 0.5)


@pytest.mark.parametrize("option", ["pipeline_model_parallel_layout='E|(tt|)*3,L'", "optimizer_cpu_offload=true"])
def test_options_of_megatron_that_change_no_number_are_reported(option: str) -> None:
    loaded = load("actor_train.strategy_args.strategy_name=megatron_train", f"actor_train.{CONFIG}.{option}")
    (told,) = [one for one in loaded.ignored if one.key.endswith(option.partition("=")[0])]
    assert not loaded.unsupported and "no number" in told.reason


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("cosine", "{min_lr: 1e-7}", ("cosine", 0.1, 0.5)),
        ("cosine_with_min_lr", "{min_lr_rate: 0.25}", ("cosine", 0.25, 0.5)),
        ("linear", "{min_lr: 5e-7}", ("linear", 0.5, 0.5)),
        ("cosine", "{num_cycles: 1.5}", ("cosine", 0.0, 1.5)),
        ("cosine_with_min_lr", "null", ("cosine", 0.0, 0.5)),
    ],
)
def test_the_lowest_learning_rate_and_its_waves(kind: str, settings: str, expected: tuple[str, float, float]) -> None:
    args = (f"{TRAIN}.learning_rate=1e-6", f"{TRAIN}.lr_scheduler_type={kind}")
    schedule = config_of(*args, f"+{TRAIN}.lr_scheduler_kwargs={settings}").policy.schedule
    assert (schedule.name, pytest.approx(schedule.min_lr_ratio), schedule.cycles) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{min_lr: 1e-3}", "the lowest learning rate is 0.001, and the highest 1e-06"),
        ("{min_lr: low}", "min_lr must be a number, not 'low'"),
        ("{wsd_decay_steps: 5}", "wsd_decay_steps has no meaning for cosine here"),
    ],
)
def test_what_the_learning_rate_cannot_do(settings: str, message: str) -> None:
    args = (f"{TRAIN}.learning_rate=1e-6", f"{TRAIN}.lr_scheduler_type=cosine")
    (problem,) = load(*args, f"+{TRAIN}.lr_scheduler_kwargs={settings}").problems
    assert message in problem.what and problem.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_grad_norm", "-3.5"),
        ("actor_infer.strategy_args.strategy_config.block_size", "-7"),
        ("actor_infer.strategy_args.strategy_config.max_num_seqs", "0"),
        ("actor_infer.strategy_args.strategy_config.max_num_batched_tokens", "-1"),
    ],
)
def test_numbers_below_their_least_are_refused_by_name(key: str, value: str) -> None:
    (problem,) = load("adv_estimator=grpo", *SIXTEEN, f"++{key}={value}").problems
    assert problem.field == key and f" from {'0' if key == 'max_grad_norm' else '1'}" in problem.what


def test_a_slip_of_a_key_that_the_engine_does_not_have_gets_the_dialects_own() -> None:
    wrong = f"actor_train.{CONFIG}.pypeline_model_parallel_size"
    (problem,) = load(MEGATRON, *SIXTEEN, f"+{wrong}=2").problems
    assert (problem.field, problem.fix) == (
        wrong,
        f"did you mean actor_train.{CONFIG}.pipeline_model_parallel_size?",
    )


@pytest.mark.parametrize("section", ["reference", "critic"])
def test_devices_of_a_role_that_the_run_does_without_are_read(section: str) -> None:
    (problem,) = load("adv_estimator=grpo", *SIXTEEN, f"{section}.device_mapping=few").problems
    assert (problem.field, "'few' holds few, which is not read" in problem.what) == (f"{section}.device_mapping", True)

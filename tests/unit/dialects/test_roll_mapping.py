"""Every mapped key of ROLL changes the RunConfig in the stated way: what is written, what it needs around it, one of our
fields and its value then, by hand."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import pytest

from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.roll import DIALECT

LEDGER = DIALECT.ledger.of("train")
CONFIG = "strategy_args.strategy_config"
AGENTIC = re.compile(
    r"(custom_envs|train_env_manager|val_env_manager|reward_normalization)\.|(episode|step)_reward_|use_turn_scores|"
    r"max_steps_per_traj|val_batch_size|actor_infer\.generating_args\.max_new_tokens"
)


class Case(NamedTuple):
    row: str  # the ledger's name of the key
    override: str
    field: str
    value: Any
    given: tuple[str, ...] = ()  # what else is written, with and without the override


BASE = (
    "pretrain=m", "response_length=100", "actor_train.data_args.file_name=a.jsonl", "rewards.d.worker_cls=exact_match",
    "adv_estimator=reinforce",
)  # fmt: skip
GAE = ("adv_estimator=gae",)
KL = ("use_kl_loss=true", "kl_loss_coef=0.01")
KL_REWARD = ("add_token_level_kl=true",)
PG = ("actor_train.worker_cls=roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",)
TRAIN2 = ("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0,1]")
CRITIC2 = (*GAE, *TRAIN2, "critic.device_mapping=[0,1]")
CODE = "roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker"
JUDGE = (
    "rewards.d.worker_cls=roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "rewards.d.judge_api_url=http://here/v1",
    "rewards.d.judge_model_name=m",
)
VAL = ("validation.data_args.file_name=v.jsonl",)
GROUPS = ("num_return_sequences_in_group=8",)
WEIGHT = ("train_infer_correction.is_weight.enabled=true",)
MEAN = (*GROUPS, "rewards.d.query_filter_config.type=mean_filter")
STD = (*GROUPS, "rewards.d.query_filter_config.type=std_filter")
CROSS = (
    "rewards.d.worker_cls=roll.pipeline.rlvr.rewards.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker",
)


def term(name: str, sources: list[str] | None = None, **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": None,
        "weight": 1.0,
        "options": options,
        "batched": False,
        "halve_failed_batch": True,
        "data_sources": sources or [],
    }


TOP = [
    Case("exp_name", "exp_name=mine", "run.name", "mine"),
    Case("seed", "seed=7", "run.seed", 7),
    Case("output_dir", "output_dir=out", "run.folder", "out/mine", ("exp_name=mine",)),
    Case("track_with", "track_with=wandb", "tracking.trackers", ["console", "wandb"]),
    Case("track_with", "track_with=swanlab", "tracking.dialect_names", "roll"),
    Case("tracker_kwargs.project", "tracker_kwargs.project=math", "tracking.project", "math"),
    Case("max_steps", "max_steps=20", "run.total_steps", 20),
    Case("save_steps", "save_steps=5", "checkpoint.every_steps", 5),
    Case("max_ckpt_to_keep", "max_ckpt_to_keep=3", "checkpoint.keep_last", 3),
    *(
        Case(f"actor_train.{CONFIG}.{name}", f"actor_train.{CONFIG}.{name}={value}", f"checkpoint.{field}", False,
             ("actor_train.strategy_args.strategy_name=fsdp2_train",))
        for name, value, field in (("save_only_model", "true", "save_optimizer"), ("async_save_ckpt", "false", "background"))
    ),
    Case("logging_steps", "logging_steps=4", "tracking.samples_every_steps", 4),
    Case("profiler_timeline", "profiler_timeline=true", "profiling.steps", [1, 2, 3]),
    Case("profiler_memory", "profiler_memory=true", "profiling.steps", [1, 2, 3]),
    Case("profiler_memory", "profiler_memory=true", "profiling.memory", True),
    Case("profiler_memory", "profiler_memory=true", "profiling.operators", False),
    Case("profiler_output_dir", "profiler_output_dir=p", "profiling.folder", "p", ("profiler_timeline=true",)),
    Case("rollout_mock.enable", "rollout_mock.enable=true", "tracking.batches_every_steps", 1),
    Case("eval_steps", "eval_steps=5", "validation.every_steps", 5, VAL),
    Case("resume_from_checkpoint", "resume_from_checkpoint=true", "run.resume", "auto"),
    Case("resume_from_checkpoint", "resume_from_checkpoint=/ck/global_step_5", "run.resume_path", "/ck/global_step_5"),
    Case("checkpoint_config.output_dir", "checkpoint_config.output_dir=ck", "checkpoint.folder", "ck"),
    Case("num_gpus_per_node", "num_gpus_per_node=1", "placement.nodes", 2, TRAIN2),
    Case("rollout_batch_size", "rollout_batch_size=64", "data.prompts_per_step", 64),
    Case("num_return_sequences_in_group", "num_return_sequences_in_group=4", "rollout.samples_per_prompt", 4),
    Case("prompt_length", "prompt_length=500", "data.max_prompt_tokens", 500),
    Case("response_length", "response_length=50", "rollout.max_response_tokens", 50),
    Case("rpc_timeout", "rpc_timeout=60", "placement.call_timeout_s", 60),
    Case("model_update_buffer_size_mb", "model_update_buffer_size_mb=256", "rollout.weight_bucket_mib", 256,
         (*TRAIN2, "actor_infer.strategy_args.strategy_name=vllm")),
    Case("sequence_length", "sequence_length=1324", "rollout.max_response_tokens", 300),  # 1324 - 1024
    Case("val_prompt_length", "val_prompt_length=24", "validation.max_response_tokens", 76,  # 100 - 24
         (*VAL, "val_sequence_length=100", "val_prompt_length=50")),
    Case("val_sequence_length", "val_sequence_length=200", "validation.max_response_tokens", 150,  # 200 - 50
         (*VAL, "val_sequence_length=100", "val_prompt_length=50")),
    Case("max_running_requests", "max_running_requests=32", "rollout.max_concurrent_sequences", 32),
    Case("pretrain", "pretrain=other", "model.path", "other"),
    Case("reward_pretrain", "reward_pretrain=rm", "critic.path", "rm", GAE),
    Case("adv_estimator", "adv_estimator=grpo", "advantage.name", "grpo", GROUPS),
    Case("ppo_epochs", "ppo_epochs=2", "policy.epochs_per_step", 2),
    Case("gamma", "gamma=0.9", "advantage.gamma", 0.9),
    Case("lambd", "lambd=0.9", "advantage.gae_lambda", 0.9, GAE),
    Case("whiten_rewards", "whiten_rewards=true", "advantage.whiten_rewards", True),
    Case("whiten_advantages", "whiten_advantages=true", "advantage.whiten", True),
    Case("whiten_advantages", "whiten_advantages=true", "advantage.whiten", True, GAE),
    Case("advantage_clip", "advantage_clip=2", "advantage.clip", 2.0),
    Case("reward_clip", "reward_clip=5", "reward.clip", 5.0),
    Case("norm_mean_type", "norm_mean_type=batch", "reward.normalize_mean", "batch"),
    Case("norm_std_type", "norm_std_type=group", "reward.normalize_std", "group", GROUPS),
    Case("reward_norm", "reward_norm=running", "reward.normalize_std", "running"),
    Case("reward_shift", "reward_shift=true", "reward.normalize_std", "none", ("reward_norm=batch",)),
    Case("reward_scale", "reward_scale=true", "reward.normalize_mean", "none", ("reward_norm=running",)),
    Case("kl_penalty", "kl_penalty=mse", "reward.kl.estimator", "k2", KL_REWARD),
    Case("init_kl_coef", "init_kl_coef=0.05", "reward.kl.coef", 0.05, KL_REWARD),
    Case("target_kl", "target_kl=0.1", "reward.kl.target", 0.1, KL_REWARD),
    Case("kl_horizon", "kl_horizon=500", "reward.kl.horizon_sequences", 500, (*KL_REWARD, "target_kl=0.1")),
    Case("add_token_level_kl", "add_token_level_kl=true", "reward.kl.coef", 0.2),
    Case("use_kl_loss", "use_kl_loss=true", "loss.kl_coef", 0.01, ("kl_loss_coef=0.01",)),
    Case("kl_loss_coef", "kl_loss_coef=0.02", "loss.kl_coef", 0.02, KL),
    Case("pg_clip", "pg_clip=0.3", "loss.clip_ratio_high", 0.3),
    Case("use_pg_clip_range", "use_pg_clip_range=true", "loss.clip_ratio_high", 0.28, ("pg_clip_high=0.28",)),
    Case("pg_clip_low", "pg_clip_low=0.1", "loss.clip_ratio_low", 0.1, ("use_pg_clip_range=true",)),
    Case("pg_clip_high", "pg_clip_high=0.4", "loss.clip_ratio_high", 0.4, ("use_pg_clip_range=true",)),
    Case("dual_clip_loss", "dual_clip_loss=true", "loss.dual_clip", 1.4),  # 1 + 2 x 0.2
    Case("importance_sampling", "importance_sampling=seq", "loss.name", "gspo"),
    Case("loss_agg_mode", "loss_agg_mode=token-mean", "loss.aggregation", "token_mean"),
    Case("loss_agg_mode", "loss_agg_mode=seq-mean-token-sum", "loss.aggregation", "sequence_mean_token_sum"),
    Case("loss_agg_mode", "loss_agg_mode=seq-mean-token-sum-norm", "loss.norm_tokens", 1123),  # 1024 + 100 - 1
    Case("entropy_loss_coef", "entropy_loss_coef=0.01", "loss.entropy_coef", 0.01),
    Case("postive_loss_coef", "postive_loss_coef=0.1", "loss.sft_coef", 0.1),
    Case("sft_loss_coef", "sft_loss_coef=0.2", "loss.sft_coef", 0.2),
    Case("max_grad_norm", "max_grad_norm=0.5", "policy.optimizer.max_grad_norm", 0.5),
    Case("max_grad_norm", "max_grad_norm=0.5", "critic.optimizer.max_grad_norm", 0.5, GAE),
    Case("value_clip", "value_clip=0.2", "critic.value_clip", 0.2, GAE),
    Case("critic_warmup", "critic_warmup=3", "critic.warmup_steps", 3, GAE),
    Case("max_len_mask", "max_len_mask=true", "loss.mask_truncated", True),
    Case("difficulty_mask", "difficulty_mask=true", "group_filter.strategy", "mask", GROUPS),
    Case("difficulty_low_threshold", "difficulty_low_threshold=0.1", "group_filter.above_mean", 0.1,
         (*GROUPS, "difficulty_mask=true")),
    Case("difficulty_high_threshold", "difficulty_high_threshold=0.9", "group_filter.below_mean", 0.9,
         (*GROUPS, "difficulty_mask=true")),
    Case("global_template", "global_template=qwen3", "data.chat_template_options", {"enable_thinking": True}),
    Case("train_infer_correction.is_weight.enabled", "train_infer_correction.is_weight.enabled=true",
         "loss.rollout_correction.weights", "token"),
    Case("train_infer_correction.is_weight.weight_type", "train_infer_correction.is_weight.weight_type=sequence",
         "loss.rollout_correction.weights", "sequence", WEIGHT),
    Case("train_infer_correction.is_weight.upper_bound", "train_infer_correction.is_weight.upper_bound=3",
         "loss.rollout_correction.weight_high", 3.0, WEIGHT),
    Case("train_infer_correction.filters", "train_infer_correction.filters=[{enabled: true, ratio_low: 0.5, ratio_high: 4.0}]",
         "loss.rollout_correction.reject_bounds", ["0.25_2"]),  # 1 / 4 and 1 / 0.5
]  # fmt: skip

REWARDS = [
    Case("rewards.*.worker_cls", "rewards.d.worker_cls=roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
         "reward.terms", [term("math_rule")]),
    Case("rewards.*.worker_cls", "rewards.d.worker_cls=roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
         "reward.overrun_is_zero", True),
    Case("rewards.*.worker_cls", "rewards.d.worker_cls=ifeval_rule_reward_worker.GeneralRuleRewardWorker",
         "reward.terms", [term("ifeval"), term("repetition")]),
    Case("rewards.*.worker_cls", f"rewards.d.worker_cls={CODE}", "reward.terms",
         [term("code", block="first_def", timeout_s=20.0, function_in="test_case_function")]),
    Case("rewards.*.worker_cls", f"rewards.d.worker_cls={CODE}", "data.ground_truth_column", "test_cases"),
    Case("rewards.*.worker_cls", f"rewards.d.worker_cls={CODE}", "data.extra_columns", ["test_case_function", "case_type"]),
    Case("rewards.*.worker_cls", f"rewards.d.worker_cls={CODE}", "reward.timeout_s", 450.0),  # 80 % of it are ROLL's 360
    Case("rewards.*.judge_model_name", "rewards.d.judge_model_name=qwen", "reward.terms.0.options.model", "qwen", JUDGE),
    Case("rewards.*.judge_api_url", "rewards.d.judge_api_url=http://there/v1", "reward.terms.0.options.base_url",
         "http://there/v1", JUDGE),
    Case("rewards.*.judge_api_key", "rewards.d.judge_api_key=JUDGE_KEY", "reward.terms.0.options.api_key_env", "JUDGE_KEY",
         JUDGE),
    Case("rewards.*.worker_cls", "rewards.d.worker_cls='mine.py:brevity'", "reward.terms",
         [{**term("brevity"), "path": "mine.py"}]),
    Case("rewards.*.tag_included", "rewards.d.tag_included=[sums, maths]", "reward.terms",
         [term("exact_match", ["sums", "maths"])]),
    Case("rewards.*.options", "rewards.d.options={extract: last_number}", "reward.terms",
         [term("exact_match", extract="last_number")]),
    Case("rewards.*.reward_type", "rewards.d.reward_type=strict", "reward.terms",
         [term("crossthinkqa", reward_type="strict"), term("repetition")], (*CROSS, "rewards.d.reward_type=loose")),
    Case("rewards.*.query_filter_config.type", "rewards.d.query_filter_config.type=mean_filter", "group_filter.strategy",
         "refill", GROUPS),
    Case("rewards.*.query_filter_config.filter_args.threshold_down",
         "rewards.d.query_filter_config.filter_args.threshold_down=0.1", "group_filter.above_mean", 0.1, MEAN),
    Case("rewards.*.query_filter_config.filter_args.threshold_up",
         "rewards.d.query_filter_config.filter_args.threshold_up=0.9", "group_filter.below_mean", 0.9, MEAN),
    Case("rewards.*.query_filter_config.filter_args.std_threshold",
         "rewards.d.query_filter_config.filter_args.std_threshold=0.05", "group_filter.above_std", 0.05, STD),
]  # fmt: skip

TIS, CISPO, KIMI, TOPR = ((*PG, f"actor_train.pg_variant={name}") for name in ("tis", "cispo", "kimi15", "topr"))
ACTOR = [
    Case("worker_cls", PG[0].removeprefix("actor_train."), "loss.name", "gpg"),
    Case("pg_variant", "pg_variant=kimi15", "loss.name", "dro", PG),
    Case("pg_variant", "pg_variant=tis", "loss.name", "cispo", PG),
    Case("pg_variant", "pg_variant=ppo", "loss.name", "ppo_clip", PG),
    Case("tis_lower_bound", "tis_lower_bound=0.25", "loss.clip_ratio_low", 0.75, TIS),  # 1 - 0.25
    Case("tis_upper_bound", "tis_upper_bound=1.5", "loss.clip_ratio_high", 0.5, TIS),  # 1.5 - 1
    Case("cispo_epsilon_low", "cispo_epsilon_low=1", "loss.clip_ratio_low", 1.0, CISPO),
    Case("cispo_epsilon_high", "cispo_epsilon_high=3", "loss.clip_ratio_high", 3.0, CISPO),
    Case("cispo_use_unified_mask", "cispo_use_unified_mask=true", "loss.drop_clipped", True, CISPO),
    Case("kimi15_tau", "kimi15_tau=0.3", "loss.dro_beta", 0.3, KIMI),
    Case("pg_variant", "pg_variant=topr", "loss.name", "topr", PG),
    Case("topr_positive_weight", "topr_positive_weight=2", "loss.positive_weight", 2.0, TOPR),
    Case("topr_negative_weight", "topr_negative_weight=0.5", "loss.negative_weight", 0.5, TOPR),
    Case("device_mapping", "device_mapping='list(range(0,4))'", "placement.devices", 4),
    Case("device_mapping", "device_mapping='list(range(0,2))'", "policy.devices", [0, 1], ("actor_infer.device_mapping=[2,3]",
         "actor_train.device_mapping=[0,1,2,3]")),
    Case("infer_batch_size", "infer_batch_size=4", "reference.sequences_per_micro_batch_per_device", 4),
    Case("use_dynamic_batching_in_train", "use_dynamic_batching_in_train=true", "policy.max_tokens_per_micro_batch", 4096,
         ("actor_train.max_tokens_per_microbatch_in_train=4096",)),
    Case("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_train=8192", "policy.max_tokens_per_micro_batch",
         8192, ("actor_train.max_tokens_per_microbatch_in_train=4096", "actor_train.use_dynamic_batching_in_train=true")),
    Case("use_dynamic_batching_in_infer", "use_dynamic_batching_in_infer=true", "reference.max_tokens_per_micro_batch", 4096,
         ("actor_train.max_tokens_per_microbatch_in_infer=4096",)),
    Case("max_tokens_per_microbatch_in_infer", "max_tokens_per_microbatch_in_infer=8192",
         "reference.max_tokens_per_micro_batch", 8192,
         ("actor_train.max_tokens_per_microbatch_in_infer=4096", "actor_train.use_dynamic_batching_in_infer=true")),
    Case("model_args.model_name_or_path", "model_args.model_name_or_path=own", "model.path", "own"),
    Case("model_args.dtype", "model_args.dtype=fp32", "model.compute_dtype", "float32"),
    Case("model_args.disable_gradient_checkpointing", "model_args.disable_gradient_checkpointing=true",
         "model.gradient_checkpointing", False),
    Case("model_args.model_config_kwargs", "model_args.model_config_kwargs={rope_theta: 5}", "model.config_overrides",
         {"rope_theta": 5}),
    Case("data_args.template", "data_args.template=qwen3", "data.chat_template_options", {"enable_thinking": True}),
    Case("data_args.file_name", "data_args.file_name=[b.jsonl, c.jsonl]", "data.train_files", ["b.jsonl", "c.jsonl"]),
    Case("data_args.prompt", "data_args.prompt=instruction", "data.prompt_column", "instruction"),
    Case("data_args.messages", "data_args.messages=chat", "data.prompt_column", "chat"),
    Case("data_args.tag", "data_args.tag=task", "data.data_source_column", "task"),
    Case("data_args.preprocessing_num_workers", "data_args.preprocessing_num_workers=4", "data.filter_workers", 4),
    Case("data_args.image_folder", "data_args.image_folder=/pictures", "data.image_folder", "/pictures"),
    Case("model_args.freeze_module_prefix", "model_args.freeze_module_prefix=vision_model", "model.freeze_vision", True),
]  # fmt: skip


def trained(role: str) -> list[Case]:
    """actor_train and critic, whose section and our section are both called role here."""
    two = TRAIN2 if role == "policy" else CRITIC2
    section = "actor_train" if role == "policy" else "critic"
    megatron = (*two, f"{section}.strategy_args.strategy_name=megatron_train")
    lora = (f"{section}.model_args.lora_target=all",)
    recompute = "model.gradient_checkpointing" if role == "policy" else "critic.gradient_checkpointing"
    return [
        Case("training_args.learning_rate", "training_args.learning_rate=1e-6", f"{role}.optimizer.lr", 1e-6),
        Case("training_args.lr_scheduler_type", "training_args.lr_scheduler_type=constant_with_warmup", f"{role}.schedule.name",
             "constant"),
        Case("training_args.lr_scheduler_type", "training_args.lr_scheduler_type=inverse_sqrt", f"{role}.schedule.name",
             "inverse_square_root"),
        Case("training_args.weight_decay", "training_args.weight_decay=0.1", f"{role}.optimizer.weight_decay", 0.1),
        Case("training_args.adam_beta1", "training_args.adam_beta1=0.8", f"{role}.optimizer.betas", (0.8, 0.999)),
        Case("training_args.adam_beta2", "training_args.adam_beta2=0.95", f"{role}.optimizer.betas", (0.9, 0.95)),
        Case("model_args.lora_target", "model_args.lora_target='q_proj, v_proj'", f"{role}.lora.target_modules",
             ["q_proj", "v_proj"]),
        *(Case("model_args.lora_target", f"model_args.lora_target={every}", f"{role}.lora.target_modules", "all-linear")
          for every in ("all", "all-linear")),
        Case("model_args.lora_rank", "model_args.lora_rank=32", f"{role}.lora.rank", 32, lora),
        Case("model_args.lora_rank", "model_args.lora_rank=32", f"{role}.lora.alpha", 64.0, lora),  # 2 x 32
        Case("model_args.lora_alpha", "model_args.lora_alpha=8", f"{role}.lora.alpha", 8.0, lora),
        Case("model_args.lora_dropout", "model_args.lora_dropout=0.1", f"{role}.lora.dropout", 0.1, lora),
        Case("model_args.adapter_name_or_path", "model_args.adapter_name_or_path=my/adapter", f"{role}.lora.adapter_path",
             "my/adapter", lora),
        Case("training_args.warmup_steps", "training_args.warmup_steps=20", f"{role}.schedule.warmup_updates", 20),
        Case("training_args.warmup_ratio", "training_args.warmup_ratio=0.1", f"{role}.schedule.warmup_ratio", 0.1),
        Case("training_args.warmup_ratio", "training_args.warmup_ratio=0.1", f"{role}.schedule.warmup_rounding", "up"),
        # 4 x 1 x 1 device, and 8 x 4 x 1 device
        Case("training_args.per_device_train_batch_size", "training_args.per_device_train_batch_size=4",
             f"{role}.sequences_per_mini_batch", 4),
        Case("training_args.per_device_train_batch_size", "training_args.per_device_train_batch_size=4",
             f"{role}.sequences_per_micro_batch_per_device", 4),
        Case("training_args.gradient_accumulation_steps", "training_args.gradient_accumulation_steps=4",
             f"{role}.sequences_per_mini_batch", 32),
        Case("strategy_args.strategy_name", "strategy_args.strategy_name=megatron_train", f"{role}.engine", "megatron", two),
        Case("strategy_args.strategy_name", "strategy_args.strategy_name=deepspeed_train", f"{role}.engine", "deepspeed", two),
        Case(f"{CONFIG}.tensor_model_parallel_size", f"{CONFIG}.tensor_model_parallel_size=2", f"{role}.tensor_parallel", 2,
             megatron),
        Case(f"{CONFIG}.pipeline_model_parallel_size", f"{CONFIG}.pipeline_model_parallel_size=2", f"{role}.pipeline_parallel",
             2, megatron),
        Case(f"{CONFIG}.context_parallel_size", f"{CONFIG}.context_parallel_size=2", f"{role}.sequence_parallel", 2, megatron),
        Case(f"{CONFIG}.recompute_granularity", f"{CONFIG}.recompute_granularity=full", recompute, True, megatron),
        Case("model_args.ulysses_size", "model_args.ulysses_size=2", f"{role}.sequence_parallel", 2, two),
    ]  # fmt: skip


CRITIC = [
    Case("device_mapping", "device_mapping=[1]", "critic.devices", [1], (*GAE, *TRAIN2, "critic.device_mapping=[0]")),
    Case("use_dynamic_batching_in_train", "use_dynamic_batching_in_train=true", "critic.max_tokens_per_micro_batch", 4096,
         (*GAE, "critic.max_tokens_per_microbatch_in_train=4096")),
    Case("max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_train=8192", "critic.max_tokens_per_micro_batch",
         8192, (*GAE, "critic.max_tokens_per_microbatch_in_train=4096", "critic.use_dynamic_batching_in_train=true")),
    Case("model_args.model_name_or_path", "model_args.model_name_or_path=own", "critic.path", "own"),
    Case("model_args.disable_gradient_checkpointing", "model_args.disable_gradient_checkpointing=true",
         "critic.gradient_checkpointing", False),
]  # fmt: skip
BUDGET = ("actor_train.use_dynamic_batching_in_infer=true", "actor_train.max_tokens_per_microbatch_in_infer=8192")
REFERENCE = [
    Case("device_mapping", "device_mapping=[1]", "reference.devices", [1], (*KL, *TRAIN2)),
    Case("infer_batch_size", "infer_batch_size=2", "reference.sequences_per_micro_batch_per_device", 2, KL),
    Case("use_dynamic_batching_in_infer", "use_dynamic_batching_in_infer=true", "reference.max_tokens_per_micro_batch", 4096,
         (*KL, *BUDGET, "reference.max_tokens_per_microbatch_in_infer=4096")),
    Case("max_tokens_per_microbatch_in_infer", "max_tokens_per_microbatch_in_infer=2048",
         "reference.max_tokens_per_micro_batch", 2048,
         (*KL, *BUDGET, "reference.use_dynamic_batching_in_infer=true", "reference.max_tokens_per_microbatch_in_infer=4096")),
    Case("model_args.model_name_or_path", "model_args.model_name_or_path=frozen", "reference.path", "frozen", KL),
]  # fmt: skip
SAMPLER = [
    Case("device_mapping", "device_mapping=[1]", "rollout.devices", [1], TRAIN2),
    Case("num_gpus_per_worker", "num_gpus_per_worker=2", "rollout.tensor_parallel", 2,
         (*TRAIN2, "actor_infer.strategy_args.strategy_name=sglang")),
    Case("strategy_args.strategy_name", "strategy_args.strategy_name=hf_infer", "rollout.engine", "hf"),
    Case("strategy_args.strategy_config.tensor_parallel_size", "strategy_args.strategy_config.tensor_parallel_size=2",
         "rollout.tensor_parallel", 2, (*TRAIN2, "actor_infer.strategy_args.strategy_name=vllm")),
]  # fmt: skip


def sampling(role: str, given: tuple[str, ...]) -> list[Case]:
    args = "generating_args"
    # What an engine of its own is told needs one: vllm.
    vllm = (*given, "actor_infer.strategy_args.strategy_name=vllm")
    return [
        Case(f"{args}.temperature", f"{args}.temperature=0.6", f"{role}.temperature", 0.6, given),
        Case(f"{args}.top_p", f"{args}.top_p=1.0", f"{role}.top_p", 1.0, given),
        Case(f"{args}.top_k", f"{args}.top_k=-1", f"{role}.top_k", 0, given),
        Case(f"{args}.repetition_penalty", f"{args}.repetition_penalty=1.1", f"{role}.engine_sampling",
             {"repetition_penalty": 1.1}, vllm),
        Case(f"{args}.stop_strings", f"{args}.stop_strings=[END]", f"{role}.stop", ["END"], given),
    ]  # fmt: skip


VALIDATION = [
    Case("data_args.file_name", "data_args.file_name=v.jsonl", "data.validation_files", ["v.jsonl"]),
    Case("generating_args.num_return_sequences", "generating_args.num_return_sequences=4", "validation.samples_per_prompt", 4,
         VAL),
]  # fmt: skip


def in_section(section: str, cases: list[Case], given: tuple[str, ...] = ()) -> list[Case]:
    return [
        case._replace(
            row=f"{section}.{case.row}",
            override=f"{section}.{case.override}",
            given=(*given, *(one for one in case.given if one not in given)),
        )
        for case in cases
    ]


CASES = [
    *TOP,
    *REWARDS,
    *in_section("actor_train", [*ACTOR, *trained("policy")]),
    *in_section("critic", [*CRITIC, *trained("critic")], GAE),
    *in_section("reference", REFERENCE),
    *in_section("actor_infer", [*SAMPLER, *sampling("rollout", ())]),
    *in_section("validation", [*VALIDATION, *sampling("validation", VAL)]),
]

# strategy_config: what is handed to the engine as it is. Value written, by name; and whose it is.
MEGATRON = {
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4,
    "sequence_parallel": True, "recompute_method": "uniform", "recompute_num_layers": 2, "recompute_modules": ["mlp"],
    "moe_layer_recompute": True, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
    "moe_shared_expert_overlap": True, "moe_aux_loss_coeff": 0.01, "use_distributed_optimizer": True,
    "overlap_grad_reduce": True, "overlap_p2p_comm": False, "variable_seq_lengths": True, "bias_activation_fusion": True,
    "apply_rope_fusion": True, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
    "additional_configs": {"masked_softmax_fusion": True}, "optimizer_offload": True,
}  # fmt: skip
FOR_REFERENCE = {  # the reference has no parallel sizes of its own among our fields: they are its engine's
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2,
    "recompute_granularity": "full",
}  # fmt: skip
FSDP2 = {
    "fsdp_size": 2, "param_dtype": "fp32", "reduce_dtype": "bf16", "reshard_after_forward": True, "offload_policy": True,
    "wrap_policy": {"wrap_embeddings": True}, "ep_size": 2, "efsdp_size": 2, "moe_use_grouped_mm": True,
    "apply_tiled_mlp": True, "tiled_num_shards": 8, "use_batched_model_update": True,
    "reduce_scatter_during_grad_accumulation": False,
}  # fmt: skip
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4, "train_batch_size": 64, "gradient_accumulation_steps": 8, "gradient_clipping": 0.5,
    "bf16.enabled": False, "fp16.enabled": True, "fp16.loss_scale": 128, "fp16.initial_scale_power": 12,
    "fp16.loss_scale_window": 500, "fp16.hysteresis": 4, "fp16.min_loss_scale": 2, "checkpoint.tag_validation": "WARN",
    "zero_optimization.stage": 3, "zero_optimization.allgather_partitions": False,
    "zero_optimization.allgather_bucket_size": 100.0, "zero_optimization.overlap_comm": False,
    "zero_optimization.reduce_scatter": False, "zero_optimization.reduce_bucket_size": 100,
    "zero_optimization.contiguous_gradients": False, "zero_optimization.sub_group_size": 100,
    "zero_optimization.stage3_prefetch_bucket_size": 100, "zero_optimization.stage3_param_persistence_threshold": 100,
    "zero_optimization.stage3_max_live_parameters": 100, "zero_optimization.stage3_max_reuse_distance": 100,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_optimizer.pin_memory": True,
    "zero_optimization.offload_param.device": "cpu", "zero_optimization.offload_param.pin_memory": True,
    "zero_optimization.round_robin_gradients": True, "zero_optimization.zero_hpz_partition_size": 2,
    "zero_optimization.zero_quantized_weights": True, "zero_optimization.zero_quantized_gradients": True,
    "communication_data_type": "bf16", "data_types.grad_accum_dtype": "bf16", "something_new": 3,
}  # fmt: skip
SAMPLERS = {"pipeline_parallel_size": 1, "load_format": "auto", "disable_custom_all_reduce": False}
VLLM = {
    "gpu_memory_utilization": 0.6, "block_size": 32, "max_model_len": 8000, "max_num_seqs": 64,
    "max_num_batched_tokens": 4096, "enforce_eager": True, "enable_prefix_caching": False, "data_parallel_size": 2,
    "quantization": "fp8", "sleep_level": 2, "VLLM_USE_V1": 0, "something_new": 3, **SAMPLERS,
}  # fmt: skip
SGLANG = {"mem_fraction_static": 0.7, "enable_memory_saver": False}

# (section, our field, strategy, what is written, what else is given)
OPTIONS = [
    ("actor_train", "policy.engine_options", "megatron_train", MEGATRON, TRAIN2),
    ("actor_train", "policy.engine_options", "fsdp2_train", FSDP2, TRAIN2),
    ("actor_train", "policy.engine_options", "deepspeed_train", DEEPSPEED, TRAIN2),
    ("critic", "critic.engine_options", "megatron_train", MEGATRON, CRITIC2),
    ("critic", "critic.engine_options", "fsdp2_train", FSDP2, CRITIC2),
    ("critic", "critic.engine_options", "deepspeed_train", DEEPSPEED, CRITIC2),
    ("reference", "reference.engine_options", "megatron_infer", MEGATRON | FOR_REFERENCE, (*TRAIN2, *KL)),
    ("reference", "reference.engine_options", "fsdp2_infer", FSDP2, (*TRAIN2, *KL)),
    ("reference", "reference.engine_options", "deepspeed_infer", DEEPSPEED, (*TRAIN2, *KL)),
    ("actor_infer", "rollout.engine_options", "vllm", VLLM, TRAIN2),
    ("actor_infer", "rollout.engine_options", "sglang", SGLANG, TRAIN2),
]


@cache
def read(*overrides: str) -> LoadedConfig:
    loaded = read_dialect(DIALECT, None, overrides)
    assert not loaded.problems, [str(problem) for problem in loaded.problems]
    return loaded


def at(config: RunConfig, field: str) -> Any:
    node: Any = config
    for name in field.split("."):
        if isinstance(node, list):
            node = node[int(name)]
        else:
            node = node.get(name) if isinstance(node, dict) else getattr(node, name, None)
    return [one.model_dump() for one in node] if field == "reward.terms" else node


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.override} -> {case.field}")
def test_a_key_decides_its_field(case: Case) -> None:
    given = (*BASE, *case.given)
    without, with_it = read(*given), read(*given, case.override)
    assert at(with_it.config, case.field) == case.value
    assert at(without.config, case.field) != case.value
    row = LEDGER.by_name[case.row]
    assert any(
        f"{case.field}.".startswith(f"{field}.") or f"{field}.".startswith(f"{case.field}.") for field in row.fields
    )


def test_inverse_sqrt_falls_as_slowly_as_transformers_has_it() -> None:
    """Its timescale is the warm-up's steps, and 10,000 without a warm-up."""
    slow = (*BASE, "actor_train.training_args.lr_scheduler_type=inverse_sqrt")
    assert read(*slow).config.policy.schedule.timescale_updates == 10_000
    for warmup in ("warmup_steps=5", "warmup_ratio=0.1"):
        assert read(*slow, f"actor_train.training_args.{warmup}").config.policy.schedule.timescale_updates is None


@pytest.mark.parametrize(("section", "field", "strategy", "written", "given"), OPTIONS)
def test_settings_of_an_engine_are_handed_on(section, field, strategy, written, given) -> None:
    given = (*BASE, *given, f"{section}.strategy_args.strategy_name={strategy}")
    overrides = [f"{section}.{CONFIG}.{name}={_text(value)}" for name, value in written.items()]
    assert at(read(*given).config, field) == {}
    options = at(read(*given, *overrides).config, field)
    for name, value in written.items():
        node = options
        for part in name.split("."):
            node = node[part]
        assert node == value, name


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "{" + ", ".join(f"{name}: {_text(one)}" for name, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(value) + "]"
    return str(value)


def test_every_mapped_key_is_tested() -> None:
    tested = {case.row for case in CASES}
    for section, _, _, written, _ in OPTIONS:
        known = {name: f"{section}.{CONFIG}.{name}" for name in written}
        tested |= {row if row in LEDGER.by_name else f"{section}.{CONFIG}.**" for row in known.values()}
    agentic = {row.name for row in LEDGER.rows if AGENTIC.match(row.name)}  # test_roll_agentic.py has their table
    assert tested == {row.name for row in LEDGER.rows if row.status == "mapped"} - agentic


def test_the_options_of_an_engine_that_is_not_chosen_are_told() -> None:
    key = f"actor_train.{CONFIG}.recompute_num_layers"
    loaded = read(*BASE, "actor_train.device_mapping=[0,1]", f"{key}=2")
    assert {one.key: one.reason for one in loaded.ignored}[key] == "megatron reads it, and this is fsdp2_train"
    assert loaded.config.policy.engine_options == {}


def test_a_misspelt_option_is_handed_on_with_a_question() -> None:
    key = f"actor_infer.{CONFIG}.gpu_memory_utilisation"
    loaded = read(*BASE, "actor_infer.strategy_args.strategy_name=vllm", f"{key}=0.5")
    assert loaded.config.rollout.engine_options == {"gpu_memory_utilisation": 0.5}
    [warning] = [text for text in loaded.warnings if key in text]
    assert f"(did you mean actor_infer.{CONFIG}.gpu_memory_utilization?)" in warning

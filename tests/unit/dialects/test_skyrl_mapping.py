"""Every mapped key of SkyRL changes the RunConfig in the stated way: an override, what it needs around it, one of our fields,
and its value then, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.skyrl import DIALECT

T, P, AL, G, E = "trainer", "trainer.placement", "trainer.algorithm", "generator", "generator.inference_engine"
OPC = f"{AL}.off_policy_correction"

# 8 prompts x 8 samples = 64 sequences, 2 updates of 4 x 8 = 32, micro-batches of 8; one device; no KL.
BASE = (
    "data.train_data=[train.parquet]",
    "data.val_data=[val.parquet]",
    f"{T}.train_batch_size=8",
    f"{T}.policy_mini_batch_size=4",
    f"{T}.critic_mini_batch_size=4",
    f"{T}.micro_train_batch_size_per_gpu=8",
    f"{P}.policy_num_gpus_per_node=1",
    f"{P}.critic_num_gpus_per_node=1",
    f"{P}.ref_num_gpus_per_node=1",
    f"{T}.logger=console",
    f"{AL}.use_kl_loss=false",
    f"{G}.backend=native",
    f"{G}.n_samples_per_prompt=8",
    f"{G}.inference_engine_tensor_parallel_size=1",
)
JUDGE = ("environment.env_class=llm_as_a_judge",)
KL = (f"{AL}.use_kl_loss=true",)
KL_REWARD = (f"{AL}.use_kl_in_reward=true",)
ADAPTIVE = (*KL_REWARD, f"{AL}.kl_ctrl.type=adaptive")
PPO = (f"{AL}.advantage_estimator=gae", f"{T}.critic.model.path=some/critic")
TWO = tuple(f"{P}.{role}_num_gpus_per_node=2" for role in ("policy", "critic", "ref"))
APART = (f"{P}.colocate_all=false",)
VLLM = (f"{G}.backend=vllm",)
REMOTE = (*VLLM, *APART, f"{G}.run_engines_locally=false")
DEEPSPEED = (f"{T}.strategy=deepspeed", *TWO)
MEGATRON = (f"{T}.strategy=megatron", *TWO)
NORM = (f"{AL}.loss_reduction=seq_mean_token_sum_norm",)
TURNS = (f"{G}.max_turns=2", "environment.env_class=search")
SEARCH = {"env_class": "search"}
WHOLE = (f"{T}.micro_train_batch_size_per_gpu=32",)  # for losses that look at a whole mini-batch
TOKEN_OUTLIERS = (f"{OPC}.outlier_token_is_threshold_low=0.5", f"{OPC}.outlier_token_is_threshold_high=2.0")

Case = tuple[str, str, tuple[str, ...], str, Any]


def case(key: str, text: str, around: tuple[str, ...], field: str, value: Any, plus: str = "") -> Case:
    return key, f"{plus}{key}={text}", around, field, value


DATA: list[Case] = [
    case("data.train_data", "[a.parquet,b.json]", (), "data.train_files", ["a.parquet", "b.json"]),
    case("data.val_data", "c.jsonl", (), "data.validation_files", ["c.jsonl"]),
    case(
        "environment.env_class",
        "aime",
        (),
        "reward.terms",
        [("math_dapo", {"box_fallback": False, "stop_at_tag": True})],
    ),
    case("environment.env_class", "search", (), "reward.terms", [("search", {"max_answer_tags": None})]),
    case(
        "environment.env_class",
        "lcb",
        (),
        "reward.terms",
        [("code", {"block": "last", "tolerance": 0.0, "timeout_s": 6.0})],
    ),
    case("environment.env_class", "lcb", (), "reward.timeout_s", 60.0),
    case("environment.env_class", "text2sql", (), "data.extra_columns", ["db_id", "data"]),
    case(
        "environment.skyrl_gym.text2sql.db_path",
        "/data/sql",
        ("environment.env_class=text2sql",),
        "reward.terms",
        [("text2sql", {"db_path": "/data/sql"})],
    ),
    case("environment.skyrl_gym.llm_as_a_judge.model", "qwen", JUDGE, "reward.terms.0.options.model", "qwen"),
    case(
        "environment.skyrl_gym.llm_as_a_judge.base_url",
        "http://here:8000/v1",
        JUDGE,
        "reward.terms.0.options.base_url",
        "http://here:8000/v1",
    ),
    (
        "environment.skyrl_gym.*.**",
        "+environment.skyrl_gym.gsm8k.method=flexible",
        (),
        "reward.terms",
        [("gsm8k", {"which": "first", "method": "flexible"})],
    ),
]
# Apart: policy on device 0, the sampler (vllm) behind it, unless something stands between.
PLACEMENT: list[Case] = [
    case(f"{P}.colocate_all", "false", VLLM, "placement.devices", 2),
    case(f"{P}.colocate_policy_ref", "false", (*APART, *KL, *VLLM), "reference.devices", [1]),
    case(f"{P}.policy_num_nodes", "2", (f"{P}.policy_num_gpus_per_node=2",), "placement.nodes", 2),
    case(f"{P}.policy_num_gpus_per_node", "2", (), "placement.devices", 2),
    case(f"{P}.critic_num_nodes", "2", (*APART, *PPO), "critic.devices", [1, 2]),
    case(f"{P}.critic_num_gpus_per_node", "2", (*APART, *PPO), "critic.devices", [1, 2]),
    case(f"{P}.ref_num_nodes", "2", (*APART, *KL, f"{P}.colocate_policy_ref=false"), "reference.devices", [1, 2]),
    case(
        f"{P}.ref_num_gpus_per_node", "2", (*APART, *KL, f"{P}.colocate_policy_ref=false"), "reference.devices", [1, 2]
    ),
    case(f"{T}.strategy", "deepspeed", TWO, "policy.engine", "deepspeed"),
]
TRAINER: list[Case] = [
    case(f"{T}.epochs", "3", (), "run.total_epochs", 3),
    case(f"{T}.max_training_steps", "7", (), "run.total_steps", 7),
    case(f"{T}.update_epochs_per_batch", "2", (), "policy.epochs_per_step", 2),
    case(f"{T}.train_batch_size", "12", (), "data.prompts_per_step", 12),
    case(f"{T}.policy_mini_batch_size", "2", (), "policy.sequences_per_mini_batch", 16),  # 2 prompts x 8 samples
    case(f"{T}.critic_mini_batch_size", "2", PPO, "critic.sequences_per_mini_batch", 16),
    case(f"{T}.micro_train_batch_size_per_gpu", "4", (), "policy.sequences_per_micro_batch_per_device", 4),
    case(f"{T}.micro_forward_batch_size_per_gpu", "16", (), "reference.sequences_per_micro_batch_per_device", 16),
    case(f"{T}.num_warmup_steps", "5", (), "policy.schedule.warmup_updates", 5),
    case(f"{T}.max_prompt_length", "300", (), "data.max_prompt_tokens", 300),
    case(f"{T}.gradient_checkpointing", "false", (), "model.gradient_checkpointing", False),
    case(f"{T}.seed", "7", (), "run.seed", 7),
    case(f"{T}.bf16", "false", (), "model.compute_dtype", "float32"),
    case(f"{T}.rope_scaling", "{factor: 2}", (), "model.config_overrides", {"rope_scaling": {"factor": 2}}),
    case(f"{T}.rope_theta", "5e5", (), "model.config_overrides", {"rope_theta": 5e5}),
    case(f"{T}.eval_before_train", "false", (), "validation.before_training", False),
    case(f"{T}.eval_interval", "20", (), "validation.every_steps", 20),
    case(f"{T}.resume_mode", "none", (), "run.resume", "never"),
    case(f"{T}.hf_save_interval", "5", (), "checkpoint.export_every_steps", 5),
    case(f"{T}.export_path", "out/hf", (f"{T}.hf_save_interval=5",), "checkpoint.export_folder", "out/hf"),
    case(f"{T}.resume_path", "x/global_step_9", (f"{T}.resume_mode=from_path",), "run.resume_path", "x/global_step_9"),
    case(f"{T}.ckpt_path", "out/here", (), "checkpoint.folder", "out/here"),
    case(f"{T}.max_ckpts_to_keep", "3", (), "checkpoint.keep_last", 3),
    case(f"{T}.ckpt_interval", "20", (), "checkpoint.every_steps", 20),
    case(f"{T}.project_name", "mine", (), "tracking.project", "mine"),
    case(f"{T}.run_name", "first", (), "run.name", "first"),
    case(f"{T}.logger", "[console,wandb]", (), "tracking.trackers", ["console", "wandb"]),
    case(f"{T}.dump_data_batch", "true", (), "tracking.batches_every_steps", 1),
    case(f"{T}.policy.record_memory", "true", (), "profiling.memory", True),
]


def _model(role: str, ours: str, around: tuple[str, ...]) -> Iterator[Case]:
    """What policy and critic have alike."""
    keys = f"{T}.{role}"
    optimizer, two = f"{keys}.optimizer_config", (*around, *TWO)
    yield case(f"{optimizer}.lr", "3e-6", around, f"{ours}.optimizer.lr", 3e-6)
    yield case(f"{optimizer}.adam_betas", "[0.8,0.95]", around, f"{ours}.optimizer.betas", (0.8, 0.95))
    yield case(f"{optimizer}.weight_decay", "0", around, f"{ours}.optimizer.weight_decay", 0.0)
    yield case(f"{optimizer}.max_grad_norm", "0", around, f"{ours}.optimizer.max_grad_norm", None)
    yield case(f"{optimizer}.offload_after_step", "false", two, f"{ours}.engine_options.offload_after_step", False)
    yield case(f"{optimizer}.num_warmup_steps", "4", around, f"{ours}.schedule.warmup_updates", 4)
    yield case(f"{optimizer}.scheduler", "inverse_sqrt", around, f"{ours}.schedule.name", "inverse_square_root")
    timescale = f"{ours}.schedule.timescale_updates"  # transformers' without a warm-up; with one it is the warm-up
    yield case(f"{optimizer}.scheduler", "inverse_sqrt", around, timescale, 10_000)
    yield case(f"{keys}.sequence_parallel_size", "2", two, f"{ours}.sequence_parallel", 2)
    lora = f"{keys}.model.lora"
    on = (*around, f"{lora}.rank=8")
    yield case(f"{lora}.rank", "32", around, f"{ours}.lora.rank", 32)
    yield case(f"{lora}.alpha", "32", on, f"{ours}.lora.alpha", 32.0)
    yield case(f"{lora}.dropout", "0.1", on, f"{ours}.lora.dropout", 0.1)
    yield case(f"{lora}.target_modules", "[q_proj]", on, f"{ours}.lora.target_modules", ["q_proj"])
    yield case(f"{lora}.exclude_modules", "[o_proj]", on, f"{ours}.lora.exclude_modules", ["o_proj"])


def _sharding(role: str, ours: str, around: tuple[str, ...], *, offloads: bool) -> Iterator[Case]:
    """The settings of FSDP, which keep their names and values."""
    keys, options, around = f"{T}.{role}.fsdp_config", f"{ours}.engine_options", (*around, *TWO)
    yield case(f"{keys}.cpu_offload", str(not offloads), around, f"{options}.cpu_offload", not offloads)
    yield case(f"{keys}.reshard_after_forward", "2", around, f"{options}.reshard_after_forward", 2)
    yield case(f"{keys}.fsdp_size", "2", around, f"{options}.fsdp_size", 2)
    yield case(f"{keys}.wrap_policy", "{min_num_params: 9}", around, f"{options}.wrap_policy", {"min_num_params": 9})
    dtypes = {"param_dtype": "bf16"}
    yield case(f"{keys}.mixed_precision", "{param_dtype: bf16}", around, f"{options}.mixed_precision", dtypes)


def _own_deepspeed(role: str, ours: str, around: tuple[str, ...]) -> Iterator[Case]:
    """Below the reference, which stands for one of the trees of deepspeed_config."""
    keys, around = f"{T}.{role}.deepspeed_config", (*around, *DEEPSPEED)
    field = f"{ours}.engine_options.zero_optimization.stage3_param_persistence_threshold"
    text = "{zero_optimization: {stage3_param_persistence_threshold: 5}}"
    yield case(keys, text, around, field, 5)
    override = f"+{keys}.zero_optimization.stage3_param_persistence_threshold=6"
    yield f"{keys}.**", override, around, field, 6


MODELS: list[Case] = [
    case(f"{T}.policy.model.path", "some/model", (), "model.path", "some/model"),
    *_model("policy", "policy", ()),
    *_sharding("policy", "policy", (), offloads=False),
    *_own_deepspeed("policy", "policy", ()),
    case(f"{T}.policy.megatron_config.tensor_model_parallel_size", "2", MEGATRON, "policy.tensor_parallel", 2),
    case(f"{T}.policy.megatron_config.pipeline_model_parallel_size", "2", MEGATRON, "policy.pipeline_parallel", 2),
    case(f"{T}.policy.megatron_config.context_parallel_size", "2", MEGATRON, "policy.sequence_parallel", 2),
    (
        f"{T}.policy.megatron_config.**",
        f"+{T}.policy.megatron_config.transformer_config_kwargs.recompute_granularity=full",
        MEGATRON,
        "policy.engine_options.transformer_config_kwargs.recompute_granularity",
        "full",
    ),
    (
        f"{T}.policy.megatron_config.**",
        f"+{T}.policy.megatron_config.transformer_config_kwargs.virtual_pipeline_model_parallel_size=2",
        MEGATRON,
        "policy.engine_options.transformer_config_kwargs.virtual_pipeline_model_parallel_size",
        2,
    ),
    case(f"{T}.critic.model.path", "other/critic", PPO, "critic.path", "other/critic"),
    *_model("critic", "critic", PPO),
    *_sharding("critic", "critic", PPO, offloads=False),
    *_own_deepspeed("critic", "critic", PPO),
    case(f"{T}.ref.model.path", "some/reference", KL, "reference.path", "some/reference"),
    *_sharding("ref", "reference", KL, offloads=True),
    *_own_deepspeed("ref", "reference", KL),
    case(
        f"{T}.ref.sequence_parallel_size",
        "2",
        (*KL, *TWO),
        "reference.engine_options.sequence_parallel_size",
        2,
    ),
]
ALGORITHM: list[Case] = [
    case(f"{AL}.advantage_estimator", "reinforce++", (), "advantage.name", "reinforce_plus_plus"),
    case(f"{AL}.grpo_norm_by_std", "false", (), "advantage.normalize_by_std", False),
    case(f"{AL}.lambd", "0.95", PPO, "advantage.gae_lambda", 0.95),
    case(f"{AL}.gamma", "0.9", PPO, "advantage.gamma", 0.9),
    case(f"{AL}.advantage_batch_normalize", "true", (), "advantage.whiten", True),
    case(f"{AL}.value_clip", "null", PPO, "critic.value_clip", None),
    case(f"{AL}.use_kl_estimator_k3", "false", KL, "loss.kl_estimator", "k1"),
    case(
        f"{AL}.use_abs_kl", "true", (*KL_REWARD, f"{AL}.use_kl_estimator_k3=false"), "reward.kl.estimator", "abs"
    ),
    case(f"{AL}.kl_estimator_type", "k2", KL, "loss.kl_estimator", "k2"),
    case(f"{AL}.use_kl_in_reward", "true", (), "reward.kl.coef", 0.001),
    case(f"{AL}.use_kl_loss", "true", (), "loss.kl_coef", 0.001),
    case(f"{AL}.kl_loss_coef", "0.05", KL, "loss.kl_coef", 0.05),
    case(f"{AL}.kl_ctrl.type", "adaptive", KL_REWARD, "reward.kl.target", 0.1),
    case(f"{AL}.kl_ctrl.kl_target", "0.02", ADAPTIVE, "reward.kl.target", 0.02),
    case(f"{AL}.kl_ctrl.horizon", "2e4", ADAPTIVE, "reward.kl.horizon_sequences", 20000),
    case(f"{AL}.dynamic_sampling.type", "filter", (), "group_filter.strategy", "refill"),
    case(
        f"{AL}.dynamic_sampling.max_sample_batches", "0", (f"{AL}.dynamic_sampling.type=filter",),
        "group_filter.max_batches", None,
    ),
    case(
        f"{AL}.dynamic_sampling.min_replace_ratio", "0.5", (f"{AL}.dynamic_sampling.type=replace",),
        "group_filter.min_kept_share", 5 / 8,  # more than 4 of 8
    ),
    case(f"{AL}.zero_variance_filter", "true", (), "group_filter.strategy", "mask"),
    case(f"{AL}.overlong_buffer.len", "64", (), "reward.overlong_buffer_tokens", 64, plus="+"),
    case(
        f"{AL}.overlong_buffer.penalty_factor", "0.5", (f"+{AL}.overlong_buffer.len=64",), "reward.overlong_penalty", 0.5,
        plus="+",
    ),
]  # fmt: skip


def _of_loss(name: str, setting: str, text: str, field: str, value: Any) -> Case:
    return case(f"{AL}.{setting}", text, (f"{AL}.ppo_loss_type={name}", *WHOLE), field, value)


LOSS: list[Case] = [
    case(f"{AL}.ppo_loss_type", "gspo", (), "loss.name", "gspo"),
    case(f"{AL}.policy_loss_type", "sapo", (), "loss.name", "sapo"),
    case(f"{AL}.loss_reduction", "token_mean", (), "loss.aggregation", "token_mean"),
    case(f"{AL}.max_seq_len", "2000", NORM, "loss.norm_tokens", 2000),
    case(f"{AL}.eps_clip_low", "0.1", (), "loss.clip_ratio_low", 0.1),
    case(f"{AL}.eps_clip_high", "0.28", (), "loss.clip_ratio_high", 0.28),
    _of_loss("dual_clip", "clip_ratio_c", "10", "loss.dual_clip", 10.0),
    _of_loss("clip_cov", "clip_cov.clip_ratio", "0.01", "loss.covariance_share", 0.01),
    _of_loss("clip_cov", "clip_cov.clip_cov_lb", "2", "loss.covariance_low", 2.0),
    _of_loss("clip_cov", "clip_cov.clip_cov_ub", "4", "loss.covariance_high", 4.0),
    _of_loss("kl_cov", "kl_cov.kl_cov_frac", "0.1", "loss.covariance_share", 0.1),
    _of_loss("kl_cov", "kl_cov.ppo_kl_coef", "0.5", "loss.covariance_kl_coef", 0.5),
    _of_loss("cispo", "cispo.cispo_eps_clip_low", "1", "loss.clip_ratio_low", 1.0),
    _of_loss("cispo", "cispo.cispo_eps_clip_high", "4", "loss.clip_ratio_high", 4.0),
    _of_loss("sapo", "sapo.tau_pos", "2", "loss.gate_sharpness_positive", 2.0),
    _of_loss("sapo", "sapo.tau_neg", "2", "loss.gate_sharpness_negative", 2.0),
    case(f"{AL}.use_entropy_loss", "true", (), "loss.entropy_coef", 0.01),
    case(f"{AL}.entropy_loss_coef", "0.02", (f"{AL}.use_entropy_loss=true",), "loss.entropy_coef", 0.02),
    case(f"{AL}.use_tis", "true", (f"{AL}.tis_imp_ratio_cap=4",), "loss.rollout_correction.weights", "token"),
    # before it, use_tis alone is refused: the cap is -1
    case(f"{AL}.tis_imp_ratio_cap", "4", (f"{AL}.use_tis=true",), "loss.rollout_correction.weight_high", 4.0),
]
W, X = "loss.rollout_correction.weight_high", "loss.rollout_correction.reject_bounds"
CORRECTION: list[Case] = [
    case(f"{OPC}.tis_ratio_type", "sequence", (), "loss.rollout_correction.weights", "sequence"),
    case(f"{OPC}.token_tis_ratio_clip_high", "3", (f"{OPC}.tis_ratio_type=token",), W, 3.0),
    case(f"{OPC}.sequence_tis_ratio_clip_high", "9", (f"{OPC}.tis_ratio_type=sequence",), W, 9.0),
    case(f"{OPC}.sequence_mask_metric", "product", (), "loss.rollout_correction.reject", ["sequence_sum_k1"]),
    # bounds of old / rollout become those of rollout / old: 1 / high and 1 / low
    case(f"{OPC}.geo_mask_low", "0.8", (f"{OPC}.sequence_mask_metric=geometric", f"{OPC}.geo_mask_high=1.25"), X, ["0.8_1.25"]),
    case(f"{OPC}.geo_mask_high", "1.6", (f"{OPC}.sequence_mask_metric=geometric", f"{OPC}.geo_mask_low=0.8"), X, ["0.625_1.25"]),
    case(f"{OPC}.product_mask_low", "0.25", (f"{OPC}.sequence_mask_metric=product",), X, ["0.5_4"]),
    case(f"{OPC}.product_mask_high", "4", (f"{OPC}.sequence_mask_metric=product",), X, ["0.25_2"]),
    case(f"{OPC}.outlier_token_is_threshold_low", "0.25", TOKEN_OUTLIERS, X, ["0.5_4"]),
    case(f"{OPC}.outlier_token_is_threshold_high", "4", TOKEN_OUTLIERS, X, ["0.25_2"]),
    case(f"{OPC}.token_mask_is_threshold_low", "0.25", (f"{OPC}.token_mask_is_threshold_high=2",), X, ["0.5_4"]),
    case(f"{OPC}.token_mask_is_threshold_high", "4", (f"{OPC}.token_mask_is_threshold_low=0.5",), X, ["0.25_2"]),
]  # fmt: skip


def _deepspeed(kind: str, ours: str, around: tuple[str, ...]) -> Iterator[Case]:
    """Trees that keep their names and values."""
    zero = "zero_optimization"
    train = {
        f"{zero}.offload_param.device": ("cpu", "cpu"),
        f"{zero}.offload_optimizer.device": ("cpu", "cpu"),
        f"{zero}.offload_optimizer.pin_memory": ("false", False),
        f"{zero}.sub_group_size": ("1e9", 1e9),
        f"{zero}.reduce_bucket_size": ("100", 100),
        f"{zero}.stage3_param_persistence_threshold": ("100", 100),
        f"{zero}.stage3_prefetch_bucket_size": ("100", 100),
        f"{zero}.stage3_max_live_parameters": ("100", 100),
        f"{zero}.stage3_max_reuse_distance": ("100", 100),
        f"{zero}.round_robin_gradients": ("false", False),
        f"{zero}.zero_hpz_partition_size": ("2", 2),
        f"{zero}.zero_quantized_weights": ("true", True),
        f"{zero}.zero_quantized_gradients": ("true", True),
        "disable_trace_cache": ("true", True),
        "data_types.grad_accum_dtype": ("bf16", "bf16"),
        "wall_clock_breakdown": ("true", True),
        "prescale_gradient": ("true", True),
    }
    evaluation = {
        f"{zero}.stage": ("0", 0),
        f"{zero}.stage3_param_persistence_threshold": ("100", 100),
        f"{zero}.offload_param.device": ("none", "none"),
        f"{zero}.offload_param.pin_memory": ("false", False),
        "prescale_gradient": ("true", True),
        "wall_clock_breakdown": ("true", True),
    }
    keys, options, around = f"deepspeed_config.{kind}", f"{ours}.engine_options", (*around, *DEEPSPEED)
    for name, (text, value) in (train if kind == "train" else evaluation).items():
        yield case(f"{keys}.{name}", text, around, f"{options}.{name}", value)
    yield f"{keys}.**", f"+{keys}.comms_logger.enabled=true", around, f"{options}.comms_logger", {"enabled": True}


# The stage of training must be 3, so it can only be written as it is.
STAGE = "deepspeed_config.train.zero_optimization.stage"
DEEPSPEEDS: list[Case] = [*_deepspeed("train", "policy", ()), *_deepspeed("eval", "reference", KL)]
OPTIONS = "rollout.engine_options"


def _engines(section: str) -> Iterator[Case]:
    """Both names of the settings of the sampler."""
    for name, later, text, field, value, around in (
        ("backend", "backend", "hf", "rollout.engine", "hf", ()),
        ("num_inference_engines", "num_engines", "2", "rollout.devices", [1, 2], (*VLLM, *APART)),
        (
            "inference_engine_tensor_parallel_size", "tensor_parallel_size", "2", "rollout.tensor_parallel", 2,
            (*VLLM, *APART),
        ),
        (
            "remote_inference_engine_urls", "remote_urls", "[127.0.0.1:1]", "rollout.endpoints", ["http://127.0.0.1:1"],
            REMOTE,
        ),
        (
            "run_engines_locally", "run_engines_locally", "false", "rollout.endpoints", ["http://127.0.0.1:8001"],
            (*VLLM, *APART),
        ),
        ("max_num_batched_tokens", "max_num_batched_tokens", "100", "rollout.max_prefill_tokens", 100, ()),
        ("max_num_seqs", "max_num_seqs", "64", "rollout.max_concurrent_sequences", 64, ()),
    ):  # fmt: skip
        yield case(f"{section}.{name if section == G else later}", text, around, field, value)
    for name, text, value in (
        ("pipeline_parallel_size", "2", 2),
        ("data_parallel_size", "2", 2),
        ("expert_parallel_size", "2", 2),
    ):
        key = f"{section}.{'inference_engine_' if section == G else ''}{name}"
        yield case(key, text, (*VLLM, *APART), f"{OPTIONS}.inference_engine_{name}", value)
    for name, text, value in (
        ("model_dtype", "float16", "float16"),
        ("weight_sync_backend", "gloo", "gloo"),
        ("weight_transfer_threshold_cuda_ipc_GB", "2.0", 2.0),
        ("vllm_v1_disable_multiproc", "false", False),
        ("enable_prefix_caching", "false", False),
        ("enable_chunked_prefill", "false", False),
        ("enforce_eager", "true", True),
        ("gpu_memory_utilization", "0.5", 0.5),
    ):
        yield case(f"{section}.{name}", text, VLLM, f"{OPTIONS}.{name}", value)
    yield case(f"{section}.engine_init_kwargs", "{swap_space: 4}", VLLM, f"{OPTIONS}.swap_space", 4)
    yield (
        f"{section}.engine_init_kwargs.**",
        f"+{section}.engine_init_kwargs.swap_space=5",
        VLLM,
        f"{OPTIONS}.swap_space",
        5,
    )


def _sampling(section: str, ours: str) -> Iterator[Case]:
    keys = f"{G}.{section}"
    yield case(f"{keys}.max_generate_length", "100", (), f"{ours}.max_response_tokens", 100)
    yield case(f"{keys}.temperature", "0.7", (), f"{ours}.temperature", 0.7)
    yield case(f"{keys}.top_p", "0.9", (), f"{ours}.top_p", 0.9)
    yield case(f"{keys}.min_p", "0.1", (), f"{ours}.min_p", 0.1)
    yield case(f"{keys}.top_k", "50", (), f"{ours}.top_k", 50)
    yield case(f"{keys}.stop", "[END]", (), f"{ours}.stop", ["END"])
    yield case(f"{keys}.repetition_penalty", "1.05", VLLM, f"{ours}.engine_sampling.repetition_penalty", 1.05)
    yield case(f"{keys}.stop_token_ids", "[5]", (), f"{ours}.stop_token_ids", [5], plus="+")
    yield case(f"{keys}.ignore_eos", "true", (), f"{ours}.ignore_eos", True, plus="+")
    yield f"{keys}.**", f"+{keys}.min_tokens=4", VLLM, f"{ours}.engine_sampling.min_tokens", 4


GENERATOR: list[Case] = [
    *_engines(G),
    *_engines(E),
    case(f"{E}.external_server_urls", "[https://127.0.0.1:9]", (*VLLM, *APART), "rollout.endpoints",
         ["https://127.0.0.1:9"]),
    case(f"{G}.rope_scaling", "{factor: 4}", (), "model.config_overrides", {"rope_scaling": {"factor": 4}}),
    case(f"{G}.rope_theta", "1e6", (), "model.config_overrides", {"rope_theta": 1e6}),
    case(f"{G}.n_samples_per_prompt", "4", (), "rollout.samples_per_prompt", 4),
    case(f"{G}.eval_n_samples_per_prompt", "4", (), "validation.samples_per_prompt", 4),
    *_sampling("sampling_params", "rollout"),
    *_sampling("eval_sampling_params", "validation"),
    # 600 + 1024; the prompt must be as long as the input
    case(f"{G}.max_input_length", "600", (*NORM, f"{G}.max_turns=2"), "loss.norm_tokens", 1624),
    case(f"{G}.max_turns", "3", TURNS, "environment.max_turns", 3),
    case(f"{G}.step_wise_trajectories", "true", TURNS, "environment.sample_per_turn", True),
    case("environment.skyrl_gym.max_env_workers", "8", TURNS, "environment.workers", 8),
    *(
        case(f"environment.skyrl_gym.search.{name}", text, TURNS, "environment.settings", {**SEARCH, "configs": config})
        for name, text, config in (
            ("topk", "5", {"search": {"topk": 5}}),
            ("timeout", "9", {"search": {"timeout": 9}}),
            ("log_requests", "true", {"search": {"log_requests": True}}),
            ("search_url", "http://h:1/r", {"search": {"search_url": "http://h:1/r"}}),
        )
    ),
    case(f"{G}.use_conversation_multi_turn", "true", TURNS, "environment.conversation", "messages"),
    case(
        f"{G}.append_eos_token_after_stop_str_in_multi_turn",
        "false",
        (*TURNS, f"{G}.use_conversation_multi_turn=true"),
        "environment.close_turns",
        False,
    ),
    case(f"{G}.zero_reward_on_non_stop", "true", (), "reward.zero_unless_stopped", True),
    case(f"{G}.apply_overlong_filtering", "true", (), "loss.mask_truncated", True),
    case(
        f"{G}.chat_template.name_or_path", "t.jinja", (f"{G}.chat_template.source=file",), "model.chat_template_file",
        "t.jinja",
    ),
    case(f"{G}.chat_template_kwargs", "{enable_thinking: false}", (), "data.chat_template_options", {"enable_thinking": False}),
    (
        f"{G}.chat_template_kwargs.*", f"+{G}.chat_template_kwargs.enable_thinking=true", (),
        "data.chat_template_options", {"enable_thinking": True},
    ),
]  # fmt: skip
# Further fields of keys that decide several.
FURTHER: list[Case] = [
    *(  # 1e-7 / 1e-5 = 0.01
        case(
            f"{T}.{role}.optimizer_config.scheduler",
            "polynomial",
            (*around, f"{T}.{role}.optimizer_config.lr=1e-5"),
            f"{role}.schedule.min_lr_ratio",
            1e-7 / 1e-5,
        )
        for role, around in (("policy", ()), ("critic", PPO))
    ),
    case(f"{P}.colocate_all", "false", VLLM, "policy.devices", [0]),
    case(f"{P}.colocate_all", "false", VLLM, "rollout.devices", [1]),
    case(f"{P}.colocate_all", "false", (*KL, *VLLM), "reference.devices", [0]),
    case(f"{P}.colocate_all", "false", PPO, "critic.devices", [1]),
    case(f"{P}.policy_num_nodes", "2", (*APART, *VLLM), "policy.devices", [0, 1]),
    case(f"{P}.policy_num_gpus_per_node", "2", (*APART, *VLLM), "policy.devices", [0, 1]),
    case(f"{T}.strategy", "megatron", (*PPO, *TWO), "critic.engine", "megatron"),
    case(f"{T}.micro_train_batch_size_per_gpu", "4", PPO, "critic.sequences_per_micro_batch_per_device", 4),
    case(f"{T}.num_warmup_steps", "5", PPO, "critic.schedule.warmup_updates", 5),
    case(f"{T}.gradient_checkpointing", "false", PPO, "critic.gradient_checkpointing", False),
    case(f"{T}.eval_interval", "-1", (), "validation.after_training", False),
    case(f"{T}.eval_interval", "-1", (), "data.validation_files", []),
    case(f"{T}.ckpt_interval", "-1", (), "checkpoint.at_end", False),
    case(f"{AL}.use_kl_estimator_k3", "false", KL_REWARD, "reward.kl.estimator", "k1"),
    case(f"{AL}.kl_estimator_type", "abs", KL_REWARD, "reward.kl.estimator", "abs"),
    case(f"{AL}.kl_loss_coef", "0.05", KL_REWARD, "reward.kl.coef", 0.05),
    case(f"{AL}.loss_reduction", "seq_mean_token_sum_norm", (), "loss.norm_tokens", 1536),  # 512 + 1024
    case(f"{AL}.loss_reduction", "prompt_mean", (), "loss.aggregation", "prompt_mean"),
    case(f"{AL}.advantage_estimator", "grpo", (f"{AL}.advantage_estimator=rloo", f"{G}.n_samples_per_prompt=1",
         f"{T}.micro_train_batch_size_per_gpu=4"), "advantage.lone_sample_keeps_reward", True),
    case(f"{AL}.dynamic_sampling.type", "replace", (), "group_filter.strategy", "replace"),
    case(f"{G}.num_inference_engines", "2", (*VLLM, *APART), "placement.devices", 3),
    case(f"{G}.sampling_params.top_k", "-1", (f"{G}.sampling_params.top_k=9",), "rollout.top_k", 0),
    case(f"{T}.logger", "wandb", (), "tracking.trackers", ["wandb"]),
    case(f"{T}.logger", "wandb", (), "tracking.dialect_names", "skyrl"),
    case(f"{T}.policy.record_memory", "true", (), "profiling.steps", "all"),
    case(f"{T}.policy.record_memory", "true", (), "profiling.operators", False),
    case(f"{T}.policy.record_memory", "true", (), "profiling.phases", ["update"]),
]  # fmt: skip

CASES = [*DATA, *PLACEMENT, *TRAINER, *MODELS, *ALGORITHM, *LOSS, *CORRECTION, *DEEPSPEEDS, *GENERATOR]


@cache
def read(*overrides: str) -> LoadedConfig:
    """The base with overrides in the place of what they say otherwise, under either name."""
    written = {override.lstrip("+").split("=")[0] for override in overrides}
    instead = {
        f"{G}.backend": f"{E}.backend",
        f"{G}.inference_engine_tensor_parallel_size": f"{E}.tensor_parallel_size",
    }
    kept = [override for override in BASE if instead.get(override.split("=")[0]) not in written]
    return read_dialect(DIALECT, None, [*kept, *overrides])


def value(config: RunConfig, field: str) -> Any:
    node: Any = config
    for part in field.split("."):
        if isinstance(node, list):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return [(item.name, item.options) for item in node] if field == "reward.terms" else node


def test_every_mapped_key_has_a_case() -> None:
    mapped = {row.name for row in DIALECT.ledger.rows if row.status == "mapped"}
    assert mapped == {key for key, *_ in CASES} | {STAGE}


@pytest.mark.parametrize("case", [*CASES, *FURTHER], ids=lambda case: f"{case[0]}-{case[3].rpartition('.')[2]}")
def test_a_key_changes_its_field(case: Case) -> None:
    _, override, around, field, expected = case
    before, after = read(*around), read(*around, override)
    assert not after.problems, [str(problem) for problem in after.problems]
    found = value(after.config, field)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)
    assert type(found) is type(expected) or isinstance(expected, float)
    assert value(before.config, field) != found


def test_the_stage_of_training_reaches_the_engine() -> None:
    config = read(*DEEPSPEED, f"{STAGE}=3").config
    assert config.policy.engine_options["zero_optimization"]["stage"] == 3


def test_the_trees_of_deepspeed_reach_policy_critic_and_reference() -> None:
    """deepspeed_config.train is the policy's and the critic's, .eval the reference's."""
    changed = ("deepspeed_config.train.prescale_gradient=true", "deepspeed_config.eval.wall_clock_breakdown=true")
    config = read(*PPO, *KL, *DEEPSPEED, *changed).config
    for role in (config.policy, config.critic):
        assert role.engine_options["prescale_gradient"] is True
        assert role.engine_options["wall_clock_breakdown"] is False
    assert config.reference.engine_options["wall_clock_breakdown"] is True
    assert "gradient_clipping" not in config.policy.engine_options  # max_grad_norm says it


def test_the_base_leaves_roles_it_does_without_at_our_defaults() -> None:
    config, plain = read().config, RunConfig.model_validate({"model": {"path": "m"}, "data": {"train_files": ["a"]}})
    assert config.critic == plain.critic
    assert config.reward.kl == plain.reward.kl
    assert config.loss.kl_coef == 0
    assert config.loss.kl_estimator == plain.loss.kl_estimator
    assert config.loss.rollout_correction == plain.loss.rollout_correction
    assert config.group_filter == plain.group_filter
    assert config.reference.engine_options == config.policy.engine_options == config.rollout.engine_options == {}
    assert (config.policy.engine, config.rollout.engine) == ("local", "native")
    assert config.validation.max_response_tokens is None
    assert config.policy.schedule == plain.policy.schedule


def test_what_holds_whatever_is_written() -> None:
    config = read(*PPO, f"{AL}.loss_reduction=token_mean").config
    assert config.data.overlong_prompts == "filter"
    assert config.critic.aggregation == "sequence_mean_token_mean"  # SkyRL's value loss, whatever loss_reduction says
    assert config.loss.aggregation == "token_mean"

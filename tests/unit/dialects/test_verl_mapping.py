"""Every mapped key of verl changes the RunConfig in the stated way: an override, what it needs around it, one of our fields,
and its value then, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.verl import DIALECT

A, M, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
P = f"{A}.policy_loss"

# 8 prompts x 8 samples = 64 sequences, 2 updates of 4 x 8 = 32, micro-batches of 8; one device.
BASE = (
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=8",
    "algorithm.adv_estimator=grpo",
    f"{A}.ppo_mini_batch_size=4",
    f"{A}.ppo_micro_batch_size_per_gpu=8",
    f"{R}.name=native",
    f"{R}.n=8",
    f"{R}.log_prob_micro_batch_size_per_gpu=8",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=console",
)
PPO = ("algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=8")
KL = (f"{A}.use_kl_loss=True", f"{F}.log_prob_micro_batch_size_per_gpu=8")
KL_REWARD = ("algorithm.use_kl_in_reward=True", f"{F}.log_prob_micro_batch_size_per_gpu=8")
ADAPTIVE = (*KL_REWARD, "algorithm.kl_ctrl.type=adaptive")
TWO = ("trainer.n_gpus_per_node=2",)
PACKED = (f"{M}.use_remove_padding=True", "critic.model.use_remove_padding=True")
VLLM = (f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1")
SGLANG = (f"{R}.name=sglang", f"{R}.tensor_model_parallel_size=1")
COSINE = (f"{A}.optim.warmup_style=cosine",)
CRITIC_COSINE = (*PPO, "critic.optim.warmup_style=cosine")
MEGATRON = (f"{A}.strategy=megatron",)
WSD = (
    *MEGATRON,
    f"{A}.optim.lr_decay_style=WSD",
    f"{A}.optim.lr_wsd_decay_style=cosine",
    "trainer.total_training_steps=100",
)
CRITIC_WSD = (
    *PPO,
    *WSD,
    "critic.optim.lr_decay_style=WSD",
    "critic.optim.lr_wsd_decay_style=cosine",
    f"{A}.optim.lr_wsd_decay_steps=10",
)
BY_TOKENS = (f"{A}.use_dynamic_bsz=True", f"{A}.ppo_micro_batch_size_per_gpu=null")
DAPO = (
    "reward_model.reward_manager=dapo",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len=64",
)
RECIPE = (
    "reward_model.reward_manager=dapo",
    "+reward_model.overlong_buffer.enable=True",
    "+reward_model.overlong_buffer.len=64",
)
WANDB = ("trainer.logger=[console,wandb]",)
FUNCTION = ("custom_reward_function.path=my.py",)
SCORER = ("reward_model.enable=True", "reward_model.micro_batch_size_per_gpu=4")
FILTER = ("+algorithm.filter_groups.enable=True",)
CORRECTION = "algorithm.rollout_correction"
SAMPLED = (f"{R}.val_kwargs.do_sample=True", f"{R}.val_kwargs.temperature=1.0")

T = f"{R}.multi_turn"
FILES = Path(__file__).parent / "verl_documents"
TOOL_FILE, TALK_FILE = (
    f"{T}.tool_config_path={FILES}/tools.yaml",
    f"{T}.interaction_config_path={FILES}/interactions.yaml",
)
TURNS = (f"{T}.enable=True", TOOL_FILE)

Case = tuple[str, str, tuple[str, ...], str, Any]


def _sharding(section: str, ours: str, around: tuple[str, ...], *, trained: bool) -> Iterator[Case]:
    """The settings of FSDP, which keep their names and values."""
    common = {
        "wrap_policy.min_num_params": ("", "1000", 1000),
        "wrap_policy.transformer_layer_cls_to_wrap": ("+", "[Block]", ["Block"]),
        "wrap_policy.disable": ("+", "True", True),
        "param_offload": ("", "True", True),
        "reshard_after_forward": ("", "False", False),
        "forward_prefetch": ("", "True", True),
        "use_orig_params": ("+", "True", True),
        "mixed_precision.reduce_dtype": ("+", "bf16", "bf16"),
        "mixed_precision.buffer_dtype": ("+", "bf16", "bf16"),
    }
    of_trained = {
        "grad_offload": ("+", "True", True),
        "optimizer_offload": ("", "True", True),
        "offload_policy": ("", "True", True),
        "fsdp_size": ("", "2", 2),
    }
    for name, (plus, text, value) in (common | (of_trained if trained else {})).items():
        yield f"{section}.{name}", f"{plus}{section}.{name}={text}", (*TWO, *around), f"{ours}.{name}", value


def _engine_sampling() -> Iterator[Case]:
    """Sampling parameters that go to the sampler as they are."""
    for name, text, value in (
        ("repetition_penalty", "1.05", 1.05),
        ("presence_penalty", "0.5", 0.5),
        ("frequency_penalty", "0.5", 0.5),
        ("min_tokens", "4", 4),
        ("bad_words", "[oh]", ["oh"]),
        ("allowed_token_ids", "[1,2]", [1, 2]),
        ("include_stop_str_in_output", "True", True),
        ("skip_special_tokens", "False", False),
        ("spaces_between_special_tokens", "False", False),
        ("truncate_prompt_tokens", "64", 64),
    ):
        yield f"{R}.{name}", f"+{R}.{name}={text}", VLLM, f"rollout.engine_sampling.{name}", value


def _engine_options() -> Iterator[Case]:
    """Settings of the sampler that keep their names and values."""
    for plus, name, text, value in (
        ("", "dtype", "float16", "float16"),
        ("", "gpu_memory_utilization", "0.8", 0.8),
        ("", "enforce_eager", "False", False),
        ("", "free_cache_engine", "False", False),
        ("", "load_format", "safetensors", "safetensors"),
        ("", "max_num_batched_tokens", "4096", 4096),
        ("", "max_num_seqs", "64", 64),
        ("", "max_model_len", "2048", 2048),
        ("", "enable_chunked_prefill", "False", False),
        ("", "disable_log_stats", "False", False),
        ("", "multi_stage_wake_up", "True", True),
        ("", "limit_images", "2", 2),
    ):
        yield f"{R}.{name}", f"{plus}{R}.{name}={text}", VLLM, f"rollout.engine_options.{name}", value
    bucket = f"{R}.update_weights_bucket_megabytes"
    yield bucket, f"+{bucket}=256", VLLM, "rollout.weight_bucket_mib", 256
    later = f"{R}.checkpoint_engine.update_weights_bucket_megabytes"
    yield later, f"+{later}=64", (*VLLM, f"+{bucket}=256"), "rollout.weight_bucket_mib", 64
    cached = f"{R}.enable_prefix_caching"
    yield cached, f"+{cached}=False", VLLM, "rollout.engine_options.enable_prefix_caching", False
    stages, two = f"{R}.pipeline_model_parallel_size", (*VLLM, "trainer.n_gpus_per_node=2")
    yield stages, f"+{stages}=2", two, "rollout.engine_options.pipeline_parallel_size", 2
    yield f"{M}.tokenizer_path", f"+{M}.tokenizer_path=t", (), "model.tokenizer_path", "t"
    yield f"{M}.custom_chat_template", f"{M}.custom_chat_template=x", (), "model.chat_template", "x"
    summon = f"{R}.layered_summon"
    yield summon, f"{summon}=True", (*VLLM, f"{R}.load_format=auto"), "rollout.engine_options.layered_summon", True


def _optimizer(section: str, ours: str, around: tuple[str, ...]) -> Iterator[Case]:
    """optim of the actor or the critic."""
    at, megatron = f"{section}.optim", (*around, *MEGATRON)
    cosine = (*around, f"{at}.warmup_style=cosine")
    roles = around
    plus = "" if section == A else "+"
    yield f"{at}.lr", f"{at}.lr=3e-6", around, f"{ours}.optimizer.lr", 3e-6
    yield f"{at}.weight_decay", f"{at}.weight_decay=0.1", around, f"{ours}.optimizer.weight_decay", 0.1
    yield f"{at}.betas", f"+{at}.betas=[0.9,0.95]", around, f"{ours}.optimizer.betas", (0.9, 0.95)
    # 5 iterations x 2 updates = 10
    yield f"{at}.lr_warmup_steps", f"{at}.lr_warmup_steps=5", around, f"{ours}.schedule.warmup_updates", 10
    yield f"{at}.lr_warmup_steps_ratio", f"{at}.lr_warmup_steps_ratio=0.1", around, f"{ours}.schedule.warmup_ratio", 0.1
    yield f"{at}.lr_warmup_steps", f"{at}.lr_warmup_steps=5", around, f"{ours}.schedule.moves_every", "step"
    yield f"{at}.warmup_style", f"{at}.warmup_style=cosine", around, f"{ours}.schedule.moves_every", "step"
    # Megatron: 0.1 of the 55 iterations of the decay are 5, x 2 updates = 10
    decay = (*megatron, f"{at}.lr_decay_style=linear", f"{at}.lr_decay_steps=55")
    yield f"{at}.lr_warmup_steps_ratio", f"{at}.lr_warmup_steps_ratio=0.1", decay, f"{ours}.schedule.warmup_updates", 10
    yield f"{at}.min_lr_ratio", f"{at}.min_lr_ratio=0.2", cosine, f"{ours}.schedule.min_lr_ratio", 0.2
    yield f"{at}.num_cycles", f"{plus}{at}.num_cycles=1.5", cosine, f"{ours}.schedule.cycles", 1.5
    yield f"{at}.warmup_style", f"{at}.warmup_style=cosine", around, f"{ours}.schedule.name", "cosine"
    yield f"{at}.lr_scheduler_type", f"+{at}.lr_scheduler_type=cosine", around, f"{ours}.schedule.name", "cosine"
    yield f"{at}.clip_grad", f"{at}.clip_grad=0.5", megatron, f"{ours}.optimizer.max_grad_norm", 0.5
    style = f"{at}.lr_decay_style"
    yield style, f"{style}=inverse-square-root", megatron, f"{ours}.schedule.name", "inverse_square_root"
    linear = (*megatron, f"{style}=linear", f"{at}.lr=1e-5")
    # 1e-6 / 1e-5 = 0.1
    yield f"{at}.min_lr", f"{at}.min_lr=1e-6", linear, f"{ours}.schedule.min_lr_ratio", 1e-6 / 1e-5
    wsd = WSD if section == A else CRITIC_WSD
    # 20 of 100 iterations decay: 1 - 20 / 100 = 0.8
    around = (*wsd, f"{at}.lr_wsd_decay_steps=40")
    yield f"{at}.lr_wsd_decay_steps", f"{at}.lr_wsd_decay_steps=20", around, f"{ours}.schedule.stable_ratio", 0.8
    shape = f"{at}.lr_wsd_decay_style"
    yield shape, f"{shape}=linear", around, f"{ours}.schedule.decay", "linear"
    # 1e-6 / 1e-5 = 0.1
    yield (
        f"{at}.lr_warmup_init",
        f"{at}.lr_warmup_init=1e-6",
        linear,
        f"{ours}.schedule.warmup_start_ratio",
        1e-6 / 1e-5,
    )
    # 50 iterations x 2 updates = 100
    yield f"{at}.lr_decay_steps", f"{at}.lr_decay_steps=50", linear, f"{ours}.schedule.decay_updates", 100
    further = f"{at}.override_optimizer_config"
    yield further, f"+{further}={{eps: 1e-6}}", roles, f"{ours}.optimizer.eps", 1e-6
    yield f"{further}.**", f"+{further}.eps=1e-6", roles, f"{ours}.optimizer.eps", 1e-6


def _lora(section: str, ours: str, around: tuple[str, ...]) -> Iterator[Case]:
    """Adapters of the actor or the critic."""
    on = (*around, f"{section}.lora_rank=8")
    for name, text, field, value in (
        ("lora_alpha", "32", "alpha", 32.0),
        ("target_modules", "[q_proj,v_proj]", "target_modules", ["q_proj", "v_proj"]),
        *([("exclude_modules", "[lm_head]", "exclude_modules", ["lm_head"])] if section == M else []),
    ):
        yield f"{section}.{name}", f"{section}.{name}={text}", on, f"{ours}.lora.{field}", value
    yield f"{section}.lora_rank", f"{section}.lora_rank=32", around, f"{ours}.lora.rank", 32
    if section == M:
        path = f"{section}.lora_adapter_path"
        yield path, f"+{path}=my/adapter", around, f"{ours}.lora.adapter_path", "my/adapter"


def _megatron(section: str, ours: str, around: tuple[str, ...]) -> Iterator[Case]:
    """Sizes and settings of Megatron."""
    around = (*around, *MEGATRON, *TWO)
    for theirs, field in (
        ("tensor_model_parallel_size", "tensor_parallel"),
        ("pipeline_model_parallel_size", "pipeline_parallel"),
        ("context_parallel_size", "sequence_parallel"),
    ):
        yield f"{section}.megatron.{theirs}", f"{section}.megatron.{theirs}=2", around, f"{ours}.{field}", 2
    virtual = "virtual_pipeline_model_parallel_size"
    written = f"+{section}.megatron.{virtual}=2"
    yield f"{section}.megatron.**", written, around, f"{ours}.engine_options.{virtual}", 2
    use = f"{section}.megatron.use_distributed_optimizer"
    yield (
        f"{section}.megatron.**",
        f"+{use}=True",
        around,
        f"{ours}.engine_options",
        {"use_distributed_optimizer": True},
    )


DATA: list[Case] = [
    ("data.train_files", "data.train_files=[a.parquet,b.parquet]", (), "data.train_files", ["a.parquet", "b.parquet"]),
    ("data.val_files", "data.val_files=null", (), "data.validation_files", []),
    ("data.train_max_samples", "+data.train_max_samples=100", (), "data.max_prompts", 100),
    ("data.val_max_samples", "+data.val_max_samples=50", (), "validation.max_prompts", 50),
    ("data.prompt_key", "data.prompt_key=question", (), "data.prompt_column", "question"),
    ("data.reward_fn_key", "data.reward_fn_key=task", (), "data.data_source_column", "task"),
    ("data.image_key", "data.image_key=pictures", (), "data.image_column", "pictures"),
    ("data.video_key", "data.video_key=films", (), "data.video_column", "films"),
    (
        "data.mm_processor_kwargs",
        "+data.mm_processor_kwargs={max_pixels: 50176}",
        (),
        "data.image_options",
        {"max_pixels": 50176},
    ),
    (
        "data.mm_processor_kwargs.**",
        "+data.mm_processor_kwargs.max_pixels=50176",
        (),
        "data.image_options",
        {"max_pixels": 50176},
    ),
    ("data.max_prompt_length", "data.max_prompt_length=256", (), "data.max_prompt_tokens", 256),
    ("data.max_response_length", "data.max_response_length=256", (), "rollout.max_response_tokens", 256),
    ("data.filter_overlong_prompts", "data.filter_overlong_prompts=True", (), "data.overlong_prompts", "filter"),
    ("data.filter_overlong_prompts_workers", "data.filter_overlong_prompts_workers=4", (), "data.filter_workers", 4),
    ("data.truncation", "data.truncation=middle", (), "data.overlong_prompts", "truncate_middle"),
    (
        "data.apply_chat_template_kwargs",
        "+data.apply_chat_template_kwargs={enable_thinking: false}",
        (),
        "data.chat_template_options",
        {"enable_thinking": False},
    ),
    (
        "data.apply_chat_template_kwargs.**",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        (),
        "data.chat_template_options",
        {"enable_thinking": False},
    ),
    ("data.train_batch_size", "data.train_batch_size=16", (), "data.prompts_per_step", 16),
    ("data.shuffle", "data.shuffle=False", (), "data.shuffle", False),
    ("data.seed", "+data.seed=7", (), "data.seed", 7),
]
MODEL: list[Case] = [
    (f"{M}.path", f"{M}.path=some/model", (), "model.path", "some/model"),
    (f"{M}.external_lib", f"{M}.external_lib=my_models", (), "model.external_modules", ["my_models"]),
    (f"{M}.override_config", f"{M}.override_config={{dropout: 0.1}}", (), "model.config_overrides", {"dropout": 0.1}),
    (f"{M}.override_config.**", f"+{M}.override_config.dropout=0.1", (), "model.config_overrides", {"dropout": 0.1}),
    (
        f"{M}.override_config.model_config",
        f"+{M}.override_config.model_config={{dropout: 0.1}}",
        (),
        "model.config_overrides",
        {"dropout": 0.1},
    ),
    (
        f"{M}.override_config.moe_config.freeze_moe_router",
        f"+{M}.override_config.moe_config.freeze_moe_router=True",
        (*MEGATRON, *TWO),
        "policy.engine_options.freeze_moe_router",
        True,
    ),
    (f"{M}.trust_remote_code", f"{M}.trust_remote_code=True", (), "model.trust_remote_code", True),
    (f"{M}.enable_activation_offload", f"{M}.enable_activation_offload=True", (), "model.activation_offload", True),
    (
        f"{M}.enable_gradient_checkpointing",
        f"{M}.enable_gradient_checkpointing=False",
        (),
        "model.gradient_checkpointing",
        False,
    ),
]
ACTOR: list[Case] = [
    (f"{A}.strategy", f"{A}.strategy=megatron", TWO, "policy.engine", "megatron"),
    # 2 prompts x 8 samples = 16 sequences
    (f"{A}.ppo_mini_batch_size", f"{A}.ppo_mini_batch_size=2", (), "policy.sequences_per_mini_batch", 16),
    # 4 sequences on 2 devices = 2 each
    (
        f"{A}.ppo_micro_batch_size",
        f"{A}.ppo_micro_batch_size=4",
        (*TWO, f"{A}.ppo_micro_batch_size_per_gpu=null"),
        "policy.sequences_per_micro_batch_per_device",
        2,
    ),
    (
        f"{A}.ppo_micro_batch_size_per_gpu",
        f"{A}.ppo_micro_batch_size_per_gpu=16",
        (),
        "policy.sequences_per_micro_batch_per_device",
        16,
    ),
    (f"{A}.use_dynamic_bsz", f"{A}.use_dynamic_bsz=True", (), "policy.max_tokens_per_micro_batch", 16384),
    (
        f"{A}.ppo_max_token_len_per_gpu",
        f"{A}.ppo_max_token_len_per_gpu=4096",
        BY_TOKENS,
        "policy.max_tokens_per_micro_batch",
        4096,
    ),
    (f"{A}.ppo_epochs", f"{A}.ppo_epochs=3", (), "policy.epochs_per_step", 3),
    (
        f"{A}.ulysses_sequence_parallel_size",
        f"{A}.ulysses_sequence_parallel_size=2",
        (*TWO, *PACKED),
        "policy.sequence_parallel",
        2,
    ),
    (f"{A}.grad_clip", f"{A}.grad_clip=0.5", (), "policy.optimizer.max_grad_norm", 0.5),
    (f"{A}.clip_ratio", f"{A}.clip_ratio=0.1", (), "loss.clip_ratio_low", 0.1),
    (f"{A}.clip_ratio_low", f"{A}.clip_ratio_low=0.1", (), "loss.clip_ratio_low", 0.1),
    (f"{A}.clip_ratio_high", f"{A}.clip_ratio_high=0.28", (), "loss.clip_ratio_high", 0.28),
    (f"{A}.clip_ratio_c", f"{A}.clip_ratio_c=5.0", (), "loss.dual_clip", 5.0),
    (f"{A}.loss_agg_mode", f"{A}.loss_agg_mode=seq-mean-token-sum", (), "loss.aggregation", "sequence_mean_token_sum"),
    (
        f"{A}.loss_scale_factor",
        f"+{A}.loss_scale_factor=100",
        (f"{A}.loss_agg_mode=seq-mean-token-sum-norm",),
        "loss.norm_tokens",
        100,
    ),
    (f"{A}.entropy_coeff", f"{A}.entropy_coeff=0.01", (), "loss.entropy_coef", 0.01),
    (f"{A}.use_kl_loss", f"{A}.use_kl_loss=True", (f"{F}.log_prob_micro_batch_size_per_gpu=8",), "loss.kl_coef", 0.001),
    (f"{A}.kl_loss_coef", f"{A}.kl_loss_coef=0.05", KL, "loss.kl_coef", 0.05),
    (f"{A}.kl_loss_type", f"{A}.kl_loss_type=mse", KL, "loss.kl_estimator", "k2"),
    (f"{P}.loss_mode", f"{P}.loss_mode=gpg", (), "loss.name", "gpg"),
    (
        f"{P}.clip_cov_ratio",
        f"{P}.clip_cov_ratio=0.01",
        (f"{P}.loss_mode=clip_cov", f"{A}.ppo_micro_batch_size_per_gpu=32"),
        "loss.covariance_share",
        0.01,
    ),
    (
        f"{P}.kl_cov_ratio",
        f"{P}.kl_cov_ratio=0.01",
        (f"{P}.loss_mode=kl_cov", f"{A}.ppo_micro_batch_size_per_gpu=32"),
        "loss.covariance_share",
        0.01,
    ),
    (
        f"{P}.clip_cov_lb",
        f"{P}.clip_cov_lb=2.0",
        (f"{P}.loss_mode=clip_cov", f"{A}.ppo_micro_batch_size_per_gpu=32"),
        "loss.covariance_low",
        2.0,
    ),
    (
        f"{P}.clip_cov_ub",
        f"{P}.clip_cov_ub=4.0",
        (f"{P}.loss_mode=clip_cov", f"{A}.ppo_micro_batch_size_per_gpu=32"),
        "loss.covariance_high",
        4.0,
    ),
    (
        f"{P}.ppo_kl_coef",
        f"{P}.ppo_kl_coef=0.3",
        (f"{P}.loss_mode=kl_cov", f"{A}.ppo_micro_batch_size_per_gpu=32"),
        "loss.covariance_kl_coef",
        0.3,
    ),
    (f"{P}.dro_beta", f"+{P}.dro_beta=0.2", (f"{P}.loss_mode=dro",), "loss.dro_beta", 0.2),
    (f"{A}.tau_pos", f"+{A}.tau_pos=2.0", (f"{P}.loss_mode=sapo",), "loss.gate_sharpness_positive", 2.0),
    (f"{A}.tau_neg", f"+{A}.tau_neg=2.0", (f"{P}.loss_mode=sapo",), "loss.gate_sharpness_negative", 2.0),
    (f"{A}.tis_imp_ratio_cap", f"+{A}.tis_imp_ratio_cap=4.0", (), "loss.rollout_correction.weight_high", 4.0),
    (
        f"{A}.use_rollout_log_probs",
        f"+{A}.use_rollout_log_probs=True",
        (),
        "loss.rollout_correction.use_rollout_logprobs",
        True,
    ),
    (
        f"{A}.fsdp_config.mixed_precision.param_dtype",
        f"+{A}.fsdp_config.mixed_precision.param_dtype=fp32",
        (),
        "model.compute_dtype",
        "float32",
    ),
    (f"{A}.fsdp_config.dtype", f"+{A}.fsdp_config.dtype=float32", (), "model.compute_dtype", "float32"),
    *_optimizer(A, "policy", ()),
    *_megatron(A, "policy", ()),
    *_sharding(f"{A}.fsdp_config", "policy.engine_options", (), trained=True),
]
REFERENCE: list[Case] = [
    # 8 sequences on 2 devices = 4 each, and the rollout's 8 are more
    (
        f"{F}.log_prob_micro_batch_size",
        f"{F}.log_prob_micro_batch_size=8",
        (*TWO, f"{A}.use_kl_loss=True"),
        "reference.sequences_per_micro_batch_per_device",
        4,
    ),
    (
        f"{F}.log_prob_micro_batch_size_per_gpu",
        f"{F}.log_prob_micro_batch_size_per_gpu=4",
        KL,
        "reference.sequences_per_micro_batch_per_device",
        4,
    ),
    (
        f"{F}.log_prob_use_dynamic_bsz",
        f"{F}.log_prob_use_dynamic_bsz=True",
        (*KL, f"{R}.log_prob_use_dynamic_bsz=True"),
        "reference.max_tokens_per_micro_batch",
        16384,
    ),
    (
        f"{F}.log_prob_max_token_len_per_gpu",
        f"{F}.log_prob_max_token_len_per_gpu=2048",
        (*KL, *BY_TOKENS),
        "reference.max_tokens_per_micro_batch",
        2048,
    ),
    (f"{F}.model.path", f"+{F}.model.path=some/reference", KL, "reference.path", "some/reference"),
    (
        f"{F}.megatron.**",
        f"+{F}.megatron.param_offload=True",
        (*KL, *MEGATRON, *TWO),
        "reference.engine_options",
        {"param_offload": True},
    ),
    *_sharding(f"{F}.fsdp_config", "reference.engine_options", KL, trained=False),
]
ROLLOUT: list[Case] = [
    (f"{R}.name", f"{R}.name=hf", (), "rollout.engine", "hf"),
    (f"{R}.n", f"{R}.n=4", (), "rollout.samples_per_prompt", 4),
    (f"{R}.temperature", f"{R}.temperature=0.7", (), "rollout.temperature", 0.7),
    (f"{R}.top_k", f"{R}.top_k=50", (), "rollout.top_k", 50),
    (f"{R}.top_p", f"{R}.top_p=0.9", (), "rollout.top_p", 0.9),
    (f"{R}.min_p", f"+{R}.min_p=0.1", (), "rollout.min_p", 0.1),
    (f"{R}.stop", f"+{R}.stop=END", (), "rollout.stop", ["END"]),
    (f"{R}.stop_token_ids", f"+{R}.stop_token_ids=[5]", (), "validation.stop_token_ids", [5]),
    (f"{R}.ignore_eos", f"{R}.ignore_eos=True", (), "rollout.ignore_eos", True),
    (f"{R}.seed", f"+{R}.seed=9", (), "run.seed", 9),
    (f"{R}.response_length", f"{R}.response_length=100", (), "rollout.max_response_tokens", 100),
    (
        f"{R}.tensor_model_parallel_size",
        f"{R}.tensor_model_parallel_size=2",
        (*VLLM, *TWO),
        "rollout.tensor_parallel",
        2,
    ),
    (
        f"{R}.engine_kwargs.vllm.swap_space",
        f"{R}.engine_kwargs.vllm.swap_space=32",
        VLLM,
        "rollout.engine_options.swap_space",
        32,
    ),
    (
        f"{R}.engine_kwargs.vllm.disable_mm_preprocessor_cache",
        f"{R}.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
        VLLM,
        "rollout.engine_options.disable_mm_preprocessor_cache",
        True,
    ),
    (
        f"{R}.engine_kwargs.vllm.**",
        f"+{R}.engine_kwargs.vllm.disable_cascade_attn=True",
        VLLM,
        "rollout.engine_options.disable_cascade_attn",
        True,
    ),
    (
        f"{R}.engine_kwargs.sglang.attention_backend",
        f"{R}.engine_kwargs.sglang.attention_backend=triton",
        SGLANG,
        "rollout.engine_options.attention_backend",
        "triton",
    ),
    (
        f"{R}.engine_kwargs.sglang.**",
        f"+{R}.engine_kwargs.sglang.chunked_prefill_size=512",
        SGLANG,
        "rollout.engine_options.chunked_prefill_size",
        512,
    ),
    # 4 sequences on 2 devices = 2 each
    (
        f"{R}.log_prob_micro_batch_size",
        f"{R}.log_prob_micro_batch_size=4",
        (*TWO, f"{R}.log_prob_micro_batch_size_per_gpu=null"),
        "reference.sequences_per_micro_batch_per_device",
        2,
    ),
    (
        f"{R}.log_prob_micro_batch_size_per_gpu",
        f"{R}.log_prob_micro_batch_size_per_gpu=4",
        (),
        "reference.sequences_per_micro_batch_per_device",
        4,
    ),
    (
        f"{R}.log_prob_use_dynamic_bsz",
        f"{R}.log_prob_use_dynamic_bsz=True",
        (),
        "reference.max_tokens_per_micro_batch",
        16384,
    ),
    (
        f"{R}.log_prob_max_token_len_per_gpu",
        f"{R}.log_prob_max_token_len_per_gpu=2048",
        BY_TOKENS,
        "reference.max_tokens_per_micro_batch",
        2048,
    ),
    (f"{R}.val_kwargs.n", f"{R}.val_kwargs.n=4", (), "validation.samples_per_prompt", 4),
    (
        f"{R}.val_kwargs.do_sample",
        f"{R}.val_kwargs.do_sample=True",
        (f"{R}.val_kwargs.temperature=0.6",),
        "validation.temperature",
        0.6,
    ),
    (f"{R}.val_kwargs.temperature", f"{R}.val_kwargs.temperature=0.6", SAMPLED, "validation.temperature", 0.6),
    (f"{R}.val_kwargs.top_p", f"{R}.val_kwargs.top_p=0.7", SAMPLED, "validation.top_p", 0.7),
    (f"{R}.val_kwargs.top_k", f"{R}.val_kwargs.top_k=20", SAMPLED, "validation.top_k", 20),
    *_engine_sampling(),
    *_engine_options(),
]
CRITIC: list[Case] = [
    ("critic.model.path", "critic.model.path=some/critic", PPO, "critic.path", "some/critic"),
    ("critic.model.external_lib", "critic.model.external_lib=values", PPO, "model.external_modules", ["values"]),
    (
        "critic.model.enable_activation_offload",
        "critic.model.enable_activation_offload=True",
        PPO,
        "critic.activation_offload",
        True,
    ),
    (
        "critic.model.enable_gradient_checkpointing",
        "critic.model.enable_gradient_checkpointing=False",
        PPO,
        "critic.gradient_checkpointing",
        False,
    ),
    (
        "critic.strategy",
        "critic.strategy=megatron",
        (*PPO, *TWO, f"{A}.strategy=megatron", "critic.strategy=fsdp"),
        "critic.engine",
        "megatron",
    ),
    # 2 prompts x 8 samples = 16 sequences
    ("critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size=2", PPO, "critic.sequences_per_mini_batch", 16),
    (
        "critic.ppo_micro_batch_size",
        "critic.ppo_micro_batch_size=4",
        (*PPO, *TWO, "critic.ppo_micro_batch_size_per_gpu=null"),
        "critic.sequences_per_micro_batch_per_device",
        2,
    ),
    (
        "critic.ppo_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu=4",
        PPO,
        "critic.sequences_per_micro_batch_per_device",
        4,
    ),
    ("critic.use_dynamic_bsz", "critic.use_dynamic_bsz=True", PPO, "critic.max_tokens_per_micro_batch", 32768),
    (
        "critic.ppo_max_token_len_per_gpu",
        "critic.ppo_max_token_len_per_gpu=8192",
        (*PPO, "critic.use_dynamic_bsz=True"),
        "critic.max_tokens_per_micro_batch",
        8192,
    ),
    (
        "critic.ulysses_sequence_parallel_size",
        "critic.ulysses_sequence_parallel_size=2",
        (*PPO, *TWO, *PACKED),
        "critic.sequence_parallel",
        2,
    ),
    ("critic.ppo_epochs", "critic.ppo_epochs=2", PPO, "critic.epochs_per_step", 2),
    ("critic.grad_clip", "critic.grad_clip=0.5", PPO, "critic.optimizer.max_grad_norm", 0.5),
    ("critic.cliprange_value", "critic.cliprange_value=0.2", PPO, "critic.value_clip", 0.2),
    (
        "critic.loss_agg_mode",
        "critic.loss_agg_mode=seq-mean-token-mean",
        PPO,
        "critic.aggregation",
        "sequence_mean_token_mean",
    ),
    *_optimizer("critic", "critic", PPO),
    *_megatron("critic", "critic", PPO),
    *_sharding("critic.model.fsdp_config", "critic.engine_options", PPO, trained=True),
]
MY_REWARD = {
    "name": "compute_score",
    "path": "my.py",
    "weight": 1.0,
    "options": {},
    "batched": False,
    "data_sources": [],
    "halve_failed_batch": True,
}
MY_BATCH = {**MY_REWARD, "batched": True}
EXACT_MATCH = {**MY_REWARD, "name": "exact_match", "path": None}
REWARD: list[Case] = [
    ("custom_reward_function.path", "custom_reward_function.path=my.py", (), "reward.terms", [MY_REWARD]),
    ("custom_reward_function.name", "custom_reward_function.name=exact_match", (), "reward.terms", [EXACT_MATCH]),
    (
        "custom_reward_function.reward_kwargs",
        "+custom_reward_function.reward_kwargs={scale: 2}",
        FUNCTION,
        "reward.terms",
        [{**MY_REWARD, "options": {"scale": 2}}],
    ),
    (
        "custom_reward_function.reward_kwargs.**",
        "+custom_reward_function.reward_kwargs.scale=2",
        FUNCTION,
        "reward.terms",
        [{**MY_REWARD, "options": {"scale": 2}}],
    ),
    (
        "reward_model.reward_manager",
        "reward_model.reward_manager=dapo",
        DAPO[1:],
        "reward.overlong_buffer_tokens",
        64,
    ),
    (
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        "++reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
        (DAPO[0], DAPO[2]),
        "reward.overlong_buffer_tokens",
        64,
    ),
    (
        "reward_model.reward_kwargs.overlong_buffer_cfg.len",
        "++reward_model.reward_kwargs.overlong_buffer_cfg.len=32",
        DAPO,
        "reward.overlong_buffer_tokens",
        32,
    ),
    (
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
        DAPO,
        "reward.overlong_penalty",
        0.5,
    ),
    (
        "reward_model.overlong_buffer.enable",
        "++reward_model.overlong_buffer.enable=True",
        (RECIPE[0], RECIPE[2]),
        "reward.overlong_buffer_tokens",
        64,
    ),
    (
        "reward_model.overlong_buffer.len",
        "++reward_model.overlong_buffer.len=32",
        RECIPE,
        "reward.overlong_buffer_tokens",
        32,
    ),
    (
        "reward_model.overlong_buffer.penalty_factor",
        "+reward_model.overlong_buffer.penalty_factor=0.5",
        RECIPE,
        "reward.overlong_penalty",
        0.5,
    ),
    ("reward_model.enable", "reward_model.enable=True", SCORER[1:], "reward.terms", []),
    ("reward_model.model.path", "reward_model.model.path=some/scorer", SCORER, "reward.model.path", "some/scorer"),
    (
        "reward_model.model.input_tokenizer",
        "reward_model.model.input_tokenizer=null",
        SCORER,
        "reward.model.own_template",
        False,
    ),
    (
        "reward_model.model.external_lib",
        "reward_model.model.external_lib=scorers",
        SCORER,
        "model.external_modules",
        ["scorers"],
    ),
    (
        "reward_model.model.trust_remote_code",
        "reward_model.model.trust_remote_code=True",
        SCORER,
        "reward.model.trust_remote_code",
        True,
    ),
    (
        "reward_model.micro_batch_size",
        "reward_model.micro_batch_size=4",
        ("reward_model.enable=True", *TWO),
        "reward.model.sequences_per_micro_batch_per_device",
        2,
    ),
    (
        "reward_model.micro_batch_size_per_gpu",
        "reward_model.micro_batch_size_per_gpu=2",
        SCORER,
        "reward.model.sequences_per_micro_batch_per_device",
        2,
    ),
    ("reward_model.max_length", "reward_model.max_length=700", SCORER, "reward.model.max_tokens", 700),
    (
        "reward.custom_reward_function.path",
        "+reward.custom_reward_function.path=my.py",
        (),
        "reward.terms",
        [MY_REWARD],
    ),
    (
        "reward.custom_reward_function.name",
        "+reward.custom_reward_function.name=exact_match",
        (),
        "reward.terms",
        [EXACT_MATCH],
    ),
    ("reward.reward_manager.name", "+reward.reward_manager.name=dapo", DAPO[1:], "reward.overlong_buffer_tokens", 64),
    ("reward.reward_manager.name", "+reward.reward_manager.name=batch", FUNCTION, "reward.terms", [MY_BATCH]),
    ("reward_model.reward_manager", "reward_model.reward_manager=batch", FUNCTION, "reward.terms", [MY_BATCH]),
    ("reward.num_workers", "+reward.num_workers=3", FUNCTION, "reward.workers", 3),
    ("reward_model.num_workers", "+reward_model.num_workers=3", FUNCTION, "reward.workers", 3),
    (
        "reward_model.reward_kwargs.num_processes",
        "+reward_model.reward_kwargs.num_processes=3",
        FUNCTION,
        "reward.workers",
        3,
    ),
    (
        "reward_model.reward_kwargs.timeout",
        "+reward_model.reward_kwargs.timeout=20",
        FUNCTION,
        "reward.timeout_s",
        20.0,
    ),
]
ALGORITHM: list[Case] = [
    ("algorithm.adv_estimator", "algorithm.adv_estimator=rloo", (), "advantage.name", "rloo"),
    ("algorithm.gamma", "algorithm.gamma=0.99", PPO, "advantage.gamma", 0.99),
    ("algorithm.lam", "algorithm.lam=0.95", PPO, "advantage.gae_lambda", 0.95),
    (
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.norm_adv_by_std_in_grpo=False",
        (),
        "advantage.normalize_by_std",
        False,
    ),
    ("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward=True", KL_REWARD[1:], "reward.kl.coef", 0.001),
    ("algorithm.kl_penalty", "algorithm.kl_penalty=low_var_kl", KL_REWARD, "reward.kl.estimator", "k3"),
    ("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type=adaptive", KL_REWARD, "reward.kl.target", 0.1),
    ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.kl_coef=0.01", KL_REWARD, "reward.kl.coef", 0.01),
    ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.horizon=500", ADAPTIVE, "reward.kl.horizon_sequences", 500),
    ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.target_kl=0.3", ADAPTIVE, "reward.kl.target", 0.3),
    ("algorithm.filter_groups.enable", "+algorithm.filter_groups.enable=True", (), "group_filter.strategy", "refill"),
    (
        "algorithm.filter_groups.metric",
        "+algorithm.filter_groups.metric=acc",
        FILTER,
        "group_filter.metric",
        "by_data_source/acc",
    ),
    (
        "algorithm.filter_groups.max_num_gen_batches",
        "+algorithm.filter_groups.max_num_gen_batches=10",
        FILTER,
        "group_filter.max_batches",
        10,
    ),
    (
        f"{CORRECTION}.rollout_is",
        f"+{CORRECTION}.rollout_is=sequence",
        (),
        "loss.rollout_correction.weights",
        "sequence",
    ),
    (
        f"{CORRECTION}.rollout_is_threshold",
        f"+{CORRECTION}.rollout_is_threshold=0.5_5.0",
        (f"+{CORRECTION}.rollout_is=token",),
        "loss.rollout_correction.weight_low",
        0.5,
    ),
    (
        f"{CORRECTION}.rollout_is_batch_normalize",
        f"+{CORRECTION}.rollout_is_batch_normalize=True",
        (f"+{CORRECTION}.rollout_is=token",),
        "loss.rollout_correction.normalize",
        True,
    ),
    (
        f"{CORRECTION}.rollout_rs",
        f"+{CORRECTION}.rollout_rs='token_k1,seq_max_k3'",
        (f"+{CORRECTION}.rollout_rs_threshold=2.0",),
        "loss.rollout_correction.reject",
        ["token_k1", "sequence_max_k3"],
    ),
    (
        f"{CORRECTION}.rollout_rs_threshold",
        f"{CORRECTION}.rollout_rs_threshold='0.5_2.0,0.01'",
        (f"+{CORRECTION}.rollout_rs='token_k1,seq_mean_k3'", f"+{CORRECTION}.rollout_rs_threshold=2.0"),
        "loss.rollout_correction.reject_bounds",
        ["0.5_2.0", "0.01"],
    ),
    (
        f"{CORRECTION}.bypass_mode",
        f"+{CORRECTION}.bypass_mode=True",
        (),
        "loss.rollout_correction.use_rollout_logprobs",
        True,
    ),
    (
        f"{CORRECTION}.loss_type",
        f"+{CORRECTION}.loss_type=reinforce",
        (f"+{CORRECTION}.bypass_mode=True",),
        "loss.name",
        "gpg",
    ),
    (
        "algorithm.gdpo_reward_keys",
        "algorithm.gdpo_reward_keys=[score,acc]",
        ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[format]"),
        "advantage.terms",
        ["by_data_source", "by_data_source/acc"],
    ),
    (
        "algorithm.gdpo_reward_weights",
        "+algorithm.gdpo_reward_weights=[1.0,0.5]",
        ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[acc,format]"),
        "advantage.term_weights",
        [1.0, 0.5],
    ),
]
TRAINER: list[Case] = [
    ("trainer.total_epochs", "trainer.total_epochs=3", (), "run.total_epochs", 3),
    ("trainer.total_training_steps", "trainer.total_training_steps=40", (), "run.total_steps", 40),
    # the actor joins in at iteration 5, so 4 are the critic's alone
    ("trainer.critic_warmup", "trainer.critic_warmup=5", PPO, "critic.warmup_steps", 4),
    ("trainer.n_gpus_per_node", "trainer.n_gpus_per_node=2", (), "placement.devices", 2),
    (
        "trainer.ray_wait_register_center_timeout",
        "trainer.ray_wait_register_center_timeout=60",
        (),
        "placement.start_timeout_s",
        60.0,
    ),
    ("ray_kwargs.ray_init.address", "+ray_kwargs.ray_init.address=auto", (), "placement.ray_address", "auto"),
    ("trainer.nnodes", "trainer.nnodes=2", TWO, "placement.devices", 4),
    ("trainer.device", "trainer.device=cpu", (), "placement.device", "cpu"),
    ("trainer.project_name", "trainer.project_name=sums", (), "tracking.project", "sums"),
    ("trainer.experiment_name", "trainer.experiment_name=first", (), "run.name", "first"),
    ("trainer.logger", "trainer.logger=[console,tracking,file]", (), "tracking.trackers", ["console", "wandb"]),
    ("trainer.log_val_generations", "trainer.log_val_generations=10", WANDB, "tracking.validation_samples", 10),
    (
        "trainer.val_generations_to_log_to_wandb",
        "+trainer.val_generations_to_log_to_wandb=5",
        WANDB,
        "tracking.validation_samples",
        5,
    ),
    ("trainer.wandb_proxy", "+trainer.wandb_proxy=http://proxy:80", WANDB, "tracking.proxy", "http://proxy:80"),
    ("trainer.test_freq", "trainer.test_freq=5", (), "validation.every_steps", 5),
    ("trainer.val_before_train", "trainer.val_before_train=False", (), "validation.before_training", False),
    ("trainer.save_freq", "trainer.save_freq=20", (), "checkpoint.every_steps", 20),
    ("trainer.default_local_dir", "trainer.default_local_dir=out/here", (), "run.folder", "out/here"),
    ("trainer.resume_mode", "trainer.resume_mode=disable", (), "run.resume", "never"),
    (
        "trainer.resume_from_path",
        "trainer.resume_from_path=out/global_step_5",
        ("trainer.resume_mode=resume_path",),
        "run.resume_path",
        "out/global_step_5",
    ),
    ("trainer.default_hdfs_dir", "trainer.default_hdfs_dir=s3://store/run", (), "checkpoint.upload", "s3://store/run"),
    *(
        (f"{A}.checkpoint.{key}", f"{plus}{A}.checkpoint.{key}=[model,extra]", (), f"checkpoint.{field}", False)
        for key, field, plus in (
            ("save_contents", "save_optimizer", ""),
            ("load_contents", "load_optimizer", ""),
            ("contents", "save_optimizer", "+"),
        )
    ),
    (f"{A}.checkpoint.async_save", f"+{A}.checkpoint.async_save=False", (), "checkpoint.background", False),
    ("trainer.max_actor_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep=3", (), "checkpoint.keep_last", 3),
    (
        "trainer.remove_previous_ckpt_in_save",
        "+trainer.remove_previous_ckpt_in_save=True",
        (),
        "checkpoint.keep_last",
        1,
    ),
]

# A key decides several fields: the others, with the same override.
FURTHER: list[Case] = [
    *(
        (f"{A}.checkpoint.{key}", f"{plus}{A}.checkpoint.{key}=[model]", (), f"checkpoint.{field}", False)
        for key, field, plus in (
            ("load_contents", "load_schedule", ""),
            ("contents", "load_optimizer", "+"),
            ("contents", "load_schedule", "+"),
        )
    ),
    ("trainer.logger", "trainer.logger=[console,mlflow]", (), "tracking.dialect_names", "verl"),
    *(
        (f"{key}{end}", f"+{key}{text}", around, f"{role}.optimizer.betas", (0.8, 0.9))
        for key, role, around in (
            (f"{A}.optim.override_optimizer_config", "policy", ()),
            ("critic.optim.override_optimizer_config", "critic", PPO),
        )
        for end, text in (("", "={betas: [0.8, 0.9]}"), (".**", ".betas=[0.8,0.9]"))
    ),
    (  # the loss of bypass_mode=reinforce has no ratio, so that the weights have an effect
        f"{CORRECTION}.rollout_is",
        f"+{CORRECTION}.rollout_is=sequence",
        (f"+{CORRECTION}.bypass_mode=True", f"+{CORRECTION}.loss_type=reinforce"),
        "loss.rollout_correction.weights",
        "sequence",
    ),
    (f"{A}.clip_ratio", f"{A}.clip_ratio=0.1", (), "loss.clip_ratio_high", 0.1),
    (f"{A}.tis_imp_ratio_cap", f"+{A}.tis_imp_ratio_cap=4.0", (), "loss.rollout_correction.weights", "token"),
    (
        f"{CORRECTION}.rollout_is_threshold",
        f"+{CORRECTION}.rollout_is_threshold=5.0",
        (f"+{CORRECTION}.rollout_is=token",),
        "loss.rollout_correction.weight_high",
        5.0,
    ),
    ("reward_model.enable", "reward_model.enable=True", SCORER[1:], "reward.model.own_template", True),
    (f"{R}.stop", f"+{R}.stop=[A,B]", (), "validation.stop", ["A", "B"]),
    (f"{R}.stop_token_ids", f"+{R}.stop_token_ids=[5]", (), "rollout.stop_token_ids", [5]),
    (f"{R}.ignore_eos", f"{R}.ignore_eos=True", (), "validation.ignore_eos", True),
    (
        f"{R}.repetition_penalty",
        f"+{R}.repetition_penalty=1.05",
        VLLM,
        "validation.engine_sampling.repetition_penalty",
        1.05,
    ),
    (
        "algorithm.adv_estimator",
        "algorithm.adv_estimator=rloo",
        (f"{R}.n=1", f"{A}.ppo_micro_batch_size_per_gpu=4", *PPO[:1], "critic.ppo_micro_batch_size_per_gpu=4"),
        "advantage.lone_sample_keeps_reward",
        True,
    ),
    ("trainer.nnodes", "trainer.nnodes=2", TWO, "placement.nodes", 2),
    ("trainer.test_freq", "trainer.test_freq=5", (), "validation.after_training", True),
    ("trainer.save_freq", "trainer.save_freq=20", (), "checkpoint.at_end", True),
    (
        "global_profiler.tool",
        "+global_profiler.tool=torch_memory",
        ("+global_profiler.steps=[2]",),
        "profiling.operators",
        False,
    ),
    ("trainer.default_local_dir", "trainer.default_local_dir=out/here", (), "checkpoint.folder", "out/here"),
]

ADAPTERS = [*_lora(M, "policy", ()), *_lora("critic.model", "critic", PPO)]
_CHECK = {"type": "function", "function": {"name": "check", "description": "d",
          "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
_OTHERS = [
    {"name": "verl", "class_name": "my.tools.Weather", "config": {"city": "Rome"}, "tool_schema": None},
    {"name": "python", "timeout_s": 9},
]
_TALKS = [
    {"name": "check", "class_name": "gsm8k", "config": {}},
    {"name": "quiz", "class_name": "my.talks.QuizInteraction", "config": {"rounds": 3}},
]
_S = "environment.settings"
# Prompts of up to 512 tokens and responses of up to 512: 1024 together.
_PATH = f"{R}.agent.custom_async_server.path"
_NAME = f"{R}.agent.custom_async_server.name"
TURN_CASES: list[Case] = [
    (_PATH, f"{_PATH}=my.py", (f"{R}.mode=async", f"{_NAME}=Server"), "rollout.engine", "http"),
    (_PATH, f"{_PATH}=my.py", (f"{R}.mode=async", f"{_NAME}=Server"), "rollout.engine_options.server", "my.py:Server"),
    (_NAME, f"{_NAME}=Server", (f"{R}.mode=async", f"{_PATH}=my.py"), "rollout.engine_options.server", "my.py:Server"),
    (f"{T}.enable", f"{T}.enable=True", (TOOL_FILE,), "environment.name", "tools"),
    (f"{T}.enable", f"{T}.enable=True", (TOOL_FILE,), "environment.max_trajectory_tokens", 512),
    (f"{T}.enable", f"{T}.enable=True", (TOOL_FILE,), "environment.max_sequence_tokens", 1024),
    (f"{T}.enable", f"{T}.enable=True", (TALK_FILE,), "environment.name", "interaction"),
    (f"{T}.max_turns", f"+{T}.max_turns=7", TURNS, "environment.max_turns", 7),
    (f"{T}.max_assistant_turns", f"{T}.max_assistant_turns=5", TURNS, "environment.max_turns", 5),
    (f"{T}.max_user_turns", f"{T}.max_user_turns=3", TURNS, "environment.max_turns", 4),  # the model reads the third answer
    (f"{T}.max_user_turns", f"{T}.max_user_turns=3", (*TURNS, f"{T}.max_assistant_turns=9"), "environment.max_turns", 4),
    (f"{T}.tool_config_path", f"{T}.tool_config_path={FILES}/other_tools.yaml", TURNS, f"{_S}.tools", _OTHERS),
    (f"{T}.tool_config_path", TOOL_FILE, (f"{T}.enable=True", TALK_FILE), f"{_S}.tools", [{"name": "gsm8k", "schema": _CHECK}]),
    (f"{T}.interaction_config_path", TALK_FILE, TURNS, f"{_S}.interactions", _TALKS),
    (f"{T}.max_parallel_calls", f"{T}.max_parallel_calls=4", TURNS, f"{_S}.max_calls_per_turn", 4),
    (f"{T}.max_tool_response_length", f"{T}.max_tool_response_length=99", TURNS, f"{_S}.max_result_characters", 99),
    (f"{T}.tool_response_truncate_side", f"{T}.tool_response_truncate_side=left", TURNS, f"{_S}.cut", "end"),
    (f"{T}.tool_response_truncate_side", f"{T}.tool_response_truncate_side=right", TURNS, f"{_S}.cut", "start"),
    (f"{T}.use_inference_chat_template", f"{T}.use_inference_chat_template=True", TURNS, "environment.changed_history", "split"),
    (f"{R}.agent.default_agent_loop", f"+{R}.agent.default_agent_loop=tool_agent", (f"{R}.mode=async", TOOL_FILE),
     "environment.name", "tools"),
]  # fmt: skip

PROFILED = ("trainer.profile_steps=[2]",)
BY_TORCH = ("+global_profiler.steps=[2]", "+global_profiler.tool=torch")
PROFILERS = [
    ("trainer.profile_steps", "trainer.profile_steps=[1,5]", (), "profiling.steps", [1, 5]),
    ("global_profiler.steps", "+global_profiler.steps=[3]", ("+global_profiler.tool=torch",), "profiling.steps", [3]),
    ("global_profiler.tool", "+global_profiler.tool=torch_memory", BY_TORCH[:1], "profiling.memory", True),
    ("global_profiler.save_path", "+global_profiler.save_path=out", BY_TORCH, "profiling.folder", "out"),
    *(
        (f"{role}.profiler.{name}", f"{sign}{role}.profiler.{name}={written}", PROFILED, "profiling.phases", phases)
        for role, phases in (
            (A, ["logprobs", "update"]),
            (F, ["logprobs"]),
            (R, ["rollout"]),
            ("critic", ["values", "critic_update"]),
            ("reward_model", ["reward"]),
        )
        for sign, name, written in (("", "all_ranks", "True"), ("", "ranks", "[0]"), ("+", "enable", "True"))
    ),
    *((f"{role}.profiler.all_ranks", f"{role}.profiler.all_ranks=True", (*PROFILED, f"{role}.profiler.ranks=[1]"),
       "profiling.ranks", "all") for role in (A, F, R, "critic", "reward_model")),
    *((f"{role}.profiler.ranks", f"{role}.profiler.ranks=[3,1]", PROFILED, "profiling.ranks", [1, 3])
      for role in (A, F, R, "critic", "reward_model")),
    (f"{A}.profiler.ranks", f"{A}.profiler.ranks=[2]", (*PROFILED, f"{R}.profiler.ranks=[0]"), "profiling.ranks", [0, 2]),
]  # fmt: skip
# Pools of devices beside the trainer's one, device 0: the reward model's come first, then the sampler's.
SAMPLER_POOL = {"nnodes": f"+{R}.nnodes=2", "n_gpus_per_node": f"+{R}.n_gpus_per_node=2"}
SCORER_POOL = {
    "enable_resource_pool": "+reward_model.enable_resource_pool=True",
    "nnodes": "+reward_model.nnodes=2",
    "n_gpus_per_node": "+reward_model.n_gpus_per_node=3",
}
POOLS = [
    *(
        (f"{R}.{name}", override, tuple(other for other in SAMPLER_POOL.values() if other != override), field, expected)
        for name, override in SAMPLER_POOL.items()
        for field, expected in (("rollout.devices", [1, 2, 3, 4]), ("placement.devices", 5))  # 2 x 2
    ),
    *(
        (f"reward_model.{name}", override, (*SCORER, *(other for other in SCORER_POOL.values() if other != override)),
         field, expected)
        for name, override in SCORER_POOL.items()
        for field, expected in (("reward.model.devices", [1, 2, 3, 4, 5, 6]), ("placement.devices", 7))  # 2 x 3
    ),
]  # fmt: skip
TOWER = [
    (f"{role}.freeze_vision_tower", f"+{role}.freeze_vision_tower=True", (), "model.freeze_vision", True)
    for role in (A, M)
]
CASES = [
    *ADAPTERS,
    *PROFILERS,
    *POOLS,
    *TOWER,
    *DATA,
    *MODEL,
    *ACTOR,
    *REFERENCE,
    *ROLLOUT,
    *TURN_CASES,
    *CRITIC,
    *REWARD,
    *ALGORITHM,
    *TRAINER,
]


@cache
def read(*overrides: str) -> LoadedConfig:
    return read_dialect(DIALECT, None, [*BASE, *overrides])


def value(config: RunConfig, field: str) -> Any:
    node: Any = config
    for part in field.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part, None)
    return [item.model_dump() for item in node] if field == "reward.terms" else node


def test_every_mapped_key_has_a_case() -> None:
    mapped = {row.name for row in DIALECT.ledger.of("train").rows if row.status == "mapped"}
    assert mapped == {key for key, *_ in CASES}


def test_every_field_of_every_mapped_key_has_a_case() -> None:
    """A key that decides several fields has one case for each; sections stand for what lies in them."""
    seen = {(key, field) for key, _, _, field, _ in [*CASES, *FURTHER]}
    for row in DIALECT.ledger.of("train").rows:
        if row.status == "mapped" and len(row.fields) > 1 and "engine_sampling" not in row.fields[0]:
            missing = [field for field in row.fields if (row.name, field) not in seen]
            assert missing in ([], ["reward.model.path"]), row.name


@pytest.mark.parametrize("case", [*CASES, *FURTHER], ids=lambda case: f"{case[0]}-{case[3].rpartition('.')[2]}")
def test_a_key_changes_its_field(case: Case) -> None:
    _, override, around, field, expected = case
    before, after = read(*around), read(*around, override)
    assert not after.problems
    found = value(after.config, field)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)
    assert type(found) is type(expected) or isinstance(expected, float)
    assert value(before.config, field) != found


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


def test_the_whole_sequence_is_what_verl_gives_the_sampler() -> None:
    """max_model_len, where it is given; and a conversation goes on behind what the model has read."""
    environment = read(*TURNS, *VLLM, f"{R}.max_model_len=900", f"{R}.max_num_batched_tokens=1024").config.environment
    assert (environment.max_sequence_tokens, environment.changed_history) == (900, "append")

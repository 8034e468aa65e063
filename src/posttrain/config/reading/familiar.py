"""Settings by the names that other trainers give them: TRL, Hugging Face's Trainer, OpenRLHF. They serve suggestions only: no
configuration is read by them."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.registry import TRAIN_ENGINES

# Another trainer's name -> the key here, and after a semicolon what to know about it.
KEYS: dict[str, str] = {
    "adam_beta1": "policy.optimizer.betas",
    "adam_beta2": "policy.optimizer.betas",
    "adam_epsilon": "policy.optimizer.eps",
    "algorithm": "advantage.name; the policy loss is loss.name",
    "batch_size": "data.prompts_per_step",
    "beta": "loss.kl_coef; it weighs the KL to the reference",
    "bf16": "model.compute_dtype; bfloat16 is the default",
    "clip_eps": "loss.clip_ratio_low; the other side is loss.clip_ratio_high",
    "clip_range": "loss.clip_ratio_low; the other side is loss.clip_ratio_high",
    "clip_ratio": "loss.clip_ratio_low; the other side is loss.clip_ratio_high",
    "cliprange": "loss.clip_ratio_low; the other side is loss.clip_ratio_high",
    "data_files": "data.train_files",
    "dataset": "data.train_files",
    "dataset_name": "data.train_files; a data set of the hub is [org/name:train]",
    "dataset_path": "data.train_files",
    "delta": "loss.dual_clip",
    "ds_config": "policy.engine_options; policy.engine names the engine",
    "dtype": "model.compute_dtype",
    "epsilon": "loss.clip_ratio_low; the other side is loss.clip_ratio_high",
    "epsilon_high": "loss.clip_ratio_high",
    "eval_dataset": "data.validation_files",
    "eval_steps": "validation.every_steps",
    "eval_strategy": "validation.every_steps",
    "fp16": "model.compute_dtype; float16, with loss scaling",
    "gradient_accumulation_steps": "policy.sequences_per_mini_batch; micro-batches per update follow from it and from "
    "policy.sequences_per_micro_batch_per_device",
    "learning_rate": "policy.optimizer.lr",
    "logging_dir": "run.folder",
    "logging_steps": "tracking.trackers; every step is logged",
    "lora_alpha": "policy.lora.alpha",
    "lora_dropout": "policy.lora.dropout",
    "lora_r": "policy.lora.rank",
    "lora_rank": "policy.lora.rank",
    "lora_target_modules": "policy.lora.target_modules",
    "loss_type": "loss.name; the average over tokens is loss.aggregation",
    "lr_scheduler_type": "policy.schedule.name",
    "max_completion_length": "rollout.max_response_tokens",
    "max_length": "data.max_prompt_tokens; the response has rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_seq_length": "data.max_tokens",
    "max_steps": "run.total_steps",
    "n": "rollout.samples_per_prompt",
    "micro_train_batch_size": "policy.sequences_per_micro_batch_per_device",
    "mini_batch_size": "policy.sequences_per_mini_batch; in sequences, not prompts",
    "model_id": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "n_gpus": "placement.devices",
    "n_gpus_per_node": "placement.devices; of all machines together",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "nproc_per_node": "placement.devices; of all machines together",
    "num_epochs": "run.total_epochs",
    "num_generations": "rollout.samples_per_prompt",
    "num_gpus": "placement.devices",
    "num_iterations": "policy.epochs_per_step",
    "num_ppo_epochs": "policy.epochs_per_step",
    "num_train_epochs": "run.total_epochs",
    "output_dir": "run.folder",
    "peft_config": "policy.lora",
    "per_device_train_batch_size": "policy.sequences_per_micro_batch_per_device; it changes memory and speed, not the result",
    "ppo_epochs": "policy.epochs_per_step",
    "ppo_mini_batch_size": "policy.sequences_per_mini_batch; in sequences, not prompts",
    "ref_model": "reference.path",
    "report_to": "tracking.trackers",
    "response_length": "rollout.max_response_tokens",
    "resume_from_checkpoint": "run.resume_path; by default a run resumes from its own newest checkpoint",
    "reward_fn": "reward.terms",
    "reward_function": "reward.terms",
    "reward_funcs": "reward.terms",
    "reward_weights": "reward.terms; each term has a weight",
    "run_name": "run.name",
    "save_steps": "checkpoint.every_steps",
    "save_strategy": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "scale_rewards": "advantage.normalize_by_std",
    "test_files": "data.validation_files",
    "tokenizer_name": "model.tokenizer_path",
    "tokenizer_name_or_path": "model.tokenizer_path",
    "torch_dtype": "model.compute_dtype",
    "total_epochs": "run.total_epochs",
    "train_batch_size": "data.prompts_per_step; in prompts, each of which has rollout.samples_per_prompt sequences",
    "train_dataset": "data.train_files",
    "train_file": "data.train_files",
    "use_peft": "policy.lora",
    "use_vllm": "rollout.engine; rollout.engine=vllm",
    "val_files": "data.validation_files",
    "vllm_gpu_memory_utilization": "rollout.engine_options; {gpu_memory_utilization: 0.5}",
    "warmup_steps": "policy.schedule.warmup_updates",
}
KEYS |= {
    engine: f"policy.engine; policy.engine={engine}, with its settings in policy.engine_options"
    for engine in TRAIN_ENGINES.names()
}
# The same of a run that has no key of that name: supervised fine-tuning.
ELSEWHERE = {
    "data.prompts_per_step": "data.sequences_per_step",
    "policy.sequences_per_mini_batch": "data.sequences_per_step",
    "rollout.max_response_tokens": "data.max_tokens",
    "data.max_prompt_tokens": "data.max_tokens",
}


def familiar_key(name: str) -> str:
    """Our key for another trainer's name of a setting; "" for a name that is not listed."""
    return KEYS.get(name.replace("-", "_"), "").partition("; ")[0]


def familiar_fix(name: str, known: Mapping[str, object]) -> str:
    """The fix for a key that another trainer has: the key of ``known`` that means it; "" for a name that is not listed, or whose
    key this kind of run does not have."""
    target, remark = familiar_key(name), KEYS.get(name.replace("-", "_"), "").partition("; ")[2]
    if target not in known:
        target, remark = ELSEWHERE.get(target, ""), ""
    if not target or target not in known:
        return ""
    return f"did you mean {target}?" + (f" ({remark})" if remark else "")

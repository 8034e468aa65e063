"""Keys of trainer about the steps: their number, batch sizes, precision."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned

_FULLY_ASYNC = "the asynchronous loop"

ROWS: tuple[Key, ...] = (
    mapped(
        "trainer.epochs", int, 1, "run.total_epochs", "passes over the training data; incomplete steps are left out"
    ),
    mapped(
        "trainer.max_training_steps",
        int | None,
        None,
        "run.total_steps",
        "stop after so many steps; null: trainer.epochs decides",
        since="later",
    ),
    mapped(
        "trainer.update_epochs_per_batch",
        int,
        1,
        "policy.epochs_per_step",
        "passes over a step's sequences, the critic's too",
    ),
    mapped(
        "trainer.train_batch_size",
        int,
        1024,
        "data.prompts_per_step",
        "PROMPTS per step; each gives generator.n_samples_per_prompt sequences",
    ),
    mapped(
        "trainer.policy_mini_batch_size",
        int,
        256,
        "policy.sequences_per_mini_batch",
        "PROMPTS per update (optimizer step) of the policy, over all devices",
        by_rule=True,
        change="prompts x generator.n_samples_per_prompt = sequences",
    ),
    mapped(
        "trainer.critic_mini_batch_size",
        int,
        256,
        "critic.sequences_per_mini_batch",
        "PROMPTS per update of the critic, over all devices; unread without a critic",
        by_rule=True,
        change="prompts x generator.n_samples_per_prompt = sequences",
    ),
    mapped(
        "trainer.micro_train_batch_size_per_gpu",
        int,
        1,
        "policy.sequences_per_micro_batch_per_device critic.sequences_per_micro_batch_per_device",
        "SEQUENCES per device in a forward and backward pass, of policy and critic",
        by_rule=True,
        change="as it is; SkyRL divides losses by micro-batch counts, here by counts over the whole mini-batch, so this key "
        "never changes the result",
    ),
    mapped(
        "trainer.micro_forward_batch_size_per_gpu",
        int,
        1,
        "reference.sequences_per_micro_batch_per_device",
        "SEQUENCES per device in a forward pass without gradient (old log-probs, reference, values)",
        by_rule=True,
        note="SkyRL's page says each mini-batch is cut by this; its code and this program cut the step's whole batch.",
    ),
    planned(
        "trainer.update_ref_every_epoch",
        bool,
        False,
        "replacing the reference by the policy during the run",
        "take the policy as the new reference after each epoch",
    ),
    mapped(
        "trainer.num_warmup_steps",
        int,
        0,
        "policy.schedule.warmup_updates critic.schedule.warmup_updates",
        "updates (not steps) of linear warm-up, of policy and critic",
        by_rule=True,
        until="2025-06",
        note="In June 2025 the FSDP engines left this unread, whatever the page says; here it is honoured. From July 2025 it "
        "is {policy,critic}.optimizer_config.num_warmup_steps.",
    ),
    ignored(
        "trainer.use_sample_packing",
        bool,
        True,
        "sequences are always packed here; the numbers are those of padded ones",
        "run without padding",
    ),
    mapped(
        "trainer.max_prompt_length",
        int,
        512,
        "data.max_prompt_tokens data.overlong_prompts",
        "longest prompt, in tokens after the chat template; longer rows are dropped",
        by_rule=True,
        change="and data.overlong_prompts becomes filter",
        note="SkyRL's page says longer prompts are truncated; its code drops them, and so does this program.",
    ),
    mapped(
        "trainer.gradient_checkpointing",
        bool,
        True,
        "model.gradient_checkpointing critic.gradient_checkpointing",
        "recompute activations in the backward passes of policy and critic",
        by_rule=True,
    ),
    ignored(
        "trainer.gradient_checkpointing_use_reentrant",
        bool,
        False,
        "two ways to the same numbers; the newer one is used",
        "PyTorch's older form of checkpointing",
    ),
    mapped(
        "trainer.seed",
        int,
        42,
        "run.seed",
        "seed of data order and sampling",
        note="In June 2025 the data order was not seeded; here it is.",
    ),
    mapped(
        "trainer.bf16",
        bool,
        True,
        "model.compute_dtype",
        "compute in bfloat16",
        to=lambda value: "bfloat16" if value else "float32",
        change="true: bfloat16; false: float32. Master weights are float32",
        note="SkyRL's FSDP policy computes in bfloat16 whatever this says; here false is float32 for every model.",
    ),
    ignored(
        "trainer.flash_attn",
        bool,
        True,
        "the attention kernel follows the device; the numbers do not depend on it",
        "FlashAttention 2 instead of plain attention",
    ),
    ignored(
        "trainer.disable_fast_tokenizer",
        bool,
        False,
        "transformers 5 has one tokenizer for a model",
        "use the slow tokenizer",
    ),
    ignored(
        "trainer.target_modules",
        str | list[str] | None,
        "all-linear",
        "only LoRA reads it, and trainer.policy.model.lora.rank is what turns LoRA on",
        "layers that get LoRA matrices",
    ),
    ignored(
        "trainer.use_orm_score",
        bool,
        False,
        "left over in SkyRL from a reward model that it has not",
        "take scores from a reward model",
        until="2025-06",
    ),
    mapped(
        "trainer.rope_scaling",
        dict | None,
        None,
        "model.config_overrides",
        "how rotary positions are stretched, as in the model's config.json",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.rope_theta",
        int | float | None,
        None,
        "model.config_overrides",
        "base of the rotary positions, as in the model's config.json",
        by_rule=True,
        since="later",
    ),
    planned(
        "trainer.fully_async.max_staleness_steps", int, 4, _FULLY_ASYNC, "steps a sample may be old", since="later"
    ),
    planned(
        "trainer.fully_async.num_parallel_generation_workers",
        int,
        768,
        _FULLY_ASYNC,
        "prompts in generation at a time",
        since="later",
    ),
    planned("trainer.fully_async.**", Any, ABSENT, _FULLY_ASYNC, "settings of asynchronous training", since="later"),
)

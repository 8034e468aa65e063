"""Keys of reward_model and custom_reward_function: how responses are scored."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned, refused
from posttrain.dialects.verl.keys.shared import profiler_rows
from posttrain.dialects.verl.keys.words import ALWAYS_FUSED, ALWAYS_PACKED

MANAGERS = Literal["naive", "prime", "dapo", "batch"]
_SERVED = "reward models in a sampler of their own"
_ONE_DEVICE_MODEL = "the reward model only runs forward, whole, on one device"


def _sandbox(section: str, since: str, default: object = ABSENT) -> tuple[Key, ...]:
    """A server that runs model-written code, which verl asks about codecontests, apps, codeforces and taco."""
    ours = "programs run in boxes on this machine (docs/sandbox.md), with limits of the reward code's own"
    why = "model-written code runs in boxes on this machine (docs/sandbox.md), and no sandbox server is asked; a server that "
    why += "scores whole responses can be the reward http"
    at_once, memory = (ABSENT, ABSENT) if default is ABSENT else (64, 1024)
    return (
        refused(f"{section}.url", str | None, default, why, "address of a sandbox server", since=since),
        ignored(f"{section}.max_concurrent", int, at_once, ours, "programs at once, on that server", since=since),
        ignored(f"{section}.memory_limit_mb", int, memory, ours, "memory of each, MB", since=since),
    )


_FUNCTION: tuple[Key, ...] = (
    mapped(
        "custom_reward_function.path",
        str | None,
        None,
        "reward.terms",
        "Python file (or pkg://module) with your reward function",
        by_rule=True,
        change="with its name, one reward term; null: the scorer of each prompt's data source",
        since="0.4",
    ),
    mapped(
        "custom_reward_function.name",
        str,
        "compute_score",
        "reward.terms",
        "name of the function in that file",
        by_rule=True,
        change="without a path, the name of a reward built in here",
        since="0.4",
    ),
    mapped(
        "custom_reward_function.reward_kwargs",
        dict | None,
        ABSENT,
        "reward.terms",
        "further arguments of the function; they win over the call's own",
        by_rule=True,
        change="options of the reward term",
        since="0.4",
    ),
    mapped(
        "custom_reward_function.reward_kwargs.**",
        Any,
        ABSENT,
        "reward.terms",
        "one of them",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_manager",
        MANAGERS,
        "naive",
        "reward.overlong_buffer_tokens reward.terms",
        "how scorers are called: naive, prime (in parallel), dapo (with a penalty for long responses), batch",
        by_rule=True,
        change="dapo: reward_kwargs.overlong_buffer_cfg counts; batch: your function is called with lists; naive and prime are "
        "the same here",
        note="A scorer that fails gives 0 with prime in verl; here the response is without a reward and leaves the gradient.",
    ),
    mapped(
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        bool,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "dapo: take reward from responses that come near the limit",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_kwargs.overlong_buffer_cfg.len",
        int,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "dapo: the last so many tokens before the limit cost",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        float,
        ABSENT,
        "reward.overlong_penalty",
        "dapo: what the longest response loses",
        by_rule=True,
        since="0.4",
    ),
    ignored(
        "reward_model.reward_kwargs.overlong_buffer_cfg.log",
        bool,
        ABSENT,
        "the penalty is always logged",
        "dapo: log the penalty",
        since="0.4",
    ),
    ignored(
        "reward_model.reward_kwargs.max_resp_len",
        int,
        ABSENT,
        "it is the longest response, data.max_response_length; another number is refused",
        "dapo: longest response, tokens",
        since="0.4",
    ),
    planned(
        "reward_model.reward_kwargs.**",
        Any,
        ABSENT,
        "other arguments of a reward manager",
        "arguments of the reward manager",
        since="0.4",
    ),
    mapped(
        "reward_model.overlong_buffer.enable",
        bool,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "the DAPO recipe's name of overlong_buffer_cfg.enable",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward_model.overlong_buffer.len",
        int,
        ABSENT,
        "reward.overlong_buffer_tokens",
        "the same of len",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward_model.overlong_buffer.penalty_factor",
        float,
        ABSENT,
        "reward.overlong_penalty",
        "the same of penalty_factor",
        by_rule=True,
        since="later",
    ),
    ignored(
        "reward_model.overlong_buffer.log",
        bool,
        ABSENT,
        "the penalty is always logged",
        "the same of log",
        since="later",
    ),
    ignored(
        "reward_model.launch_reward_fn_async",
        bool,
        False,
        "scoring has its own place in a step, and takes little of it",
        "score while log-probs are computed",
        since="0.4",
    ),
    *_sandbox("reward_model.sandbox_fusion", "0.4", None),
)

_MODEL: tuple[Key, ...] = (
    mapped(
        "reward_model.enable",
        bool,
        False,
        "reward.model.path reward.terms",
        "score with a reward model",
        by_rule=True,
        change="its score takes the place of all other terms, as in verl",
    ),
    mapped(
        "reward_model.model.path",
        str,
        "~/models/FsfairX-LLaMA3-RM-v0.1",
        "reward.model.path",
        "folder or hub id of a sequence or token classification model with one label",
        by_rule=True,
        note="verl's page shows ~/models/Anomy-RM-v0.1.",
    ),
    mapped(
        "reward_model.model.input_tokenizer",
        str | None,
        "${actor_rollout_ref.model.path}",
        "reward.model.own_template",
        "not null: write the conversation again with the reward model's own template; null: give it the policy's tokens",
        by_rule=True,
        change="not null: true, null: false",
    ),
    mapped(
        "reward_model.model.external_lib",
        list[str] | str | None,
        "${actor_rollout_ref.model.external_lib}",
        "model.external_modules",
        "Python modules imported before the model is loaded",
        by_rule=True,
        change="one list with those of the actor and the critic",
    ),
    mapped(
        "reward_model.model.trust_remote_code",
        bool,
        False,
        "reward.model.trust_remote_code",
        "let code from the model's folder run",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.micro_batch_size",
        int | None,
        None,
        "reward.model.sequences_per_micro_batch_per_device",
        "deprecated: sequences per forward pass, on all devices together",
        by_rule=True,
        change="sequences on all devices / devices = sequences per device",
    ),
    mapped(
        "reward_model.micro_batch_size_per_gpu",
        int | None,
        None,
        "reward.model.sequences_per_micro_batch_per_device",
        "sequences per forward pass on one device",
        by_rule=True,
        note="verl's page shows 16; its file says null, so one of the two sizes must be given.",
    ),
    mapped(
        "reward_model.max_length",
        int | None,
        None,
        "reward.model.max_tokens",
        "longest conversation, tokens; null: not cut",
        by_rule=True,
        note="verl cuts the end of longer ones, with the response in it; here they lose their beginning. Without it verl cuts "
        "at the longest prompt and response, and here nothing is cut.",
    ),
    planned(
        "reward_model.truncation",
        str,
        ABSENT,
        "other ends to cut conversations at",
        "which end is cut",
        off=("left",),
    ),
    ignored(
        "reward_model.use_dynamic_bsz",
        bool,
        "${critic.use_dynamic_bsz}",
        "the reward model's passes are cut by sequences; it changes memory and speed only",
        "cut passes by tokens",
        since="0.4",
    ),
    ignored(
        "reward_model.forward_max_token_len_per_gpu",
        int,
        "${critic.forward_max_token_len_per_gpu}",
        "the reward model's passes are cut by sequences; it changes memory and speed only",
        "tokens per pass and device",
        since="0.4",
    ),
    ignored(
        "reward_model.strategy",
        Literal["fsdp", "fsdp2", "megatron"],
        "${actor_rollout_ref.actor.strategy}",
        _ONE_DEVICE_MODEL,
        "engine",
    ),
    ignored(
        "reward_model.ulysses_sequence_parallel_size",
        int,
        1,
        _ONE_DEVICE_MODEL,
        "devices that share a sequence",
        since="0.4",
    ),
    ignored("reward_model.model.use_shm", bool, False, "weights are loaded once", "copy to /dev/shm", since="0.4"),
    ignored("reward_model.model.use_remove_padding", bool, False, ALWAYS_PACKED, "pack sequences", since="0.4"),
    ignored("reward_model.model.use_fused_kernels", bool, False, ALWAYS_FUSED, "fused kernels", since="0.4"),
    *(
        ignored(f"reward_model.model.fsdp_config.{name}", type, default, _ONE_DEVICE_MODEL, meaning, since=since)
        for name, type, default, meaning, since in (
            ("min_num_params", int, ABSENT, "shard modules of at least so many parameters (0.2 and the page)", ""),
            ("wrap_policy.min_num_params", int, 0, "shard modules of at least so many parameters", ""),
            ("wrap_policy.transformer_layer_cls_to_wrap", list[str] | str, ABSENT, "classes of layers to shard", ""),
            ("param_offload", bool, False, "keep the weights on the CPU", ""),
            ("fsdp_size", int, -1, "devices that share one copy", "0.4"),
            ("reshard_after_forward", bool, True, "FSDP2: free gathered parameters", "0.4"),
            ("forward_prefetch", bool, False, "gather the next layer early", "0.4"),
        )
    ),
    ignored("reward_model.megatron.**", Any, ABSENT, _ONE_DEVICE_MODEL, "settings of Megatron"),
    *profiler_rows("reward_model"),
)

_LATER: tuple[Key, ...] = (
    mapped(
        "reward.custom_reward_function.path",
        str | None,
        ABSENT,
        "reward.terms",
        "the later name of custom_reward_function.path",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward.custom_reward_function.name",
        str,
        ABSENT,
        "reward.terms",
        "the later name of custom_reward_function.name",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward.reward_manager.name",
        MANAGERS,
        ABSENT,
        "reward.overlong_buffer_tokens reward.terms",
        "the later name of reward_model.reward_manager",
        by_rule=True,
        since="later",
    ),
    planned(
        "reward.reward_manager.source",
        str,
        ABSENT,
        "reward managers of your own",
        "where the manager comes from",
        off=("register",),
        since="later",
    ),
    planned("reward.reward_manager.module.**", Any, ABSENT, "reward managers of your own", "its file", since="later"),
    mapped("reward.num_workers", int, ABSENT, "reward.workers", "processes that score", by_rule=True, since="later"),
    planned("reward.reward_model.**", Any, ABSENT, _SERVED, "a reward model", since="later"),
    *_sandbox("reward.sandbox_fusion", "later"),
    *_sandbox("sandbox_fusion", "later"),
    mapped(
        "reward_model.enable_resource_pool",
        bool,
        ABSENT,
        "reward.model.devices placement.devices",
        "the reward model has devices of its own, beside the trainer's",
        by_rule=True,
        since="later",
    ),
    mapped(
        "reward_model.n_gpus_per_node",
        int,
        ABSENT,
        "reward.model.devices placement.devices",
        "with enable_resource_pool: its devices of each machine",
        by_rule=True,
        change="x nnodes = its devices",
        since="later",
    ),
    mapped(
        "reward_model.nnodes",
        int,
        ABSENT,
        "reward.model.devices placement.devices",
        "with enable_resource_pool: machines of its own",
        by_rule=True,
        change="x n_gpus_per_node = its devices",
        since="later",
    ),
    planned("reward_model.rollout.**", Any, ABSENT, _SERVED, "its sampler", since="later"),
    mapped(
        "reward_model.num_workers", int, ABSENT, "reward.workers", "processes that score", by_rule=True, since="later"
    ),
    mapped(
        "reward_model.reward_kwargs.num_processes",
        int,
        ABSENT,
        "reward.workers",
        "prime: processes that score",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "reward_model.reward_kwargs.timeout",
        int | float,
        ABSENT,
        "reward.timeout_s",
        "prime: limit of scoring one response, seconds",
        by_rule=True,
        since="0.4",
    ),
)

ROWS: tuple[Key, ...] = (*_FUNCTION, *_MODEL, *_LATER)

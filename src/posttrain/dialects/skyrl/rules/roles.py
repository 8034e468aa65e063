"""Policy, critic and reference: weights, optimizers, learning rates, and engine options."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.ledger import leaves
from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.algorithm import reads_values
from posttrain.dialects.skyrl.rules.look import get, ignore_all, is_of_2026, joined
from posttrain.dialects.skyrl.rules.teachers import NO_OP
from posttrain.dialects.skyrl.strategies import CANNOT_OFFLOAD, DEEPSPEED, MEGATRON
from posttrain.errors import did_you_mean

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",  # SkyRL gives it no number of cycles, and the default is one, which never restarts
    "polynomial": "linear",  # of degree 1, the default
    "inverse_sqrt": "inverse_square_root",
    "warmup_stable_decay": "warmup_stable_decay",
}
# SkyRL calls them without the arguments they need, so they cannot run there either.
WITHOUT_ARGUMENTS = ("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr")
WITHOUT_WARMUP = 10_000  # the timescale of transformers' inverse_sqrt then
POLYNOMIAL_END = 1e-7  # the learning rate at which transformers' polynomial (of degree 1) ends
LORA = ("rank", "alpha", "dropout", "target_modules", "exclude_modules")
_FSDP = ("cpu_offload", "reshard_after_forward", "fsdp_size", "wrap_policy", "mixed_precision")
_MEGATRON_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_REPLAY = "trainer.policy.megatron_config.moe_enable_routing_replay"
_RECORDS = "generator.inference_engine.enable_return_routed_experts"
# Keys of Megatron's section that are no options of the engine: of R3, of heads that are not trained, of adapters and saves.
NO_OPTIONS = (
    *("moe_enable_routing_replay", "mtp_loss_topk", "mtp_loss_chunk_size", "mtp_loss_weight", "mtp_num_layers"),
    *("lora_config", "hf_export_config", "moe_per_layer_logging"),
    *("async_dist_ckpt_save", "async_dist_ckpt_strategy", "async_save_prestage_to_cpu"),
)
_KINDS = {"policy": "train", "critic": "train", "ref": "eval"}
_OURS = {"policy": "policy", "critic": "critic", "ref": "reference"}


def roles(keys: Reader, *, has_critic: bool, has_reference: bool) -> dict[str, Any]:
    """Return the fields of the run's models; written keys of other models are reported."""
    _check_strategy(keys)
    fields = _trained(keys, "policy")
    fields["model.gradient_checkpointing"] = keys["trainer.gradient_checkpointing"]
    if keys["trainer.strategy"] == MEGATRON and keys.written(_REPLAY):
        if keys[_REPLAY]:
            fields["rollout.routing_replay"] = True
        elif get(keys, _RECORDS):
            keys.problem(f"{_RECORDS}=true records the sampler's experts, and {_REPLAY}=false does not use them: SkyRL stops "
                         "there", key=_REPLAY, fix=f"use {_REPLAY}=true, or {_RECORDS}=false")  # fmt: skip
    if has_critic:
        path = keys["trainer.critic.model.path"]
        fields |= _trained(keys, "critic")
        # Where values are optional, the critic is there because it is named
        optional = reads_values(keys)[1]
        fields["critic.path"] = None if path == keys["trainer.policy.model.path"] and not optional else path
        fields["critic.gradient_checkpointing"] = keys["trainer.gradient_checkpointing"]
        fields["critic.config_overrides"] = get(keys, "trainer.critic.model_config_kwargs") or {}
        fields["critic.value_clip"] = keys["trainer.algorithm.value_clip"]
        fields["critic.aggregation"] = "sequence_mean_token_mean"
    else:
        estimator = keys["trainer.algorithm.advantage_estimator"]
        sections = ("trainer.critic", "trainer.critic_mini_batch_size", "trainer.algorithm.value_clip")
        ignore_all(keys, sections, f"no critic: {estimator} needs no values (gae does)")
    if has_reference:
        fields |= _reference(keys)
    elif keys["trainer.algorithm.advantage_estimator"] == NO_OP:
        for row in keys.ledger.rows:
            if row.name.startswith("trainer.ref.") and row.name != "trainer.ref.model.path":
                keys.ignore(row.name, "the reference is the teacher, and is computed in the policy's engine")
    else:
        ignore_all(
            keys,
            ("trainer.ref", "trainer.update_ref_every_epoch"),
            "no reference: neither use_kl_loss nor use_kl_in_reward",
        )
    _tell_unread_sections(keys, [role for role in _OURS if role != "critic" or has_critic])
    return fields


def _reference(keys: Reader) -> dict[str, Any]:
    fields: dict[str, Any] = {"reference.update_every": "epoch"} if keys["trainer.update_ref_every_epoch"] else {}
    fields |= {f"reference.engine_options.{name}": value for name, value in _engine_options(keys, "ref").items()}
    path = get(keys, "trainer.ref.model.path")
    if path is not None and path != keys["trainer.policy.model.path"]:
        fields["reference.path"] = path
    return fields


def _trained(keys: Reader, role: str) -> dict[str, Any]:
    """Optimizer, schedule and engine options of policy or critic."""
    section = f"trainer.{role}.optimizer_config"
    fields = optimizer(keys, section, role)
    options = {"offload_after_step": keys[f"{section}.offload_after_step"], **_engine_options(keys, role)}
    fields |= {f"{role}.engine_options.{name}": value for name, value in options.items()}
    return fields | schedule(keys, section, role, _warmup(keys, role)) | lora(keys, f"trainer.{role}.model.lora", role)


def optimizer(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """Return the fields of AdamW, from SkyRL's section of it."""
    norm, betas = keys[f"{section}.max_grad_norm"], keys[f"{section}.adam_betas"]
    if len(betas) != 2:
        what = f"{section}.adam_betas has {len(betas)} numbers, and AdamW takes two"
        keys.problem(what, key=f"{section}.adam_betas", fix="write [0.9, 0.999]")
        betas = [0.9, 0.999]
    return {
        f"{role}.optimizer.lr": keys[f"{section}.lr"],
        f"{role}.optimizer.betas": betas,
        f"{role}.optimizer.weight_decay": keys[f"{section}.weight_decay"],
        f"{role}.optimizer.max_grad_norm": norm if norm > 0 else None,
    }


def lora(keys: Reader, section: str, role: str) -> dict[str, Any]:
    """Return the fields of an adapter, from SkyRL's section of it; none where rank is 0."""
    if not keys.ledger.find(f"{section}.rank"):
        return {}
    rank = keys[f"{section}.rank"]
    if rank < 0:
        keys.problem(f"{section}.rank is {rank}", key=f"{section}.rank", fix="use 0 for no adapter, or a rank")
    if rank <= 0:
        for name in LORA[1:]:
            keys.ignore(_lora_key(keys, section, name), f"{section}.rank is 0, so all weights are trained")
        return {}
    found = {name: keys[_lora_key(keys, section, name)] for name in LORA}
    return {f"{role}.lora.{name}": value for name, value in found.items() if value is not None}


def _lora_key(keys: Reader, section: str, name: str) -> str:
    """Return the key of an adapter's setting: its layers stood in trainer until December 2025."""
    earlier = f"trainer.{name}"
    return earlier if keys.written(earlier) and not keys.written(f"{section}.{name}") else f"{section}.{name}"


def schedule(keys: Reader, section: str, role: str, warmup: int) -> dict[str, Any]:
    """Return the fields of the learning rate over the run, from SkyRL's section of the optimizer."""
    name = get(keys, f"{section}.scheduler")
    fields: dict[str, Any] = {}
    if name in WITHOUT_ARGUMENTS:
        what = f"the scheduler {name} needs arguments that SkyRL has no key for"
        keys.problem(what, key=f"{section}.scheduler", fix="use cosine, or linear")
    elif name not in SCHEDULES:
        known = list(SCHEDULES)
        what = f"there is no scheduler {name!r} (known: {', '.join(known)})"
        keys.problem(what, key=f"{section}.scheduler", fix=did_you_mean(name, known, listed=True) or "use cosine")
    else:
        fields[f"{role}.schedule.name"] = SCHEDULES[name]
    if name == "inverse_sqrt" and not warmup:
        fields[f"{role}.schedule.timescale_updates"] = WITHOUT_WARMUP
    lr = keys[f"{section}.lr"]
    if name == "polynomial" and lr > POLYNOMIAL_END:
        fields[f"{role}.schedule.min_lr_ratio"] = POLYNOMIAL_END / lr
    if name == "constant":
        for key in (f"{section}.num_warmup_steps", "trainer.num_warmup_steps"):
            keys.ignore(key, "the scheduler constant has no warm-up (constant_with_warmup has)")
    elif warmup:
        fields[f"{role}.schedule.warmup_updates"] = warmup
    return fields


def _warmup(keys: Reader, role: str) -> int:
    """Updates of warm-up, under the name of June or of August 2025."""
    june, august = "trainer.num_warmup_steps", f"trainer.{role}.optimizer_config.num_warmup_steps"
    if august not in keys.ledger.by_name or not keys.written(august):
        return int(keys[june])
    if keys.written(june):
        keys.problem(f"{august} took the place of {june}, and both are written", key=august, fix="keep one of them")
    return int(keys[august])


def _engine_options(keys: Reader, role: str) -> dict[str, Any]:
    """Return the role's engine options, by dotted name: FSDP's section, DeepSpeed's, or Megatron's."""
    strategy = keys["trainer.strategy"]
    if strategy == DEEPSPEED:
        return dict(leaves(_deepspeed(keys, role)))
    if strategy == MEGATRON:
        given = keys.section("trainer.policy.megatron_config") if role == "policy" else {}
        unread = (*_MEGATRON_SIZES, *NO_OPTIONS)
        return {name: value for name, value in given.items() if name not in unread and value is not None}
    given = {name: keys[f"trainer.{role}.fsdp_config.{name}"] for name in _FSDP}
    return {name: value for name, value in given.items() if value is not None}


def _deepspeed(keys: Reader, role: str) -> dict[str, Any]:
    """The tree of deepspeed_config.train or .eval, with what was written about this role alone laid upon it."""
    shared, own = keys.section(f"deepspeed_config.{_KINDS[role]}"), keys.section(f"trainer.{role}.deepspeed_config")
    tree = joined(shared, own)
    tree.pop("gradient_clipping", None)  # the optimizer's max_grad_norm
    return tree


def _tell_unread_sections(keys: Reader, present: list[str]) -> None:
    strategy = keys["trainer.strategy"]
    for role in present:
        if strategy in (DEEPSPEED, MEGATRON):
            ignore_all(keys, (f"trainer.{role}.fsdp_config",), f"trainer.strategy is {strategy}")
        if strategy != DEEPSPEED:
            keys.ignore(f"trainer.{role}.deepspeed_config", f"trainer.strategy is {strategy}")
    if strategy != DEEPSPEED:
        ignore_all(keys, ("deepspeed_config",), f"trainer.strategy is {strategy}")


def _check_strategy(keys: Reader) -> None:
    """Checks i, j and q. SkyRL makes those about the critic without a critic too."""
    strategy = keys["trainer.strategy"]
    for role in ("policy", "critic"):
        offload = f"trainer.{role}.fsdp_config.cpu_offload"
        # In files of 2026 fsdp is FSDP2
        if strategy == CANNOT_OFFLOAD and keys[offload] and not is_of_2026(keys):
            what = f"FSDP1 cannot train with weights in CPU memory ({offload}=true)"
            keys.problem(what, key=offload, fix=f"use {offload}=false, or trainer.strategy=fsdp2")
        if strategy != DEEPSPEED:
            continue
        after = f"trainer.{role}.optimizer_config.offload_after_step"
        if not keys[after]:
            keys.problem(f"DeepSpeed offloads after every step: {after} is false", key=after, fix=f"use {after}=true")
    if strategy == DEEPSPEED:
        stage = _deepspeed(keys, "policy").get("zero_optimization", {}).get("stage")
        if stage != 3:
            key = "deepspeed_config.train.zero_optimization.stage"
            keys.problem(f"SkyRL runs DeepSpeed at ZeRO stage 3, not {stage}", key=key, fix=f"use {key}=3")

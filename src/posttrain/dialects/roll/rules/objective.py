"""Advantages, KL, the policy loss, masks, the correction of the sampler's gap."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.look import is_agentic, uses_critic
from posttrain.dialects.roll.rules.normalization import normalization
from posttrain.dialects.roll.strategies import MEGATRON
from posttrain.dialects.value_types import fits

AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}
KL = {"kl": "k1", "abs": "abs", "mse": "k2"}
PG_WORKERS = ("roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",)
PPO_WORKERS = (
    "roll.pipeline.rlvr.actor_worker.ActorWorker",
    "roll.pipeline.agentic.agentic_actor_worker.ActorWorker",
    "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker",
)
_VALUE_KEYS = ("value_clip", "critic_warmup", "lambd")
_LOSS_KEYS = {
    "pg_clip": ("ppo_clip", "gspo"),
    "use_pg_clip_range": ("ppo_clip", "gspo"),
    "pg_clip_low": ("ppo_clip", "gspo"),
    "pg_clip_high": ("ppo_clip", "gspo"),
    "dual_clip_loss": ("ppo_clip",),
    "importance_sampling": ("ppo_clip", "gspo"),
}


def advantage(keys: Reader) -> dict[str, Any]:
    """The estimator, and what is done to rewards before and to advantages after it."""
    name = keys["adv_estimator"]
    if name == "agentic_reinforce":
        keys.problem("agentic_reinforce is about turns, and this pipeline has single answers", key="adv_estimator",
                     fix="use adv_estimator=reinforce")  # fmt: skip
    elif name in ("gigpo", "step_reinforce"):
        keys.warn(
            f"adv_estimator={name} is reinforce in this pipeline, as in ROLL: its turns are those of environments"
        )
    samples = keys["num_return_sequences_in_group"]
    if name == "grpo" and samples == 1:
        keys.problem(
            "grpo compares the responses to a prompt, and there is 1 (ROLL gets NaN rewards)",
            key="num_return_sequences_in_group", fix="use num_return_sequences_in_group=8, or another number above 1",
        )  # fmt: skip
    norms = normalization(keys)
    clip, whiten = keys["reward_clip"] or None, keys["whiten_advantages"]
    fields: dict[str, Any] = {"advantage.clip": keys["advantage_clip"] or None, "advantage.whiten": whiten}
    if name == "grpo" and not _looks_at_tokens(keys) and clip is None:
        by_std = norms["reward.normalize_std"] != "none"
        return fields | {"advantage.name": "grpo", "advantage.normalize_by_std": by_std}
    fields |= generalised(keys) if name == "gae" else {"advantage.name": "reinforce"}
    return fields | norms | {
        "reward.clip": clip,
        "advantage.gamma": keys["gamma"],
        "advantage.whiten_rewards": keys["whiten_rewards"],
    }  # fmt: skip


def generalised(keys: Reader) -> dict[str, Any]:
    """gae, which ROLL whitens as it does the others: after it, over the tokens of the loss."""
    return {"advantage.name": "gae", "advantage.gae_lambda": keys["lambd"], "advantage.estimator_whitens": False}


def _looks_at_tokens(keys: Reader) -> bool:
    """Return True when the tokens of a response can have different advantages, so that grpo sums token rewards as in ROLL."""
    return bool(keys["gamma"] != 1 or keys["add_token_level_kl"] or keys["whiten_rewards"])


def kl(keys: Reader) -> dict[str, Any]:
    """Return the KL settings of the reward, of the loss, of both, or none."""
    fields: dict[str, Any] = {}
    if keys["add_token_level_kl"] and keys["init_kl_coef"]:
        kind = keys["kl_penalty"]
        fields |= {"reward.kl.coef": keys["init_kl_coef"], "reward.kl.estimator": KL.get(kind, kind)}
        fields["reward.clip_tokens"] = keys["reward_clip"] or None
        if keys["target_kl"] is not None:
            fields |= {"reward.kl.target": keys["target_kl"], "reward.kl.horizon_sequences": keys["kl_horizon"]}
        else:
            keys.ignore("kl_horizon", "the weight is fixed: there is no target_kl")
    else:
        reason = "init_kl_coef is 0" if keys["add_token_level_kl"] else "add_token_level_kl is false"
        for key in ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon"):
            keys.ignore(key, f"no KL is taken from the reward: {reason}")
    if keys["use_kl_loss"] and keys["kl_loss_coef"]:
        fields |= {"loss.kl_coef": keys["kl_loss_coef"] * keys["rl_loss_coef"], "loss.kl_estimator": "k3"}
    elif keys["use_kl_loss"]:
        keys.warn("use_kl_loss has no effect: kl_loss_coef is 0")
    else:
        keys.ignore("kl_loss_coef", "use_kl_loss is false")
    return fields


def critic(keys: Reader) -> dict[str, Any]:
    """Settings of the top level that only a critic reads."""
    if not uses_critic(keys):
        for key in _VALUE_KEYS:
            keys.ignore(key, f"there is no critic: adv_estimator is {keys['adv_estimator']}")
        return {}
    return {
        "critic.value_clip": keys["value_clip"] or None,
        "critic.aggregation": "sequence_mean_token_mean",
        "critic.warmup_steps": keys["critic_warmup"],
        "critic.optimizer.max_grad_norm": keys["max_grad_norm"] or None,
    }


def loss(keys: Reader) -> dict[str, Any]:
    """The policy loss: its name, clipping, aggregation."""
    fields = _variant(keys)
    mode = keys["loss_agg_mode"]
    fields["loss.aggregation"] = fields["loss.entropy_aggregation"] = AGGREGATIONS[mode]
    if mode == "seq-mean-token-sum-norm":
        longest = keys["sequence_length"] or (keys["response_length"] or 0) + keys["prompt_length"]
        fields["loss.norm_tokens"] = max(1, longest - 1)  # the width of ROLL's log-probs
        keys.warn(
            "loss_agg_mode=seq-mean-token-sum-norm is divided by the number of sequences here and not in ROLL: losses and "
            "gradient norms are smaller by that, which AdamW levels out and max_grad_norm does not"
        )
    fields["loss.policy_coef"] = keys["rl_loss_coef"]
    if keys["error_max_len_clip"]:
        fields["loss.mask_long_wrong_tokens"] = keys["error_max_len_threshold"]
    else:
        keys.ignore("error_max_len_threshold", "error_max_len_clip is false")
    weights = (("difficulty_loss_weight", "difficulty"), ("length_loss_weight", "length"))
    fields["loss.weigh_by"] = [name for key, name in weights if keys[key]]
    fields["loss.sft_coef"] = keys["postive_loss_coef"] or keys["sft_loss_coef"]
    fields["policy.optimizer.max_grad_norm"] = keys["max_grad_norm"] or None
    return fields | _experts(keys)


def _experts(keys: Reader) -> dict[str, Any]:
    """The balance and the replay of a mixture's experts."""
    coef, key = keys["actor_train.model_args.moe_aux_loss_coef"], "actor_train.router_replay.mode"
    fields: dict[str, Any] = {}
    if coef and keys["actor_train.strategy_args.strategy_name"] == f"{MEGATRON}_train":
        fields["policy.engine_options.moe_aux_loss_coeff"] = coef
    elif coef:
        fields["loss.router_balance_coef"] = coef
    mode = keys[key] if keys.ledger.find(key) else "disable"
    if mode == "R3":
        fields["rollout.routing_replay"] = True
    elif mode == "R2":
        fields["policy.routing_replay"] = True
    return fields


def _variant(keys: Reader) -> dict[str, Any]:
    """loss.name and the settings that this loss reads."""
    worker, variant = keys["actor_train.worker_cls"], keys["actor_train.pg_variant"] or "vanilla"
    is_pg = worker in PG_WORKERS or (worker or "").endswith("agentic_actor_pg_worker.ActorWorker")
    if worker is not None and worker not in (*PG_WORKERS, *PPO_WORKERS):
        keys.plan_only(f"actor_train.worker_cls={worker} is planned: workers of your own", key="actor_train.worker_cls",
                       fix=f"remove it, or use {PG_WORKERS[0]}")  # fmt: skip
    if not is_pg:
        for key in (
            "pg_variant",
            "tis_lower_bound",
            "tis_upper_bound",
            "cispo_epsilon_low",
            "cispo_epsilon_high",
            "cispo_use_unified_mask",
            "kimi15_tau",
            "topr_positive_weight",
            "topr_negative_weight",
        ):
            keys.ignore(f"actor_train.{key}", "read by the PG worker classes only (actor_train.worker_cls)")
        return _clipped(keys)
    for key, variants in (("tis_lower_bound", "tis"), ("tis_upper_bound", "tis"), ("cispo_epsilon_low", "cispo"),
                          ("cispo_epsilon_high", "cispo"), ("cispo_use_unified_mask", "cispo"), ("kimi15_tau", "kimi15"),
                          ("topr_positive_weight", "topr"), ("topr_negative_weight", "topr")):  # fmt: skip
        if variant != variants:
            keys.ignore(f"actor_train.{key}", f"pg_variant is {variant}")
    if variant == "ppo":
        return _clipped(keys)
    if is_agentic(keys) and keys["ratio_type"] == "segment":
        keys.problem(f"ratio_type=segment is not supported with pg_variant={variant}", key="ratio_type",
                     fix="use actor_train.pg_variant=ppo, or ratio_type=token", refused=True)  # fmt: skip
    for key in _LOSS_KEYS:
        keys.ignore(key, f"pg_variant={variant} does not use it")
    match variant:
        case "tis":
            low, high = keys["actor_train.tis_lower_bound"], keys["actor_train.tis_upper_bound"]
            if not 0 <= low <= 1 <= high:
                key = "actor_train.tis_upper_bound" if high < 1 else "actor_train.tis_lower_bound"
                what = f"tis bounds {low:g} and {high:g} do not hold 1"
                keys.problem(what, key=key, fix="use bounds around 1, such as 0 and 1")
                low, high = 0.0, 1.0
            return {"loss.name": "cispo", "loss.clip_ratio_low": 1 - low, "loss.clip_ratio_high": high - 1}
        case "cispo":
            return {
                "loss.name": "cispo",
                "loss.clip_ratio_low": keys["actor_train.cispo_epsilon_low"],
                "loss.clip_ratio_high": keys["actor_train.cispo_epsilon_high"],
                "loss.drop_clipped": keys["actor_train.cispo_use_unified_mask"],
            }
        case "kimi15":
            return {"loss.name": "dro", "loss.dro_beta": keys["actor_train.kimi15_tau"]}
        case "topr":
            return {
                "loss.name": "topr",
                "loss.positive_weight": keys["actor_train.topr_positive_weight"],
                "loss.negative_weight": keys["actor_train.topr_negative_weight"],
            }
    return {"loss.name": "gpg"}


def _clipped(keys: Reader) -> dict[str, Any]:
    """PPO's clipping, with one ratio per token or per response."""
    name = "gspo" if keys["importance_sampling"] == "seq" else "ppo_clip"
    low = high = keys["pg_clip"]
    if keys["use_pg_clip_range"]:
        low, high = keys["pg_clip_low"], keys["pg_clip_high"]
        if not keys["dual_clip_loss"]:
            keys.ignore("pg_clip", "use_pg_clip_range is true: pg_clip_low and pg_clip_high count")
    else:
        for key in ("pg_clip_low", "pg_clip_high"):
            keys.ignore(key, "use_pg_clip_range is false: pg_clip counts")
    fields = {"loss.name": name, "loss.clip_ratio_low": low, "loss.clip_ratio_high": high}
    if is_agentic(keys) and keys["ratio_type"] == "segment" and name == "ppo_clip":
        fields["loss.ratio_of"] = "turn"
    if keys["dual_clip_loss"] and name == "ppo_clip":
        fields["loss.dual_clip"] = 1 + 2 * keys["pg_clip"]
    elif keys["dual_clip_loss"]:
        keys.ignore("dual_clip_loss", "importance_sampling=seq has no dual clip here")
    return fields


_WEIGHTS = {"token": "token", "geometric": "sequence_mean", "sequence": "sequence", "segment": "turn"}
_RULES = {"token": "token", "geometric": "sequence_mean", "sequence": "sequence_sum", "segment": "turn_mean"}
_FILTER_KEYS: dict[str, Any] = {
    "enabled": bool, "agg_type": str, "ratio_enabled": bool, "ratio_low": float, "ratio_high": float, "diff_enabled": bool,
    "diff_low": float, "diff_high": float,
}  # fmt: skip


def correction(keys: Reader) -> dict[str, Any]:
    """Weights and filters for a sampler whose log-probs are not the trainer's. Empty without."""
    at, ours = "train_infer_correction", "loss.rollout_correction"
    fields: dict[str, Any] = {}
    if not keys[f"{at}.is_weight.enabled"]:
        for name in ("weight_type", "upper_bound"):
            keys.ignore(f"{at}.is_weight.{name}", "is_weight.enabled is false")
    else:
        bound = keys[f"{at}.is_weight.upper_bound"]
        if bound is None:
            bound = 1e9  # ROLL's null does not cut; a ratio is never larger, as log-ratios are clamped to 20
        kind = _WEIGHTS[keys[f"{at}.is_weight.weight_type"]]
        fields = {f"{ours}.weights": kind, f"{ours}.weight_high": bound}
    rules, bounds = [], []
    for index, item in enumerate(keys[f"{at}.filters"] or []):
        for rule, bound in _filter(keys, f"{at}.filters.{index}", item):
            rules.append(rule)
            bounds.append(bound)
    return fields | ({f"{ours}.reject": rules, f"{ours}.reject_bounds": bounds} if rules else {})


def _filter(keys: Reader, key: str, item: Any) -> list[tuple[str, str]]:
    """Our rules and their bounds: of ratios, which are sampler / trainer where ROLL's are trainer / sampler, and of
    differences of probabilities, which are trainer less sampler in both."""
    if not isinstance(item, dict) or any(
        name not in _FILTER_KEYS or not fits(value, _FILTER_KEYS[name]) for name, value in item.items()
    ):
        keys.problem(f"{key} is {item!r}", key=key, fix=f"write a section of {', '.join(_FILTER_KEYS)}")
        return []
    if not item.get("enabled", False):
        return []
    kind, found = item.get("agg_type", "token"), []
    low, high = item.get("ratio_low", 0.8), item.get("ratio_high", 1.2)
    least, most = item.get("diff_low", -0.2), item.get("diff_high", 0.2)
    if kind not in _RULES or not 0 < low < high:
        keys.problem(f"{key} keeps {kind} ratios from {low:g} to {high:g}", key=key,
                     fix=f"use an agg_type of {', '.join(_RULES)}, and 0 < ratio_low < ratio_high")  # fmt: skip
        return []
    if item.get("ratio_enabled", True):
        found.append((f"{_RULES[kind]}_k1", f"{1 / high:.6g}_{1 / low:.6g}"))
    if item.get("diff_enabled", False):
        if least >= most:
            keys.problem(f"{key} keeps {kind} differences from {least:g} to {most:g}", key=key,
                         fix="use diff_low below diff_high, such as -0.2 and 0.2")  # fmt: skip
            return []
        found.append((f"{_RULES[kind]}_difference", f"{least:.6g}_{most:.6g}"))
    return found

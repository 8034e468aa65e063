"""The policy loss: its form, its mean, and the correction for a sampler with other log-probs."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.plugged import settings_of_own
from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get, is_of_2026, name_of
from posttrain.errors import did_you_mean
from posttrain.registry import POLICY_LOSSES

_ALGORITHM = "trainer.algorithm"
_TYPE = f"{_ALGORITHM}.ppo_loss_type"
_CORRECTION = f"{_ALGORITHM}.off_policy_correction"
_DPPO = f"{_ALGORITHM}.dppo.dppo_type"
LOSSES = {"regular": "ppo_clip", "dual_clip": "ppo_clip"}
CORRECTING = {
    "apply_off_policy_correction",
    "ppo_policy_loss",
}  # SkyRL's functions that weigh by the sampler's log-probs
_DIVERGENCES = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}  # of their loss dppo
_LARGEST_RATIO = 4.85e8  # they clamp the log-ratio at 20, and the weight of a token no further
THEIR_LOSSES = (
    "regular",
    "dual_clip",
    "gspo",
    "clip_cov",
    "kl_cov",
    "cispo",
    "sapo",
    "dppo",
    "rollout_is",
    "cross_entropy",
    "importance_sampling",
)
AGGREGATIONS = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean_token_mean",
    "seq_mean_token_sum_norm": "sequence_mean_token_sum_norm",
    "prompt_mean": "prompt_mean",
}
# Settings of one loss: key below trainer.algorithm -> (their name of the loss, our field)
_OF_ONE_LOSS = {
    "clip_ratio_c": ("dual_clip", "loss.dual_clip"),
    "clip_cov.clip_ratio": ("clip_cov", "loss.covariance_share"),
    "clip_cov.clip_cov_lb": ("clip_cov", "loss.covariance_low"),
    "clip_cov.clip_cov_ub": ("clip_cov", "loss.covariance_high"),
    "kl_cov.kl_cov_frac": ("kl_cov", "loss.covariance_share"),
    "kl_cov.ppo_kl_coef": ("kl_cov", "loss.covariance_kl_coef"),
    "cispo.cispo_eps_clip_low": ("cispo", "loss.clip_ratio_low"),
    "cispo.cispo_eps_clip_high": ("cispo", "loss.clip_ratio_high"),
    "dppo.delta_low": ("dppo", "loss.clip_ratio_low"),
    "dppo.delta_high": ("dppo", "loss.clip_ratio_high"),
    "sapo.tau_pos": ("sapo", "loss.gate_sharpness_positive"),
    "sapo.tau_neg": ("sapo", "loss.gate_sharpness_negative"),
}


def loss(keys: Reader) -> dict[str, Any]:
    """Name, clipping, aggregation, entropy, correction."""
    kind = get(keys, _TYPE)
    if own := settings_of_own(keys, _TYPE, kind):
        return {"loss.name": kind} | own | _aggregation(keys) | _entropy(keys) | _own_correction(keys, kind, own)
    name = _DIVERGENCES[get(keys, _DPPO)] if kind == "dppo" else LOSSES.get(kind, kind)
    fields: dict[str, Any] = {}
    if name in POLICY_LOSSES.names():
        fields["loss.name"] = name
    else:
        known = [*THEIR_LOSSES, *(own for own in POLICY_LOSSES.names() if own not in (*THEIR_LOSSES, "ppo_clip"))]
        key = name_of(keys, _TYPE)
        what = f"there is no policy loss {kind!r} (known: {', '.join(known)})"
        keys.problem(what, key=key, fix=did_you_mean(kind, known, listed=True) or f"use {key}=regular")
        name = "ppo_clip"
    for setting, field in (("eps_clip_low", "loss.clip_ratio_low"), ("eps_clip_high", "loss.clip_ratio_high")):
        key = f"{_ALGORITHM}.{setting}"
        if kind == "cispo":
            keys.ignore(key, f"cispo clips at {_ALGORITHM}.cispo.cispo_{setting}")
        elif kind == "dppo":
            keys.ignore(key, f"dppo drops tokens at {_ALGORITHM}.dppo.{setting.replace('eps_clip', 'delta')}")
        elif field.removeprefix("loss.") in POLICY_LOSSES.settings(name):
            fields[field] = keys[key]
        else:
            keys.ignore(key, f"{kind} does not clip the ratio")
    anchor = f"{_ALGORITHM}.cispo.cispo_anchor"
    if kind != "cispo":
        keys.ignore(anchor, f"{_TYPE} is {kind}")
    elif get(keys, anchor) == "rollout":
        fields["loss.rollout_correction.use_rollout_logprobs"] = True
        if get(keys, f"{_CORRECTION}.tis_ratio_type") is not None:
            what = f"{anchor}=rollout weighs tokens by the sampler's log-probs, and {_CORRECTION}.tis_ratio_type would once more"
            keys.problem(what, key=anchor, fix=f"use {_CORRECTION}.tis_ratio_type=null")
    for setting, (reader, field) in _OF_ONE_LOSS.items():
        key = f"{_ALGORITHM}.{setting}"
        if kind == reader:
            fields[field] = get(keys, key)
        else:
            keys.ignore(key, f"{kind} does not use it ({reader} does)")
    return fields | _aggregation(keys) | _entropy(keys) | _correction(keys, kind) | _dppo(keys, kind)


def _own_correction(keys: Reader, kind: str, own: dict[str, Any]) -> dict[str, Any]:
    """The correction for a loss of the user's own: in SkyRL losses do it, so it is done for one that calls SkyRL's function."""
    theirs = POLICY_LOSSES.written_for_verl(kind, own["loss.path"])
    if theirs is None or not theirs.is_for_skyrl or theirs.calls & CORRECTING:
        return _correction(keys, kind)
    for row in keys.ledger.rows:
        if row.name.startswith((f"{_CORRECTION}.", f"{_ALGORITHM}.use_tis", f"{_ALGORITHM}.tis_imp_ratio_cap")):
            keys.ignore(row.name, f"{kind} is yours, and does not call apply_off_policy_correction")
    return {}


def _dppo(keys: Reader, kind: str) -> dict[str, Any]:
    """Settings of dppo that SkyRL has no keys for: it measures the move from the sampler's log-probs."""
    if kind != "dppo":
        keys.ignore(_DPPO, f"{kind} does not use it (dppo does)")
        return {}
    return {"loss.weight_limit": _LARGEST_RATIO, "loss.rollout_correction.use_rollout_logprobs": True}


def _aggregation(keys: Reader) -> dict[str, Any]:
    key, norm = f"{_ALGORITHM}.loss_reduction", f"{_ALGORITHM}.max_seq_len"
    mode = get(keys, key)
    if mode == "token_mean_legacy":
        keys.warn(
            f"{key}=token_mean_legacy is a mean of micro-batch means, so that the size of micro-batches changes the gradient; "
            "here it is token_mean, the mean over the whole mini-batch"
        )
        mode = "token_mean"
    fields: dict[str, Any] = {"loss.aggregation": AGGREGATIONS[mode]}
    if mode == "seq_mean_token_sum_norm":
        lengths = keys["generator.max_input_length"] + keys["generator.sampling_params.max_generate_length"]
        fields["loss.norm_tokens"] = get(keys, norm) or lengths
    else:
        keys.ignore(norm, f"loss_reduction is {mode}")
    return fields


def _entropy(keys: Reader) -> dict[str, Any]:
    coef = f"{_ALGORITHM}.entropy_loss_coef"
    if get(keys, f"{_ALGORITHM}.use_entropy_loss"):
        return {"loss.entropy_coef": get(keys, coef)}
    keys.ignore(coef, "use_entropy_loss is false")
    return {}


def _correction(keys: Reader, kind: str) -> dict[str, Any]:
    """Truncated importance sampling of August 2025, or the corrections that took its place."""
    use, cap = f"{_ALGORITHM}.use_tis", f"{_ALGORITHM}.tis_imp_ratio_cap"
    ours, section = "loss.rollout_correction", f"{_ALGORITHM}.off_policy_correction"
    level = get(keys, f"{section}.tis_ratio_type")
    fields: dict[str, Any] = {}
    if get(keys, use):
        _check_tis(keys, kind, use, cap)
        if level is not None:
            what = f"{section}.tis_ratio_type took the place of {use}, and both are given"
            keys.problem(what, key=use, fix=f"use {use}=false")
        if get(keys, cap) > 0:
            fields = {f"{ours}.weights": "token", f"{ours}.weight_high": get(keys, cap)}
    else:
        keys.ignore(cap, "use_tis is false")
    if level is not None:
        fields = {f"{ours}.weights": level, f"{ours}.weight_high": get(keys, f"{section}.{level}_tis_ratio_clip_high")}
    for name in ("token", "sequence"):
        key = f"{section}.{name}_tis_ratio_clip_high"
        if name != level:
            keys.ignore(key, f"tis_ratio_type is {level or 'null'}")
    return fields | _rejections(keys, section, ours)


def _check_tis(keys: Reader, kind: str, use: str, cap: str) -> None:
    """Check s of August 2025, and what came to it."""
    if get(keys, cap) <= 0:
        what = f"use_tis cuts weights at {cap}, which must be above 0, not {get(keys, cap):g}"
        keys.problem(what, key=cap, fix=f"use {cap}=2.0")
    if get(keys, "generator.backend") == "sglang":
        what = "use_tis needs the sampler's log-probs, which SkyRL does not get from sglang"
        keys.problem(what, key=use, fix=f"use {name_of(keys, 'generator.backend')}=vllm, or {use}=false")
    if not keys["generator.batched"] and not is_of_2026(keys):
        keys.warn(
            "SkyRL of August and September 2025 refuses use_tis with generator.batched=false; here they go together"
        )
    if kind not in ("regular", "dual_clip"):
        keys.problem(
            f"use_tis goes with the losses regular and dual_clip, not with {kind}", key=use, fix=f"use {use}=false"
        )


def _rejections(keys: Reader, section: str, ours: str) -> dict[str, Any]:
    """Sequences and tokens left out. SkyRL bounds old / rollout, we rollout / old: the bounds change places."""
    metric = get(keys, f"{section}.sequence_mask_metric")
    rules: list[tuple[str, float, float]] = []
    for name, prefix, rule in (
        ("product", "product_mask", "sequence_sum_k1"),
        ("geometric", "geo_mask", "sequence_mean_k1"),
    ):
        low, high = f"{section}.{prefix}_low", f"{section}.{prefix}_high"
        if metric == name:
            _append(keys, rules, rule, low, high)
        else:
            for key in (low, high):
                keys.ignore(key, f"sequence_mask_metric is {metric or 'null'}")
    for prefix, rule in (("outlier_token_is_threshold", "sequence_max_k1"), ("token_mask_is_threshold", "token_k1")):
        low, high = get(keys, f"{section}.{prefix}_low"), get(keys, f"{section}.{prefix}_high")
        if (low is None) != (high is None):
            key = f"{section}.{prefix}_{'low' if low is None else 'high'}"
            what = f"{section}.{prefix}_low and _high go together, and one of them is null"
            keys.problem(what, key=key, fix=f"give {key} too, such as {key}={1e-4 if low is None else 100.0:g}")
        elif low is not None:
            _append(keys, rules, rule, f"{section}.{prefix}_low", f"{section}.{prefix}_high")
    if not rules:
        return {}
    bounds = [f"{1 / high:.12g}_{1 / low:.12g}" for _, low, high in rules]
    return {f"{ours}.reject": [rule for rule, _, _ in rules], f"{ours}.reject_bounds": bounds}


def _append(keys: Reader, rules: list[tuple[str, float, float]], rule: str, low: str, high: str) -> None:
    """Add a rule with the bounds of two keys; report bounds that nothing lies between."""
    least, most = get(keys, low), get(keys, high)
    if 0 < least < most:
        rules.append((rule, least, most))
        return
    key = high if keys.written(high) and least > 0 else low
    what = f"{low}={least:g} and {high}={most:g} are bounds of a ratio: above 0, the lower one first"
    keys.problem(what, key=key, fix="use bounds such as 0.5 and 2.0")

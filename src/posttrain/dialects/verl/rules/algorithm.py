"""Advantages, losses, KL, dynamic sampling, rollout correction."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.plugged import own_path, settings_of_own
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.early_correction import early_rejections, first_correction
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, ROLLOUT
from posttrain.dialects.verl.rules.prime import is_prime, prime_estimator, prime_filter, without_prime
from posttrain.dialects.verl.rules.spin import is_spin, spin_estimator, spin_loss, without_spin
from posttrain.dialects.verl.rules.sppo import ETA, is_sppo, mean_of_responses, sppo_loss
from posttrain.dialects.verl.strategies import MEGATRON
from posttrain.errors import did_you_mean
from posttrain.registry import ADVANTAGES

ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
ESTIMATORS_OF_0_2 = ("gae", "grpo", "reinforce_plus_plus", "remax")
KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k3+"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}
# verl averages these over sequences whatever loss_agg_mode says; entropy and KL over tokens, its default
SEQUENCE_LOSSES = ("gspo", "sapo", "geo_mean")
REWEIGHTED = {"pow": "power", "max_min": "extremes", "max_random": "best"}
_CORRECTION = "algorithm.rollout_correction"
_KEEP_LONE_REWARD = ("grpo", "reinforce_plus_plus_baseline", "rloo", "opo", "gpg", "grpo_vectorized", "gdpo")


def estimator(keys: Reader) -> dict[str, Any]:
    """advantage.name, and what a group of one gets."""
    name, samples = keys["algorithm.adv_estimator"], keys[f"{ROLLOUT}.n"]
    own = settings_of_own(keys, "algorithm.adv_estimator", ESTIMATORS.get(name, name))
    if keys.ledger.version == "0.2" and name not in ESTIMATORS_OF_0_2 and not own:
        keys.problem(
            f"verl 0.2 has no estimator {name} (it has {', '.join(ESTIMATORS_OF_0_2)})",
            key="algorithm.adv_estimator",
            fix="use one of these, or a later verl: --dialect verl",
        )
    if name == "grpo_passk" and samples == 1:
        what = "grpo_passk compares the best two responses of a prompt, and there is 1"
        keys.problem(what, key=f"{ROLLOUT}.n", fix=f"use {ROLLOUT}.n=8, or another number above 1")
    if is_prime(keys):
        return prime_estimator(keys)
    if is_sppo(keys):
        return {"advantage.name": "sppo", "advantage.soft_mean_scale": keys[ETA]}
    if is_spin(keys):
        return spin_estimator(keys)
    without_spin(keys)
    keys.ignore(f"{ACTOR}.sppo_eta", f"the recipe sppo reads it, which {ETA} asks for")
    fields: dict[str, Any] = {"advantage.name": ESTIMATORS.get(name, name)} | own
    if samples == 1 and name in _KEEP_LONE_REWARD:
        fields["advantage.lone_sample_keeps_reward"] = True
    return fields


def terms(keys: Reader, scorer: str) -> dict[str, Any]:
    """gdpo's numbers, and their weights. ``scorer`` is the reward term that gives them; "" where there is none."""
    section = "algorithm.gdpo_reward"
    if keys["algorithm.adv_estimator"] != "gdpo":
        for name in ("keys", "weights"):
            keys.ignore(f"{section}_{name}", f"{keys['algorithm.adv_estimator']} does not use it (gdpo does)")
        return {}
    names = get(keys, f"{section}_keys") or []
    if not scorer:
        what = "gdpo compares numbers of a reward function, and a reward model scores alone"
        keys.problem(what, key="algorithm.adv_estimator", fix="use algorithm.adv_estimator=grpo")
    elif not names:
        what = "gdpo compares the numbers that gdpo_reward_keys names, and it names none"
        keys.problem(what, key=f"{section}_keys", fix=f"use +{section}_keys=[score], or names that the scorer gives")
    return {
        "advantage.terms": [scorer if name == "score" else f"{scorer}/{name}" for name in names],
        "advantage.term_weights": get(keys, f"{section}_weights") or [],
    }


def resampling(keys: Reader) -> dict[str, Any]:
    """PF-PPO's second draw of a step's responses."""
    switch, method, power = (f"algorithm.{name}" for name in ("use_pf_ppo", *_later_pf_ppo(keys)))
    if not get(keys, switch, False):
        for key in (method, power):
            keys.ignore(key, f"{switch} is false")
        return {}
    if keys["algorithm.adv_estimator"] != "gae":
        why = f"verl draws again for gae alone, not for {keys['algorithm.adv_estimator']}"
        for key in (switch, method, power):
            keys.ignore(key, why)
        return {}
    fields: dict[str, Any] = {"resampling.weights": REWEIGHTED[keys[method]]}
    if keys[method] != "pow":
        keys.ignore(power, f"{method} is {keys[method]}, not pow")
        return fields
    return fields | {"resampling.exponent": keys[power]}


def _later_pf_ppo(keys: Reader) -> tuple[str, str]:
    """The names of PF-PPO's settings: those of a section of their own, or of 0.4's code where they are written."""
    found = []
    for name in ("reweight_method", "weight_pow"):
        first = f"pf_ppo_{name}"
        found.append(first if keys.written(f"algorithm.{first}") else f"pf_ppo.{name}")
    return found[0], found[1]


def uses_critic(keys: Reader) -> bool:
    """Return True when a critic is built: gae needs one, as does an estimator of the user's own that reads its values, and
    critic.enable cannot add or remove it here."""
    name = keys["algorithm.adv_estimator"]
    if "algorithm.adv_estimator" in keys.bad and name == "gae":
        return False  # the default in the place of an unknown one: verl builds a critic for gae alone
    path = None if ADVANTAGES.is_built_in(name) else own_path(keys, "advantage.name", name)
    about = ADVANTAGES.known(ESTIMATORS.get(name, name), path)
    # verl itself hands estimators none
    needed = "values" in about.inputs and "values" not in about.optional
    asked = get(keys, "critic.enable")
    if asked is not None and asked != needed:
        what = (
            f"critic.enable is {str(asked).lower()}, and {name} {'needs' if needed else 'reads no values of'} a critic"
        )
        keys.problem(what, key="critic.enable", fix="remove it: a critic is there where the estimator needs one")
    return needed


def loss(keys: Reader) -> dict[str, Any]:
    """The policy loss: its name, clipping, aggregation."""
    mode = get(keys, f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if is_sppo(keys):
        return sppo_loss(keys)
    if is_spin(keys):
        return spin_loss(keys)
    kind = f"{_CORRECTION}.loss_type"
    if _without_ratio(keys):
        name = "gpg"
    else:
        keys.ignore(kind, "read with bypass_mode only" if not _bypasses(keys) else "ppo_clip is the loss in any case")
        name = "ppo_clip" if mode in ("vanilla", "bypass_mode") else mode
    own = settings_of_own(keys, f"{ACTOR}.policy_loss.loss_mode", name)
    fields: dict[str, Any] = {"loss.name": name} | own | _clip(keys, name) | _covariance(keys, name)
    if not keys.written(f"{ACTOR}.loss_agg_mode"):
        if name in SEQUENCE_LOSSES or get(keys, f"{ACTOR}.use_token_level_loss") is False:
            return fields | mean_of_responses(keys)
    else:
        keys.ignore(f"{ACTOR}.use_token_level_loss", "loss_agg_mode counts")
    aggregation = get(keys, f"{ACTOR}.loss_agg_mode", "token-mean")
    fields["loss.aggregation"] = fields["loss.entropy_aggregation"] = AGGREGATIONS[aggregation]
    return fields


_AS_THE_OTHER = -1  # of DeepScaleR's fork: no bound of this side's own


def _clip(keys: Reader, name: str) -> dict[str, Any]:
    key, low, high = f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"
    both = keys[key]
    sides: dict[str, Any] = {}
    for side, field in ((low, "loss.clip_ratio_low"), (high, "loss.clip_ratio_high")):
        known = keys.ledger.find(side) is not None
        given = keys[side] if known and (keys.written(side) or not keys.written(key)) else None
        if given == _AS_THE_OTHER:
            keys.warn(f"{side}={given}: {key}={both:g} counts, as in the forks whose files have this number there")
            given = None
        sides[field] = both if given is None else given
    if sides["loss.clip_ratio_low"] > 1:
        keys.warn(
            f"{low}={sides['loss.clip_ratio_low']:g}: no ratio is below 0, so nothing is clipped from below, as with 1"
        )
        sides["loss.clip_ratio_low"] = 1.0
    if keys.ledger.find(low) and keys.written(key):
        unwritten = [side for side in (low, high) if not keys.written(side)]
        if unwritten and both != 0.2:
            names = " and ".join(side.rpartition(".")[2] for side in unwritten)
            keys.warn(f"{key}={both:g} counts for {names} too; verl 0.4 itself would keep its 0.2 there")
        elif not unwritten and keys[low] is not None and keys[high] is not None:
            keys.ignore(key, "clip_ratio_low and clip_ratio_high are given")
    bound = get(keys, f"{ACTOR}.clip_ratio_c")
    if name == "ppo_clip" and keys.ledger.find(f"{ACTOR}.clip_ratio_c"):
        return sides | {"loss.dual_clip": bound}
    if name in ("dppo_tv", "dppo_kl") and bound is not None:
        return sides | {"loss.weight_limit": bound}
    keys.ignore(f"{ACTOR}.clip_ratio_c", f"{name} does not use it")
    return sides


def _covariance(keys: Reader, name: str) -> dict[str, Any]:
    readers = {
        "clip_cov_ratio": ("clip_cov", "loss.covariance_share"),
        "clip_cov_lb": ("clip_cov", "loss.covariance_low"),
        "clip_cov_ub": ("clip_cov", "loss.covariance_high"),
        "kl_cov_ratio": ("kl_cov", "loss.covariance_share"),
        "ppo_kl_coef": ("kl_cov", "loss.covariance_kl_coef"),
    }
    fields = {}
    for setting, (reader, field) in readers.items():
        key = f"{ACTOR}.policy_loss.{setting}"
        if name == reader:
            fields[field] = keys[key]
        else:
            keys.ignore(key, f"{name} does not use it ({reader} would)")
    return fields


def kl_in_loss(keys: Reader) -> dict[str, Any]:
    """Empty without."""
    if not keys[f"{ACTOR}.use_kl_loss"]:
        for name in ("kl_loss_coef", "kl_loss_type"):
            keys.ignore(f"{ACTOR}.{name}", "use_kl_loss is false")
        return {}
    kind = keys[f"{ACTOR}.kl_loss_type"]
    return {"loss.kl_coef": keys[f"{ACTOR}.kl_loss_coef"], "loss.kl_estimator": KL.get(kind, kind)}


def kl_in_reward(keys: Reader) -> dict[str, Any]:
    """Empty without. verl 0.2 has it wherever there is none in the loss."""
    of_its_own = keys.ledger.find("algorithm.use_kl_in_reward")
    used = keys["algorithm.use_kl_in_reward"] if of_its_own else not keys[f"{ACTOR}.use_kl_loss"]
    if used and is_prime(keys):
        for key in ("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl"):
            keys.ignore(key, "the recipe prime computes no reward with a KL")
        return {}
    if not used:
        off = "algorithm.use_kl_in_reward is false" if of_its_own else "use_kl_loss is true, which switches it off"
        for key in ("algorithm.kl_penalty", "algorithm.kl_ctrl"):
            keys.ignore(key, off)
        return {}
    if keys[f"{ACTOR}.use_kl_loss"]:
        keys.warn(
            "the KL to the reference counts twice: in the reward (use_kl_in_reward) and in the loss (use_kl_loss)"
        )
    kind = keys["algorithm.kl_penalty"]
    fields = {"reward.kl.coef": keys["algorithm.kl_ctrl.kl_coef"], "reward.kl.estimator": KL.get(kind, kind)}
    if keys["algorithm.kl_ctrl.type"] == "adaptive":
        fields["reward.kl.target"] = get(keys, "algorithm.kl_ctrl.target_kl", 0.1)
        fields["reward.kl.horizon_sequences"] = get(keys, "algorithm.kl_ctrl.horizon", 10000)
    else:
        for name in ("target_kl", "horizon"):
            keys.ignore(f"algorithm.kl_ctrl.{name}", "the weight is fixed (kl_ctrl.type)")
    return fields


def group_filter(keys: Reader, scorer: str) -> dict[str, Any]:
    """Dynamic sampling. ``scorer`` is the reward term whose further numbers the metric may name; "" where there is none."""
    section = "algorithm.filter_groups"
    if is_prime(keys):
        for name in ("enable", "metric", "max_num_gen_batches"):
            keys.ignore(f"{section}.{name}", "the recipe prime filters by data.filter_accuracy")
        return prime_filter(keys)
    without_prime(keys)
    if not get(keys, f"{section}.enable"):
        for name in ("metric", "max_num_gen_batches"):
            keys.ignore(f"{section}.{name}", "filter_groups.enable is not true")
        if get(keys, "trainer.v1.sampler.sync_refill_failed_groups", False):
            return {"group_filter.strategy": "refill", "group_filter.above_std": None}
        return {}
    metric = get(keys, f"{section}.metric", "reward")
    of_the_reward = metric in ("reward", "score", "seq_reward", "seq_final_reward")
    if not of_the_reward and not scorer:
        what = f"{metric} is a number of a reward function, and a reward model scores alone"
        keys.problem(what, key=f"{section}.metric", fix=f"use {section}.metric=reward")
    return {
        "group_filter.strategy": "refill",
        "group_filter.metric": "reward" if of_the_reward or not scorer else f"{scorer}/{metric}",
        "group_filter.max_batches": get(keys, f"{section}.max_num_gen_batches") or None,
    }


_STATISTICS = ("k1", "k2", "k3")
_RULES = {
    **{f"token_{one}": f"token_{one}" for one in _STATISTICS},
    **{f"seq_{how}_{one}": f"sequence_{how}_{one}" for how in ("sum", "mean") for one in _STATISTICS},
    **{f"seq_max_{one}": f"sequence_max_{one}" for one in ("k2", "k3")},
}


def _bypasses(keys: Reader) -> bool:
    """Return True when the sampler's log-probs are the old ones."""
    by_mode = get(keys, f"{ACTOR}.policy_loss.loss_mode") == "bypass_mode"
    return bool(get(keys, f"{_CORRECTION}.bypass_mode") or by_mode)


def _without_ratio(keys: Reader) -> bool:
    """Return True for the loss that has no ratio, by its later name or the one of 0.6."""
    early = get(keys, f"{_CORRECTION}.use_policy_gradient")
    return _bypasses(keys) and (get(keys, f"{_CORRECTION}.loss_type") == "reinforce" or bool(early))


def rollout_correction(keys: Reader) -> dict[str, Any]:
    """Weights and rejections for a sampler whose log-probs are not the trainer's. Empty without."""
    section, ours = _CORRECTION, "loss.rollout_correction"
    fields: dict[str, Any] = {}
    bypass = _bypasses(keys)
    with_ratio = bypass and not _without_ratio(keys)
    recomputed = f"{ACTOR}.recompute_old_log_prob"
    if keys[f"{ACTOR}.strategy"] != MEGATRON:
        keys.ignore(recomputed, f"the strategy {MEGATRON} reads it, and this is {keys[f'{ACTOR}.strategy']}")
    by_sampler = keys[f"{ACTOR}.strategy"] == MEGATRON and get(keys, recomputed) is False
    if bypass or by_sampler or get(keys, f"{ACTOR}.use_rollout_log_probs"):
        fields[f"{ours}.use_rollout_logprobs"] = True
    level, cap = get(keys, f"{section}.rollout_is"), get(keys, f"{ACTOR}.tis_imp_ratio_cap", -1)
    if level is not None and with_ratio:
        keys.ignore(f"{section}.rollout_is", "bypass_mode: the ratio itself starts from the sampler's log-probs")
    elif level is not None:
        fields[f"{ours}.weights"] = level
        fields |= _weight_bounds(keys, section, ours)
        fields[f"{ours}.normalize"] = bool(get(keys, f"{section}.rollout_is_batch_normalize"))
    elif cap > 0:
        fields |= {f"{ours}.weights": "token", f"{ours}.weight_high": cap}
    if level is None or with_ratio:
        for name in ("rollout_is_threshold", "rollout_is_batch_normalize"):
            keys.ignore(f"{section}.{name}", "read with rollout_is only")
    return fields | _rejections(keys, section, ours) | first_correction(keys)


def _weight_bounds(keys: Reader, section: str, ours: str) -> dict[str, Any]:
    """2.0 cuts weights to 2; 0.5_2.0 sets those outside to 0."""
    given = str(get(keys, f"{section}.rollout_is_threshold", 2.0))
    low, _, high = given.rpartition("_")
    try:
        bounds = [float(bound) for bound in (low, high) if bound]
    except ValueError:
        what = f"{section}.rollout_is_threshold is {given!r}"
        keys.problem(
            what,
            key=f"{section}.rollout_is_threshold",
            fix=f"write a number, or two: {section}.rollout_is_threshold=0.5_2.0",
        )
        return {}
    fields = {f"{ours}.weight_high": bounds[-1]}
    return fields | ({f"{ours}.weight_low": bounds[0]} if low else {})


def _rejections(keys: Reader, section: str, ours: str) -> dict[str, Any]:
    early = early_rejections(keys)
    if early is not None:
        return {f"{ours}.reject": early[0], f"{ours}.reject_bounds": early[1]}
    names = _listed(get(keys, f"{section}.rollout_rs"))
    bounds = _listed(get(keys, f"{section}.rollout_rs_threshold"))
    if not names:
        keys.ignore(f"{section}.rollout_rs_threshold", "read with rollout_rs only")
        return {}
    unknown = [name for name in names if name not in _RULES]
    if unknown:
        what = f"there is no rule {unknown[0]!r} (known: {', '.join(_RULES)})"
        keys.problem(what, key=f"{section}.rollout_rs", fix=did_you_mean(unknown[0], list(_RULES), listed=True))
        return {}
    if len(bounds) not in (1, len(names)):
        what = f"{len(names)} rules have {len(bounds)} bounds" if bounds else "rollout_rs needs rollout_rs_threshold"
        key = f"{section}.rollout_rs_threshold"
        keys.problem(
            what, key=key, fix=f"give one bound for all, such as {key}=2.0, or {len(names)} with commas between"
        )
        return {}
    return {f"{ours}.reject": [_RULES[name] for name in names], f"{ours}.reject_bounds": bounds}


def _listed(value: Any) -> list[str]:
    """A number, a text with commas, or a list, as texts."""
    items = value if isinstance(value, list) else str(value).split(",") if value is not None else []
    return [str(item).strip() for item in items if str(item).strip()]

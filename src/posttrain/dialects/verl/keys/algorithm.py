"""Keys of algorithm: advantages, KL in the reward, dynamic sampling, rollout correction."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, mapped, planned

ESTIMATORS = Literal[
    "gae",
    "grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "opo",
    "grpo_passk",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
]
_WEIGHED = "weighting responses by their reward (PF-PPO)"
_TERMS = "advantages of the reward's terms one by one (GDPO)"

_ADVANTAGES: tuple[Key, ...] = (
    mapped(
        "algorithm.adv_estimator",
        ESTIMATORS,
        "gae",
        "advantage.name advantage.lone_sample_keeps_reward",
        "advantage estimator",
        by_rule=True,
        change="grpo_vectorized: grpo, rloo_vectorized: rloo; with n=1, a lone response keeps its reward, as in verl",
        note="verl 0.2 has gae, grpo, reinforce_plus_plus and remax.",
    ),
    mapped("algorithm.gamma", float, 1.0, "advantage.gamma", "discount per token (gae, reinforce_plus_plus)"),
    mapped("algorithm.lam", float, 1.0, "advantage.gae_lambda", "gae: 1 trusts the returns, 0 the critic"),
    mapped(
        "algorithm.norm_adv_by_std_in_grpo",
        bool,
        True,
        "advantage.normalize_by_std",
        "grpo: divide by the group's standard deviation",
        since="0.4",
    ),
    planned("algorithm.use_pf_ppo", bool, False, _WEIGHED, "weigh responses by their reward", since="0.4"),
    planned(
        "algorithm.pf_ppo.reweight_method",
        Literal["pow", "max_min", "max_random"],
        "pow",
        _WEIGHED,
        "how they are weighed",
        since="0.4",
    ),
    planned("algorithm.pf_ppo.weight_pow", float, 2.0, _WEIGHED, "exponent of pow", since="0.4"),
    planned("algorithm.gdpo_reward_keys", list[str] | None, ABSENT, _TERMS, "names of the terms", since="later"),
    planned("algorithm.gdpo_reward_weights", list[float] | None, ABSENT, _TERMS, "their weights", since="later"),
)

_KL: tuple[Key, ...] = (
    mapped(
        "algorithm.use_kl_in_reward",
        bool,
        False,
        "reward.kl.coef",
        "KL to the reference as a part of the reward",
        by_rule=True,
        change="true: kl_ctrl.kl_coef, false: 0",
        since="0.4",
        note="verl 0.2 has no such key: there the KL is in the reward unless use_kl_loss is true. So it is in verl@0.2 here.",
    ),
    mapped(
        "algorithm.kl_penalty",
        Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full"],
        "kl",
        "reward.kl.estimator",
        "its estimator",
        by_rule=True,
        change="kl: k1, mse: k2, low_var_kl: k3",
        note="verl's page lists full, and its code does not have it; of sampled tokens there is none, so it is refused.",
    ),
    mapped(
        "algorithm.kl_ctrl.type",
        Literal["fixed", "adaptive"],
        "fixed",
        "reward.kl.target",
        "whether the weight is steered towards target_kl",
        by_rule=True,
        change="adaptive: target_kl counts, fixed: null",
    ),
    mapped(
        "algorithm.kl_ctrl.kl_coef",
        float,
        0.001,
        "reward.kl.coef",
        "weight at the start",
        by_rule=True,
        note="verl's page shows 0.005 in its block and 0.001 in its text; the file says 0.001.",
    ),
    mapped(
        "algorithm.kl_ctrl.horizon",
        int,
        10000,
        "reward.kl.horizon_sequences",
        "adaptive: how slowly it is steered, sequences",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        "algorithm.kl_ctrl.target_kl",
        float,
        0.1,
        "reward.kl.target",
        "adaptive: KL that is aimed at, nats per token",
        by_rule=True,
        since="0.4",
    ),
)

_FILTER: tuple[Key, ...] = (
    mapped(
        "algorithm.filter_groups.enable",
        bool,
        ABSENT,
        "group_filter.strategy",
        "sample prompts until a step is full of groups whose responses differ in the metric (DAPO)",
        by_rule=True,
        change="true: refill",
        since="later",
    ),
    mapped(
        "algorithm.filter_groups.metric",
        str | None,
        ABSENT,
        "group_filter.metric",
        "what must differ: score, seq_reward, seq_final_reward, or a number that the scorer gives, such as acc",
        by_rule=True,
        change="the first three: reward; acc: NAME_OF_THE_SCORER/acc",
        since="later",
    ),
    mapped(
        "algorithm.filter_groups.max_num_gen_batches",
        int,
        ABSENT,
        "group_filter.max_batches",
        "batches before the run stops itself; 0: no limit",
        by_rule=True,
        change="0: null",
        since="later",
    ),
    planned(
        "algorithm.filter_groups.max_inflight_gen_batches",
        int,
        ABSENT,
        "several batches of a step at once",
        "batches sampled at once",
        off=(1,),
        since="later",
    ),
)

_CORRECTION = "algorithm.rollout_correction"
_OURS = "loss.rollout_correction"

_ROLLOUT_CORRECTION: tuple[Key, ...] = (
    mapped(
        f"{_CORRECTION}.rollout_is",
        Literal["token", "sequence"] | None,
        ABSENT,
        f"{_OURS}.weights",
        "multiply token losses by pi_old / pi_rollout, of the token or of its response",
        by_rule=True,
        change="null: none",
        since="later",
    ),
    mapped(
        f"{_CORRECTION}.rollout_is_threshold",
        float | str,
        ABSENT,
        f"{_OURS}.weight_high {_OURS}.weight_low",
        "the most such a weight is; low_high: 0 outside the two",
        by_rule=True,
        change="2.0 where not given",
        since="later",
    ),
    mapped(
        f"{_CORRECTION}.rollout_is_batch_normalize",
        bool,
        ABSENT,
        f"{_OURS}.normalize",
        "divide the weights by their mean",
        by_rule=True,
        since="later",
    ),
    mapped(
        f"{_CORRECTION}.rollout_rs",
        str | list[str] | None,
        ABSENT,
        f"{_OURS}.reject",
        "rules that take tokens or responses out of the loss, with commas between",
        by_rule=True,
        change="seq_mean_k1: sequence_mean_k1, and so on",
        since="later",
    ),
    mapped(
        f"{_CORRECTION}.rollout_rs_threshold",
        float | str | list[Any] | None,
        ABSENT,
        f"{_OURS}.reject_bounds",
        "their bounds: one for all, or one for each with commas between",
        by_rule=True,
        since="later",
    ),
    mapped(
        f"{_CORRECTION}.bypass_mode",
        bool,
        ABSENT,
        f"{_OURS}.use_rollout_logprobs",
        "take the sampler's log-probs as the old ones",
        by_rule=True,
        since="later",
    ),
    planned(
        f"{_CORRECTION}.loss_type",
        Literal["ppo_clip", "reinforce"],
        ABSENT,
        "the reinforce loss on the sampler's log-probs",
        "loss of bypass_mode",
        off=("ppo_clip",),
        since="later",
    ),
)

ROWS: tuple[Key, ...] = (*_ADVANTAGES, *_KL, *_FILTER, *_ROLLOUT_CORRECTION)

"""Keys of trainer.algorithm about the policy loss: its form, its mean, and the gap between sampler and trainer."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import Key, mapped

_A = "2025-08"

_LOSS: tuple[Key, ...] = (
    mapped(
        "trainer.algorithm.ppo_loss_type",
        str,
        "regular",
        "loss.name",
        "policy loss: regular, dual_clip, gspo, clip_cov, kl_cov, cispo, sapo, or one of this program's",
        by_rule=True,
        change="regular, dual_clip: ppo_clip",
        note="In June 2025 regular and dual_clip only.",
    ),
    mapped(
        "trainer.algorithm.loss_reduction",
        Literal["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "token_mean_legacy", "prompt_mean"],
        "sequence_mean",
        "loss.aggregation loss.norm_tokens",
        "how token losses become one number",
        by_rule=True,
        since=_A,
        earlier={_A: "token_mean"},
        change="sequence_mean: a mean over sequences of means over tokens; seq_mean_token_sum_norm: sums of tokens divided by "
        "generator.max_input_length + generator.sampling_params.max_generate_length",
        note="Means are over the whole mini-batch here. SkyRL's token_mean was a mean of micro-batch means until March 2026.",
    ),
    mapped(
        "trainer.algorithm.max_seq_len",
        int | None,
        None,
        "loss.norm_tokens",
        "seq_mean_token_sum_norm: tokens that sums are divided by; null: input plus response length",
        by_rule=True,
        since=_A,
    ),
    mapped(
        "trainer.algorithm.eps_clip_low",
        float,
        0.2,
        "loss.clip_ratio_low",
        "the ratio is clipped below at 1 - this",
        by_rule=True,
    ),
    mapped(
        "trainer.algorithm.eps_clip_high",
        float,
        0.2,
        "loss.clip_ratio_high",
        "the ratio is clipped above at 1 + this",
        by_rule=True,
    ),
    mapped(
        "trainer.algorithm.clip_ratio_c",
        float,
        3.0,
        "loss.dual_clip",
        "dual_clip: bounds the loss of tokens with negative advantage at this ratio",
        by_rule=True,
    ),
    mapped(
        "trainer.algorithm.clip_cov.clip_ratio",
        float,
        2e-4,
        "loss.covariance_share",
        "clip_cov: share of a mini-batch's tokens that is dropped",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.clip_cov.clip_cov_lb",
        float,
        1.0,
        "loss.covariance_low",
        "clip_cov: drop among tokens with a covariance above this",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.clip_cov.clip_cov_ub",
        float,
        5.0,
        "loss.covariance_high",
        "clip_cov: and below this",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.kl_cov.kl_cov_frac",
        float,
        0.2,
        "loss.covariance_share",
        "kl_cov: share of a mini-batch's tokens that is pulled back",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.kl_cov.ppo_kl_coef",
        float,
        1.0,
        "loss.covariance_kl_coef",
        "kl_cov: weight of the pull back to the old policy",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.cispo.cispo_eps_clip_low",
        float,
        0.0,
        "loss.clip_ratio_low",
        "cispo: the weight is clipped below at 1 - this",
        by_rule=True,
        since="later",
        note="0 and 5, in 2026 changed to 1 and 4: bounds 0 and 5.",
    ),
    mapped(
        "trainer.algorithm.cispo.cispo_eps_clip_high",
        float,
        5.0,
        "loss.clip_ratio_high",
        "cispo: the weight is clipped above at 1 + this",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.sapo.tau_pos",
        float,
        1.0,
        "loss.gate_sharpness_positive",
        "sapo: sharpness of the gate for tokens with positive advantage",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.sapo.tau_neg",
        float,
        1.05,
        "loss.gate_sharpness_negative",
        "sapo: sharpness of the gate for tokens with negative advantage",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.use_entropy_loss",
        bool,
        False,
        "loss.entropy_coef",
        "add an entropy bonus",
        by_rule=True,
        since="later",
    ),
    mapped(
        "trainer.algorithm.entropy_loss_coef",
        float,
        0.01,
        "loss.entropy_coef",
        "weight of the entropy bonus",
        by_rule=True,
        since="later",
    ),
)

_CORRECTION = "trainer.algorithm.off_policy_correction"


def _correction(name: str, type: Any, default: Any, fields: str, meaning: str) -> Key:
    fields = " ".join(f"loss.rollout_correction.{field}" for field in fields.split())
    return mapped(f"{_CORRECTION}.{name}", type, default, fields, meaning, by_rule=True, since="later")


_OFF_POLICY: tuple[Key, ...] = (
    mapped(
        "trainer.algorithm.use_tis",
        bool,
        False,
        "loss.rollout_correction.weights",
        "multiply token losses by the trainer's probability over the sampler's, cut at tis_imp_ratio_cap",
        by_rule=True,
        since=_A,
        change="true: token",
    ),
    mapped(
        "trainer.algorithm.tis_imp_ratio_cap",
        float,
        -1.0,
        "loss.rollout_correction.weight_high",
        "the cap; above 0 with use_tis",
        by_rule=True,
        since=_A,
    ),
    _correction(
        "tis_ratio_type",
        Literal["token", "sequence"] | None,
        None,
        "weights",
        "weights per token or per sequence; null: none",
    ),
    _correction("token_tis_ratio_clip_high", float, 2.0, "weight_high", "token: weights are cut to this"),
    _correction("sequence_tis_ratio_clip_high", float, 5.0, "weight_high", "sequence: weights are cut to this"),
    _correction(
        "sequence_mask_metric",
        Literal["product", "geometric"] | None,
        None,
        "reject",
        "leave sequences out by the product, or the geometric mean, of their ratios; null: do not",
    ),
    _correction("geo_mask_low", float, 0.99, "reject_bounds", "geometric: lowest mean ratio kept"),
    _correction("geo_mask_high", float, 1.01, "reject_bounds", "geometric: highest mean ratio kept"),
    _correction("product_mask_low", float, 0.5, "reject_bounds", "product: lowest ratio kept"),
    _correction("product_mask_high", float, 2.0, "reject_bounds", "product: highest ratio kept"),
    _correction(
        "outlier_token_is_threshold_low",
        float | None,
        None,
        "reject reject_bounds",
        "leave sequences with a token of a smaller ratio out",
    ),
    _correction(
        "outlier_token_is_threshold_high",
        float | None,
        None,
        "reject reject_bounds",
        "leave sequences with a token of a larger ratio out",
    ),
    _correction(
        "token_mask_is_threshold_low", float | None, None, "reject reject_bounds", "leave tokens of a smaller ratio out"
    ),
    _correction(
        "token_mask_is_threshold_high", float | None, None, "reject reject_bounds", "leave tokens of a larger ratio out"
    ),
)

ROWS: tuple[Key, ...] = (*_LOSS, *_OFF_POLICY)

"""From rewards to the loss: advantages, KL, clipping."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from posttrain.config.base import Section

KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"]
Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "prompt_mean",
]


class AdvantageConfig(Section):
    name: str = "grpo"
    """Advantage estimator."""
    normalize_by_std: bool = True
    """grpo, grpo_passk, gigpo: divide by the group's standard deviation (GRPO); false does not (Dr. GRPO)."""
    lone_sample_keeps_reward: bool = False
    """Estimators that compare a prompt's responses: a response that is alone in its group gets its reward; false gives 0."""
    gamma: float = Field(default=1.0, ge=0.0, le=1.0)
    """gae, reinforce, reinforce_plus_plus: discount per sampled token; agentic_reinforce: per turn."""
    gae_lambda: float = Field(default=1.0, ge=0.0, le=1.0)
    """gae: 1 trusts the returns, 0 the critic."""
    estimator_whitens: bool = True
    """gae: bring the advantages to mean 0 and variance 1 as part of the estimator; false leaves that to whiten."""
    whiten_rewards: bool = False
    """Bring the step's token rewards to mean 0 and variance 1 before the estimator sees them."""
    whiten: bool = False
    """Bring the step's advantages to mean 0 and variance 1 over all loss tokens (estimators that do so anyway: no change)."""
    clip: float | None = Field(default=None, gt=0.0)
    """Advantages are cut to plus or minus this, after whitening; null does not cut."""
    terms: list[str] = []
    """gdpo: names of the reward terms that are compared; empty means all."""
    term_weights: list[float] = []
    """gdpo: weight of each of these terms; empty means 1 each."""
    step_gamma: float = Field(default=0.95, ge=0.0, le=1.0)
    """gigpo, step_reinforce: discount per step of the environment."""
    episode_weight: float = 1.0
    """gigpo: weight of the comparison of whole trajectories."""
    step_weight: float = 1.0
    """gigpo: weight of the comparison of steps from the same state."""


class RolloutCorrectionConfig(Section):
    """What is done about a sampler whose log-probs are not the trainer's."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Multiply token losses by pi_old / pi_rollout, per token or its product over the response; none does not."""
    weight_high: float = Field(default=2.0, gt=0.0)
    """Weights are cut to this (truncated importance sampling)."""
    weight_low: float | None = Field(default=None, gt=0.0)
    """When given, weights outside [weight_low, weight_high] become 0 instead of being cut (IcePop)."""
    normalize: bool = False
    """Divide the weights by their mean over the step."""
    reject: list[str] = []
    """Rules that take tokens or responses out of the loss: token_k1, token_k2, token_k3, or sequence_sum_, sequence_mean_,
    sequence_max_ with k1, k2, k3 behind."""
    reject_bounds: list[str] = []
    """One bound for all rules or one for each: an upper bound, or for k1 lower_upper, such as 0.5_2."""
    use_rollout_logprobs: bool = False
    """Take the sampler's log-probs as the old ones: the ratio corrects the gap itself, and without weights or rules there is
    no forward pass for old log-probs."""


class LossConfig(Section):
    name: str = "ppo_clip"
    """Policy loss."""
    clip_ratio_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at 1 - this. geo_mean: the log-ratio at minus this; dppo_tv, dppo_kl: the largest fall
    in probability, or KL in nats, of a kept token."""
    clip_ratio_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped above at 1 + this. geo_mean: the log-ratio at this; dppo_tv, dppo_kl: the largest rise in
    probability, or KL in nats, of a kept token."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """ppo_clip: bounds the loss of tokens with negative advantage at this ratio; null does not."""
    gate_sharpness_positive: float = Field(default=1.0, gt=0.0)
    """sapo: how sharply the gate closes as the ratio leaves 1, for tokens with positive advantage."""
    gate_sharpness_negative: float = Field(default=1.05, gt=0.0)
    """sapo: the same for tokens with negative advantage."""
    covariance_share: float = Field(default=2e-4, gt=0.0, le=1.0)
    """clip_cov, kl_cov: the share of a mini-batch's tokens that is dropped or pulled back, but at least one token."""
    covariance_low: float = 1.0
    """clip_cov: tokens are dropped among those with a covariance above this, in nats x advantage units."""
    covariance_high: float = 5.0
    """clip_cov: and below this."""
    covariance_kl_coef: float = Field(default=1.0, ge=0.0)
    """kl_cov: weight of the pull back to the old policy."""
    weight_limit: float = Field(default=20.0, ge=1.0)
    """dppo_tv, dppo_kl: the ratio that weighs a token is at most this."""
    dro_beta: float | None = Field(default=None, gt=0.0)
    """dro: weight of the quadratic pull back to the old policy; must be given."""
    drop_clipped: bool = False
    """cispo: tokens whose ratio is beyond the clip in the direction of their advantage leave the loss."""
    positive_weight: float = Field(default=1.0, ge=0.0)
    """topr: weight of tokens of responses with a score above 0."""
    negative_weight: float = Field(default=1.0, ge=0.0)
    """topr: weight of tokens of the other responses."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number, over the whole mini-batch."""
    norm_tokens: int | None = Field(default=None, ge=1)
    """sequence_mean_token_sum_norm: the sum of a response's token losses is divided by this; null means
    rollout.max_response_tokens."""
    mask_truncated: bool = False
    """Leave responses that were cut at max_response_tokens out of the loss; their rewards still count in the baseline."""
    sft_coef: float = Field(default=0.0, ge=0.0)
    """Weight of a supervised term besides the loss: -score x log pi on the responses with a score above 0."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference in the loss; 0 loads no reference model."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of that KL; with + it has the gradient of k2, which is the KL's."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Correction for the gap between sampler and trainer."""

"""Plans: plain values that say what a stage or an engine does. They cross process borders as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from posttrain.config.fitting import Fit
from posttrain.config.rejection import RejectionRule
from posttrain.records.trajectories import SamplingParams, mixed_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionPlan:
    """The correction of a sampler whose log-probs are not the trainer's: once per step, or in each update where the proximal
    log-probs are interpolated."""

    weights: str = "none"  # none, token, sequence, sequence_mean, turn
    weight_high: float = 2.0
    weight_low: float | None = None
    normalize: bool = False
    rules: tuple[RejectionRule, ...] = ()
    interpolated: bool = False  # the proximal log-probs are those of algos.proximal, and no forward pass gives them

    def __bool__(self) -> bool:
        """True if anything is corrected."""
        return self.weights != "none" or bool(self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationPlan:
    """The divergence from teachers: a name in DIVERGENCES with its keyword arguments, and plain numbers."""

    name: str
    path: str | None = None  # of the user's file that holds it
    parameters: Mapping[str, Any] = field(default_factory=dict)
    of_sampled_tokens: bool  # reads the log-probs of the sampled tokens alone
    teachers: Mapping[str, float]  # weights of the teachers, by name
    coef: float = 1.0
    as_loss: bool  # a term of the loss; False: taken from advantages
    alone: bool = False  # nothing is learned from rewards
    top_k: int | None = None  # None: the whole vocabulary
    rest: str = "bucket"
    temperature: float = 1.0
    teacher_temperature: float = 1.0
    min_logprob: float | None = None
    clip: float | None = None

    @property
    def in_forward_pass(self) -> bool:
        """True when the student's forward pass computes the divergence, over the vocabulary or the teacher's top k."""
        return not self.of_sampled_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlan:
    """The policy's loss: a name in POLICY_LOSSES with its keyword arguments, and plain numbers."""

    name: str
    path: str | None = None  # of the user's file that holds it
    parameters: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str
    entropy_aggregation: str = "token_mean"
    norm_tokens: int | None = None  # sequence_mean_token_sum_norm divides by it
    temperature: float  # divides the logits, as in sampling
    use_rollout_logprobs: bool = False  # the ratio is to the sampler's log-probs, not the trainer's old ones
    policy_coef: float = 1.0
    topr_coef: float = 0.0
    sft_coef: float = 0.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_aggregation: str | None = None  # None: as the policy loss
    kl_importance_weighted: bool = False
    router_balance_coef: float = 0.0
    off_policy_limit: float | None = None  # nats per token; None masks nothing
    high_entropy_share: float | None = None  # of a mini-batch's loss tokens; None: all of them
    chooses_before: bool = False  # the loss's tokens are chosen in a pass of their own over the mini-batch
    correction: RolloutCorrectionPlan | None = None  # where its weights are computed in the update; None: once per step
    distillation: DistillationPlan | None = None  # None: no divergence from teachers is in the loss

    @property
    def from_advantages_alone(self) -> bool:
        """Return True without terms that move the policy where advantages are 0, as far as the policy loss itself does not."""
        others = self.sft_coef, self.entropy_coef, self.kl_coef, self.router_balance_coef, self.distillation
        return not any(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePlan:
    """The loss of a tuning method: a name in TUNE_METHODS with its keyword arguments, and plain numbers."""

    name: str
    path: str | None = None  # of the user's file that holds it
    parameters: Mapping[str, Any] = field(default_factory=dict)
    paired: bool  # rows are pairs, the chosen side first; False: single completions
    kl: float = 0.0  # nats, of the policy to the reference on completions of other prompts, for methods that name it

    @property
    def rows_per_unit(self) -> int:
        """Rows that the loss compares, which are never in two micro-batches."""
        return 2 if self.paired else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossPlan:
    """The critic's loss, in plain numbers."""

    value_clip: float | None  # None does not clip
    aggregation: str
    norm_tokens: int | None = None  # sequence_mean_token_sum_norm divides by it


@dataclass(frozen=True, slots=True, kw_only=True)
class KlRewardPlan:
    """The KL penalty inside the reward."""

    coef: float  # at the start; 0 has none
    estimator: str = "k1"
    target: float | None = None  # nats per token; None keeps the coefficient
    horizon_sequences: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """The part of a judge of the run's own in the reward."""

    weight: float = 1.0  # of its verdict
    data_sources: frozenset[str] = frozenset()  # the prompts that it counts for; empty means all


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlan:
    """Reward shaping applied before advantage estimation; docs/rewards.md has the order."""

    model_weight: float = 1.0  # of the reward model's score
    judges: Mapping[str, JudgePlan] = field(default_factory=dict)  # by the names of their verdicts
    max_response_tokens: int = 0  # the limit that the overlong rule looks at
    overlong_buffer_tokens: int | None = None
    overlong_penalty: float = 1.0
    zero_unless_stopped: bool = False
    by_turn: bool = True  # what an environment gives stands where it was earned
    normalize_mean: str = "none"
    normalize_std: str = "none"
    clip: float | None = None
    clip_tokens: float | None = None
    kl: KlRewardPlan = KlRewardPlan(coef=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilterPlan:
    """Dynamic sampling. A bound that is None is not checked."""

    strategy: str = "none"
    metric: str = "reward"
    above_std: float | None = None
    above_mean: float | None = None
    below_mean: float | None = None
    below_tokens: int | None = None
    oversample: int = 1
    max_batches: int | None = None
    min_kept_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainPlan:
    """A kind of rows with a fixed part of every step."""

    name: str
    sources: tuple[str, ...]
    prompts: int  # groups of a step
    group_filter: GroupFilterPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantagePlan:
    """A name in ADVANTAGES with its keyword arguments, and the whitening and clipping around it."""

    name: str
    path: str | None = None  # of the user's file that holds it
    parameters: Mapping[str, Any] = field(default_factory=dict)
    whiten_rewards: bool = False
    whiten: bool = False
    clip: float | None = None
    pad_token: int = 0  # behind the tokens of responses, for estimators that read them


@dataclass(frozen=True, slots=True, kw_only=True)
class ResamplingPlan:
    """A second draw of the responses of a step, before its updates."""

    weights: str = "none"  # none, power, extremes, best
    exponent: float = 2.0  # of power
    fit: Fit = "none"  # as records.fitting: the number of samples is made to divide
    multiple_of: int = 1  # by this


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """The updates of the policy in a step."""

    loss: LossPlan
    epochs: int
    sequences_per_update: int
    shuffle_seed: int | None = None  # of this step; None: mini-batches are cut in the order of the batch
    full_kl_in_reward: bool = False  # the reward holds the KL to the reference over the whole vocabulary
    on_policy: bool  # nothing needs old log-probs before the update, such as one update per step
    replays_experts: bool = False  # updates use the experts of the pass that computes old log-probs
    correction: RolloutCorrectionPlan = RolloutCorrectionPlan()

    @property
    def chooses_tokens(self) -> bool:
        """True where something is computed from the tokens of a whole mini-batch before its update."""
        return self.loss.high_entropy_share is not None or self.loss.chooses_before or self.correction.interpolated


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdatePlan:
    """The updates of the critic in a step."""

    loss: ValueLossPlan
    epochs: int
    sequences_per_update: int
    shuffle_seed: int | None = None  # as the policy's


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRewardPlan:
    """The updates of the process reward model in a step, and the rewards of tokens that it gives."""

    loss: LossPlan
    update: str  # before, after, never
    sequences_per_update: int
    log_ratio_scale: float
    normalize: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OneUpdate:
    """The update of a step that makes one, on all of its sequences."""

    sequences_per_update: int
    epochs: int = 1
    shuffle_seed: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that a step does."""

    prompts: int  # groups that make up a step
    sampling: SamplingParams
    group_filter: GroupFilterPlan = field(default_factory=GroupFilterPlan)
    domains: tuple[DomainPlan, ...] = ()  # empty: the step is of all rows as they come
    domain_statistics: bool = False  # batch statistics of rewards and advantages are over a domain's part of the step
    statistics_of: tuple[
        str, ...
    ] = ()  # data sources with batch statistics of their own; empty: domains', or the step's
    reward: RewardPlan = field(default_factory=RewardPlan)
    turn_is_response: bool = False  # every turn counts as a response with its episode's reward
    similar_states: float | None = None  # likeness of states that count as equal; None: they are equal
    mask_truncated: bool = False  # responses cut at the token limit have no part in the loss
    mask_long_wrong_tokens: int | None = None  # neither have so long ones whose score is not above 0; None: they have
    weigh_by: tuple[str, ...] = ()  # difficulty, length: weights of responses in the policy loss
    advantage: AdvantagePlan
    resampling: ResamplingPlan = ResamplingPlan()
    update: UpdatePlan
    critic_update: CriticUpdatePlan | None = None  # None: there is no critic
    process_reward: ProcessRewardPlan | None = None  # None: there is no process reward model
    distillation: DistillationPlan | None = None  # None: there is no teacher
    # Data sources of each teacher; empty: all rows
    teacher_sources: Mapping[str, frozenset[str]] = field(default_factory=dict)
    updates_policy: bool = True  # False in the steps in which only the critic warms up
    max_invalid_share: float

    @property
    def parts(self) -> dict[str, int]:
        """Return the number of the part of every data source, where statistics are over parts; empty where over the step."""
        if self.statistics_of:
            return {source: number for number, source in enumerate(self.statistics_of)}
        domains = enumerate(self.domains) if self.domain_statistics else ()
        return {source: number for number, domain in domains for source in domain.sources}

    def sampling_of(self, batch: int) -> SamplingParams:
        """The sampling of the step's batch of prompts of this number, from 0. A small dataset may bring a prompt again: in later
        batches it gets other random numbers."""
        return replace(self.sampling, seed=mixed_seed(self.sampling.seed, batch)) if batch else self.sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """The phases and steps that are profiled, and the content of their profiles."""

    steps: tuple[int, ...] | None = ()  # None: every step
    phases: tuple[str, ...] = ()  # as in time/<phase>_s; empty: every phase
    operators: bool = True
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    ranks: tuple[int, ...] | None = (0,)  # of the workers of a role; None: all of them
    folder: Path | None = None  # None: profiles in the run folder

    def covers(self, step: int, phase: str) -> bool:
        return (self.steps is None or step in self.steps) and (not self.phases or phase in self.phases)

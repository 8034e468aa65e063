"""One step of reinforcement learning, from prompts to updated weights. docs/reading.md is a tour of it, file by file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from posttrain.errors import RunStopped
from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.phase_clock import PhaseClock
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.interfaces.rollout_engine import OnGroup, OnTokens
from posttrain.interfaces.train_engine import ScoringEngine, TrainEngine
from posttrain.records.batches import ScoredBatch, SequenceBatch, ShapedBatch, TrainerLogprobs
from posttrain.records.plans import StepPlan, UpdatePlan
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import Learned
from posttrain.records.trajectories import SamplingParams, ScoredGroup, TrajectoryGroup
from posttrain.steps.advantage import estimate_advantages
from posttrain.steps.assemble import assemble
from posttrain.steps.correction import correct_rollout
from posttrain.steps.domains import DomainSelection
from posttrain.steps.extras import add_columns, add_greedy_rewards, add_sum_pi_squared, old_and_reference
from posttrain.steps.play import play
from posttrain.steps.process_rewards import add_process_rewards
from posttrain.steps.resample import resample, stats_of_all
from posttrain.steps.score import score
from posttrain.steps.select import Selection
from posttrain.steps.shape_rewards import RewardState, shape_outcomes, shape_rewards
from posttrain.steps.teachers import with_teachers
from posttrain.steps.update import update_models

AnySelection = Selection | DomainSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Everything that a step has sampled and learned, for metrics and records."""

    selection: AnySelection  # groups, as sampled and scored
    scored: ScoredBatch  # the same, as a batch
    learned: Learned


def rl_step(
    roles: Roles, scorer: GroupScorer, loader: PromptLoader, rewards: RewardState, plan: StepPlan, clock: PhaseClock
) -> StepResult:
    """One step of GRPO (arXiv:2402.03300, algorithm 1); with a critic, of PPO (arXiv:1707.06347, algorithm 1)."""
    # G responses per prompt, and r_i for each
    selection = sample_groups(roles, scorer, loader, plan, clock)
    return train_on(selection, roles, scorer, rewards, plan, clock)


def train_on(
    selection: AnySelection,
    roles: Roles,
    scorer: GroupScorer,
    rewards: RewardState,
    plan: StepPlan,
    clock: PhaseClock,
    before_sync: Callable[[], None] = lambda: None,
) -> StepResult:
    """The part of a step after sampling and scoring; see ``learn`` for before_sync."""
    scored = assembled(selection, plan)
    # For ReMax alone
    scored = add_greedy_rewards(scored, selection.groups, roles, scorer, plan, clock, collect)
    learned = learn(roles, scored, rewards, plan, clock, before_sync)
    return StepResult(selection=selection, scored=scored, learned=learned)


def assembled(selection: AnySelection, plan: StepPlan) -> ScoredBatch:
    """The groups of a step, padded to [batch, response_len]."""
    scored = assemble(
        selection.groups,
        mask_truncated=plan.mask_truncated,
        mask_long_wrong_tokens=plan.mask_long_wrong_tokens,
        weigh_by=plan.weigh_by,
        parts=plan.parts,
        with_versions=plan.update.correction.interpolated,
    )
    return add_columns(scored, selection.groups, plan)


def sample_groups(
    roles: Roles,
    scorer: GroupScorer,
    loader: PromptLoader,
    plan: StepPlan,
    clock: PhaseClock,
    *,
    collected_by: Callable[..., list[TrajectoryGroup]] | None = None,
) -> AnySelection:
    """The groups of a step, sampled by the policy (``collect``, or what stands in for it) and scored: those of one batch of
    prompts, or with a filter that refills, of as many as it takes (DAPO, arXiv:2503.14476, algorithm 1).

    Raises: RunStopped when the filter's limit of batches is reached.
    """
    selection = selection_of(plan)
    while not selection.complete:
        prompts, sampling = loader.next(selection.wanting), plan.sampling_of(selection.batches)
        with clock.phase("rollout", total=roles.most_tokens(len(prompts), sampling)):
            # Scored while others are sampled
            sample = collected_by or collect
            groups = sample(roles, prompts, sampling, clock.advance, scorer.begin)
        with clock.phase("reward"):
            selection.add(score_groups(groups, roles, scorer, plan))
    return selection


def selection_of(plan: StepPlan) -> AnySelection:
    """An empty selection for the groups of a step."""
    return DomainSelection(plan.domains) if plan.domains else Selection(plan.group_filter, plan.prompts)


def score_groups(
    groups: Sequence[TrajectoryGroup], roles: Roles, scorer: GroupScorer, plan: StepPlan
) -> list[ScoredGroup]:
    """r_i for every response, by reward terms, reward model, judge and environment, after the rules about its end."""
    scored = score(
        groups,
        scorer,
        plan.max_invalid_share,
        reward_model=roles.reward_model,
        model_weight=plan.reward.model_weight,
        judges=roles.judges,
        judging=plan.reward.judges,
    )
    return shape_outcomes(scored, plan.reward)


def collect(
    roles: Roles,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    on_tokens: OnTokens | None = None,
    on_group: OnGroup | None = None,
) -> list[TrajectoryGroup]:
    """A group of responses per prompt, sampled by the policy; where the run has environments, each of them an episode.

    The weights may change while responses are sampled: a trajectory's spans say which version each of its tokens is from.

    Raises: RunStopped when the sampler serves other weights than the trainer holds.
    """
    served, held = roles.rollout.version, roles.policy.version
    if served != held:
        raise RunStopped(f"the sampler serves version {served} of the weights, the trainer holds version {held}")
    return respond(roles, prompts, sampling, on_tokens, on_group)


def respond(
    roles: Roles,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    on_tokens: OnTokens | None = None,
    on_group: OnGroup | None = None,
) -> list[TrajectoryGroup]:
    """Sample with the weights that the sampler has, whichever they are."""
    if roles.worlds:
        return play(roles.rollout, prompts, sampling, roles.worlds, on_tokens, on_group)
    return roles.rollout.generate(prompts, sampling, on_tokens, on_group)


def learn(
    roles: Roles,
    scored: ScoredBatch,
    rewards: RewardState,
    plan: StepPlan,
    clock: PhaseClock,
    before_sync: Callable[[], None] = lambda: None,
) -> Learned:
    """Update the models on a batch, and hand the sampler the weights. ``before_sync`` is called in between: a sampler that is
    at work has to come to an end first."""
    process: dict[str, float] = {}
    if roles.process_reward and plan.process_reward:
        found = add_process_rewards(scored, roles.process_reward, plan.process_reward, clock)
        scored, process = found.scored, found.metrics
    shaped = shape(roles, scored, rewards, plan, clock)
    values = None
    if roles.critic:
        with clock.phase("values"):
            values = roles.critic.values(scored.sequences)  # V(s_i,t), by the weights that the step starts with
    # A_i,t, and with a critic the returns R_i,t
    train = estimate_advantages(shaped, values, plan.advantage)
    drawn = resample(train, scored.valid, plan.resampling, plan.sampling.seed)  # for PF-PPO alone
    # K epochs of clipped mini-batch updates
    stats = stats_of_all(update_models(roles.policy, roles.critic, drawn, plan, clock), train, drawn)
    stats = replace(stats, metrics={**stats.metrics, **process})
    before_sync()
    with clock.phase("weight_sync"):
        roles.weight_sync.publish(roles.policy, roles.rollout)  # sampler <- policy
    return Learned(shaped=shaped, train=train, stats=stats)


def shape(roles: Roles, scored: ScoredBatch, rewards: RewardState, plan: StepPlan, clock: PhaseClock) -> ShapedBatch:
    """The batch with the log-probs of the trainer's models, and its rewards as advantages are estimated from them."""
    with clock.phase("logprobs"):
        # log pi_old, log pi_ref
        logprobs = trainer_logprobs(scored.sequences, roles.policy, roles.reference, plan.update)
        if logprobs.experts is not None:
            scored = replace(scored, sequences=replace(scored.sequences, experts=logprobs.experts))
            logprobs = replace(logprobs, experts=None)
        scored = add_sum_pi_squared(scored, roles.policy, plan)  # for estimators that name it
    # R_i normalised; r_i,t less the KL
    return with_teachers(shape_rewards(scored, logprobs, plan.reward, rewards), roles, plan, clock)


def trainer_logprobs(
    batch: SequenceBatch, policy: TrainEngine, reference: ScoringEngine | None, plan: UpdatePlan
) -> TrainerLogprobs:
    """log pi_old, unless nothing needs it before the update, with the experts of this pass where updates replay them, and
    log pi_ref, if there is a reference; then the correction of the gap between sampler and trainer, if the plan has one."""
    temperature = plan.loss.temperature
    old, ref, experts = None, None, None
    if not plan.on_policy and plan.replays_experts:
        old, experts = policy.logprobs_and_experts(batch, temperature)
    elif not plan.on_policy:
        old, ref = old_and_reference(batch, policy, reference, temperature)
    logprobs = TrainerLogprobs(
        old=old,
        experts=experts,
        ref=reference.logprobs(batch, temperature) if reference and ref is None else ref,
        full_kl=policy.reference_kl(batch, temperature) if plan.full_kl_in_reward else None,
        entropies=None if plan.loss.high_entropy_share is None else policy.entropies(batch, temperature),
    )
    if not plan.correction or plan.correction.interpolated:
        return logprobs
    return correct_rollout(batch, logprobs, plan.correction)

"""Episodes, or responses without an environment, of a model that is not trained: played and scored part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from posttrain.interfaces.reward import GroupScorer, RewardModel
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.interfaces.worlds import Worlds
from posttrain.loops.by_parts import OnTokens, OnWork, Sampled, run_parts
from posttrain.records.plans import JudgePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, ScoredGroup, StopReason
from posttrain.run.episode_texts import episode_text
from posttrain.run.parts import Parts
from posttrain.run.stopping import StopSignal
from posttrain.steps.play import play
from posttrain.steps.score import score


@dataclass(frozen=True, slots=True, kw_only=True)
class Players:
    """Everything that plays and scores."""

    engine: RolloutEngine
    worlds: Worlds | None  # None: a response is one turn
    scorer: GroupScorer
    reward_model: RewardModel | None = None
    model_weight: float = 1.0
    judges: Mapping[str, RewardModel] = field(default_factory=dict)
    judging: Mapping[str, JudgePlan] = field(default_factory=dict)


def run(
    players: Players,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    parts: Parts,
    *,
    stop: StopSignal,
    on_work: OnWork,
) -> None:
    """Play every part that is not done yet, score it, and keep it as soon as it is.

    An episode that its environment fails is a result, without a score. One that the sampler fails is none: its part is not kept.

    Raises: RunInterrupted, RunStopped (by_parts.run_parts).
    """

    def sample(rows: list[Prompt], on_tokens: OnTokens) -> Sampled:
        groups = _scored(players, rows, sampling, on_tokens)
        trajectories = [one for group in groups for one in group.group.trajectories]
        lost = [one for one in trajectories if one.stop_reason is StopReason.FAILED and not one.failure_reason]
        return Sampled([[episode_text(*pair) for pair in group.pairs] for group in groups], lost)

    run_parts(
        parts, prompts, sample, stop=stop, on_work=on_work, failure="episodes were failed by the sampler", again="play"
    )


def _scored(
    players: Players, prompts: Sequence[Prompt], sampling: SamplingParams, on_tokens: OnTokens
) -> list[ScoredGroup]:
    if players.worlds is None:
        groups = players.engine.generate(prompts, sampling, on_tokens, players.scorer.begin)
    else:
        groups = play(players.engine, prompts, sampling, players.worlds, on_tokens, players.scorer.begin)
    return score(
        groups,
        players.scorer,
        reward_model=players.reward_model,
        model_weight=players.model_weight,
        judges=players.judges,
        judging=players.judging,
    )

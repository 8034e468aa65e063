"""The parts of a reinforcement-learning run, as its loops get them."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.interfaces.loader import PromptLoader
from posttrain.interfaces.reward import GroupScorer
from posttrain.interfaces.roles import Roles
from posttrain.loops.rl_plan import RunPlan
from posttrain.run.kept_responses import KeptResponses
from posttrain.run.lifetime import Run
from posttrain.run.progress import Progress
from posttrain.run.token_values import TokenTexts
from posttrain.steps.shape_rewards import RewardState


@dataclass(frozen=True, slots=True, kw_only=True)
class RlRun:
    """Models, data, rewards and records of a run under way."""

    roles: Roles
    scorer: GroupScorer
    loader: PromptLoader
    rewards: RewardState
    progress: Progress
    plan: RunPlan
    run: Run
    token_texts: TokenTexts
    responses: KeptResponses | None = None  # None: every step samples its own

"""The model that reward functions ask, where a command plays or scores without a runtime."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from posttrain.backends.runtime.inprocess import start_judge_here
from posttrain.config import RunConfig
from posttrain.interfaces.reward import GroupScorer
from posttrain.rewards.asking import AskingScorer


def serve_judge(config: RunConfig, scorer: GroupScorer, device: torch.device, stack: ExitStack) -> None:
    """Start its server until the stack is left, and lead the scorer's functions there; a no-op in a run without one."""
    if isinstance(scorer, AskingScorer) and (server := start_judge_here(config, device)) is not None:
        stack.callback(server.close)
        scorer.lead_to((server.address,))

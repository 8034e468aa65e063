"""Groups of responses as plain values, for checkpoints: token ids, log-probs, versions and rewards come back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter

from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Outcome, ScoredGroup, Trajectory, TrajectoryGroup, Unfinished

TRAJECTORY: Final = TypeAdapter(Trajectory)
UNFINISHED: Final = TypeAdapter(Unfinished)
OUTCOMES: Final = TypeAdapter(tuple[Outcome, ...])


def trajectory_to_plain(trajectory: Trajectory) -> Any:
    return TRAJECTORY.dump_python(trajectory, mode="json", exclude_defaults=True)


def trajectory_from_plain(plain: Any) -> Trajectory:
    return TRAJECTORY.validate_python(plain)


def unfinished_to_plain(unfinished: Unfinished) -> Any:
    return UNFINISHED.dump_python(unfinished, mode="json")


def unfinished_from_plain(plain: Any) -> Unfinished:
    return UNFINISHED.validate_python(plain)


def scored_to_plain(scored: ScoredGroup) -> dict[str, Any]:
    """The prompt is saved by its id."""
    return {
        "prompt_id": scored.group.prompt.prompt_id,
        "trajectories": [trajectory_to_plain(each) for each in scored.group.trajectories],
        "outcomes": OUTCOMES.dump_python(scored.outcomes, mode="json"),
        "kept": scored.kept,
    }


def scored_from_plain(plain: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> ScoredGroup:
    """Args: prompts of the run, by id."""
    trajectories = tuple(trajectory_from_plain(each) for each in plain["trajectories"])
    return ScoredGroup(
        group=TrajectoryGroup(prompt=prompts[plain["prompt_id"]], trajectories=trajectories),
        outcomes=OUTCOMES.validate_python(plain["outcomes"]),
        kept=plain["kept"],
    )

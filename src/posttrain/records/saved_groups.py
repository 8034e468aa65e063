"""Groups of responses as plain values, for checkpoints: token ids, log-probs, versions and rewards come back bit for bit."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, Final

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Outcome,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    Unfinished,
    in_memory,
)


def _array_to_plain(array: Any) -> dict[str, Any] | None:
    if array is None:
        return None
    return {"dtype": array.dtype.str, "shape": array.shape, "base64": base64.b64encode(array.tobytes()).decode()}


def _array_from_plain(plain: Any) -> Any:
    if plain is None:
        return None
    array = np.frombuffer(base64.b64decode(plain["base64"]), dtype=np.dtype(plain["dtype"]))
    return array.reshape(plain["shape"]).copy()


def _images_to_plain(images: Any) -> dict[str, Any] | None:
    """Return files and features as texts: a resumed run needs no image processor for groups that were ready."""
    if images is None:
        return None
    return {
        "files": [base64.b64encode(file).decode() for file in images.files],
        "features": {name: _array_to_plain(array) for name, array in images.features.items()},
        "content_hash": images.content_hash,
        "in_prompt": images.in_prompt,
    }


def _images_from_plain(plain: Any) -> Any:
    if plain is None:
        return None
    return PromptImages(
        files=tuple(base64.b64decode(file) for file in plain["files"]),
        features={name: _array_from_plain(array) for name, array in plain["features"].items()},
        content_hash=plain["content_hash"],
        in_prompt=plain["in_prompt"],
    )


IMAGES: Final = Annotated[Any, PlainSerializer(_images_to_plain), PlainValidator(_images_from_plain)]


class NDArray:
    """The annotation of arrays in records, which records.trajectories knows to type checkers alone, as pydantic reads it."""

    def __class_getitem__(cls, dtype: Any) -> Any:
        return Annotated[Any, PlainSerializer(_array_to_plain), PlainValidator(_array_from_plain)]


TRAJECTORY: Final = TypeAdapter(Trajectory)
TRAJECTORY.rebuild(_types_namespace={"NDArray": NDArray, "np": np, "PromptImages": IMAGES | None})
UNFINISHED: Final = TypeAdapter(Unfinished)
OUTCOMES: Final = TypeAdapter(tuple[Outcome, ...])


def trajectory_to_plain(trajectory: Trajectory) -> Any:
    """Tokens and log-probs that lie in a store are read."""
    return TRAJECTORY.dump_python(in_memory(trajectory), mode="json")


def trajectory_from_plain(plain: Any) -> Trajectory:
    return TRAJECTORY.validate_python(plain)


def unfinished_to_plain(unfinished: Unfinished) -> Any:
    """Return everything but the cache as plain values: a resumed run computes the tokens again."""
    return UNFINISHED.dump_python(in_memory(unfinished), mode="json", exclude={"cache"})


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

"""Boxes around objects: how well the labelled boxes of an answer fit the reference's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from posttrain.interfaces.reward import RewardFn
from posttrain.libraries import json_text
from posttrain.records.prompts import Prompt, patches_of_images
from posttrain.registry import REWARDS
from posttrain.rewards.box_matching import (
    THRESHOLDS,
    Box,
    match_by_label,
    match_by_overlap,
    mean_average_precision,
)

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OVERLAPS = (*THRESHOLDS, 0.99)
_SIZE_PENALTY = 0.6  # factor for every box too many or too few
_FARTHEST = 1e9  # from the origin; NaN is not within it either
_PARTS = ("iou_max_iou_first", "iou_max_label_first", "map", "map50", "map75")


@REWARDS.register("boxes")
def boxes(
    *,
    weights: Mapping[str, float] | None = None,
    format_weight: float = 0.1,
    accuracy_weight: float = 1.0,
    iou_threshold: float | None = None,
    settings_in: str = "reward_model",
    pixels_per_patch: int | None = None,
) -> RewardFn:
    """The fit of labelled boxes, 0 to 1, with ``format`` and ``accuracy`` beside it.

    An answer is ``<answer>`` with a list of {"bbox_2d": [x1, y1, x2, y2], "label": ...}; the reference is one, too.

    Args: ``weights`` of iou_max_iou_first, iou_max_label_first, map, map50 and map75 in the accuracy, and iou_completeness, the
        share of completeness beside overlap in the first two. ``iou_threshold`` the least overlap of a match; None: the mean
        over 0.5, 0.55, ... 0.95 and 0.99. ``settings_in`` the extra column in which a row has its own format_ratio,
        accuracy_ratio and verifier_parm.det_reward_ratio. ``pixels_per_patch`` for a model that writes pixels of the image as it
        reads it (Qwen2.5-VL: 14), while references are in thousandths: rows whose verifier_parm.det_verifier_normalized is true
        have the answer's boxes brought to thousandths of the first image; None: answers are compared as they are.
    Source: the measures of One-RL-to-See-Them-All (arXiv:2505.18129), as ROLL's DetectionRewardWorker scores them.
    """
    given = {"weights": weights, "format": format_weight, "accuracy": accuracy_weight}
    return partial(
        _score, given=given, threshold=iou_threshold, settings_in=settings_in, pixels_per_patch=pixels_per_patch
    )


def _score(
    prompt: Prompt,
    response: str,
    *,
    given: Mapping[str, Any],
    threshold: float | None,
    settings_in: str,
    pixels_per_patch: int | None,
) -> dict[str, object]:
    """Raises: ValueError when the reference holds no box, or nothing weighs the measures."""
    own = prompt.extra_info.get(settings_in)
    own = own if isinstance(own, Mapping) else {}
    parameters = own.get("verifier_parm") or {}
    weights = given["weights"] or parameters.get("det_reward_ratio")
    wanted = boxes_of(str(prompt.ground_truth))
    if not wanted:
        raise ValueError("the reference holds no box in <answer>")
    if not weights or not sum(weights.get(name) or 0 for name in _PARTS):
        raise ValueError(f"nothing weighs {', '.join(_PARTS)}: neither the option weights nor {settings_in} of the row")
    found = boxes_of(response)
    if pixels_per_patch is not None and parameters.get("det_verifier_normalized"):
        found = [_in_thousandths(box, *_size(prompt, pixels_per_patch)) for box in found]
    accuracy = _accuracy(found, wanted, weights, threshold) if found else 0.0
    form = float(bool(found) and "\n<answer>\n" in response and response.count("\n</answer>") == 1)
    share, rest = own.get("format_ratio", given["format"]), own.get("accuracy_ratio", given["accuracy"])
    score = (accuracy * rest + form * share) / (rest + share)
    return {"score": score, "accuracy": accuracy, "format": form}


def _size(prompt: Prompt, pixels_per_patch: int) -> tuple[int, int]:
    """Width and height in pixels of the first image, as the model reads it. Raises: ValueError without one."""
    sizes = patches_of_images(prompt)
    if not sizes:
        raise ValueError("the boxes are in pixels, and the prompt has no image whose size is known")
    rows, columns = sizes[0]
    return columns * pixels_per_patch, rows * pixels_per_patch


def _in_thousandths(box: Box, width: int, height: int) -> Box:
    """A box in pixels as whole thousandths of the image, cut down as in ROLL."""
    x1, x2 = (float(int(each / width * 1000)) for each in (box.x1, box.x2))
    y1, y2 = (float(int(each / height * 1000)) for each in (box.y1, box.y2))
    return box._replace(x1=x1, y1=y1, x2=x2, y2=y2)


def _accuracy(found: list[Box], wanted: list[Box], weights: Mapping[str, float], threshold: float | None) -> float:
    """The weighted mean of the measures, less for every box too many or too few."""
    complete = weights.get("iou_completeness") or 0.0
    thresholds = _OVERLAPS if threshold is None else (threshold,)
    measures = {}
    for name, match in (("iou_max_iou_first", match_by_overlap), ("iou_max_label_first", match_by_label)):
        matches = [match(found, wanted, each) for each in thresholds]
        fits = [each.mean_overlap * (1 - complete) + each.completeness * complete for each in matches]
        measures[name] = sum(fits) / len(fits)
    for name, at in (("map", THRESHOLDS), ("map50", (0.5,)), ("map75", (0.75,))):
        measures[name] = mean_average_precision(found, wanted, at) if weights.get(name) else 0.0
    asked = {name: weights.get(name) or 0.0 for name in _PARTS}
    mean = sum(measures[name] * weight for name, weight in asked.items()) / sum(asked.values())
    return mean * _SIZE_PENALTY ** abs(len(found) - len(wanted))


def boxes_of(text: str) -> list[Box]:
    """The boxes of the first ``<answer>``, lower-cased, each place once; empty where none can be read. A list that breaks
    off keeps its whole entries."""
    match = _ANSWER.search(text)
    listed = match[1].strip().lower() if match else ""
    listed = listed.replace("[[", "[").replace("]]", "]").replace("'", '"').replace("\\", "")
    if not listed.endswith("]"):
        listed = listed.rsplit("},", 1)[0] + "}]"
    try:
        items = json_text.loads(listed)
    except ValueError:
        return []
    found: dict[tuple[float, ...], Box] = {}
    for item in items if isinstance(items, list) else []:
        if isinstance(item, Mapping) and (box := _box(item)) is not None:
            found.setdefault(tuple(box[:4]), box)
    return list(found.values())


def _box(item: Mapping[str, Any]) -> Box | None:
    corners, label = item.get("bbox_2d"), item.get("label")
    if not isinstance(label, str) or not isinstance(corners, list) or len(corners) != 4:
        return None
    if not all(isinstance(each, int | float) and abs(each) <= _FARTHEST for each in corners):
        return None
    x1, y1, x2, y2 = (float(each) for each in corners)
    return Box(x1, y1, x2, y2, label) if x1 <= x2 and y1 <= y2 else None

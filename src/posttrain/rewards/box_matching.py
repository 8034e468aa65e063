"""Comparison of labelled boxes with reference boxes: intersection over union, matches, average precision."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
MOST_DETECTIONS = 100  # per label, as in COCO's evaluation
_RECALLS = [step / 100 for step in range(101)]


class Box(NamedTuple):
    """Corners and a label; x1 <= x2 and y1 <= y2."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str

    @property
    def area(self) -> float:
        return (self.x2 - self.x1) * (self.y2 - self.y1)


@dataclass(frozen=True, slots=True)
class Matched:
    """Overlaps of the matches, and how many boxes there were."""

    overlaps: tuple[float, ...]  # of each match; 0 where labels differ
    found: int
    wanted: int

    @property
    def mean_overlap(self) -> float:
        """Return the sum of overlaps / reference boxes."""
        return sum(self.overlaps) / self.wanted

    @property
    def completeness(self) -> float:
        """Return 1 - (share of reference boxes missed + share of found boxes without a match) / 2."""
        missed = (self.wanted - len(self.overlaps)) / self.wanted
        false = (self.found - len(self.overlaps)) / self.found if self.found else 0.0
        return 1.0 - (missed + false) / 2


def overlap(one: Box, other: Box) -> float:
    """Intersection over union, 0 to 1."""
    width = min(one.x2, other.x2) - max(one.x1, other.x1)
    height = min(one.y2, other.y2) - max(one.y1, other.y1)
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (one.area + other.area - shared)


def match_by_overlap(found: Sequence[Box], wanted: Sequence[Box], threshold: float) -> Matched:
    """Match the pair of largest overlap first, whatever the labels; a match of two labels counts 0."""
    pairs = sorted(
        (
            (overlap(box, reference), -place, -at)
            for place, box in enumerate(found)
            for at, reference in enumerate(wanted)
        ),
        reverse=True,
    )
    overlaps, left, right = [], set(range(len(found))), set(range(len(wanted)))
    for size, place, at in pairs:
        if size < threshold:
            break
        if -place in left and -at in right:
            left.remove(-place)
            right.remove(-at)
            overlaps.append(size if found[-place].label == wanted[-at].label else 0.0)
    return Matched(tuple(overlaps), len(found), len(wanted))


def match_by_label(found: Sequence[Box], wanted: Sequence[Box], threshold: float) -> Matched:
    """Match each reference box, in order, with the free box of its label that overlaps it most."""
    overlaps, free = [], dict(enumerate(found))
    for reference in wanted:
        sizes = {place: overlap(box, reference) for place, box in free.items() if box.label == reference.label}
        best = max(sizes, key=lambda place: sizes[place], default=None)
        if best is not None and sizes[best] >= threshold:
            overlaps.append(sizes[best])
            del free[best]
    return Matched(tuple(overlaps), len(found), len(wanted))


def mean_average_precision(found: Sequence[Box], wanted: Sequence[Box], thresholds: Sequence[float]) -> float:
    """Mean over labels and thresholds of the precision at 101 recalls, for boxes of equal confidence in the order given.

    Source: COCO's evaluation of boxes (pycocotools), of one image and all areas.
    """
    labels = dict.fromkeys(box.label for box in wanted)
    values = [_average_precision(found, wanted, label, threshold) for label in labels for threshold in thresholds]
    return sum(values) / len(values)


def _average_precision(found: Sequence[Box], wanted: Sequence[Box], label: str, threshold: float) -> float:
    references = [box for box in wanted if box.label == label]
    free, hits, recalls, precisions = list(references), 0, list[float](), list[float]()
    for number, box in enumerate([box for box in found if box.label == label][:MOST_DETECTIONS], start=1):
        sizes = [overlap(box, reference) for reference in free]
        best = max(range(len(free)), key=lambda at: (sizes[at], at), default=None)
        if best is not None and sizes[best] >= min(threshold, 1 - 1e-10):
            del free[best]
            hits += 1
        recalls.append(hits / len(references))
        precisions.append(hits / number)
    for at in range(len(precisions) - 1, 0, -1):  # precision never rises with recall
        precisions[at - 1] = max(precisions[at - 1], precisions[at])
    places = [bisect_left(recalls, recall) for recall in _RECALLS]
    return sum(precisions[place] if place < len(precisions) else 0.0 for place in places) / len(_RECALLS)

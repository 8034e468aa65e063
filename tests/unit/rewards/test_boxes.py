"""Boxes around objects, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from posttrain.records.prompts import Prompt
from posttrain.rewards.box_matching import (
    Box,
    match_by_label,
    match_by_overlap,
    mean_average_precision,
    overlap,
)
from posttrain.rewards.scorers.boxes import boxes, boxes_of

CAT, DOG = Box(0, 0, 10, 10, "cat"), Box(20, 0, 30, 10, "dog")
RATIO = {"iou_max_iou_first": 0, "iou_max_label_first": 1.0, "iou_completeness": 0.3, "map": 0, "map50": 0, "map75": 0}


def answer(*found: Box, form: str = "\n<answer>\n{}\n</answer>") -> str:
    return form.format(json.dumps([{"bbox_2d": list(box[:4]), "label": box.label} for box in found]))


def prompt(*wanted: Box, **row: Any) -> Prompt:
    settings = {"verifier_parm": {"det_reward_ratio": RATIO}} | row
    return Prompt(
        prompt_id="p", token_ids=(1,), text="", data_source="t", ground_truth=answer(*wanted),
        extra_info={"reward_model": settings},
    )  # fmt: skip


def test_boxes_in_pixels_are_compared_in_thousandths_of_the_image() -> None:
    """20 x 10 patches of 14 pixels: 140 wide and 280 high; 70 of 140 is 500, 28 of 280 is 100."""
    reference = Box(0, 0, 500, 100, "cat")
    asked = prompt(reference, verifier_parm={"det_reward_ratio": RATIO, "det_verifier_normalized": True})
    asked = replace(asked, image_patches=((20, 10),))
    in_pixels, in_thousandths = answer(Box(0, 0, 70, 28, "cat")), answer(reference)
    score = boxes(pixels_per_patch=14)
    assert score(asked, in_pixels)["accuracy"] == 1.0
    assert score(asked, in_thousandths)["accuracy"] < 0.5
    assert score(prompt(reference), in_thousandths)["accuracy"] == 1.0  # the row does not ask for it
    assert boxes()(asked, in_thousandths)["accuracy"] == 1.0
    with pytest.raises(ValueError, match="no image whose size is known"):
        score(replace(asked, image_patches=()), in_pixels)


def test_overlap_is_the_intersection_over_the_union() -> None:
    assert overlap(CAT, Box(5, 0, 15, 10, "cat")) == pytest.approx(50 / 150)
    assert overlap(CAT, DOG) == 0.0
    assert overlap(CAT, CAT) == 1.0


def test_the_largest_overlap_is_matched_first_whatever_its_label() -> None:
    """The dog lies on the cat: matched, with nothing for it. The second cat overlaps by 80 / 120 and has lost its reference."""
    near = Box(2, 0, 12, 10, "cat")
    matched = match_by_overlap([Box(0, 0, 10, 10, "dog"), near], [CAT], 0.5)
    assert matched.overlaps == (0.0,)
    assert matched.completeness == 1 - (0 + 1 / 2) / 2
    assert match_by_label([Box(0, 0, 10, 10, "dog"), near], [CAT], 0.5).overlaps == pytest.approx((80 / 120,))
    assert match_by_label([near], [CAT], 0.7).overlaps == ()


def test_average_precision_of_one_label_by_hand() -> None:
    """First a miss, then a hit, one of two references: precision 1/2 up to recall 1/2, which 51 of 101 recalls are within."""
    far, other = Box(90, 90, 99, 99, "cat"), Box(50, 50, 60, 60, "cat")
    assert mean_average_precision([far, CAT], [CAT, other], [0.5]) == pytest.approx(0.5 * 51 / 101)
    assert mean_average_precision([CAT, DOG], [CAT, DOG], [0.5, 0.95]) == 1.0
    assert mean_average_precision([CAT], [CAT, DOG], [0.5]) == 0.5  # nothing found of the dogs
    assert mean_average_precision([], [CAT], [0.5]) == 0.0


def test_a_perfect_answer_scores_1_and_a_box_too_many_costs() -> None:
    """Two found, one wanted: overlap 1, completeness 1 - (0 + 1/2) / 2 = 0.75; 0.7 + 0.3 x 0.75 = 0.925, x 0.6 = 0.555.
    With the form, (0.555 x 1 + 1 x 0.1) / 1.1."""
    score = boxes()
    assert score(prompt(CAT), answer(CAT)) == {"score": 1.0, "accuracy": 1.0, "format": 1.0}
    found = score(prompt(CAT), answer(CAT, DOG))
    assert isinstance(found, dict)
    assert found["accuracy"] == pytest.approx(0.555)
    assert found["score"] == pytest.approx((0.555 + 0.1) / 1.1)


def test_rows_have_their_own_ratios() -> None:
    found = boxes()(prompt(CAT, format_ratio=1.0, accuracy_ratio=3.0), answer(CAT, form="<answer>{}</answer>"))
    assert found == {"score": 0.75, "accuracy": 1.0, "format": 0.0}  # right, and not in the form


def test_the_least_overlap_may_be_given() -> None:
    """80 / 120 is enough for 0.5 and not for 0.95; by default it counts in 4 of 11 thresholds (0.5, 0.55, 0.6, 0.65)."""
    near = Box(2, 0, 12, 10, "cat")
    weights = {"map": 0, "iou_max_label_first": 1.0}
    accuracy = lambda **more: boxes(weights=weights, **more)(prompt(CAT), answer(near))["accuracy"]  # noqa: E731
    assert accuracy(iou_threshold=0.5) == pytest.approx(80 / 120)
    assert accuracy(iou_threshold=0.95) == 0.0
    assert accuracy() == pytest.approx(4 / 11 * 80 / 120)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("no answer", 0),
        ("<answer>[]</answer>", 0),
        ("<answer>[{'bbox_2d': [0, 0, 1, 1], 'label': 'A'}, {'bbox_2d': [0, 0, 1, 1], 'label': 'b'}]</answer>", 1),
        ("<answer>[{'bbox_2d': [0, 0, 1, 1], 'label': 'a'}, {'bbox_2d': [0, 0,</answer>", 1),  # breaks off
        ("<answer>[[{'bbox_2d': [0, 0, 1, 1], 'label': 'a'}]]</answer>", 1),
        ("<answer>[{'bbox_2d': [3, 0, 1, 1], 'label': 'a'}]</answer>", 0),  # right of its right side
        ("<answer>[{'bbox_2d': [0, 0, 1], 'label': 'a'}]</answer>", 0),
        (f"<answer>[{{'bbox_2d': [0, 0, 1, 1{'0' * 400}], 'label': 'a'}}]</answer>", 0),
        ("<answer>[{'bbox_2d': [0, 0, NaN, 1], 'label': 'a'}]</answer>", 0),
        (f"<answer>{'[' * 5000}</answer>", 0),
    ],
)  # fmt: skip
def test_what_is_read_of_a_text(text: str, count: int) -> None:
    assert len(boxes_of(text)) == count


def test_nothing_readable_scores_0_and_a_bad_row_raises() -> None:
    assert boxes()(prompt(CAT), "I see a cat")["score"] == 0.0
    with pytest.raises(ValueError, match="the reference holds no box"):
        boxes()(prompt(), answer(CAT))
    with pytest.raises(ValueError, match="nothing weighs"):
        boxes()(prompt(CAT, verifier_parm={}), answer(CAT))

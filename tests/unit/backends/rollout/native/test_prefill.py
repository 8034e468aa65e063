"""Plans of prefills: a prompt that several responses begin with is computed once."""

from __future__ import annotations

import numpy as np

from posttrain.backends.rollout.native.prefill import Copy, experts_of_prompts, plan_prefill, shared_tokens
from posttrain.backends.rollout.native.responses import PromptState

STEM = (1, 2, 3)


def prompt(*more: int, stem: int = 3) -> PromptState:
    return PromptState((*STEM, *more), stem=stem)


def rows(plan_parts: list) -> list[tuple[int, int, tuple[int, ...]]]:
    """(slot, tokens that it holds before, tokens that are computed) of every part."""
    return [(part.slot, part.known, part.token_ids) for part in plan_parts]


def test_continued_siblings_share_their_prompt() -> None:
    plan = plan_prefill([], [(prompt(7), 0), (prompt(8, 9), 0), (prompt(), 0)])
    assert rows(plan.heads) == [(0, 0, STEM)]
    # The one that has not begun computes its last token again: its logits are those of the first token.
    assert rows(plan.rests) == [(0, 3, (7,)), (1, 3, (8, 9)), (2, 2, (3,))]
    assert plan.copies == [Copy(0, 1, 3), Copy(0, 2, 2)]
    assert plan.split == 3
    assert [(part.slot, begin, end) for part, begin, end in plan.placed()] == [
        (0, 0, 3),
        (0, 3, 4),
        (1, 4, 6),
        (2, 6, 7),
    ]


def test_a_lone_response_is_one_part() -> None:
    other = PromptState((5, 6, 7), stem=2)
    plan = plan_prefill([], [(prompt(7), 0), (other, 0)])
    assert rows(plan.heads) == [(0, 0, (*STEM, 7)), (1, 0, (5, 6, 7))]
    assert not plan.rests and not plan.copies and plan.split == 7


def test_a_prompt_that_is_held_is_copied() -> None:
    held = [PromptState((9, 9), stem=2), prompt(4, 4)]
    plan = plan_prefill(held, [(prompt(7), 0), (prompt(), 0)])
    assert not plan.heads and plan.split == 0
    assert rows(plan.rests) == [(2, 3, (7,)), (3, 2, (3,))]
    assert plan.copies == [Copy(1, 2, 3), Copy(1, 3, 2)]


def test_other_keys_and_values_are_not_copied() -> None:
    own = prompt(8, stem=0)  # images, older weights, or log-probs of every token
    plan = plan_prefill([prompt(5, stem=0)], [(own, 0), (prompt(7), 0)])
    assert rows(plan.heads) == [(1, 0, (*STEM, 8)), (2, 0, (*STEM, 7))]
    assert not plan.copies


def test_a_conversation_that_is_held_in_part_gives_its_prompt() -> None:
    long, fork = PromptState((*STEM, 4, 5), stem=5), PromptState((*STEM, 4, 5, 6), stem=5)
    plan = plan_prefill([], [(long, 3), (fork, 0)])
    assert rows(plan.heads) == [(0, 3, (4, 5))]
    assert rows(plan.rests) == [(1, 5, (6,))]
    assert plan.copies == [Copy(0, 1, 5)]


def test_tokens_that_are_counted() -> None:
    assert shared_tokens(prompt(7), set()) == 0
    assert shared_tokens(prompt(7), {STEM}) == 3
    assert shared_tokens(prompt(), {STEM}) == 2
    assert shared_tokens(prompt(7, stem=0), {()}) == 0


def test_experts_follow_the_copies() -> None:
    first, second, waiting = prompt(7), prompt(8, 9), prompt(6)
    held = [first, second]
    plan = plan_prefill([], [(first, 0), (second, 0)])
    recorded = np.array([10, 20, 30, 71, 81, 91], dtype=np.int16).reshape(6, 1, 1)
    found = experts_of_prompts(plan, held, recorded)
    assert found[first].ravel().tolist() == [10, 20, 30, 71]
    assert found[second].ravel().tolist() == [10, 20, 30, 81, 91]
    # A later pass copies from a slot that is held.
    first.experts = found[first]
    later = plan_prefill(held, [(waiting, 0)])
    only = experts_of_prompts(later, [*held, waiting], np.array([61], dtype=np.int16).reshape(1, 1, 1))
    assert only[waiting].ravel().tolist() == [10, 20, 30, 61]
    # Of a source without them there are none.
    first.experts = None
    assert experts_of_prompts(later, [*held, waiting], np.array([61], dtype=np.int16).reshape(1, 1, 1)) == {}

"""A test of the reward before the first step: does it prefer the reference answers of the data to wrong ones?

The reference answer of each of a few prompts is written in the forms that graders usually look for, and so is the answer to
another prompt, which is wrong. A reward that gives every form of the right answer 0 does not find it; one that gives it less
than the wrong one has its sign turned round. Both would show only after many steps of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

from posttrain.interfaces.reward import GroupScorer
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, StopReason, Trajectory, TrajectoryGroup

PROMPTS = 4  # with different reference answers
LONGEST = 200  # characters of a reference that is an answer, not a set of tests
THINKING = "<think>\nLet me see.\n</think>\n\n"
FORMS = (
    "{}",
    "#### {}",
    r"\boxed{{{}}}",
    "<answer>{}</answer>",
    "Answer: {}",
    "The answer is {}.",
    THINKING + r"\boxed{{{}}}",
    THINKING + "<answer>{}</answer>",
)

Encode = Callable[[str], Sequence[int]]


def reference_warning(scorer: GroupScorer, prompts: Sequence[Prompt], encode: Encode) -> str:
    """Score reference answers and wrong ones; "" where the reward tells them apart, or nothing can be said.

    Args: encode gives the token ids of a text, for rewards that read those.
    """
    chosen = _with_different_answers(prompts)
    if len(chosen) < 2:
        return ""
    groups = [
        _group(prompt, _answer(prompt), _answer(other), encode)
        for prompt, other in zip(chosen, [*chosen[1:], chosen[0]], strict=True)
    ]
    outcomes = scorer.score(groups)
    invalid = [each for group in outcomes for each in group if isinstance(each, Invalid)]
    if len(invalid) == sum(map(len, outcomes)):
        return (
            f"the reward can score no reference answer of the first prompts ({invalid[0].reason}: {invalid[0].detail})"
        )
    right = [_mean([group[place] for group in outcomes]) for place in range(len(FORMS))]
    wrong = [_mean([group[place + len(FORMS)] for group in outcomes]) for place in range(len(FORMS))]
    gaps = [one - other for one, other in zip(right, wrong, strict=True)]
    answers = ", ".join(repr(_answer(prompt)) for prompt in chosen[:2])
    if max(gaps) <= 0 and min(gaps) < 0:
        place = gaps.index(min(gaps))
        return (
            f"the reward gives reference answers less than wrong ones: {right[place]:.4g} and {wrong[place]:.4g} on average, "
            f"written as {FORMS[place].format(_answer(chosen[0]))!r}. Is its sign turned round?"
        )
    if not any(gaps) and max(right) <= 0:
        return (
            f"the reward gives none of {len(chosen)} reference answers ({answers}, ...) more than {max(right):.4g}, in any of "
            f"{len(FORMS)} usual forms: does it look for another form, or in another column?"
        )
    return ""


def _with_different_answers(prompts: Sequence[Prompt]) -> list[Prompt]:
    found: dict[str, Prompt] = {}
    for prompt in prompts[: 50 * PROMPTS]:
        answer = _answer(prompt)
        if answer and len(answer) <= LONGEST and not answer.startswith(("{", "[")):
            found.setdefault(answer, prompt)
        if len(found) == PROMPTS:
            break
    return list(found.values())


def _answer(prompt: Prompt) -> str:
    """The reference answer as text; "" where it is no text or number."""
    answer = prompt.ground_truth
    return str(answer).strip() if isinstance(answer, str | int | float) and not isinstance(answer, bool) else ""


def _group(prompt: Prompt, right: str, wrong: str, encode: Encode) -> TrajectoryGroup:
    texts = [form.format(answer) for answer in (right, wrong) for form in FORMS]
    encoded = [tuple(encode(text)) for text in texts]
    return TrajectoryGroup(
        prompt=prompt,
        trajectories=tuple(
            Trajectory(
                sample_id=f"{prompt.prompt_id}/reference-{number}",
                token_ids=ids,
                logprobs=(0.0,) * len(ids),
                text=text,
                stop_reason=StopReason.EOS,
                policy_version=0,
            )
            for number, (text, ids) in enumerate(zip(texts, encoded, strict=True))
        ),
    )


def _mean(outcomes: Sequence[Outcome]) -> float:
    """Mean of the valid ones; 0 without any."""
    values = [outcome.value for outcome in outcomes if not isinstance(outcome, Invalid)]
    return mean(values) if values else 0.0

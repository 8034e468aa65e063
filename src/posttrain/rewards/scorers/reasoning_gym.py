"""reasoning-gym's own verifier, on datasets that ``posttrain data reasoning-gym`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from posttrain.interfaces.reward import RewardFn
from posttrain.libraries import reasoning_gym as library
from posttrain.records.prompts import Prompt
from posttrain.registry import REWARDS
from posttrain.rewards.extract import Extract, check_extract, extract_answer


@REWARDS.register("reasoning_gym")
def reasoning_gym(*, extract: Extract = "tag") -> RewardFn:
    """A reward from the task's own verifier, on the extracted answer; without an answer it is 0. ``pred`` is the answer.

    Raises: ConfigError for an unknown ``extract``; MissingDependency without reasoning-gym.
    """
    check_extract(extract)
    library.check_installed("reward reasoning_gym")
    return partial(_score, extract=extract)


def _score(prompt: Prompt, response: str, *, extract: Extract) -> dict[str, object]:
    """Raises: ValueError when the row was not written for this reward; ConfigError when the task's verifier must not run
    in this process; any error of the verifier."""
    task, entry, options = (_text(prompt.extra_info, key) for key in ("task", "entry", "options"))
    library.check_scorable(task)
    answer = extract_answer(response, extract)
    if answer is None:
        return {"score": 0.0, "pred": ""}
    score = library.verify(task, options, answer, library.entry_from_text(entry))
    return {"score": score, "pred": answer}


def _text(extra_info: Mapping[str, object], key: str) -> str:
    value = extra_info.get(key)
    if not isinstance(value, str):
        raise ValueError(
            f"extra_info has no {key!r}; the reward reasoning_gym scores what posttrain data reasoning-gym wrote"
        )
    return value

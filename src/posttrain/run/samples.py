"""Every sample of every step, one JSON object per line; and the values of their tokens beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.interfaces.row_work import RowReader, as_they_are
from posttrain.libraries.disk_errors import naming
from posttrain.records.batches import SequenceBatch, TrainBatch
from posttrain.records.computed_tensors import of_each_row
from posttrain.records.images import PromptImages
from posttrain.records.span_tensors import first_values, row_counts
from posttrain.records.trajectories import Invalid, Outcome, ScoredGroup, Trajectory
from posttrain.run.sample_images import SampleImages
from posttrain.run.token_values import TokenTexts, token_lines, token_values_path

_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str).encode


def write_samples(
    path: Path,
    step: int,
    groups: Sequence[ScoredGroup],
    batch: TrainBatch | SequenceBatch | None = None,
    *,
    token_rewards: Tensor | None = None,
    trainer_logprobs: Tensor | None = None,
    token_texts: TokenTexts | None = None,
    read_rows: RowReader = as_they_are,
    first_advantages: Tensor | None = None,
) -> None:
    """Write the samples of a step (with the advantages of those in the loss) or of a validation, whole or not at all. With a
    batch and ``token_texts``, the values of single tokens go into a file beside (run.token_values). Images go into
    the run folder, which ``path`` is in a folder of.

    Args: batch: of all the groups; of a validation a SequenceBatch, which may be of the first groups alone. token_rewards
        [B, T]; None: none are placed on tokens. trainer_logprobs [n, T] nats, of the first n rows of the batch; None: the
        trainer computed none. read_rows reads the rows of which tokens are written. first_advantages [B, 1], of each row's
        first sampled token, where they are known.
    """
    places = [(group, number) for group in groups for number in range(len(group.outcomes))]
    # The rows of the batch: a trajectory whose history was edited between turns has several, the last one last.
    line_of = [
        line
        for line, (group, number) in enumerate(places)
        for _ in range(1 + len(group.group.trajectories[number].earlier))
    ]
    last_row = {line: row for row, line in enumerate(line_of)}
    advantages: Sequence[float | None] = [None] * len(places)
    if isinstance(batch, TrainBatch):
        first = first_advantages
        if first is None:
            first = of_each_row(first_values, batch.advantages, batch.sequences.response_mask)
        in_loss, values = (row_counts(batch.loss_mask) > 0).tolist(), first.squeeze(1).tolist()
        advantages = [values[row] if in_loss[row] else None for row in last_row.values()]
    images = SampleImages(path.parent.parent)
    of_row = iter(advantages)
    lines = (line for group in groups for line in _lines(step, group, of_row, images))
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = token_values_path(path)
    tokens.unlink(missing_ok=True)  # of samples that these replace
    _write(path, lines)
    if batch is not None and token_texts is not None:
        of_tokens = token_lines(
            batch, trainer_logprobs, token_texts, line_of, token_rewards=token_rewards, read_rows=read_rows
        )
        _write(tokens, of_tokens)


def _write(path: Path, lines: Iterable[str]) -> None:
    """Write the lines one after the other, so that a step's samples are never in memory as text."""
    beside = path.with_suffix(".tmp")
    with naming(path):
        # A lone surrogate (half a character, in someone's error text) has no UTF-8; its escape is valid JSON.
        with open(beside, "wb", buffering=1 << 20) as file:
            file.writelines(f"{line}\n".encode(errors="backslashreplace") for line in lines)
        os.replace(beside, path)


def _lines(step: int, group: ScoredGroup, advantages: Iterator[float | None], images: SampleImages) -> Iterator[str]:
    """Yield the samples of a group as JSON; what they have alike is encoded once. Args: advantages has the next one for each of
    them."""
    prompt, prompt_tokens = group.group.prompt, len(group.group.first_prompt)
    truth = _entries({"ground_truth": as_json(prompt.ground_truth)})

    def about_prompt(text: str, shown: PromptImages | None) -> str:
        known: dict[str, object] = {"prompt_id": prompt.prompt_id, "data_source": prompt.data_source, "prompt": text}
        return _entries(known | ({"images": images.of(shown)} if shown else {}))

    alike = about_prompt(prompt.text, prompt.images)
    for trajectory, outcome in group.pairs:
        own_text, own_images = trajectory.samples[0].prompt_text, trajectory.images
        about = alike
        if own_text or own_images:
            about = about_prompt(own_text or prompt.text, prompt.images or own_images)
        sample_id, response = _json(trajectory.sample_id), _json(trajectory.text)
        spans, turns = "", ""
        if trajectory.version_spans:
            spans = f', "version_spans": {_json([list(span) for span in trajectory.spans])}'
        if trajectory.turn_texts:
            turns = f", {_entries({'turns': _turns(trajectory), 'environment': _environment(trajectory)})}"
        yield (
            f'{{"step": {step}, "sample_id": {sample_id}, {about}, "response": {response}, {truth}, {_scored(outcome)}, '
            f'"advantage": {_number(next(advantages))}, "stop_reason": "{trajectory.stop_reason}", '
            f'"policy_version": {trajectory.policy_version}{spans}, "prompt_tokens": {prompt_tokens}, '
            f'"response_tokens": {trajectory.sampled_tokens}{turns}}}'
        )


def _scored(outcome: Outcome) -> str:
    """The entries of an outcome."""
    if isinstance(outcome, Invalid):
        why = _json({"reason": outcome.reason, "detail": outcome.detail})
        return f'"reward": null, "reward_terms": {{}}, "reward_texts": {{}}, "invalid": {why}'
    terms = ", ".join([f"{_json(name)}: {_number(value)}" for name, value in dict(outcome.terms).items()])
    texts = _json(dict(outcome.texts)) if outcome.texts else "{}"
    return f'"reward": {_number(outcome.value)}, "reward_terms": {{{terms}}}, "reward_texts": {texts}, "invalid": null'


def _entries(values: Mapping[str, object]) -> str:
    """Encode a mapping as JSON, without its braces."""
    return _json(values)[1:-1]


def _number(value: float | None) -> str:
    """Encode a number as ``_json`` does, which takes three times as long for one alone; null where it is not finite, as an
    advantage of an estimator of the user's own may be."""
    if type(value) is float and isfinite(value):
        return float.__repr__(value)
    return "null" if value is None or not isfinite(value) else _json(value)


def _turns(trajectory: Trajectory) -> list[dict[str, object]]:
    """The turns of all samples of a trajectory, oldest first; ``sample`` numbers the samples, whose tokens start and end
    count."""
    return [
        {
            "sample": number,
            "start": turn.start,
            "end": turn.end,
            "text": turn.text,
            "observation": turn.observation,
            "reward": turn.reward,
            "stop_reason": str(turn.stop_reason),
            "policy_version": turn.policy_version,
        }
        for number, sample in enumerate(trajectory.samples)
        for turn in sample.turns
    ]


def _environment(trajectory: Trajectory) -> dict[str, object]:
    """The environment's rewards, stop reason and metrics of the whole episode."""
    return {
        "reward": trajectory.env_reward,
        "stop": trajectory.env_stop,
        "metrics": {name: as_json(value) for name, value in trajectory.env_metrics},
        **({"close_failure": trajectory.close_failure} if trajectory.close_failure else {}),
    }


def as_json(value: Any) -> Any:
    """The value, or its text where JSON has no form for it (NaN in a dataset, keys that are not strings)."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except (ValueError, TypeError):
        return str(value)
    return value

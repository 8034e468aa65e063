"""The results of an evaluation and its files: results.json, and every sample, in the layout of SkyRL's evaluation dumps."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.algos.validation import bootstrap_intervals
from posttrain.libraries.disk_errors import naming
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup
from posttrain.run.durable import write_durably
from posttrain.run.samples import as_json
from posttrain.steps.validate import (
    PASS_SCORE,
    answer_of,
    by_source,
    episode_metrics,
    prompt_metrics,
    report_success,
    source_metrics,
    success_metrics,
)

RESULTS = "results.json"
SAMPLES = "dumped_evals"
ALL = "all"  # all data sources together
FAMILIES = (  # the order in which metrics are shown; the invalid ones come last
    "accuracy",
    "pass",
    "reward_mean",
    "reward_maj",
    "reward_best",
    "reward_worst",
    "reward_std",
    "length_mean",
    "turns_mean",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceResult:
    """The numbers of one data source, or of all."""

    source: str
    prompts: int
    responses: int
    metrics: Mapping[str, float]  # see steps.validate
    intervals: Mapping[str, tuple[float, float]]  # of those metrics that are means over prompts
    invalid: Mapping[str, int]  # responses without a score, by reason
    majority: str  # why there is, or is no, majority vote
    right: str = ""  # of played episodes: when one counts as right


def source_results(
    scored: Sequence[ScoredGroup], *, pass_score: float | None, draws: int, confidence: float, seed: int
) -> list[SourceResult]:
    """A result per data source, by name, and where there are several one of all together.

    Args: pass_score, the least score of a right response; None: 1, and where all episodes of a source report ``success``, that.
    """
    parts = by_source(scored)
    if len(parts) > 1:
        parts[ALL] = list(scored)
    return [
        _result(source, groups, pass_score=pass_score, draws=draws, confidence=confidence, seed=seed)
        for source, groups in parts.items()
    ]


def _result(
    source: str, groups: Sequence[ScoredGroup], *, pass_score: float | None, draws: int, confidence: float, seed: int
) -> SourceResult:
    by_success = pass_score is None and report_success(groups)
    least = PASS_SCORE if pass_score is None else pass_score
    per_prompt = [
        prompt_metrics(group.outcomes, least) | (success_metrics(group) if by_success else {}) | episode_metrics(group)
        for group in groups
    ]
    played = any(trajectory.token_ids for group in groups for trajectory in group.group.trajectories)
    if all(len(group.outcomes) == 1 for group in groups):  # the mean of all rewards is then one over prompts
        for group, found in zip(groups, per_prompt, strict=True):
            if isinstance(group.outcomes[0], Reward):
                found["reward_mean"] = group.outcomes[0].value
    metrics = source_metrics(groups, per_prompt)
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    return SourceResult(
        source=source,
        prompts=len(groups),
        responses=len(outcomes),
        metrics={name: metrics[name] for name in sorted(metrics, key=_order)},
        intervals=bootstrap_intervals(per_prompt, draws=draws, confidence=confidence, seed=seed),
        invalid=Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Invalid)),
        majority=_majority(groups),
        right="the environment reports success" if by_success else f"a reward of at least {least:g}" if played else "",
    )


def _order(metric: str) -> tuple[int, int]:
    """Sorts metrics by what they are about, and then by k."""
    family, _, size = metric.partition("@")
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), int(size or 0)


def _majority(groups: Sequence[ScoredGroup]) -> str:
    """The basis of the majority vote, in words."""
    if all(len(group.outcomes) == 1 for group in groups):
        return "none: there is one response per prompt"
    rewards = [outcome for group in groups for outcome in group.outcomes if isinstance(outcome, Reward)]
    silent = sum(answer_of(reward) is None for reward in rewards)
    if not rewards or silent == len(rewards):
        return "none: the scorer does not say which answer it found"
    if silent:
        return f"for prompts all of whose scores say which answer was found; {silent} of {len(rewards)} do not"
    return "by the answer that the scorer found"


def results_json(name: str, files: Sequence[str], results: Sequence[SourceResult], settings: Mapping[str, Any]) -> str:
    """results.json: {name, files, settings, sources: {source: {prompts, responses, metrics: {name: {value, low, high}},
    invalid: {reason: count}, majority}}}; low and high where there is an interval."""
    sources = {
        result.source: {
            "prompts": result.prompts,
            "responses": result.responses,
            "metrics": {
                name: {"value": value, **_bounds(result.intervals.get(name))} for name, value in result.metrics.items()
            },
            "invalid": dict(result.invalid),
            "majority": result.majority,
            **({"right": result.right} if result.right else {}),
        }
        for result in results
    }
    document = {"name": name, "files": list(files), "settings": dict(settings), "sources": sources}
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _bounds(interval: tuple[float, float] | None) -> dict[str, float]:
    return {} if interval is None else {"low": interval[0], "high": interval[1]}


def write_evaluation(folder: Path, text: str, scored: Sequence[ScoredGroup]) -> None:
    """Write the samples and then results.json into ``folder``, each file whole or not at all."""
    samples = folder / SAMPLES
    samples.mkdir(parents=True, exist_ok=True)
    by_file: dict[str, list[ScoredGroup]] = defaultdict(list)
    for group in scored:
        by_file[file_name(group.group.prompt.data_source)].append(group)
    for old in samples.glob("*.jsonl"):  # of an evaluation that was here before
        if old.stem not in by_file:
            old.unlink()
    for name, groups in by_file.items():
        rows = [_sample(group, number) for group in groups for number in range(len(group.outcomes))]
        _write_lines(samples / f"{name}.jsonl", rows)
    _write_lines(samples / "aggregated_results.jsonl", [skyrl_metrics(scored)])
    write_durably(folder / RESULTS, text)


def _sample(group: ScoredGroup, number: int) -> dict[str, Any]:
    """A line as SkyRL's dumps have it, and behind it what they do not have."""
    prompt, trajectory, outcome = group.group.prompt, group.group.trajectories[number], group.outcomes[number]
    return {
        "input_prompt": prompt.text,
        "output_response": trajectory.text,
        "score": outcome.value if isinstance(outcome, Reward) else None,
        # A file of responses does not say
        "stop_reason": (trajectory.env_stop or str(trajectory.stop_reason)) if trajectory.token_ids else None,
        "env_class": None,
        "env_extras": {"ground_truth": as_json(prompt.ground_truth), "extra_info": as_json(dict(prompt.extra_info))},
        "data_source": prompt.data_source,
        "sample_id": trajectory.sample_id,
        "answer": answer_of(outcome),
        "score_terms": dict(outcome.terms) if isinstance(outcome, Reward) else {},
        "invalid": {"reason": outcome.reason, "detail": outcome.detail} if isinstance(outcome, Invalid) else None,
        **(
            {"turns": trajectory.turn_count, "environment": dict(trajectory.env_metrics)}
            if trajectory.turn_texts
            else {}
        ),
    }


def skyrl_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """SkyRL's names: eval/<source>/avg_score, the mean of all valid scores, and eval/<source>/pass_at_<n>, the share of
    prompts with a score above 0 among their n responses; the same of eval/all. ``/`` in a source is written ``_``."""
    found: dict[str, float] = {}
    for source, groups in [*by_source(scored).items(), (ALL, list(scored))]:
        rewards = [outcome.value for group in groups for outcome in group.outcomes if isinstance(outcome, Reward)]
        passed = [
            any(isinstance(outcome, Reward) and outcome.value > 0 for outcome in group.outcomes) for group in groups
        ]
        name, most = f"eval/{source.replace('/', '_')}", max(len(group.outcomes) for group in groups)
        if rewards:
            found[f"{name}/avg_score"] = sum(rewards) / len(rewards)
        found[f"{name}/pass_at_{most}"] = sum(passed) / len(passed)
    return found


def file_name(source: str) -> str:
    """A data source as a file's name: what is no letter, digit, dot, dash or underscore becomes an underscore."""
    name = re.sub(r"[^\w.-]", "_", source).lstrip(".")[:120] or "_"
    return f"{name}_" if name == "aggregated_results" else name


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) for row in rows]
    beside = path.with_suffix(".tmp")
    with naming(path):
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
        os.replace(beside, path)

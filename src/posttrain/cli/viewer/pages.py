"""Pages of the viewer about a sample, a step and two validations, as styled text. Text written by a model, a dataset or a
reward passes through ``shown`` and is never read as markup."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from textual.content import Content

from posttrain.cli.viewer.pictures import pictures
from posttrain.cli.viewer.words import one_line, shown, word_diff

Row = Mapping[str, Any]
SIGNS = {"gone": "[-{}-]", "new": "{{+{}+}}", "same": "{}"}  # for terminals without colours
STYLES = {"gone": "strike $text-error", "new": "bold $text-success", "same": ""}


def sample_page(row: Row, run_folder: Path) -> Content:
    """Render all fields of a sample, and its images from the run folder."""
    if "damaged" in row:
        return Content(f"This line of the file is not a JSON object:\n\n{shown(row['damaged'])}")
    about = {
        "prompt": row.get("prompt_id"),
        "source": row.get("data_source"),
        "end": row.get("stop_reason"),
        "tokens": row.get("response_tokens"),
        "version": row.get("policy_version"),
        "advantage": row.get("advantage"),
    }
    parts = [
        Content("   ".join(f"{name} {_value(value)}" for name, value in about.items() if value is not None) + "\n"),
        _rewards(row),
    ]
    known = {"prompt", "response", "ground_truth", "turns"}
    parts.append(pictures(row, run_folder))
    for name in ("prompt", "response", "ground_truth"):
        parts.append(_section(name, row.get(name)))
    turns = row.get("turns")
    if isinstance(turns, list):
        parts += [_turn(number, turn) for number, turn in enumerate(turns, start=1)]
    further = {
        name: value for name, value in row.items() if name not in known | SHOWN_ABOVE and value not in (None, {}, [])
    }
    if further:
        parts.append(_section("further", further))
    return Content("\n").join(parts)


SHOWN_ABOVE = {
    "step",
    "sample_id",
    "prompt_id",
    "data_source",
    "stop_reason",
    "response_tokens",
    "policy_version",
    "advantage",
    "reward",
    "reward_terms",
    "reward_texts",
    "invalid",
}


def _rewards(row: Row) -> Content:
    """Render the reward, its terms, and the terms' texts; or the reason why there is none."""
    invalid = row.get("invalid")
    if isinstance(invalid, Mapping):
        reason = f"no valid reward: {shown(str(invalid.get('reason')))}\n{shown(str(invalid.get('detail') or ''))}"
        return Content.styled(reason, "bold $text-error")
    lines = [f"reward {_value(row.get('reward'))}"]
    for field in ("reward_terms", "reward_texts"):
        values = row.get(field)
        if isinstance(values, Mapping):
            lines += [f"  {one_line(str(name), 60):<30} {_value(value)}" for name, value in values.items()]
    return Content.styled("\n".join(lines), "bold")


def _turn(number: int, turn: Any) -> Content:
    """Render one turn of a conversation: the policy's text and the observation."""
    if not isinstance(turn, Mapping):
        return _section(f"turn {number}", turn)
    about = [
        f"turn {number}",
        *(f"{name} {_value(turn[name])}" for name in ("reward", "stop_reason") if turn.get(name) is not None),
    ]
    said = _section(" · ".join(about), turn.get("text"))
    return said + _section(f"answer to turn {number}", turn.get("observation") or None)


def _section(name: str, value: Any) -> Content:
    if value is None:
        return Content("")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    return Content.assemble((f"── {name} ──\n", "bold $text-accent"), Content(shown(text)), "\n")


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else one_line(str(value), 200)


def difference_page(before: Row, after: Row, steps: tuple[int, int]) -> Content:
    """Render the differences, word by word, between the responses of two validations to one prompt."""
    rewards = f"reward {_value(before.get('reward'))} → {_value(after.get('reward'))}"
    parts = [
        Content.assemble(
            (f"prompt {_value(after.get('prompt_id'))}   step {steps[0]} → {steps[1]}   {rewards}\n", "bold")
        ),
        Content.assemble(("[-only before-]", STYLES["gone"]), " ", ("{+only after+}", STYLES["new"]), "\n"),
        _section("prompt", after.get("prompt")),
        Content.assemble(("── response ──\n", "bold $text-accent")),
    ]
    pieces = word_diff(str(before.get("response") or ""), str(after.get("response") or ""))
    parts += [Content.styled(SIGNS[kind].format(shown(text)), STYLES[kind]) for kind, text in pieces]
    parts.append(Content("\n"))
    parts.append(_section("ground_truth", after.get("ground_truth")))
    return Content("").join(parts)


def metrics_page(step: int, metrics: Mapping[str, float | None]) -> Content:
    """Render all metrics of a step."""
    width = max((len(name) for name in metrics), default=0)
    lines = [
        f"{one_line(name, 80):<{min(width, 80)}}  {'not finite' if value is None else format(value, '.6g')}"
        for name, value in sorted(metrics.items())
    ]
    return Content("\n".join([f"step {step}", "", *lines]))

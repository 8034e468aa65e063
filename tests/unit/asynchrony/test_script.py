"""Recorded decisions, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.asynchrony.passes import Due
from posttrain.asynchrony.script import Script, read_script
from posttrain.errors import RequestError


def event(step: int, name: str, group: int = 0, **more: Any) -> dict[str, Any]:
    return {"step": step, "event": name, "group": group, "prompt_id": f"p{group}", **more}


EVENTS = [
    event(1, "admitted", 0, draw=1, attempt=0),
    event(1, "admitted", 1, draw=1, attempt=0),
    event(1, "admitted", 2, draw=2, attempt=1),
    {"step": 1, "event": "order", "pass": 0, "sent": ["0/0", "0/1"], "cancelled": []},
    {"step": 1, "event": "order", "pass": 7, "sent": [], "cancelled": ["1/0"]},
    event(1, "finished", 1),
    {"step": 1, "event": "rest", "pass": 9},
    event(1, "cut", 0, sample=1, turn=0, token=5),
    event(1, "filtered", 1),
    event(1, "finished", 2),
    {"step": 1, "event": "rest", "pass": 3},
    event(1, "cut", 0, sample=1, turn=0, token=9),
    event(1, "consumed", 2),
    event(2, "admitted", 3, draw=2, attempt=0, started=0),
    event(2, "finished", 3),
    event(2, "finished", 0),
    {"step": 2, "event": "rest", "pass": 4},
    event(2, "consumed", 0),
    {"step": 2, "event": "ready"},
    event(2, "consumed", 3, mark="9f"),
    event(2, "dropped", 4),
]


def test_a_step_is_rounds_of_sampling_and_choosing() -> None:
    script = Script.of(EVENTS)
    first, second = script.rounds[1]
    assert first.admitted == [(0, "p0", 1, 0, None), (1, "p1", 1, 0, None), (2, "p2", 2, 1, None)]
    assert first.chosen == [1] and script.rounds[2][0].admitted == [(3, "p3", 2, 0, 0)]
    assert first.cuts == {(0, 1): 5} and second.cuts == {(0, 1): 9}
    assert first.orders == [Due("order", 0, ("0/0", "0/1")), Due("order", 7, (), ("1/0",)), Due("rest", 9)]
    assert (first.finished, second.finished) == ([1], [2])
    assert (second.chosen, second.samples) == ([2], True)
    assert [(each.chosen, each.samples) for each in script.rounds[2]] == [([0], True), ([3], False)]
    assert script.consumed == {1: [("p2", "")], 2: [("p0", ""), ("p3", "9f")]}


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "schedule.jsonl"
    with pytest.raises(RequestError, match=r"holds no schedule\.jsonl"):
        read_script(tmp_path)
    file.write_text('{"step": 1}\n')
    with pytest.raises(RequestError, match="is damaged"):
        read_script(tmp_path)
    older = [each for each in EVENTS if each["event"] not in ("order", "rest")]
    Script.of(EVENTS).check_orders()
    with pytest.raises(RequestError, match="has no passes of the sampler in step 1"):
        Script.of(older).check_orders()
    file.write_text("".join(json.dumps(each) + "\n" for each in [*EVENTS, event(3, "restarted", 5)]))
    with pytest.raises(RequestError, match="resumed before step 3, where episodes began again"):
        read_script(tmp_path)
    file.write_text("".join(json.dumps(each) + "\n" for each in [*EVENTS, {"step": 3, "event": "recomputed"}]))
    with pytest.raises(RequestError, match="resumed before step 3, where kept caches were computed again"):
        read_script(tmp_path)

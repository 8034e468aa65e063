"""The recorded decisions of an asynchronous run (schedule.jsonl), to be made again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.asynchrony.passes import Due, Passes
from posttrain.errors import Problem, RequestError

_CHOSEN = ("consumed", "filtered")
# Events of a resumed run after which it is no longer a function of its decisions
_BREAKS = {
    "restarted": "episodes began again",
    "recomputed": "kept caches were computed again",
    "resumed": "its samplers were started again",
}


class Admission(NamedTuple):
    """A group that was admitted."""

    serial: int
    prompt_id: str
    draw: int  # number of the loader's batch that its prompt came with, from 1
    attempt: int = 0  # 1 where it replaces a group that was dropped
    started: int | None = None  # steps trained when the weights were made that the samplers had; None: all


@dataclass(slots=True)
class Round:
    """One stretch of sampling within a step, and the groups that the step took after it."""

    samples: bool = True  # False: enough groups were complete already
    admitted: list[Admission] = field(default_factory=list)  # in order
    # Tokens of the turn under way with which a sample (group, number) stopped; the others ended.
    cuts: dict[tuple[int, int], int] = field(default_factory=dict)
    orders: list[Due] = field(default_factory=list)  # of the sampler, at its passes; the last one is its rest
    finished: list[int] = field(default_factory=list)  # groups whose last sample ended in it
    chosen: list[int] = field(default_factory=list)  # groups


class Trained(NamedTuple):
    """A group that a step has trained on."""

    prompt_id: str
    mark: str  # of its samples (records.marks); "" where an older version has recorded it


@dataclass(frozen=True, slots=True)
class Script:
    """The rounds of every step."""

    rounds: Mapping[int, list[Round]]
    consumed: Mapping[int, list[Trained]]  # by step
    passes: Passes | None = None  # the orders of samplers that worked apart

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Script:
        rounds: dict[int, list[Round]] = {}
        consumed: dict[int, list[Trained]] = {}
        events = list(events)
        for event in events:
            of_step = rounds.setdefault(event["step"], [Round()])
            if of_step[-1].chosen and event["event"] not in (*_CHOSEN, "dropped"):
                of_step.append(Round())
            now = of_step[-1]
            match event["event"]:
                case "admitted":
                    group, prompt_id, draw = event["group"], event["prompt_id"], event["draw"]
                    now.admitted.append(Admission(group, prompt_id, draw, event["attempt"], event.get("started")))
                case "cut":
                    now.cuts[event["group"], event["sample"]] = event["token"]
                case "order" | "rest" if "sampler" not in event:
                    sent, cancelled = event.get("sent", ()), event.get("cancelled", ())
                    now.orders.append(Due(event["event"], event["pass"], tuple(sent), tuple(cancelled)))
                case "finished":
                    now.finished.append(event["group"])
                case "ready":
                    now.samples = False
                case "consumed" | "filtered":
                    now.chosen.append(event["group"])
            if event["event"] == "consumed":
                trained = Trained(event["prompt_id"], event.get("mark", ""))
                consumed.setdefault(event["step"], []).append(trained)
        apart = any(event["event"] == "joined" for event in events)
        return cls(rounds, consumed, Passes.of(events) if apart else None)

    def check_orders(self) -> None:
        """Raises: RequestError when the sampler's passes are missing."""
        for step, rounds in self.rounds.items():
            if any(each.samples and not each.orders for each in rounds):
                what = f"schedule.jsonl has no passes of the sampler in step {step}: an older version has written it"
                fix = "replay it with that version, or run it once more with its configuration"
                raise RequestError(Problem(what, fix=fix))


def read_script(folder: Path) -> Script:
    """Read the schedule of a run. Raises: RequestError when there is none, or it cannot be followed."""
    file = folder / "schedule.jsonl"
    if not file.is_file():
        what = f"{folder} holds no schedule.jsonl: only asynchronous runs need one"
        raise RequestError(
            Problem(what, fix="a synchronous run is the same again with the same configuration and seed")
        )
    try:
        events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        broken = next((event for event in events if event["event"] in _BREAKS), None)
        script = Script.of(events)
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(Problem(f"{file} is damaged: {error}")) from None
    if broken:
        what = f"{folder} was resumed before step {broken['step']}, where {_BREAKS[broken['event']]}: it cannot be replayed"
        raise RequestError(Problem(what, fix="replay a run that was not interrupted"))
    return script

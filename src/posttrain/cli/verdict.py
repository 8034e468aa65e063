"""The last lines of a plan: the configuration trains here, on other devices, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.config.policy import ONE_DEVICE
from posttrain.dialects.loaded import LoadedConfig
from posttrain.errors import Problem

# What each entry point does.
DOES = {
    "train": "trains",
    "sft": "trains",
    "tune": "trains",
    "generate": "generates",
    "evaluate": "evaluates",
    "serve": "serves",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of a plan to the question that matters."""

    does: str  # trains, generates, ...
    devices: int
    engines: tuple[str, ...]
    needs: tuple[str, ...]  # libraries that are not installed in this Python
    lacking: tuple[Problem, ...]  # why it cannot run anywhere

    @property
    def trains(self) -> bool:
        return not self.lacking

    def line(self) -> str:
        if self.lacking:
            many = "1 thing" if len(self.lacking) == 1 else f"{len(self.lacking)} things"
            return f"does not {self.does.removesuffix('s')}: {many}"
        if self.devices == 1 and not self.needs:
            return f"{self.does} here"
        devices = f"{self.devices} device{'s' if self.devices > 1 else ''}"
        given = f" with {', '.join(self.engines)}" if self.engines else ""
        missing = f"; not installed here: {', '.join(self.needs)}" if self.needs else ""
        return f"{self.does} on {devices}{given}{missing}"

    def text(self) -> str:
        """The line, and below it every reason."""
        return "\n".join([self.line(), *(f"  {number}. {one}" for number, one in enumerate(self.lacking, start=1))])

    def for_programs(self) -> dict[str, Any]:
        return {"trains": self.trains, "verdict": self.line(), "needs": list(self.needs)}


def verdict(loaded: LoadedConfig[Any], devices: int | None = None) -> Verdict:
    """Judge a configuration without problems.

    Args: ``devices`` of all roles together; None for entry points without roles.
    """
    config = loaded.config
    sections = [getattr(config, name, None) for name in ("policy", "rollout")]
    engines = [section.engine for section in sections if section is not None]
    return Verdict(
        does=DOES[loaded.entry],
        devices=devices or (config.placement.devices if loaded.entry == "generate" else 1),
        engines=tuple(dict.fromkeys(engine for engine in engines if engine != ONE_DEVICE)),
        needs=tuple(dict.fromkeys(problem.library for problem in loaded.unsupported if problem.library)),
        lacking=tuple(problem for problem in loaded.unsupported if not problem.library),
    )


def refused(problems: Sequence[Problem]) -> dict[str, Any]:
    """The plan of a configuration that is wrong, for programs."""
    return {
        "trains": False,
        "verdict": f"refused: {len(problems)} problem{'s' if len(problems) > 1 else ''}",
        "problems": [
            {"key": problem.field, "reason": problem.what, "where": problem.where, "fix": problem.fix}
            for problem in problems
        ],
    }

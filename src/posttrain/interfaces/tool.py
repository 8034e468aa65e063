"""A tool: a function that a model may call, with the schema by which the chat template offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import PosttrainError


class ToolFailed(PosttrainError):
    """A call that cannot be answered. Its message is what the model reads."""


def _nothing() -> None:
    """There is nothing to give back."""


def _any_row(row: Mapping[str, Any]) -> None:
    """It works in the same way for every row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of type object
    run: Callable[[Mapping[str, Any]], str]  # arguments -> what the model reads; may raise ToolFailed
    begin: Callable[[Mapping[str, Any]], None] = _any_row  # called once, with the row that the episode is about
    close: Callable[[], Mapping[str, float] | None] = (
        _nothing  # called once, when the episode is over; may give metrics
    )

    @property
    def schema(self) -> dict[str, Any]:
        """The function as chat templates want it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def parameters(**properties: tuple[str, str]) -> dict[str, Any]:
    """The schema of required parameters: name=(JSON type, description)."""
    return {
        "type": "object",
        "properties": {name: {"type": kind, "description": text} for name, (kind, text) in properties.items()},
        "required": list(properties),
    }

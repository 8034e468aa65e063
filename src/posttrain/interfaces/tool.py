"""Interface of tools: a function that a model may call, with the schema shown by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import PosttrainError


class ToolFailed(PosttrainError):
    """A call cannot be answered. The model reads the message."""


def _nothing() -> None:
    """No-op: the tool holds no resources."""


def _any_row(row: Mapping[str, Any]) -> None:
    """No-op: the tool does not depend on the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema of type object
    run: Callable[[Mapping[str, Any]], str]  # arguments -> text for the model; may raise ToolFailed
    begin: Callable[[Mapping[str, Any]], None] = _any_row  # called once, with the episode's row
    # Called once at the end; may return metrics.
    close: Callable[[], Mapping[str, float] | None] = _nothing

    @property
    def schema(self) -> dict[str, Any]:
        """The function in the form chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def parameters(**properties: tuple[str, str]) -> dict[str, Any]:
    """Build the schema of required parameters: name=(JSON type, description)."""
    return {
        "type": "object",
        "properties": {name: {"type": kind, "description": text} for name, (kind, text) in properties.items()},
        "required": list(properties),
    }

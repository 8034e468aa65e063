"""Interface of tools: a function that a model may call, with the schema shown by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import PosttrainError


class ToolFailed(PosttrainError):
    """A call cannot be answered. The model reads the message."""


def _nothing() -> None:
    """No-op: the tool holds no resources, or no state."""


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
    # With both, an episode can be saved and continued elsewhere: ``state`` gives all that the next calls depend on, as a JSON
    # value, and ``restore`` takes it, after ``begin``. Without them a resumed run begins the episode again.
    state: Callable[[], Any] | None = None
    restore: Callable[[Any], None] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The function in the form chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def _took(state: Any) -> None:
    """No-op: nothing is kept."""


# state and restore of a tool whose calls depend on nothing but their arguments and the row
KEEPS_NOTHING: Mapping[str, Any] = {"state": _nothing, "restore": _took}


def parameters(**properties: tuple[str, str]) -> dict[str, Any]:
    """Build the schema of required parameters: name=(JSON type, description)."""
    return {
        "type": "object",
        "properties": {name: {"type": kind, "description": text} for name, (kind, text) in properties.items()},
        "required": list(properties),
    }

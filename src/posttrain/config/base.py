"""Base class of all sections of a RunConfig: frozen, no unknown keys, each field documented where it is defined."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, PrivateAttr
from pydantic_core import CoreSchema

from posttrain.config.docstrings import field_docstrings

# A dotted key, or "" for any; the value that was read there; the text with ${oc.env:…} that it came from.
Reference = tuple[str, str, str]


class Section(BaseModel):
    """A frozen part of the configuration. The docstring under a field is its description in the JSON schema and the docs."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        validate_default=True,
        allow_inf_nan=False,
    )
    _references: tuple[Reference, ...] = PrivateAttr(default=())

    def references(self) -> tuple[Reference, ...]:
        """Return what was read from environment variables (``config.shown`` writes the references, not the values)."""
        return self._references

    def with_references(self, references: tuple[Reference, ...]) -> Self:
        """Copy this section, which then knows what was read from environment variables."""
        copied = self.model_copy()
        copied._references = references
        return copied

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema with each field's docstring as its description."""
        schema = handler(core_schema)
        described = field_docstrings(cls)
        for name, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if name in described:
                field.setdefault("description", described[name])
        return schema

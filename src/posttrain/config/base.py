"""What every section of a RunConfig has in common: frozen, no unknown keys, each field documented where it is defined."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the configuration. The docstring under a field is its description in the JSON schema and the docs."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

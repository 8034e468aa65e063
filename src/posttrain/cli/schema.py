"""``posttrain schema``: the JSON schema of a native configuration."""

from __future__ import annotations

import typer


def schema() -> None:
    """Print the JSON schema of a configuration, for editors."""
    from posttrain.dialects.native.write import json_schema

    typer.echo(json_schema(), nl=False)

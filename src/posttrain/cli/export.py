"""``posttrain export``: a checkpoint becomes a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A run folder (its newest checkpoint) or one of its global_step_N folders."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The folder to write.")],
) -> None:
    """Write a checkpoint's model as a folder that transformers loads."""
    from posttrain.stages.export import export_checkpoint

    source = export_checkpoint(checkpoint, out)
    typer.echo(f"wrote {out} from {source}")

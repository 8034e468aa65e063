"""``posttrain export``: write a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A run folder (its newest checkpoint), one of its global_step_N folders, or shards of verl or SkyRL.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The folder to write.")],
    role: Annotated[
        Literal["policy", "critic"],
        typer.Option(help="Which model: the policy, or the critic as a token classification model with one label."),
    ] = "policy",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Precision of the weights. By default the checkpoint's own: float32, or that of the shards."),
    ] = None,
) -> None:
    """Write a checkpoint's model as a folder that transformers loads."""
    from posttrain.run.export import export_checkpoint

    source = export_checkpoint(checkpoint, out, role, dtype)
    typer.echo(f"wrote {out} from {source}")
    if role == "policy":
        return
    import transformers

    from posttrain.models.loading import load_model_config

    kind = (getattr(load_model_config(str(out)), "architectures", None) or [""])[0]
    if not hasattr(transformers, kind):
        typer.echo(f"transformers has no {kind}: this folder is read as a critic by posttrain (critic.path) only")

"""``posttrain export``: write a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from posttrain.errors import Problem, RequestError


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
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Also write NAME-KIND.gguf there, for llama.cpp: f16, bf16, f32, q8_0, q6_k, q5_k_m, q5_1, q5_0, q4_k_m, q4_1, "
            "q4_0; and of an adapter, NAME-lora.gguf.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Upload OUT_DIR to the hub, with a model card made from the run."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: a repository that only you can read.")
    ] = False,
) -> None:
    """Write a checkpoint's model as a folder that transformers loads; on request as GGUF, and to the hub."""
    from posttrain.libraries.hub_push import check_repository
    from posttrain.run.export import export_checkpoint

    if push is not None:
        check_repository(push)
    if gguf is not None:
        from posttrain.models.gguf_kinds import check_kind

        check_kind(gguf)
        if role == "critic":
            raise RequestError(Problem("a critic is no model for llama.cpp", fix="leave --gguf or --role out"))
    source = export_checkpoint(checkpoint, out, role, dtype)
    typer.echo(f"wrote {out} from {source}")
    if gguf is not None:
        from posttrain.models.gguf_file import named, write_gguf

        written = write_gguf(out, named(out, gguf), gguf)
        typer.echo(
            f"wrote {written.path}: {written.tensors} tensors, read back as they were written "
            f"({', '.join(f'{count} {kind}' for kind, count in written.kinds.items())}); rounded by at most "
            f"{written.largest_error:.2g} of a tensor's largest weight"
        )
        from posttrain.models.gguf_adapter import adapter_of, write_adapter_gguf

        if (adapter := adapter_of(source)) is not None:
            alone = named(out, "lora")
            changed = write_adapter_gguf(adapter, out, alone)
            typer.echo(f"wrote {alone}: the adapter alone, for {changed} weights of its base model; read back equal")
    if push is not None:
        from posttrain.libraries.hub_push import push as upload
        from posttrain.run.card import run_of, write_card

        typer.echo(f"wrote {write_card(out, run_of(source), name=push)}")
        typer.echo(f"pushed to {upload(out, push, private=private)}")
    if role == "policy":
        return
    import transformers

    from posttrain.models.loading import load_model_config

    kind = (getattr(load_model_config(str(out)), "architectures", None) or [""])[0]
    if not hasattr(transformers, kind):
        typer.echo(f"transformers has no {kind}: this folder is read as a critic by posttrain (critic.path) only")

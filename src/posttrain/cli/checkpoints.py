"""``posttrain checkpoints``: list the checkpoints of a run, local or remote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def checkpoints(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE", help="A run folder, the folder of its checkpoints, or the URL they are copied to."
        ),
    ],
) -> None:
    """List checkpoints: step, size, and whether they are complete."""
    from posttrain.libraries.remote import is_url

    lines = _elsewhere(place) if is_url(place) else _here(Path(place))
    for name, size, state in lines:
        typer.echo(f"{name}  {size:,} bytes  {state}")
    if not any(state == "whole" for _, _, state in lines):
        typer.echo(f"there is no complete checkpoint in {place}", err=True)
        raise typer.Exit(1)


def _elsewhere(url: str) -> list[tuple[str, int, str]]:
    """List remote checkpoints. One is complete when its manifest, which is uploaded last, exists; hashes are compared when it
    is downloaded."""
    from posttrain.errors import Problem, RequestError
    from posttrain.libraries.remote import RemoteFolder, problem_of
    from posttrain.run.remote import checkpoints_in, reason

    if problem := problem_of(url, ""):
        raise RequestError(problem)
    try:
        found = checkpoints_in(RemoteFolder(url))
    except Exception as error:  # each protocol's library has its own errors
        fix = "check the network and the credentials"
        raise RequestError(Problem(f"{url} cannot be read: {reason(error)}", fix=fix)) from error
    return [(one.name, one.total_bytes, "whole" if one.complete else "not finished") for one in found]


def _here(place: Path) -> list[tuple[str, int, str]]:
    from posttrain.errors import Problem, RequestError
    from posttrain.run.checkpoint_folders import PREFIX, damage_of, steps_in

    if not place.exists():
        raise RequestError(Problem(f"{place} does not exist", fix="name a run folder, or the URL of its checkpoints"))
    inside = place / "checkpoints"
    folder = inside if inside.is_dir() else place
    found = []
    for name in (f"{PREFIX}{step}" for step in steps_in(folder)):
        files = [path for path in (folder / name).rglob("*") if path.is_file()]
        damage = damage_of(folder / name)
        state = f"damaged: {damage}" if damage else "whole"
        found.append((name, sum(path.stat().st_size for path in files), state))
    return found

"""The ``posttrain`` command. Importing this file, or a command's, loads nothing heavy: each command imports what it needs
when it runs."""

from __future__ import annotations

import sys
from copy import copy
from typing import Annotated

import typer

from posttrain.cli import (
    algorithms,
    chat,
    checkpoints,
    data,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    init,
    keys,
    plan,
    play,
    replay,
    report,
    schema,
    serve,
    sft,
    show,
    train,
    translate,
    tune,
)
from posttrain.cli.completion import mend_zsh
from posttrain.cli.errors import run_guarded
from posttrain.cli.exit_codes import codes_text, show_exit_codes

app = typer.Typer(
    name="posttrain",
    help="Reinforcement-learning post-training for language models.",
    no_args_is_help=True,
    epilog=codes_text(),
    rich_markup_mode=None,  # plain text: loads nothing, and looks the same in a terminal, a log and a pipe
    pretty_exceptions_enable=False,
)
mend_zsh()
# Unknown options are passed to the command, which explains that overrides have no dashes.
OVERRIDES = {"ignore_unknown_options": True}
app.command("init")(init.init)
app.command("train", context_settings=OVERRIDES)(train.train)
app.command("sft", context_settings=OVERRIDES)(sft.sft)
app.command("tune", context_settings=OVERRIDES)(tune.tune)
app.command("generate", context_settings=OVERRIDES)(generate.generate)
app.command("evaluate", context_settings=OVERRIDES)(evaluate.evaluate)
app.command("serve", context_settings=OVERRIDES)(serve.serve)
app.command("plan", context_settings=OVERRIDES)(plan.plan)
app.command("play", context_settings=OVERRIDES)(play.play)
app.command("keys")(keys.keys)
app.command("algorithms")(algorithms.algorithms)
app.command("translate", context_settings=OVERRIDES)(translate.translate)
app.command("report")(report.report)
app.command("show")(show.show)
app.add_typer(replay.app, name="replay")
app.command("export")(export.export)
app.command("chat")(chat.chat)
app.command("checkpoints")(checkpoints.checkpoints)
app.add_typer(data.app, name="data")
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("schema")(schema.schema)


@app.command("version")
def version() -> None:
    """Print the version, with those of Python and torch, and the commit where the package is a checkout."""
    from posttrain.cli.version import version_text

    typer.echo(version_text())


show_exit_codes(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement-learning post-training for language models."""


def main() -> None:
    """Run the command line and exit with 0, or with the exit code of the error."""
    sys.exit(run_guarded(with_only(sys.argv[1] if len(sys.argv) > 1 else "")))


def with_only(command: str) -> typer.Typer:
    """Return the app with this command alone, because typer builds the options of all commands before it runs one; whole for
    any other word. Shells that complete a line name no command."""
    chosen = [each for each in app.registered_commands if each.name == command]
    if not chosen:
        return app
    one = copy(app)
    one.registered_commands, one.registered_groups = chosen, []
    return one

"""The ``posttrain`` command. The file of the requested command is imported, and those of all commands for the help; none loads
anything heavy: each command imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Annotated

import typer

from posttrain.cli.completion import mend_zsh
from posttrain.cli.errors import run_guarded
from posttrain.cli.exit_codes import codes_text, show_exit_codes

mend_zsh()
# The commands in the order of the help. Each is the function of its name in the file of its name; a group is the file's ``app``.
COMMANDS = (
    "init",
    "train",
    "sft",
    "tune",
    "generate",
    "evaluate",
    "serve",
    "plan",
    "play",
    "keys",
    "algorithms",
    "translate",
    "report",
    "show",
    "export",
    "chat",
    "checkpoints",
    "demo",
    "doctor",
    "schema",
    "version",
)
GROUPS = ("replay", "data")
# They pass unknown options to the command, which explains that overrides have no dashes.
TAKE_OVERRIDES = ("train", "sft", "tune", "generate", "evaluate", "serve", "plan", "play")


@cache
def app_with(commands: Iterable[str]) -> typer.Typer:
    """Build the app with these commands and groups; their files are imported."""
    app = typer.Typer(
        name="posttrain",
        help="Reinforcement-learning post-training for language models.",
        no_args_is_help=True,
        epilog=codes_text(),
        rich_markup_mode=None,  # plain text: loads nothing, and looks the same in a terminal, a log and a pipe
        pretty_exceptions_enable=False,
    )
    for name in commands:
        module = import_module(f"posttrain.cli.{name}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            options = {"ignore_unknown_options": True} if name in TAKE_OVERRIDES else None
            app.command(name, context_settings=options)(getattr(module, name))
    show_exit_codes(app)
    app.callback()(options_of_all)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from posttrain.cli.version import version

        version()
        raise typer.Exit


def options_of_all(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement-learning post-training for language models."""


def whole() -> typer.Typer:
    """The app with all commands."""
    return app_with((*COMMANDS, *GROUPS))


def main() -> None:
    """Run the command line and exit with 0, or with the exit code of the error."""
    sys.exit(run_guarded(with_only(sys.argv[1] if len(sys.argv) > 1 else "")))


def with_only(word: str) -> typer.Typer:
    """Return the app with this command or group alone, which takes less time to build than all of them; whole for any other
    word. Shells that complete a line name no command."""
    if word == "--version":
        word = "version"
    return app_with((word,)) if word in (*COMMANDS, *GROUPS) else whole()


def __getattr__(name: str) -> typer.Typer:
    """``app`` is the app with all commands, built when it is used."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return whole()

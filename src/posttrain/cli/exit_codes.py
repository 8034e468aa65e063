"""The exit codes of the commands: one table, which every ``--help`` and docs/debugging.md show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import typer

from posttrain.errors import RequestError, RunInterrupted, RunStopped
from posttrain.run.early_stop import AT_ONCE

BUG = 1
MEANINGS: Mapping[int, str] = {
    0: "done",
    BUG: "a bug, with its traceback",
    RequestError.exit_code: "the request is wrong, and nothing was started",
    RunStopped.exit_code: "it stopped itself, with the reason",
    RunInterrupted.exit_code: "a signal stopped it after saving; start it again to resume",
    AT_ONCE: "stopped at once",
}
_READS = (0, BUG, RequestError.exit_code, AT_ONCE)
# A command that writes files or uses a model ends with 3 when a disk is full, a server is gone or the model fails.
_WORKS = (0, BUG, RequestError.exit_code, RunStopped.exit_code, AT_ONCE)
_TRAINS = tuple(MEANINGS)

# The codes that a command can end with. Those of a group hold for each of its commands.
CODES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("train", "sft", "tune", "demo"), _TRAINS),
    **dict.fromkeys(
        ("init", "generate", "evaluate", "serve", "play", "replay", "report", "export", "chat", "data"), _WORKS
    ),
    **dict.fromkeys(
        ("plan", "keys", "algorithms", "translate", "show", "checkpoints", "doctor", "schema", "version"), _READS
    ),
}
# Meanings that a command has in place of the general ones.
OWN: Mapping[str, Mapping[int, str]] = {
    "plan": {RequestError.exit_code: "the request is wrong, or does not train here"},
    "play": {RunStopped.exit_code: "the episode has failed, or was left unfinished"},
    "checkpoints": {BUG: "there is no complete checkpoint; with a traceback, a bug"},
}


def codes_text(command: str | None = None) -> str:
    """The line below the options of ``--help``: the codes of a command; of None, all of them."""
    meanings = MEANINGS if command is None else meanings_of(command)
    return f"Exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in meanings.items())}."


def meanings_of(command: str) -> dict[int, str]:
    """The codes that a command can end with, and the meaning of each."""
    return {code: OWN.get(command, {}).get(code, MEANINGS[code]) for code in CODES[command]}


def show_exit_codes(app: typer.Typer) -> None:
    """Give every command of ``app`` its codes as the end of its help. Raises: KeyError for one that the table lacks."""
    for name, command in _commands(app):
        command.epilog = codes_text(name)


def _commands(app: typer.Typer) -> Iterator[tuple[str, typer.models.CommandInfo]]:
    """Yield the commands, each with its name, or with that of its group."""
    for command in app.registered_commands:
        assert command.name is not None
        yield command.name, command
    for group in app.registered_groups:
        assert isinstance(group.name, str) and group.typer_instance is not None
        group.epilog = codes_text(group.name)
        for command in group.typer_instance.registered_commands:
            yield group.name, command

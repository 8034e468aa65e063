"""``posttrain chat``: talk to a model in the terminal, on request beside another one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.beginning import announce
from posttrain.cli.given_model import as_folder, check_given, name_of
from posttrain.cli.viewer.words import visible
from posttrain.errors import ModelError

if TYPE_CHECKING:
    from posttrain.models.chat import Speaker

MAX_TEMPERATURE = 100.0  # as of a run
HELP = """\
/new            begins a new conversation
/system TEXT    sets the system message, without TEXT none
/temperature N  of sampling; 0 is greedy
/quit           ends, as the end of the input does; Ctrl-C stops an answer"""


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model folder, a run or checkpoint, a GGUF file, or a hub id (org/name)."
        ),
    ],
    beside: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Another model that answers the same, such as the one before training."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=MAX_TEMPERATURE, help="Of sampling; 0 is greedy.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most tokens of an answer.")] = 512,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the first answer; each one after it has the next.")
    ] = 0,
    message: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Send this message, print the answer and end. Repeatable.")
    ] = None,
) -> None:
    """Talk to a model, before or after training, on this machine."""
    from posttrain.cli.process import prepare_cpu
    from posttrain.libraries.importing import importing

    for path in filter(None, (model, beside)):
        check_given(path)
    prepare_cpu()
    with ExitStack() as folders:
        with importing():
            speakers = [_load(path, folders) for path in (model, beside) if path is not None]
        talk = Talk(
            speakers,
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            stops_answers=not message and sys.stdin.isatty(),
        )
        if message:
            for text in message:
                talk.say(text)
        else:
            _converse(talk)


class Talk:
    """One conversation per model; all get the same messages of the user. Args: ``stops_answers``, Ctrl-C ends an answer only."""

    def __init__(
        self,
        speakers: list[Speaker],
        *,
        system: str | None,
        temperature: float,
        max_tokens: int,
        seed: int,
        stops_answers: bool = False,
    ):
        self._speakers, self._stops_answers = speakers, stops_answers
        self.system, self.temperature = system, temperature
        self._max_tokens, self._seed = max_tokens, seed
        self.begin()

    def begin(self) -> None:
        """Begin a new conversation."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        self._messages: list[list[dict[str, str]]] = [list(first) for _ in self._speakers]

    def say(self, text: str) -> None:
        """Send a message and print every model's answer as it comes."""
        for speaker, messages in zip(self._speakers, self._messages, strict=True):
            messages.append({"role": "user", "content": text})
            typer.echo(f"{speaker.name}: " if len(self._speakers) > 1 else "", nl=False)
            messages.append({"role": "assistant", "content": self._answer(speaker, messages)})
        self._seed += 1

    def _answer(self, speaker: Speaker, messages: list[dict[str, str]]) -> str:
        """Print one answer as it comes. Returns: its text; what was printed of it where Ctrl-C stops it, if that may."""
        pieces: list[str] = []

        def say(piece: str) -> None:
            pieces.append(piece)
            typer.echo(visible(piece), nl=False)

        try:
            answer = speaker.answer(
                messages, temperature=self.temperature, max_tokens=self._max_tokens, seed=self._seed, say=say
            )
        except KeyboardInterrupt:
            if not self._stops_answers:
                raise
            answer = "".join(pieces)
            typer.echo(" (stopped)", nl=False)
        typer.echo("")
        return answer


def _converse(talk: Talk) -> None:
    if sys.stdin.isatty():
        typer.echo(HELP, err=True)
    for line in _lines():
        word, _, rest = line.partition(" ")
        match word:
            case "":
                continue
            case "/quit":
                return
            case "/new":
                talk.begin()
            case "/system":
                talk.system = rest.strip() or None
                talk.begin()
            case "/temperature":
                _set_temperature(talk, rest.strip())
            case _ if word.startswith("/"):
                typer.echo(f"there is no {word}\n{HELP}", err=True)
            case _:
                try:
                    talk.say(line)
                except ModelError as error:  # the conversation has become too long
                    typer.echo(f"\n{error}", err=True)
                    talk.begin()


def _set_temperature(talk: Talk, text: str) -> None:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= MAX_TEMPERATURE:
        talk.temperature = value
    else:
        typer.echo(f"{text!r} is no temperature, such as 0.7; it stays {talk.temperature:g}", err=True)


def _lines() -> Iterator[str]:
    """Lines of the user, until the end of the input."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _load(path: str, folders: ExitStack) -> Speaker:
    """Load a model; that of a run or checkpoint is exported into a folder that is removed at the end."""
    from posttrain.cli.hub import hub_folder

    folder = path if Path(path).expanduser().exists() else hub_folder(path, "MODEL")
    announce(f"loading {path}")
    folder = as_folder(folder, folders, announce, from_gguf=False)
    from posttrain.models.chat import load_speaker

    return load_speaker(folder, name_of(path))

"""The trainer's command of a launch script, as the arguments that ``posttrain`` takes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.dialects.scripts.base_files import arguments_of
from posttrain.dialects.scripts.commands import run_text, substitute
from posttrain.dialects.scripts.state import HOLE, Call, Leave, Shell, new_shell
from posttrain.dialects.scripts.statements import statement
from posttrain.dialects.scripts.trainers import Trainer, trainer_of
from posttrain.errors import ConfigError, Problem

_NUMBERED = re.compile(r"(.+\.sh)#(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A trainer's command, as ``posttrain`` takes it."""

    arguments: tuple[str, ...]
    dialect: str
    line: int
    notes: tuple[str, ...] = ()


def is_script(word: str) -> bool:
    """True for run.sh, and for run.sh#2, the second trainer that a script calls."""
    return word.endswith(".sh") or _NUMBERED.fullmatch(word) is not None


def read_script(
    word: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    leaves_out: Callable[[str, str], bool] = lambda dialect, key: False,
    takes_names: Callable[[str, str], bool] = lambda dialect, key: False,
    counts_devices: Callable[[str, str], bool] = lambda dialect, key: False,
) -> Launch:
    """Find the trainer's command of a script, with its variables resolved and without running it.

    Args: ``arguments`` stand behind the script: its ``$1`` ... and ``$@``; overrides that the script does not pass on
        are added to the trainer's. ``environment`` holds the exported variables, by default those of this process.
        ``folder`` is the one that the script is started in, by default the current one. ``leaves_out`` tells for a dialect and a
        key whether it does not count, so that its value may stay unknown; ``takes_names`` whether the name of a variable that is
        not set, or of a program whose output is meant, may stand for its value, as in a path that need not exist;
        ``counts_devices`` whether it counts devices, of which there is one, so that an unknown number is 1.

    Raises: ConfigError for a script that cannot be read, calls no trainer or several, or holds parts that cannot be resolved.
    """
    numbered = _NUMBERED.fullmatch(word)
    file, wanted = (Path(numbered[1]), int(numbered[2])) if numbered else (Path(word), 0)
    try:
        text = file.expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(Problem(f"the script {file} cannot be read: {error.strerror}")) from None
    shell = new_shell(file, list(arguments), os.environ if environment is None else environment)
    shell.substitute, shell.follow = substitute, statement
    if folder is not None:
        shell.folder = folder
    try:
        run_text(shell, text)
    except Leave:
        pass
    except RecursionError:
        raise ConfigError(Problem(f"the script {file} is nested too deeply to be read")) from None
    call, trainer = _chosen(shell, file, wanted)
    found, unknown = _launch(shell, call, trainer, arguments, leaves_out, takes_names, counts_devices)
    return Launch(
        arguments=found,
        dialect=trainer.dialect,
        line=call.line,
        notes=(*_lost_lines(call), *unknown),
    )


def trainer_calls(shell: Shell) -> list[tuple[Call, Trainer]]:
    """The commands that start a trainer, in the order of the script."""
    found = []
    for call in shell.calls:
        trainer = next((trainer for word in call.words if (trainer := trainer_of(word))), None)
        if trainer is not None and call.words[0] not in ("echo", "printf", "cat", "ls", "cp", "mkdir", "pkill"):
            found.append((call, trainer))
    return found


def _chosen(shell: Shell, file: Path, wanted: int) -> tuple[Call, Trainer]:
    calls = trainer_calls(shell)
    if not calls and shell.ended:
        fix = "pass what it asks for: posttrain plan SCRIPT.sh VALUE ..."
        raise ConfigError(Problem(f"the script ends before it calls a trainer, at {file}:{shell.ended}", fix=fix))
    if not calls:
        seen = list(dict.fromkeys(f"{' '.join(call.words[:4])[:60]} (line {call.line})" for call in shell.calls))
        read = (
            f"; it calls {', '.join(HOLE.sub('...', word) for word in seen[:6])}" if seen else "; it calls no program"
        )
        more = f" and {len(seen) - 6} more" if len(seen) > 6 else ""
        fix = "it must call verl's, SkyRL's or ROLL's program; of another, give keys: plan --dialect verl KEY=VALUE ..."
        raise ConfigError(Problem(f"no trainer is called in {file}{read}{more}", fix=fix))
    if wanted > len(calls):
        raise ConfigError(Problem(f"{file}#{wanted}: the script calls {len(calls)} trainers"))
    if len(calls) > 1 and not wanted:
        listed = ", ".join(f"{file}#{n} (line {call.line})" for n, (call, _) in enumerate(calls[:12], start=1))
        raise ConfigError(Problem(f"{file} calls {len(calls)} trainers", fix=f"choose one: {listed}"))
    return calls[max(wanted, 1) - 1]


def _launch(
    shell: Shell,
    call: Call,
    trainer: Trainer,
    given: Sequence[str],
    leaves_out: Callable[[str, str], bool],
    takes_names: Callable[[str, str], bool],
    counts_devices: Callable[[str, str], bool],
) -> tuple[tuple[str, ...], list[str]]:
    """The arguments, and notes about those that are not known and do not count."""
    place = next(number for number, word in enumerate(call.words) if trainer_of(word))
    passed = {*call.words, *shell.read_arguments}
    given = [word for word in given if word not in passed]
    written = [word for word in call.words[place + 1 :] if shell.as_tested(word) != ""]
    last = {_key(word): number for number, word in enumerate([*written, *given])}
    words, notes = [], []
    for number, word in enumerate(written):
        key, holes = _key(word), shell.holes_of(word)
        if holes and key and last[key] > number:
            continue  # another value follows
        if holes and key and not HOLE.search(key) and leaves_out(trainer.dialect, key):
            notes.append(f"{key} is left out: no version of {trainer.dialect} has it, and {holes[0].what}")
            continue
        if holes and key and counts_devices(trainer.dialect, key):
            notes.append(f"{key} is 1, for the one device of --here: {holes[0].what}")
            word = f"{word.partition('=')[0]}=1"
        elif holes and key and all(hole.name for hole in holes) and takes_names(trainer.dialect, key):
            word = HOLE.sub(lambda mark: shell.holes[int(mark[1])].name, word)
            notes += [f"{hole.what}; the run needs it, and {hole.name} stands for it" for hole in holes]
        words.append(word)
    problems = list(
        dict.fromkeys(
            Problem(hole.what, fix=hole.fix, where=f"{shell.script}:{call.line} {HOLE.sub('...', word)[:60]}")
            for word in words
            for hole in shell.holes_of(word)
        )
    )
    if problems:
        raise ConfigError(problems)
    words += given
    script = (Path.cwd() / shell.script).resolve()
    arguments = arguments_of(trainer, words, (call.folder, *script.parents), f"{shell.script}:{call.line}")
    for name in arguments:
        line = shell.written.get(shell.path(name)) or shell.written.get(call.folder / name)
        if line:
            what = f"{name} is written by the script itself, and reading a script writes nothing"
            raise ConfigError(Problem(what, where=f"{shell.script}:{line}", fix="write the file before, and name it"))
    return arguments, list(dict.fromkeys(notes))


def _key(word: str) -> str:
    """The key of an override; "" for another word."""
    key, equals, _ = word.partition("=")
    return key.lstrip("+") if equals and not key.startswith("-") else ""


def _lost_lines(call: Call) -> list[str]:
    """Arguments behind the end of the command, which a shell does not pass: a comment or a blank behind a backslash ends it."""
    notes = []
    file, last = call.script, call.last_line
    lines = file.expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    if last > len(lines):
        return []
    following = lines[last] if last < len(lines) else ""
    if re.search(r"\\[ \t]+$", lines[last - 1]):
        notes.append(f"{file}:{last} ends in a backslash and a blank: the shell passes none of the lines after it")
    elif lines[last - 1].endswith("\\") and following.lstrip().startswith("#"):
        notes.append(
            f"{file}:{last + 1} is a comment, which ends the command: the shell passes none of the lines after it"
        )
    return notes

"""The trainer's command of a launch script, as the arguments that ``posttrain`` takes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from posttrain.dialects.scripts.asks import Ask
from posttrain.dialects.scripts.base_files import arguments_of, check_refused
from posttrain.dialects.scripts.commands import run_text, substitute
from posttrain.dialects.scripts.names import NUMBERED, SeveralTrainers
from posttrain.dialects.scripts.own_programs import started_by
from posttrain.dialects.scripts.processes import processes_of, world
from posttrain.dialects.scripts.state import HOLE, Call, Hole, Leave, Shell, new_shell
from posttrain.dialects.scripts.statements import statement
from posttrain.dialects.scripts.trainers import ENTRY_POINTS, Trainer, entry_of
from posttrain.dialects.words import OUR_SECTION
from posttrain.errors import ConfigError, Problem, did_you_mean, nearest

_PLACEHOLDER = re.compile(r"([+\w.@/-]+)=(<[^<>'\"]+>)")  # actor_rollout_ref.model.path=<path_to_model>
_ASKS_MACHINE = re.compile(r"(nvidia|npu|rocm)-smi|device_count|\b(SLURM|PBS|LSB|OMPI)_|CUDA_VISIBLE_DEVICES|\bnproc\b")
_OVERRIDE = re.compile(r"\+{0,2}\w+(\.[\w-]+)+=")


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions about a key of a dialect, as in ``read_script``."""

    leaves_out: Callable[[str, str, bool], str]
    takes_names: Callable[[str, str], bool]
    counts_devices: Callable[[str, str], bool]
    takes_empty: Callable[[str, str], bool]
    devices: int  # that stand for an unknown count


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A trainer's command, as ``posttrain`` takes it."""

    arguments: tuple[str, ...]
    dialect: str
    line: int
    notes: tuple[str, ...] = ()
    asks: tuple[Ask, ...] = ()  # what a run needs confirmed, by its field in posttrain.own_keys
    lost: tuple[Problem, ...] = ()  # arguments that a shell does not pass, from which other problems may follow


def read_script(
    word: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    given: Mapping[str, str] | None = None,
    entry: str = "",
    passes_guards: bool = False,
    leaves_out: Callable[[str, str, bool], str] = lambda dialect, key, empty: "",
    takes_names: Callable[[str, str], bool] = lambda dialect, key: False,
    counts_devices: Callable[[str, str], bool] = lambda dialect, key: False,
    takes_empty: Callable[[str, str], bool] = lambda dialect, key: False,
    devices: int = 1,
) -> Launch:
    """Find the trainer's command of a script, with its variables resolved and without running it.

    Args: ``arguments`` stand behind the script: its ``$1`` ... and ``$@``; overrides that the script does not pass on
        are added to the trainer's. ``environment`` holds the exported variables, by default those of this process.
        ``folder`` is the one that the script is started in, by default the current one. ``given`` holds values of variables,
        and of arguments by their numbers, that the script leaves open. ``entry`` names the command: of several trainers the
        only one that it is for is chosen. ``passes_guards`` reads on behind a condition that ends
        the script before it calls a trainer, such as one on its arguments or on a file. ``leaves_out`` tells for a dialect, a
        key, and whether its value is empty, why it does not count, so that its value may stay unknown; "" where it does.
        ``takes_names`` tells whether the name of a variable that is not set, or of a program whose output is meant, may stand
        for the value of a key, as in a path that need not exist;
        ``counts_devices`` whether it counts devices, so that an unknown number is ``devices``, or 1 of machines; ``takes_empty``
        whether an empty value is read as one, so that a variable which is not set is empty, as in a shell.

    Raises: ConfigError for a script that cannot be read, calls no trainer or several, or holds parts that cannot be resolved.
    """
    numbered = NUMBERED.fullmatch(word)
    file, wanted = (Path(numbered[1]), int(numbered[2])) if numbered else (Path(word), 0)
    try:
        text = file.expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(Problem(f"the script {file} cannot be read: {error.strerror}")) from None
    if "\0" in text:
        raise ConfigError(Problem(f"the script {file} is not a text file in UTF-8", fix="save it in UTF-8"))
    surroundings = os.environ if environment is None else environment
    # Keys of this program are no arguments of the script, whose options they would end.
    handed = [word for word in arguments if not word.lstrip("+").startswith(f"{OUR_SECTION}.")]

    def read(passing: bool) -> Shell:
        shell = new_shell(file, handed, surroundings, given)
        shell.substitute, shell.follow, shell.passes_guards = substitute, statement, passing
        if folder is not None:
            shell.folder = folder
        try:
            run_text(shell, text)
        except Leave:
            pass
        except RecursionError:
            raise ConfigError(Problem(f"the script {file} is nested too deeply to be read")) from None
        return shell

    shell = read(False)
    if shell.ended and not trainer_calls(shell):
        further = read(True)
        if trainer_calls(further):
            if not passes_guards:
                raise ConfigError(_ends_early(shell, further, file))
            shell = further
    _check_given(shell, file, given or {})
    call, place, trainer = _chosen(shell, file, wanted, entry)
    check_refused(trainer, f"{shell.script}:{call.line}")  # before its arguments: none of them would help
    found, unknown = _launch(
        shell, call, place, trainer, arguments, Asked(leaves_out, takes_names, counts_devices, takes_empty, devices)
    )
    lost = _lost_lines(shell, call)
    return Launch(
        arguments=found,
        dialect=trainer.dialect,
        line=call.line,
        lost=tuple(lost),
        asks=tuple(replace(each, where=f"{shell.script}:{call.line}") for each in trainer.asks),
        notes=(
            *map(str, lost),
            *dict.fromkeys(shell.remarks),
            *trainer.notes,
            *map(_guard_note, dict.fromkeys(shell.guards)),
            *unknown,
        ),
    )


def _guard_note(where: str) -> str:
    return f"the script ends at {where} unless its condition there is met, which a run needs; the plan reads on"


def _ends_early(shell: Shell, further: Shell, file: Path) -> Problem:
    """The problem of a script whose conditions are not met, with the values that its trainer's command leaves open."""
    lacks = [hole.fix.partition(",")[0] for hole in further.holes if hole.unset]
    fix = f"posttrain plan {file} {' '.join(dict.fromkeys(lacks))}" if lacks else "meet the condition of that line"
    what = f"the script ends before it calls a trainer, at {shell.ended}"
    return Problem(what, fix=f"{fix}; plan --skip-files reads on behind such conditions")


def _check_given(shell: Shell, file: Path, given: Mapping[str, str]) -> None:
    """Raises: ConfigError for a value of a variable that the script does not read."""
    lacking = [
        Problem(
            f"the script {file} reads no ${name}",
            where=f"--set {name}",
            fix=did_you_mean(name, sorted(each for each in shell.read if not each.startswith("_"))),
        )
        for name in given
        if name not in shell.read and "@" not in shell.read
    ]
    if lacking:
        raise ConfigError(lacking)


def trainer_calls(shell: Shell) -> list[tuple[Call, int, Trainer]]:
    """The commands that start a trainer, in the order of the script, with the place of its word in each."""
    found = []
    for call in shell.calls:
        started = started_by(call.words, _roots(shell, call))
        if started is not None:
            found.append((call, *started))
    return found


def _roots(shell: Shell, call: Call) -> tuple[Path, ...]:
    """Folders that a program of a command may stand below."""
    return (call.folder, *(Path.cwd() / shell.script).resolve().parents)


def _chosen(shell: Shell, file: Path, wanted: int, entry: str) -> tuple[Call, int, Trainer]:
    calls = trainer_calls(shell)
    if not calls and shell.ended:
        fix = "pass what it asks for: posttrain plan SCRIPT.sh VALUE ..."
        raise ConfigError(Problem(f"the script ends before it calls a trainer, at {shell.ended}", fix=fix))
    if not calls and (slip := _misspelt(shell)) is not None:
        raise ConfigError(slip)
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
        of_entry = [found for found in calls if entry and entry_of(found[2].module) == entry]
        if len(of_entry) == 1:
            return of_entry[0]
        listed = ", ".join(
            f"{file}#{n} ({trainer.written.rpartition('.')[2]}, line {call.line})"
            for n, (call, _, trainer) in enumerate(calls[:12], start=1)
        )
        names = tuple(f"{file}#{n}" for n in range(1, len(calls) + 1))
        raise SeveralTrainers(Problem(f"{file} calls {len(calls)} trainers", fix=f"choose one: {listed}"), names)
    return calls[max(wanted, 1) - 1]


def _launch(
    shell: Shell,
    call: Call,
    place: int,
    trainer: Trainer,
    given: Sequence[str],
    asked: Asked,
) -> tuple[tuple[str, ...], list[str]]:
    """The arguments, and notes about those that are not known and do not count."""
    passed = {*call.words, *shell.read_arguments}
    given = [word for word in given if word not in passed]
    _check_read(given, shell)
    written = [word for word in call.words[place + 1 :] if shell.as_tested(word) != ""]
    last = {_key(word): number for number, word in enumerate([*written, *given])}
    words, notes = [], []
    for number, word in enumerate(written):
        key, holes = _key(word), shell.holes_of(word)
        if holes and key and last[key] > number:
            continue  # another value follows
        if holes and key and not HOLE.search(key):
            why = asked.leaves_out(trainer.dialect, key, shell.as_tested(word.partition("=")[2]) == "")
            if why:
                notes.append(f"{key} is left out: {why}, and {holes[0].what}")
                continue
        counted = _devices(key, holes, asked.devices) if asked.counts_devices(trainer.dialect, key) else 0
        if holes and key and counted:
            why = "for the one device of --here" if asked.devices == 1 else "in this plan; the run counts its own"
            notes.append(f"{key} is {counted}, {why}: {holes[0].what}")
            word = f"{word.partition('=')[0]}={counted}"
        elif (
            holes and shell.as_tested(word) == f"{word.partition('=')[0]}=" and asked.takes_empty(trainer.dialect, key)
        ):
            notes += [f"{hole.what}, and is empty in a shell" for hole in holes]
            word = f"{word.partition('=')[0]}="
        elif holes and key and all(hole.name for hole in holes) and asked.takes_names(trainer.dialect, key):
            word = HOLE.sub(lambda mark: shell.hole_of(int(mark[1])).name, word)
            notes += [f"{hole.what}; the run needs it, and {hole.name} stands for it" for hole in holes]
        elif (left_open := _PLACEHOLDER.fullmatch(word)) is not None and asked.takes_names(trainer.dialect, key):
            notes.append(f"{key} is {left_open[2]}, a placeholder: the run needs a value in its place")
            word = f"{left_open[1]}='{left_open[2]}'"
        words.append(word)
    problems = list(
        dict.fromkeys(
            Problem(hole.what, fix=hole.fix, where=f"{shell.script}:{call.line} {HOLE.sub('...', word)[:60]}")
            for word in words
            for hole in shell.holes_of(word)
        )
    )
    if problems:
        raise ConfigError(_at_once(shell, words, problems))
    processes, machines = processes_of(call.words[:place], trainer)
    if asked.devices > 1 and (holes := shell.holes_of(processes)):
        notes.append(f"a machine has {asked.devices} devices in this plan; the run counts its own: {holes[0].what}")
    words += world(processes, machines, unknown=asked.devices if asked.devices > 1 and shell.holes_of(processes) else 0)
    words += given
    arguments = arguments_of(trainer, words, _roots(shell, call), f"{shell.script}:{call.line}")
    for name in arguments:
        line = shell.written.get(shell.path(name)) or shell.written.get(call.folder / name)
        if line:
            what = f"{name} is written by the script itself, and reading a script writes nothing"
            raise ConfigError(Problem(what, where=f"{shell.script}:{line}", fix="write the file before, and name it"))
    return arguments, list(dict.fromkeys(notes))


def _check_read(given: Sequence[str], shell: Shell) -> None:
    """Raises: ConfigError for words behind the script that it does not read, before the first option or override."""
    unread = [*takewhile(lambda word: "=" not in word and not word.startswith(("-", "~", "+")), given)]
    following = given[len(unread) :]
    if not unread or (following and following[0].startswith("=")):
        return  # KEY = VALUE is another mistake
    what = f"{shell.script} does not read its argument{'s' if unread[1:] else ''} {' '.join(unread)}"
    raise ConfigError(Problem(what, fix="leave it out, or write KEY=VALUE"))


def _devices(key: str, holes: Sequence[Hole], devices: int) -> int:
    """The count that stands for an unknown one: with --here 1, else that of a usual machine where the script asks its machine or
    its scheduler for it; 0 where it asks the user."""
    if devices == 1:
        return 1
    if not all(_ASKS_MACHINE.search(hole.what) for hole in holes):
        return 0
    return devices if "gpus" in key or key.endswith("num_engines") else 1


def _at_once(shell: Shell, words: Sequence[str], problems: list[Problem]) -> list[Problem]:
    """The problems; where several values are not given, the last one's fix gives them together."""
    unset = dict.fromkeys(f"--set {hole.unset}=..." for word in words for hole in shell.holes_of(word) if hole.unset)
    if len(unset) < 2:
        return problems
    last = problems[-1]
    return [*problems[:-1], replace(last, fix=f"{last.fix}; all of them: {' '.join(unset)}")]


def _key(word: str) -> str:
    """The key of an override; "" for another word."""
    key, equals, _ = word.partition("=")
    return key.lstrip("+") if equals and not key.startswith("-") else ""


def _misspelt(shell: Shell) -> Problem | None:
    """The problem of a command whose module is one slip away from a trainer's."""
    for call in shell.calls:
        for word in call.words:
            near = nearest(word.removesuffix(".py").replace("/", "."), ENTRY_POINTS) if "main_" in word else None
            if near is not None and "=" not in word:
                where = f"{call.script}:{call.line}"
                return Problem(f"there is no trainer {word}", where=where, fix=f"did you mean {near}?")
    return None


def _lost_lines(shell: Shell, call: Call) -> list[Problem]:
    """Arguments behind the end of the command, which a shell does not pass: a comment, a blank behind a backslash or a lacking
    backslash ends it."""
    file, last = call.script, call.last_line
    lines = file.expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    if last > len(lines):
        return []
    following = lines[last] if last < len(lines) else ""
    if re.search(r"\\[ \t]+$", lines[last - 1]):
        what = "the line ends in a backslash and a blank: the shell passes none of the lines after it"
        return [Problem(what, where=f"{file}:{last}", fix="remove the blank")]
    if lines[last - 1].endswith("\\") and following.lstrip().startswith("#"):
        what = "the line is a comment, which ends the command: the shell passes none of the lines after it"
        return [Problem(what, where=f"{file}:{last + 1}", fix="move the comment above the command")]
    after = next((each for each in shell.calls if each.script == file and each.line == last + 1), None)
    if after is not None and _OVERRIDE.match(after.words[0]):
        what = "the line lacks a backslash at its end: the shell passes none of the lines after it"
        return [Problem(what, where=f"{file}:{last}", fix="end it in a blank and a backslash")]
    return []

"""Plan every configuration and launch script in a checkout of verl, ROLL or SkyRL, and count what is accepted.

    python benchmarks/corpus.py verl-0.4.1/                  # a table of refusals by cause, and the share that is accepted
    python benchmarks/corpus.py verl-0.4.1/ --each           # one line per file, with its first problem
    python benchmarks/corpus.py verl-0.4.1/ --only gemma     # files whose path contains a word, with every problem
    python benchmarks/corpus.py verl-0.4.1/ --run 5          # and two steps of five files, drawn by --seed, on a tiny model

A launch script is run by a restricted shell in which nothing but the shell's own words exists: it writes nothing, starts
nothing and shows the trainer's arguments after all expansions. Data and models are not looked at (``--skip-files``).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import yaml
from two_steps import two_steps

from posttrain.cli.plan import PLANS
from posttrain.cli.request import load_request
from posttrain.cli.verdict import verdict as judged
from posttrain.dialects.scripts.asks import Ask, asked
from posttrain.dialects.scripts.base_files import arguments_of
from posttrain.dialects.scripts.own_programs import started_by
from posttrain.dialects.scripts.processes import processes_of, world
from posttrain.dialects.scripts.trainers import BASE_FILES
from posttrain.errors import RequestError

VERL_FILES = "verl/trainer/config"
LAUNCHERS = ("python", "python3", "torchrun", "uv", "ray", "accelerate", "deepspeed")
# Every launcher becomes a function that prints its arguments; a command that is not there is no error.
PRELUDE = (
    "trap '' PIPE\n"  # `... 2>&1 | tee log`: no tee reads what set -x prints
    "command_not_found_handle() { return 0; }\n"
    "cd() { :; }\nsource() { :; }\nexpr() { printf '%s\\n' \"$(( $* ))\"; }\n"
    "show() { printf '%s\\0' \"$@\" >&FD; printf '\\1\\0' >&FD; }\n"
    + "".join(f'{name}() {{ show {name} "$@"; }}\n' for name in LAUNCHERS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A file, or a script's call of a trainer, as ``posttrain plan`` takes it."""

    name: str
    dialect: str
    arguments: list[str]
    refused: str = ""  # before its keys are read
    asks: tuple[Ask, ...] = ()  # code of the checkout's own that a run needs confirmed by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of ``plan`` to one launch."""

    launch: Launch
    problems: list[str] = field(default_factory=list)  # why it is refused
    planned: list[str] = field(default_factory=list)  # accepted, but these settings do not train here

    @property
    def accepted(self) -> bool:
        return not self.problems

    @property
    def trains(self) -> bool:
        return self.accepted and not self.planned


def launches(folder: Path, dialect: str) -> Iterator[Launch]:
    """Every configuration file and trainer call below a folder."""
    peer = dialect.partition("@")[0]
    if peer == "roll":
        for file in sorted(folder.rglob("*.y*ml")):
            if _is_roll(file):
                yield Launch(name=str(file.relative_to(folder)), dialect="roll", arguments=[str(file)])
        return
    if peer == "verl":
        for name in sorted({*BASE_FILES.values(), "ppo_megatron_trainer"}):
            file = folder / VERL_FILES / f"{name}.yaml"
            if file.exists():
                yield Launch(name=f"{VERL_FILES}/{name}.yaml", dialect=dialect, arguments=[str(file)])
    for script in sorted(folder.rglob("*.sh")):
        for number, words in enumerate(trainer_calls(script, folder)):
            launch = _launch(words, script, folder, dialect)
            if launch is not None:
                name = f"{script.relative_to(folder)}{f' ({number + 1})' if number else ''}"
                yield replace(launch, name=name)


def dialect_of(folder: Path) -> str:
    """The dialect of a checkout, with its version where its own file says it."""
    version = folder / "verl/version/version"
    if version.exists():
        text = version.read_text()
        number = ".".join(text.split(".")[:2])
        # Between two releases the keys decide
        return f"verl@{number}" if number in ("0.1", "0.2") and "dev" not in text else "verl"
    return "skyrl" if any(folder.glob("skyrl*")) else "roll"


def _is_roll(file: Path) -> bool:
    try:
        keys = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return False
    return isinstance(keys, dict) and "exp_name" in keys


def trainer_calls(script: Path, folder: Path) -> list[list[str]]:
    """The words of every launcher that a script calls, expanded by the shell."""
    text = script.read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"^\s*(set -\w*e\w*.*|exit\b.*)$", ":", text, flags=re.M)  # a missing command must not end it
    text = re.sub(r"(?<![&>|])&[ \t]*$", "", text, flags=re.M)  # two launchers at a time would mix their arguments
    read, write = os.pipe()
    with os.fdopen(read, "rb") as shown:
        process = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc", "-r", "-c", PRELUDE.replace("FD", str(write)) + text],
            cwd=folder,
            env={"HOME": "/home/user", "PATH": "/nowhere", "LANG": "C.UTF-8", "USER": "user"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(write,),
            start_new_session=True,
        )
        # A script that waits for a server waits for ever, in shells of its own, too
        stop = threading.Timer(20, os.killpg, (process.pid, signal.SIGKILL))
        stop.start()
        os.close(write)
        printed = shown.read().decode("utf-8", errors="replace")
        process.wait()
        stop.cancel()
    return [call.split("\0")[:-1] for call in printed.split("\1\0") if call]


def _launch(words: Sequence[str], script: Path, folder: Path, dialect: str) -> Launch | None:
    """The request in a launcher's words; None where it starts something else."""
    started = started_by(words, (folder, *script.parents))
    if started is None or started[1].dialect == "roll":
        return None
    place, trainer = started
    peer = trainer.dialect
    dialect = dialect if dialect.partition("@")[0] == peer else peer
    folder = next((above for above in script.parents if (above / VERL_FILES).is_dir()), folder)
    rest = [word for word in words[place + 1 :] if word]
    rest += world(*processes_of(words[:place], trainer), unknown=0)
    try:
        arguments = arguments_of(trainer, rest, (folder, *script.parents))
    except RequestError as error:
        return Launch(name="", dialect=dialect, arguments=[], refused=str(error.problems[0]))
    file = folder / VERL_FILES / f"{arguments[0] if arguments else ''}.yaml"
    return Launch(
        name="",
        dialect=dialect,
        arguments=[str(file), *arguments[1:]] if file.is_file() else [*arguments],
        asks=trainer.asks,
    )


def judge(launch: Launch, *, here: bool, drop_unknown: bool = False) -> Verdict:
    """The verdict of ``posttrain plan --skip-files`` on one launch."""
    if launch.refused:
        return Verdict(launch=launch, problems=[launch.refused])
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            loaded = load_request(
                launch.arguments, launch.dialect, here=here, drop_unknown=drop_unknown, skip_files=True
            )
            module = import_module(PLANS[loaded.entry])
            module.plan_text(module.check_request(loaded, look_at_files=False))
    except RequestError as error:
        return Verdict(launch=launch, problems=[str(problem) for problem in error.problems])
    lacking = judged(loaded).lacking  # a library that is not installed on this machine is no reason
    open_questions = asked(launch.asks, loaded.words.value)[0] if loaded.words is not None else []
    return Verdict(launch=launch, planned=[str(problem) for problem in (*open_questions, *lacking)])


def cause(problem: str) -> str:
    """A problem without the words that differ from file to file."""
    text = re.sub(r", at [^;]*|\(known: [^)]*\)|; .*$", "", problem.replace("\n", " "))
    return re.sub(r"\s+", " ", re.sub(r"/\S+/", "", text)).strip()[:110]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="checkout of a peer's repository, or a part of it")
    parser.add_argument(
        "--dialect", help="verl, verl@0.2, skyrl, roll ...; found by the folder's content when not given"
    )
    parser.add_argument("--only", default="", help="files whose path contains this word, with every problem")
    parser.add_argument("--each", action="store_true", help="a line for every file, with its first problem")
    parser.add_argument("--here", action="store_true", help="plan for the one device at hand")
    parser.add_argument("--run", type=int, default=0, help="make two steps of so many files that train, with --here")
    parser.add_argument("--seed", type=int, default=0, help="which files --run draws")
    parser.add_argument("--drop-unknown", action="store_true", help="leave out keys of the launches' own")
    chosen = parser.parse_args()
    chosen.here = chosen.here or chosen.run > 0
    folder = chosen.folder.resolve()
    dialect = chosen.dialect or dialect_of(folder)
    os.chdir(folder)  # where people launch: a fork's own estimators and reward managers are found from there
    verdicts = [
        judge(launch, here=chosen.here, drop_unknown=chosen.drop_unknown)
        for launch in launches(folder, dialect)
        if chosen.only in launch.name
    ]
    for verdict in verdicts:
        if chosen.each or chosen.only:
            state = "trains" if verdict.trains else "accepted" if verdict.accepted else "refused"
            why = [] if chosen.only else [*verdict.problems, *verdict.planned][:1]
            print(f"{state:9} {verdict.launch.name}{''.join(f': {text}' for text in why)}")
        if chosen.only:
            for text in [*verdict.problems, *verdict.planned]:
                print(f"          {text}")
    for title, counts in (
        ("refused because", Counter(cause(text) for one in verdicts for text in one.problems)),
        ("does not train because", Counter(cause(text) for one in verdicts for text in one.planned)),
    ):
        if counts and not chosen.only:
            print(f"\n{title}")
            for text, count in counts.most_common(60):
                print(f"{count:5}  {text}")
    total = len(verdicts) or 1
    accepted, trains = sum(one.accepted for one in verdicts), sum(one.trains for one in verdicts)
    print(
        f"\n{len(verdicts)} launches: {accepted} accepted ({accepted / total:.0%}), {trains} train ({trains / total:.0%})"
    )
    if chosen.run:
        make_steps(
            [verdict.launch for verdict in verdicts if verdict.trains], chosen.run, chosen.seed, chosen.drop_unknown
        )


def make_steps(candidates: Sequence[Launch], count: int, seed: int, drop_unknown: bool) -> None:
    """Make two steps of some launches, drawn at random, and print what became of each."""
    from posttrain.models.tiny import write_tiny_model

    drawn = random.Random(seed).sample(candidates, len(candidates))
    made = tried = 0
    with tempfile.TemporaryDirectory() as place:
        model = write_tiny_model(Path(place) / "model")
        for number, launch in enumerate(drawn):
            if tried == count:
                break
            loaded = load_request(
                launch.arguments, launch.dialect, here=True, drop_unknown=drop_unknown, skip_files=True
            )
            said = two_steps(loaded, Path(place) / str(number), model)
            if said.startswith("not tried"):
                continue
            tried += 1
            made += not said
            print(f"{'two steps' if not said else 'failed':9} {launch.name}{': ' if said else ''}{said}")
    print(f"\n{made} of {tried} made two steps")


if __name__ == "__main__":
    sys.exit(main())

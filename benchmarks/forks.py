"""Plan every launch of its own that a checkout built on verl, SkyRL or ROLL has, for a folder of such checkouts.

    python benchmarks/forks.py checkouts/                             # counts by checkout; the refused ones with their causes
    python benchmarks/forks.py checkouts/ --not-in verl.git --each    # without scripts of verl's history; a line per launch
    python benchmarks/forks.py checkouts/ --only SDAR --arithmetic    # one checkout, its numbers beside a second reckoning

A launch is tried as ``posttrain plan --here --skip-files`` takes it: as it is, then with the words that its own messages ask to
have confirmed (``posttrain.own_keys``), then with ``--drop-unknown`` besides. It is accepted where the plan ends with "trains". A
script that calls several trainers counts once for each, up to MOST. One that names no trainer, or calls none, is not counted;
``--each`` lists the latter.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from launch_arithmetic import differences

from posttrain.cli.plan import PLANS
from posttrain.cli.request import load_request
from posttrain.cli.verdict import verdict as judged
from posttrain.dialects.scripts.names import SeveralTrainers
from posttrain.errors import RequestError

MOST, LIMIT_S = 4, 120
AS_IS, CONFIRMED, DROPPED, REFUSED, NO_LAUNCH = "as it is", "a word confirmed", "--drop-unknown", "refused", "no launch"
FAULTS = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
_TRAINER = re.compile(r"main_\w+|sft_trainer|start_\w+_pipeline|adv_estimator|train_batch_size|-m (verl|skyrl|recipe)")
_CALLS_NONE = re.compile(r"no trainer is called|cannot be read|is not a text file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one launch."""

    checkout: str
    launch: str
    way: str  # one of the five words above
    problems: tuple[str, ...] = ()  # why it is refused
    confirmed: tuple[str, ...] = ()  # posttrain.own_keys
    wrong: tuple[str, ...] | None = None  # numbers that a second reckoning has otherwise; None: not reckoned


def peers_own(repositories: list[Path]) -> tuple[set[str], set[str]]:
    """Return the blobs of some peers' history, and their paths as ``folder/name``."""
    blobs, paths = set(), set()
    for each in repositories:
        command = ["git", "-C", str(each), "log", "--all", "--raw", "--no-abbrev", "-m", "--no-renames", "--format="]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            facts, _, path = line.partition("\t")
            if path.endswith((".sh", ".yaml", ".yml")):
                blobs.add(facts.split()[3])
                paths.add("/".join(Path(path).parts[-2:]))
    return blobs, paths


def own_scripts(checkout: Path, blobs: set[str], paths: set[str]) -> list[Path]:
    """The launch scripts, and ROLL's files, of a checkout that are not a peer's own, as they are or changed in place."""
    found = [
        file
        for file in sorted([*checkout.rglob("*.sh"), *checkout.rglob("*.y*ml")])
        if file.is_file() and "/".join(file.parts[-2:]) not in paths and _starts_training(file)
    ]
    names = "\n".join(map(str, found))
    command = ["git", "hash-object", "--no-filters", "--stdin-paths"]
    hashes = subprocess.run(command, input=names, capture_output=True, text=True, check=True).stdout.split()
    return [file for file, blob in zip(found, hashes, strict=True) if blob not in blobs]


def _starts_training(file: Path) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace")
    return bool(_TRAINER.search(text)) if file.suffix == ".sh" else bool(re.search(r"^exp_name:", text, re.M))


def home_of(script: Path, checkout: Path) -> Path:
    """The folder that a script is launched from: the nearest above it that holds a peer's code, else the checkout."""
    above = [each for each in script.parents if each == checkout or checkout in each.parents]
    return next(
        (each for each in above if (each / "verl/trainer").is_dir() or (each / "roll/pipeline").is_dir()), checkout
    )


def _expired(*_: object) -> None:
    raise TimeoutError(f"not planned within {LIMIT_S} s")


def tried(arguments: list[str], *, drop_unknown: bool) -> list[str]:
    """Plan one launch. Returns: its problems. Raises: SeveralTrainers for a script without a number that calls several."""
    signal.alarm(LIMIT_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            loaded = load_request(arguments, None, here=True, drop_unknown=drop_unknown, skip_files=True)
            module = import_module(PLANS[loaded.entry])
            module.plan_text(module.check_request(loaded, look_at_files=False))
    except SeveralTrainers:
        raise
    except RequestError as error:
        return [str(problem) for problem in error.problems]
    except FAULTS:  # a fault of this program counts as a refusal and is shown
        return [f"fault: {traceback.format_exc()[-900:]}"]
    finally:
        signal.alarm(0)
    return [str(problem) for problem in judged(loaded).lacking]


def answers(script: Path, checkout: Path, *, arithmetic: bool) -> Iterator[Answer]:
    """Try the launches of a script."""
    signal.signal(signal.SIGALRM, _expired)
    os.chdir(home_of(script, checkout))
    try:
        found = {str(script): tried([str(script)], drop_unknown=False)}
    except SeveralTrainers as several:
        found = {word: tried([word], drop_unknown=False) for word in several.names[:MOST]}
    for word, problems in found.items():
        yield _answer(word, problems, checkout, arithmetic=arithmetic)


def _answer(word: str, problems: list[str], checkout: Path, *, arithmetic: bool) -> Answer:
    """Answer for a launch that has these problems as it is."""
    own: list[str] = []
    way = NO_LAUNCH if problems and _CALLS_NONE.search(problems[0]) else AS_IS
    for drop in (False, True) if problems and way != NO_LAUNCH else ():
        way, own, problems = _with_words(word, problems if not drop else tried([word], drop_unknown=True), drop=drop)
        if not problems:
            break
    said = REFUSED if problems and way != NO_LAUNCH else way
    wrong = None
    if arithmetic and said not in (REFUSED, NO_LAUNCH):
        with contextlib.suppress(RequestError):  # on its own devices, which --here leaves out
            wrong = tuple(differences([word, *_confirming(own)]))
    return Answer(
        checkout=checkout.name,
        launch=word.removeprefix(f"{checkout}/"),
        way=said,
        problems=tuple(problems),
        confirmed=tuple(own),
        wrong=wrong,
    )


def _confirming(own: list[str]) -> list[str]:
    return [f"+posttrain.own_keys=[{','.join(own)}]"] if own else []


def _with_words(word: str, problems: list[str], *, drop: bool) -> tuple[str, list[str], list[str]]:
    """Try a launch with every word that its messages ask to have confirmed. Returns: the way, the words, the problems."""
    own: list[str] = []
    while problems:
        texts = re.findall(r"posttrain\.own_keys=\[([^\]]*)\]", " ".join(problems))
        new = [each.strip() for text in texts for each in text.split(",") if each.strip() not in own]
        if not new:
            break
        own += dict.fromkeys(new)
        problems = tried([word, *_confirming(own)], drop_unknown=drop)
    return (DROPPED if drop else CONFIRMED), own, problems


def _of_checkout(checkout: Path, scripts: list[Path], *, arithmetic: bool) -> list[Answer]:
    return [each for script in scripts for each in answers(script, checkout, arithmetic=arithmetic)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of checkouts")
    parser.add_argument(
        "--not-in", type=Path, nargs="*", default=[], help="git repositories whose files are not a fork's own"
    )
    parser.add_argument("--only", default="", help="checkouts whose name contains this word")
    parser.add_argument("--each", action="store_true", help="a line for every launch")
    parser.add_argument(
        "--arithmetic", action="store_true", help="compare the numbers of accepted launches with a second reckoning"
    )
    parser.add_argument("--jobs", type=int, default=1, help="checkouts at a time")
    chosen = parser.parse_args()
    blobs, paths = peers_own(chosen.not_in)
    folders = [each for each in sorted(chosen.folder.resolve().iterdir()) if each.is_dir() and chosen.only in each.name]
    scripts = [own_scripts(folder, blobs, paths) for folder in folders]
    total: Counter[str] = Counter()
    # A process for each checkout: what is cached of one fork's code does not answer for another's
    with ProcessPoolExecutor(chosen.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        for folder, found in zip(
            folders, pool.map(partial(_of_checkout, arithmetic=chosen.arithmetic), folders, scripts), strict=True
        ):
            counts = Counter(each.way for each in found)
            total += counts + Counter(
                f"arithmetic {'wrong' if each.wrong else 'right'}" for each in found if each.wrong is not None
            )
            print(f"{folder.name}: {_text(counts)}", flush=True)
            for each in found:
                _print(each, every=chosen.each)
    launches = sum(total[way] for way in (AS_IS, CONFIRMED, DROPPED, REFUSED)) or 1
    accepted = launches - total[REFUSED]
    print(f"\n{launches} launches: {accepted} accepted ({accepted / launches:.0%}); {_text(total)}")


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {way}" for way, count in sorted(counts.items()))


def _print(answer: Answer, *, every: bool) -> None:
    words = f" [{', '.join(answer.confirmed)}]" if answer.confirmed else ""
    if every or answer.way == REFUSED:
        print(f"    {answer.way:16} {answer.launch}{words}")
    for text in answer.problems if answer.way == REFUSED else ():
        print(f"        {text}")
    for text in answer.wrong or ():
        print(f"    {answer.launch}: {text}")


if __name__ == "__main__":
    main()

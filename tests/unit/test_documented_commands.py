"""Every posttrain command that the documents and examples print exists, takes its options, and plans or reads its keys."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from posttrain.cli.app import app
from posttrain.dialects.detect import read_config
from posttrain.dialects.entries import ENTRIES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [path for kind in ("*.md", "*.yaml", "*.sh") for path in sorted((ROOT / "examples").rglob(kind))]
# A command on a line of its own: in a fenced or an indented block, or in the comment at the head of an example.
LINE = re.compile(r"^(?:#?\s+|#\s*)?(?:\$ )?((?:OMP_NUM_THREADS=\d+ )?posttrain [a-z].*)$", re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```|^(?: {4}.*\n?)+", re.DOTALL | re.MULTILINE)
USAGE_ERROR = typer.BadParameter.__mro__[1]
CONFIGURED = ("train", "plan", "sft", "generate", "evaluate", "serve", "translate")
# What a native configuration needs besides the keys that a page shows.
LEAST = {
    "train": ["model.path=m", "data.train_files=[a.parquet]"],
    "sft": ["model.path=m", "data.train_files=[a.parquet]"],
    "generate": ["model.path=m", "data.files=[a.parquet]", "output.file=o.parquet"],
    "evaluate": ["data.files=[a.parquet]", "output.folder=o"],
    "serve": ["model.path=m"],
}


def commands(page: Path) -> list[str]:
    """The posttrain commands that a page shows, without comments; a backslash continues a line."""
    text = page.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text) if page.suffix == ".md" else [text]
    found = []
    for block in blocks:
        joined = re.sub(r"\\\n#?\s*", " ", block)
        found += [re.split(r"\s{2,}#|\s#\s", line.strip())[0].strip() for line in LINE.findall(joined)]
    return [line for line in found if "$" not in line and "|| " not in line]


def words_of(line: str) -> list[str]:
    """The arguments behind ``posttrain``, with one choice for ``a|b|c`` and without what is optional or left out."""
    line = re.sub(r"\s(?:>|2>|\||&&|;)\s.*$", "", line)
    line = re.sub(r"\[[^\]=]*(?:=[^\]]*…)?[^\]=]*\](?=\s|$)", " ", line) if "…" in line or "[-" in line else line
    words = [word for word in shlex.split(line) if word != "…" and not word.startswith("OMP_")]
    return [word.split("|")[0] if re.fullmatch(r"[\w-]+(\|[\w-]+)+", word) else word for word in words[1:]]


CASES = [pytest.param(line, id=f"{page.relative_to(ROOT)}: {line[:70]}") for page in PAGES for line in commands(page)]


def test_commands_are_found() -> None:
    assert len(CASES) > 60
    assert words_of("posttrain data gsm8k OUT --form rl|sft [key=value …]") == ["data", "gsm8k", "OUT", "--form", "rl"]
    assert words_of("posttrain data check FILE [--for rl|sft]") == ["data", "check", "FILE"]


@pytest.mark.parametrize("line", CASES)
def test_a_documented_command_is_one(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(line)
    command: Any = typer.main.get_command(app)
    name = ""
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    parsed = command.make_context(name, words)
    if name in CONFIGURED:
        check_configuration(name, list(parsed.params.get("arguments") or []), parsed.params)


def check_configuration(command: str, arguments: list[str], options: dict[str, object]) -> None:
    """The file is read with its overrides; in the place of a file that a page makes up stands what a native one must have."""
    path = next((word for word in arguments if "=" not in word), None)
    overrides = [word for word in arguments if word != path]
    dialect = options.get("dialect")
    if path == "sft_trainer.yaml":
        dialect = "verl"
    if path is not None and not (ROOT / path).is_file():
        path = None
        if not overrides:
            return
    entry = ENTRIES.get(command)
    if path is None and dialect in (None, "native"):
        overrides = [*LEAST[command if command in LEAST else "train"], *overrides]
        entry, dialect = entry or ENTRIES["train"], "native"
    loaded = read_config(path, overrides, dialect, entry=entry, here=bool(options.get("here")))
    assert [str(problem) for problem in loaded.problems] == []


@pytest.mark.parametrize(
    "stale",
    [
        "posttrain plan examples/grpo_chain_sum.yaml policy.optimizer.learning=1",
        "posttrain train run.yaml placement.gpus=2",
        "posttrain data check FILE --columns x",
        "posttrain demonstrate",
        "posttrain plan examples/verl_ppo.yaml actor_rollout_ref.actor.lr=1",
    ],
)
def test_a_stale_command_is_noticed(stale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, USAGE_ERROR)):
        test_a_documented_command_is_one(stale, monkeypatch)

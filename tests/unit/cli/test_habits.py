"""Completion, init, doctor --fix, exit codes, coloured differences and the page of environment variables."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from posttrain import registry
from posttrain.cli.app import app
from posttrain.cli.exit_codes import CODES, MEANINGS, OWN, meanings_of
from posttrain.cli.init import Answers, methods, written
from posttrain.cli.report import difference_lines
from posttrain.cli.start import RESUMABLE
from posttrain.dialects.entries import ENTRIES
from posttrain.dialects.native.loader import load
from posttrain.errors import ModelError, Problem, RequestError
from posttrain.libraries import hub
from posttrain.libraries.hub_names import HubName

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("method", methods())
def test_init_writes_a_file_without_problems(tmp_path: Path, method: str, lora: bool) -> None:
    file = tmp_path / "run.yaml"
    words = ["init", str(file), "--method", method, "--model", "org/it's", "--data", "my data.parquet", "--steps", "7"]
    words += ["--validation", "held.parquet", "--lora" if lora else "--full"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    text = file.read_text()
    entry = ENTRIES[Answers(method=method, model="", data="").entry]
    schema = entry.schema_file
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={schema}" and (ROOT / "docs" / schema).exists()
    assert text.count("#") > 8 and yaml.safe_load(text)["data"]["train_files"] == ["my data.parquet"]
    planned = CliRunner().invoke(app, ["plan", "--skip-files", str(file)])
    assert planned.exit_code == 0, planned.output
    assert f"posttrain {entry.name}" in done.output
    config = load(str(file), [], entry).config
    assert config.model.path == "org/it's" and config.run.total_steps == 7 and (config.policy.lora is not None) == lora


def test_init_asks_for_nothing_without_a_terminal_and_names_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    done = CliRunner().invoke(app, ["init", str(file)])
    assert isinstance(done.exception, RequestError) and not file.exists()
    assert [problem.what for problem in done.exception.problems] == ["no model is given", "no data is given"]
    done = CliRunner().invoke(app, ["init", str(file), "--method", "grop"])
    assert "did you mean grpo?" in str(done.exception)
    done = CliRunner().invoke(app, ["init", str(file), "--model", "m", "--data", "d.jsonl", "--reward", "exactmatch"])
    assert "did you mean exact_match?" in str(done.exception) and not file.exists()
    file.write_text("")
    assert "exists" in str(CliRunner().invoke(app, ["init", str(file), "--model", "m", "--data", "d"]).exception)


def typed(monkeypatch: pytest.MonkeyPatch, file: Path, *answers: str) -> str:
    """Answer the questions of init as at a terminal. Returns: what stands there."""
    monkeypatch.setattr("posttrain.cli.init.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    done = CliRunner().invoke(app, ["init", str(file)], input="".join(f"{answer}\n" for answer in answers))
    assert done.exit_code == 0, done.output
    return done.output


def test_init_asks_again_after_a_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    wrong_then_right = [
        "grop",
        "dapo",
        "org/name",
        "d.jsonl",
        "",
        "exactmatch",
        "math",
        "0",
        "-5",
        "12",
        "perhaps",
        "yes",
    ]
    said = typed(monkeypatch, file, *wrong_then_right)
    assert all(part in said for part in ("did you mean grpo?", "did you mean exact_match?", "neither yes nor no"))
    assert said.count("is no number of steps") == 2
    config = load(str(file), [], ENTRIES["train"]).config
    assert config.run.total_steps == 12 and config.policy.lora is not None and config.reward.terms[0].name == "math"
    assert not config.data.validation_files


def test_init_has_an_answer_to_all_but_model_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = typed(monkeypatch, tmp_path / "a.yaml", "", "m", "d.jsonl", "", "", "", "")
    assert said.count(": ") >= 7
    config = load(str(tmp_path / "a.yaml"), [], ENTRIES["train"]).config
    assert config.run.total_steps == 100 and config.policy.lora is None and config.advantage.name == "grpo"
    typed(monkeypatch, tmp_path / "b.yaml", "sft", "m", "d.jsonl", "held.jsonl", "", "n")  # no reward is asked for
    tuned = load(str(tmp_path / "b.yaml"), [], ENTRIES["sft"]).config
    assert tuned.data.validation_files == ["held.jsonl"]


def test_init_takes_a_reward_of_the_users() -> None:
    terms = yaml.safe_load(written(Answers(method="grpo", model="m", data="d", reward="my.py")))["reward"]["terms"]
    assert terms == [{"name": "score", "path": "my.py"}]
    terms = yaml.safe_load(written(Answers(method="ppo", model="m", data="d", reward="a/my.py:f")))["reward"]["terms"]
    assert terms == [{"name": "f", "path": "a/my.py"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", " "], "no model is given; add --model"),
        (["--model", "\ud800"], r"^model\.path holds half a character, [^;]*; write"),
        (["--data", "${x}"], r"refers to x, which is not written anywhere;"),
        (["--method", "dop"], r"did you mean dpo\?"),
        (["--method", "reinforce"], r"\(known: grpo, dapo, [a-z_, ]*\)$"),
        (["--reward", "my.py:not a name"], "no reward called"),
    ],
)
def test_init_refuses_a_wrong_option_without_a_place_in_a_file_that_is_not_there(
    tmp_path: Path, options: list[str], message: str
) -> None:
    words = ["init", str(tmp_path / "run.yaml"), "--model", "m", "--data", "d.jsonl", *options]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, RequestError) and re.search(message, str(error)) and "/tmp" not in str(error)
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize("place", ["", "no/run.yaml", "/proc/run.yaml"])
def test_init_names_a_place_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "no").write_text("a file")
    words = ["init", os.path.join(tmp_path, place), "--model", "m", "--data", "d.jsonl", "--overwrite"]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, RequestError) and re.search("is a folder; name a file|cannot be written", str(error))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", str(10**20)], "total_steps must be at most 10000000"),
        (["--method", "dpo", "--reward", "exact_match"], "method dpo learns from its file, without a reward"),
        (["--method", "sft", "--reward", "my.py"], "leave out --reward"),
    ],
)
def test_init_refuses_an_option_that_no_run_could_follow(tmp_path: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["init", str(tmp_path / "run.yaml"), "--model", "m", "--data", "d", *words])
    assert isinstance(done.exception, RequestError) and message in str(done.exception)
    assert not (tmp_path / "run.yaml").exists()


def test_init_prints_the_file() -> None:
    done = CliRunner().invoke(app, ["init", "-", "--method", " DPO", "--model", "m", "--data", "d.jsonl"])
    assert done.exit_code == 0 and yaml.safe_load(done.output)["method"] == {"name": "dpo"}
    assert not Path("-").exists()


# What the script that typer installs for a shell sets when Tab is pressed.
SHELLS = {
    "bash": {"COMP_WORDS": "posttrain pl", "COMP_CWORD": "1"},
    "zsh": {"_TYPER_COMPLETE_ARGS": "posttrain pl"},
    "fish": {"_TYPER_COMPLETE_ARGS": "posttrain pl", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands(shell: str) -> None:
    environment = os.environ | SHELLS[shell] | {"_POSTTRAIN_COMPLETE": f"complete_{shell}"}
    script = "import sys; sys.argv = ['posttrain']; from posttrain.cli.app import app; app(prog_name='posttrain')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    offered = [name for name in CODES if re.search(rf"(?<![\w-]){name}(?![\w-])", done.stdout)]
    assert sorted(offered) == ["plan", "play"], done.stdout + done.stderr
    page = (ROOT / "docs/environment-variables.md").read_text()
    assert shell in page.partition("## Completion")[2]


FIRST_TAB = r"""
zmodload zsh/zpty
zpty shell zsh -d -i
zpty -w shell "PS1='<'ready'> '"
for try in {1..200}; do
    if zpty -r -t shell part; then heard+=$part; else sleep 0.1; fi
    if [[ $heard == *"<ready>"* ]]; then break; fi
done
zpty -w -n shell $'posttrain pla\t'
for try in {1..200}; do
    if zpty -r -t shell part; then said+=$part; else sleep 0.1; fi
    if [[ $said == *Explain* ]]; then break; fi
done
zpty -d shell
print -r -- $said
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
def test_the_first_tab_completes_in_zsh(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    home = {"HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "PATH": path, "TERM": "xterm"}
    install = ["posttrain", "--install-completion", "zsh"]
    told = home | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    subprocess.run(install, env=os.environ | told, check=True, capture_output=True)
    script = tmp_path / "tab.zsh"
    script.write_text(FIRST_TAB)
    done = subprocess.run(
        ["zsh", "-f", str(script)], env=os.environ | home, capture_output=True, text=True, timeout=120
    )
    assert "Explain a run" in done.stdout, done


def commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    for name, command in group.commands.items():
        yield (*names, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*names, name))


COMMANDS = list(commands(typer.main.get_command(app)))


def codes_in(words: Sequence[str]) -> dict[int, str]:
    """The codes at the end of the help of a command."""
    text = " ".join(CliRunner().invoke(app, [*words, "--help"]).output.split()).partition("Exit codes: ")[2]
    return {int(code): meaning for code, meaning in re.findall(r"(\d+) (\D+?)(?:; (?=\d)|\.$)", text)}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_lists_its_exit_codes(words: tuple[str, ...]) -> None:
    assert codes_in(words) == meanings_of(words[0])
    assert {0, 1, 2, 130} <= meanings_of(words[0]).keys()


def test_the_table_of_exit_codes_is_that_of_the_commands() -> None:
    assert codes_in([]) == MEANINGS
    assert set(CODES) == {words[0] for words in COMMANDS}
    assert {name for name, codes in CODES.items() if 75 in codes} == set(RESUMABLE)
    page = (ROOT / "docs/debugging.md").read_text().partition("## Exit codes")[2]
    assert dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)) == {str(c): m for c, m in MEANINGS.items()}
    assert all(f"`{name}`" in page for name in OWN)


def test_init_makes_the_folder_and_says_what_is_still_to_be_written(tmp_path: Path) -> None:
    words = ["init", str(tmp_path / "new/run.yaml"), "--model", "m", "--data", "d", "--reward", str(tmp_path / "r.py")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and (tmp_path / "new/run.yaml").is_file()
    assert "r.py, which is not there yet" in done.output
    (tmp_path / "r.py").write_text("def score(solution_str):\n    return 0.0\n")
    assert "not there yet" not in CliRunner().invoke(app, [*words, "--overwrite"]).output


def test_doctor_asks_the_hub_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def away(wanted: HubName, field: str, commit: str = "", *, weights: bool = True) -> hub.Fetched:
        asked.append(weights)
        raise ModelError(Problem(f"{wanted.name} cannot be fetched", field=field))

    monkeypatch.setattr(hub, "fetch_model", away)
    for name in ("org/model", "gpt2"):
        done = CliRunner().invoke(app, ["doctor", "--model", name])
        assert isinstance(done.exception, ModelError) and f"{name} cannot be fetched" in str(done.exception)
    assert asked == [
        False,
        False,
    ]  # without its weights, and transformers, which tries for half a minute, was not asked


def test_doctor_prints_one_line_that_installs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda name: name not in ("bm25s", "vllm", "peft"))
    done = CliRunner().invoke(app, ["doctor", "--fix"])
    assert "pip install 'posttrain[lora,search]'" in done.output.splitlines()


def test_doctor_where_a_whole_family_of_packages_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `pip install posttrain` alone: no package is called google, so none of its parts can be looked for."""
    find_spec = importlib.util.find_spec

    def without_google(name: str, *given: object) -> object:
        if name.startswith("google."):
            raise ModuleNotFoundError("No module named 'google'", name="google")
        return find_spec(name)

    monkeypatch.setattr(registry, "find_spec", without_google)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.exception
    assert "google.protobuf not installed: pip install 'posttrain[tinker]'" in done.output
    done = CliRunner().invoke(app, ["doctor", "--fix"])
    assert done.exit_code == 0 and re.search(r"posttrain\[[^ ]*tinker", done.output)


def test_differences_of_runs_in_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, rate in (("a", 0.25), ("b", 0.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps({"run": {"seed": 1}, "policy": {"lr": rate}}))
        (tmp_path / name / "run.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    first, line = difference_lines([tmp_path / "a", tmp_path / "b"])
    assert first == "1 settings differ:"
    assert line == "  policy.lr: \x1b[31m0.25\x1b[0m -> \x1b[32m0.5\x1b[0m"
    assert difference_lines([tmp_path / "a"]) == []
    monkeypatch.setenv("NO_COLOR", "1")
    assert difference_lines([tmp_path / "a", tmp_path / "b"])[1] == "  policy.lr: 0.25 -> 0.5"


def test_every_variable_that_is_read_is_on_the_page() -> None:
    page = (ROOT / "docs/environment-variables.md").read_text()
    read = re.compile(r'environ(?:ment)?(?:\.get\(|\.setdefault\(|\[)"([A-Z][A-Z0-9_]+)"')
    found = {name for file in SOURCES for name in read.findall(file.read_text(encoding="utf-8"))}
    found |= {
        name for file in SOURCES for name in re.findall(r'"(POSTTRAIN_[A-Z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert len(found) > 12
    # The system's own, and the mark of worker processes, which is nobody's to set
    assert {name for name in found if f"`{name}`" not in page} <= {"PATH", "PYTHONPATH", "POSTTRAIN_WORKER"}

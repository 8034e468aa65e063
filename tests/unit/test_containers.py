"""The Dockerfiles and the conda environment agree with the package; nothing here builds them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
DOCKERFILES = [FOLDER / "Dockerfile.cpu", FOLDER / "Dockerfile.cuda"]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
each = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=file.open("r+b"))
    return [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]


def extras_of(text: str) -> set[str]:
    return {name for group in re.findall(r"(?:\$1|\.\.)\[([\w,-]+)\]", text) for name in group.split(",")}


def check_pins(text: str) -> None:
    """Every version in ``text`` is the tested one."""
    found = re.findall(r"([\w-]+)==([\w.]+)", text)
    assert found and {name: version for name, version in found if PINS.get(name) != version} == {}


@each
def test_hadolint_finds_nothing(file: Path) -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@each
def test_what_is_copied_exists_and_is_sent_to_the_builder(file: Path) -> None:
    sent = [word[1:] for word in IGNORED if word.startswith("!")]
    assert IGNORED[0] == "*"
    copied = [value.split() for name, value in instructions(file) if name in ("COPY", "ADD")]
    assert len(copied) >= 3
    for words in copied:
        if words[0].startswith("--from="):
            assert words[0] == "--from=wheel"
            continue
        for path in words[:-1]:
            assert (ROOT / path).exists() and any(fnmatch(path, one) for one in sent), path
    built = {"pyproject.toml", PROJECT["readme"], "src", *PROJECT["license-files"]}
    assert built <= {path for words in copied for path in words[:-1]}  # what hatchling needs for the wheel


@each
def test_extras_and_pins_are_ours(file: Path) -> None:
    runs = [value for name, value in instructions(file) if name == "RUN"]
    text = "\n".join(runs)
    assert extras_of(text) and extras_of(text) <= PROJECT["optional-dependencies"].keys()
    assert not extras_of(text) & {
        "vllm",
        "sglang",
        "dev",
    }  # those bring a torch of their own, or are for work on the package
    check_pins(text)
    torch = next(number for number, run in enumerate(runs) if "torch==" in run)
    package = next(number for number, run in enumerate(runs) if "/wheels/posttrain" in run)
    assert torch < package and "--constraint /tmp/constraints.txt" in runs[package]
    assert all("--no-cache-dir" in run for run in runs if "pip " in run)


@each
def test_it_runs_the_command_as_a_user_without_privileges(file: Path) -> None:
    found = instructions(file)
    last = dict(found)
    assert last["USER"] == "1000" and last["ENTRYPOINT"] == '["posttrain"]'
    assert any("useradd" in value and "--uid 1000" in value for name, value in found if name == "RUN")
    version = re.findall(r"python:([\d.]+)", " ".join(value for name, value in found if name == "FROM"))
    assert len(version) == 2 and all(SpecifierSet(PROJECT["requires-python"]).contains(one) for one in version)


def test_the_conda_environment_is_that_of_the_package() -> None:
    file = FOLDER / "environment.yml"
    environment = yaml.safe_load(file.read_text(encoding="utf-8"))
    *names, by_pip = environment["dependencies"]
    python = next(name for name in names if name.startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.partition("=")[2])
    assert "pip" in names
    constraint, torch, package = by_pip["pip"]
    assert (FOLDER / constraint.split()[1]).resolve() == ROOT / "constraints.txt"
    check_pins(torch)
    wanted = next(Requirement(each) for each in PROJECT["dependencies"] if Requirement(each).name == "torch")
    assert wanted.specifier.contains(torch.partition("==")[2])
    option, place = package.split()
    assert option == "--editable" and (FOLDER / place.partition("[")[0] / "pyproject.toml").exists()
    assert extras_of(place) and extras_of(place) <= PROJECT["optional-dependencies"].keys()


def test_the_page_says_that_they_were_not_built() -> None:
    page = (ROOT / "docs/containers.md").read_text(encoding="utf-8")
    assert "linted, not built" in page and all(path.name in page for path in sorted(FOLDER.iterdir()))

"""The files of hashes hold the versions of constraints.txt, everything that pyproject.toml asks for, and no index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
APART = {"torch", "posttrain"}  # installed before and after the files


def pins(file: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([^\s;\\]+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize(("name", "extras"), [("demo", ["demo"]), ("dev", ["demo", "dev"])])
def test_a_file_of_hashes(name: str, extras: list[str]) -> None:
    file = ROOT / "requirements" / f"{name}.txt"
    locked, tested = pins(file), pins(ROOT / "constraints.txt")
    assert {package: version for package, version in locked.items() if tested.get(package) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    wanted += [
        line
        for line in (ROOT / "requirements" / "no-deps.txt").read_text(encoding="utf-8").splitlines()
        if line[:1].isalpha()
    ]
    asked = {canonicalize_name(Requirement(each.partition("#")[0].strip()).name) for each in wanted}
    assert asked - locked.keys() - APART == set(), "run tools/lock.py"
    text = file.read_text(encoding="utf-8")
    assert "://" not in text and "--index" not in text
    blocks = re.split(r"^(?=\w)", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(locked) and all("--hash=sha256:" in block for block in blocks)

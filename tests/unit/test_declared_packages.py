"""Every library that the sources import is one that pyproject.toml asks for, itself or in an extra."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from sources import FILES, nodes_of

ROOT = Path(__file__).parents[2]
# Libraries that come with one that is asked for, which could not do without them, or are looked for before they are imported.
WITH_OTHERS = {
    "accelerate": "peft",  # looked for
    "annotated_types": "pydantic",  # in its fields
    "pydantic_core": "pydantic",  # its errors
    "pandas": "skyrl-gym",
    "triton": "torch",  # for CUDA; looked for
    "verl": "",  # a stand-in of a fork's own modules, or an installed one
    "verifiers": "",  # in an environment of its own (make verifiers-env)
}


def asked_for() -> tuple[set[str], set[str]]:
    """The packages of every installation, and those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for name, wanted in project["optional-dependencies"].items() if name != "dev" for each in wanted]
    return {normal(each) for each in project["dependencies"]}, {normal(each) for each in extras}


def normal(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@cache
def imported() -> dict[str, str]:
    """Libraries that the sources import, with a file that does."""
    found = {}
    for file in FILES:
        for node in nodes_of(file):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {name.split(".")[0]: file.relative_to(ROOT).as_posix() for name in names}
    return {name: file for name, file in found.items() if name not in sys.stdlib_module_names and name != "posttrain"}


def test_every_library_is_asked_for() -> None:
    always, in_extras = asked_for()
    packages = packages_distributions()
    lost = {}
    for library, file in imported().items():
        names = {normal(name) for name in packages.get(library, [library])}
        if not names & (always | in_extras) and library not in WITH_OTHERS:
            lost[library] = file
    assert lost == {}
    assert WITH_OTHERS.keys() <= imported().keys()
    assert set(filter(None, WITH_OTHERS.values())) <= always | in_extras


def test_libraries_of_the_hub_are_no_extra() -> None:
    """Models and data sets of the hub are named in any configuration."""
    assert {"huggingface-hub", "httpx2"} <= asked_for()[0]

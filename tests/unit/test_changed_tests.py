"""The tests that `make check` runs for a changed file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools/changed_tests.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changed_tests", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/posttrain/algos/losses/ppo_clip.py", "tests/unit/algos"),  # no folder of its own: the nearest above
        ("src/posttrain/backends/rollout/native/engine.py", "tests/unit/backends/rollout/native"),
        ("src/posttrain/report/page.css", "tests/unit/report"),
        ("src/posttrain/errors.py", "tests/unit/test_errors.py"),
        ("src/posttrain/__main__.py", None),
        ("tools/changed_tests.py", "tests/unit/test_changed_tests.py"),
        ("tests/unit/algos/test_kl.py", "tests/unit/algos/test_kl.py"),
        ("tests/golden/conftest.py", "tests/golden"),
        ("tests/conftest.py", None),
        ("tests/unit/algos/test_gone.py", None),
        ("docs/data.md", None),
    ],
)
def test_a_changed_file_leads_to_the_tests_of_its_folder(tool: ModuleType, changed: str, tests: str | None) -> None:
    assert tool.tests_of(changed) == tests


def test_a_file_inside_a_named_folder_is_not_named_again(tool: ModuleType) -> None:
    paths = ["tests/unit/data/test_sft.py", "tests/unit/data", "tests/unit/data_more.py", "tests/unit/data"]
    assert tool.without_repeats(paths) == ["tests/unit/data", "tests/unit/data_more.py"]


def test_every_folder_of_the_package_leads_to_tests(tool: ModuleType) -> None:
    """Interfaces are Protocols, and the others are held by the tests of those who use them."""
    folders = [path for path in (TOOL.parents[1] / "src/posttrain").iterdir() if (path / "__init__.py").exists()]
    untested = {folder.name for folder in folders if tool.tests_of(f"src/posttrain/{folder.name}/x.py") is None}
    assert untested == {"interfaces"}

"""Definitions of verl's scoring code are told from a fork's by digests that layout and comments do not change."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from posttrain import verl_scoring
from posttrain.verl_scoring import definitions, own_definitions, own_scores, root_of

TEXT = """
def score(text, truth, weight=0.5):
    if text == truth:
        return {'score': weight}
    return f"{text!r:>3}"
"""


def digest(text: str) -> str:
    ((name, found),) = definitions(ast.parse(text))
    assert name == "score"
    return found


@pytest.mark.parametrize(
    "same",
    [
        TEXT.replace("'", '"'),
        TEXT.replace("    if", "    # why\n    if"),
        TEXT.replace("    if", '    """Score a text."""\n    if'),
        TEXT.replace("(text, truth, weight=0.5)", "(\n    text: str, truth: str, weight: float = 0.5,\n) -> dict"),
    ],
)
def test_layout_comments_and_hints_change_no_digest(same: str) -> None:
    assert same != TEXT and digest(same) == digest(TEXT)


@pytest.mark.parametrize(
    "other",
    [
        *(TEXT.replace("0.5", "0.6"), TEXT.replace("==", "!="), TEXT.replace("'score'", "'Score'")),
        *(TEXT.replace("truth,", "truth, *,"), TEXT.replace(">3", ">4"), TEXT.replace("return f", "yield f")),
        *(
            TEXT.replace("def score", "@cache\ndef score"),
            TEXT.replace("if text", "while text"),
            TEXT.replace("!r", "!s"),
        ),
    ],
)
def test_every_change_of_what_is_computed_changes_it(other: str) -> None:
    assert other != TEXT and digest(other) != digest(TEXT)


def test_the_table_is_a_sorted_list_of_digests() -> None:
    text = json.loads(Path(verl_scoring.__file__).with_suffix(".json").read_text())["digests"]
    digests = re.findall(rf"[0-9a-f]{{{verl_scoring.DIGITS}}}", text)
    assert "".join(digests) == text and digests == sorted(set(digests))
    assert len(digests) > 2000 and verl_scoring._known() == frozenset(digests)


def test_scorers_count_where_the_start_imports_them(tmp_path: Path) -> None:
    folder = tmp_path / "verl/utils/reward_score"
    (folder / "deep").mkdir(parents=True)
    files = {
        "__init__.py": "def pick():\n    from verl.utils.reward_score import near\n    from .deep import far\n",
        "near.py": "def near_score(): return 1\n",
        "deep/__init__.py": "from . import far\n",
        "deep/far.py": "from ..side import side_score\nimport os\ndef far_score(): return 2\n",
        "side.py": "SIDE = 3\ndef side_score(): return SIDE\n",
        "unused.py": "def unused_score(): return 4\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    found = {each.split(" ")[0] for each in own_scores(folder / "__init__.py", tmp_path)}
    assert found == {"pick", "near_score", "far_score", "SIDE", "side_score"}


def test_a_file_that_cannot_be_parsed_has_none(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(:\n")
    assert own_definitions(tmp_path / "broken.py") == []
    assert own_definitions(tmp_path / "absent.py") == []


def test_modules_are_imported_from_above_the_outermost_package(tmp_path: Path) -> None:
    program = tmp_path / "fork/verl/trainer/main_ppo.py"
    program.parent.mkdir(parents=True)
    for package in ("fork/verl", "fork/verl/trainer"):
        (tmp_path / package / "__init__.py").write_text("")
    assert root_of(program) == tmp_path / "fork"

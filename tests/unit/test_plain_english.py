"""tools/plain_english.py: the part of plain English that `make lint` holds."""

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "plain_english.py"
specification = importlib.util.spec_from_file_location("plain_english", SCRIPT)
assert specification is not None and specification.loader is not None
plain_english = importlib.util.module_from_spec(specification)
sys.modules["plain_english"] = plain_english
specification.loader.exec_module(plain_english)

SETTINGS = plain_english.Settings(
    openers=frozenset({"What", "Whether", "How", "Of", "Nothing", "From"}),
    lower_case_names=frozenset({"verl", "log"}),
    instead={"plainly wrong": "rejected", "(?:is|are) seen": "receives"},
    source=("src/posttrain",),
    documents=("README.md",),
    pending=("src/posttrain/cli", "README.md"),
)


def python(source: str) -> list[tuple[int, str]]:
    """Line and rule of every finding in a Python source."""
    found = plain_english.check_python(textwrap.dedent(source), "x.py", SETTINGS)
    return [(finding.line, finding.rule) for finding in found]


def document(text: str) -> list[tuple[int, str]]:
    """Line and rule of every finding in a Markdown text."""
    return [(finding.line, finding.rule) for finding in plain_english.check_document(text, "x.md", SETTINGS)]


@pytest.mark.parametrize(
    "opening",
    [
        "What the loop does.",
        "Whether it runs.",
        "How to read it.",
        "Of a chunk.",
        "Nothing: a stub.",
        "From bytes to ids.",
    ],
)
def test_a_question_word_or_a_fragment_opens_no_docstring(opening: str) -> None:
    assert python(f'"""{opening}"""\n') == [(1, "opener")]
    assert python(f'def f():\n    """{opening}"""\n') == [(2, "opener")]


@pytest.mark.parametrize(
    "opening",
    [
        "Return the ids of a text.",
        "The ids of a text. What they mean, the tokenizer knows.",
        "log pi_old of the tokens, [B, T].",
        "r - mean of the group.",
        "``x`` of the token.",
        "verl's name of a metric.",
        "cispo: upper bound of the ratio.",
    ],
)
def test_a_sentence_a_name_or_a_formula_opens_a_docstring(opening: str) -> None:
    assert python(f'def f():\n    """{opening}"""\n') == []


def test_a_lower_case_word_opens_no_docstring() -> None:
    assert python('class A:\n    """the ids of a text."""\n') == [(2, "lower")]


def test_the_docstring_behind_a_field_is_checked() -> None:
    assert python('class A:\n    steps: int = 1\n    """Whether to step."""\n') == [(3, "opener")]


def test_a_string_that_is_no_docstring_may_open_as_it_likes() -> None:
    assert python('QUESTION = "What is 1 + 1?"\n') == []


def test_words_are_found_in_docstrings_comments_and_messages_across_lines() -> None:
    source = '''\
        """A key."""
        # One that is plainly
        # wrong.
        KEY = f"{1} is plainly " f"wrong"


        def f():
            """Read a key.

            The loop is
            seen.
            """
        '''
    assert python(source) == [(4, "word"), (10, "word"), (2, "word")]


def test_a_comment_behind_a_long_line_is_found() -> None:
    code = "value = " + "1 + " * 15 + "1"  # 8 + 60 + 1 = 69 characters
    assert python(f"{code}  # {'a' * 40}\n") == [(1, "trailing")]  # 69 + 4 + 40 = 113 > 100
    assert python(f"{code}  # {'a' * 20}\n") == []  # 93
    assert python(f"x: int  # [B, T] {'a' * 90}\n") == []  # the code itself is short
    assert python(f"{code}  # noqa: {'a' * 40}\n") == []


def test_a_document_is_read_by_paragraphs_without_its_code() -> None:
    assert document("A key.\n\nIt is plainly\nwrong.\n") == [(3, "word")]
    assert document("```\nplainly wrong\n```\n") == []
    assert document("| `plainly wrong` | right |\n") == []


def test_pending_files_are_left_out_unless_named() -> None:
    files = plain_english.files_to_check([], SETTINGS)
    assert any(file.name == "errors.py" for file in files)
    assert not any("cli" in file.parts or file.name == "README.md" for file in files)
    assert plain_english.files_to_check([str(SCRIPT)], SETTINGS) == [SCRIPT]


def test_findings_name_the_place_and_the_way_out() -> None:
    finding = plain_english.check_python("# plainly wrong\n", "a/b.py", SETTINGS)[0]
    assert str(finding) == "a/b.py:1: word: 'plainly wrong': write rejected"


def test_the_settings_name_files_that_exist() -> None:
    settings = plain_english.Settings.read()
    assert settings.instead
    assert [path for path in settings.pending if not (plain_english.ROOT / path).exists()] == []

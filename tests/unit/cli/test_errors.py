"""Errors as text and exit codes."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from safetensors import SafetensorError

from posttrain.cli.errors import error_text, run_guarded
from posttrain.errors import ConfigError, Problem, RunInterrupted, RunStopped

LONG_PATH = "/data/" + "very_long_folder_name/" * 6 + "train.parquet"


def test_one_problem_is_one_paragraph() -> None:
    error = ConfigError(Problem("it is wrong", where="run.yaml:3 a.b", fix="use 4"))
    assert error_text(error) == "posttrain: it is wrong, at run.yaml:3 a.b; use 4"


def test_several_are_numbered_and_fit_80_columns() -> None:
    problems = [Problem("a sentence of some words " * 6, where="run.yaml:3 a.b", fix="use 4") for _ in range(10)]
    text = error_text(ConfigError(problems), width=80)
    lines = text.splitlines()
    assert lines[0] == "posttrain: 10 problems, and nothing was started:"
    assert lines[1].startswith(" 1. a sentence")
    assert lines[2].startswith("    ")  # hangs under the text
    assert max(map(len, lines)) <= 80
    assert sum(line.lstrip()[0].isdigit() for line in lines) == 10


def test_paths_are_not_broken() -> None:
    text = error_text(ConfigError(Problem(f"there is no file {LONG_PATH}", fix="give-one-that-is-there")), width=80)
    assert f"{LONG_PATH};" in text.splitlines()


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("no"), 2), (RunStopped("no"), 3), (RunInterrupted("no"), 75)],
)
def test_what_a_user_can_put_right_has_no_traceback(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    assert run_guarded(command) == code
    captured = capsys.readouterr()
    assert captured.err == "posttrain: no\n"
    assert captured.out == ""


def test_a_bug_keeps_its_traceback_and_asks_to_be_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def broken_function() -> None:
        raise ZeroDivisionError("by zero")

    assert run_guarded(broken_function) == 1
    shown = capsys.readouterr().err
    assert "broken_function" in shown and "ZeroDivisionError: by zero" in shown
    assert "This is a bug in posttrain. Please report it" in shown


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EACCES, 2), (errno.EISDIR, 2), (errno.EEXIST, 2), (errno.EROFS, 2), (errno.ENOSPC, 3)]
)
def test_a_place_that_cannot_be_written_is_no_bug(number: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise OSError(number, os.strerror(number), "some/file")

    assert run_guarded(command) == code
    assert capsys.readouterr().err == f"posttrain: some/file: {os.strerror(number)}\n"


def test_any_other_system_error_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    assert run_guarded(command) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "This is a bug in posttrain" in shown


def test_success_is_zero() -> None:
    assert run_guarded(lambda: None) == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), ""),
        (Exception("No space left on device (os error 28)"), ""),  # of tokenizers
        (shutil.Error([("a/b", "out/b", "[Errno 28] No space left on device: 'out/b'")]), "out/b: "),
    ],
)
def test_a_disk_error_is_recognised_in_what_libraries_make_of_it(
    error: Exception, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run_guarded(fail) == RunStopped.exit_code
    assert capsys.readouterr().err == f"posttrain: {text}No space left on device\n"


def test_an_error_that_only_names_a_number_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise SafetensorError("header too large (os error 2)")

    assert run_guarded(fail) == 1
    assert "This is a bug" in capsys.readouterr().err

"""The repository of an episode: its files in memory, the tools that read and change them, and its tests, run in a box."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.envs.repair.tasks import Case, RepairTask, path_problem
from posttrain.interfaces.tool import Tool, ToolFailed, parameters
from posttrain.sandbox.boxes import BoxError, Program, run
from posttrain.sandbox.walls import BoxLimits

TESTS = "tests/test_all.py"  # shown, and read-only
MOST_FILES, LONGEST_FILE = 64, 64 << 10  # of a repository; characters
_IN_BOX = Path(__file__).with_name("in_box.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Box:
    """The walls and limits that tests run behind."""

    limits: BoxLimits
    walls: Sequence[str]

    def outcomes(self, files: Mapping[str, str], cases: Sequence[Case]) -> list[Mapping[str, Any]]:
        """Make the calls of all cases, in one box. A program that does not answer has the same error in every case.

        Raises: BoxError when no box can be made.
        """
        written = json.dumps({"files": dict(files), "calls": [[case.call, case.arguments] for case in cases]})
        done = run(Program(source=_IN_BOX, function="run_calls", arguments=(written,)), self.limits, self.walls)
        try:
            found = json.loads(done.result) if done.finished else None
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list) and len(found) == len(cases) and all(isinstance(each, dict) for each in found):
            return found
        return [{"error": "", "message": f"the tests did not end: {done.why()}"}] * len(cases)

    def passed(self, files: Mapping[str, str], cases: Sequence[Case]) -> list[bool]:
        outcomes = self.outcomes(files, cases)
        return [case.passed(outcome) for case, outcome in zip(cases, outcomes, strict=True)]


class Checkout:
    """Tools on the files of a task."""

    def __init__(self, task: RepairTask, box: Box):
        self.files = dict(task.files)
        self.edits = self.runs = 0
        self._task = task
        self._box = box

    def tools(self) -> list[Tool]:
        path = ("string", "its path, such as one that list_files shows")
        return [
            Tool(
                name="list_files",
                description="Lists the files of the repository.",
                parameters=parameters(),
                run=lambda arguments: "\n".join(sorted([*self.files, TESTS])),
            ),
            Tool(
                name="read_file",
                description="Shows a file with its line numbers.",
                parameters=parameters(path=path),
                run=self._read,
            ),
            Tool(
                name="edit_file",
                description="Replaces a text of a file, which must stand in it once, by another one.",
                parameters=parameters(
                    path=path,
                    old=("string", "the text to replace, without line numbers"),
                    new=("string", "the text in its place"),
                ),
                run=self._edit,
            ),
            Tool(
                name="write_file",
                description="Writes a whole file, a new one or in place of another.",
                parameters=parameters(path=path, text=("string", "the whole text")),
                run=self._write,
            ),
            Tool(
                name="run_tests",
                description="Runs the tests of the repository, and shows those that fail.",
                parameters=parameters(),
                run=lambda arguments: self.report(),
            ),
        ]

    def report(self) -> str:
        """Run the tests that the policy may see. Returns: the failures in words. Raises: ToolFailed without a box."""
        self.runs += 1
        tests = self._task.tests
        try:
            outcomes = self._box.outcomes(self.files, tests)
        except BoxError as error:
            raise ToolFailed(f"the tests could not be run: {error}") from error
        lines = [
            f"FAILED test_{number}: {case.asked()} {_said(outcome)}, expected {case.wanted()}"
            for number, (case, outcome) in enumerate(zip(tests, outcomes, strict=True), 1)
            if not case.passed(outcome)
        ]
        return "\n".join([*lines, f"{len(lines)} of {len(tests)} tests fail" if lines else "all tests pass"])

    def shares(self) -> tuple[float, bool]:
        """Run all tests, the hidden ones too. Returns: the share that passes, and whether all do. Raises: BoxError."""
        passed = self._box.passed(self.files, self._task.all)
        return sum(passed) / len(passed), all(passed)

    def _text(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        path = str(arguments["path"]).removeprefix("./")
        if path == TESTS:
            return path, rendered_tests(self._task.tests)
        if path not in self.files:
            raise ToolFailed(f"there is no file {path[:80]!r} (list_files shows all)")
        return path, self.files[path]

    def _read(self, arguments: Mapping[str, Any]) -> str:
        _, text = self._text(arguments)
        return "\n".join(f"{number:4d}  {line}" for number, line in enumerate(text.splitlines(), 1)) or "(empty)"

    def _edit(self, arguments: Mapping[str, Any]) -> str:
        path, text = self._text(arguments)
        old, new = str(arguments["old"]), str(arguments["new"])
        if not old or (count := text.count(old)) == 0:
            raise ToolFailed(f"{path} does not hold that text; read_file shows it (leave line numbers out)")
        if count > 1:
            raise ToolFailed(f"{path} holds that text {count} times; give more of what is around it")
        return self._put(path, text.replace(old, new))

    def _write(self, arguments: Mapping[str, Any]) -> str:
        return self._put(str(arguments["path"]).removeprefix("./"), str(arguments["text"]))

    def _put(self, path: str, text: str) -> str:
        if path.split("/")[0] == "tests":
            raise ToolFailed("the tests cannot be changed")
        if problem := path_problem(path):
            raise ToolFailed(problem)
        if len(text) > LONGEST_FILE or (path not in self.files and len(self.files) >= MOST_FILES):
            raise ToolFailed(f"a repository has at most {MOST_FILES} files of {LONGEST_FILE} characters")
        self.files[path] = text
        self.edits += 1
        return f"{path} is written ({len(text.splitlines())} lines)"


def rendered_tests(tests: Sequence[Case]) -> str:
    """Write the tests as a file of Python."""
    modules = sorted({(case.call.partition(":")[0], case.call.partition(":")[2]) for case in tests})
    lines = ["import pytest", *(f"from {module} import {name}" for module, name in modules)]
    for number, case in enumerate(tests, 1):
        body = (
            f"    with pytest.raises({case.error}):\n        {case.asked()}"
            if case.error
            else f"    assert {case.asked()} == {case.wanted()}"
        )
        lines += ["", f"def test_{number}():", body]
    return "\n".join(lines) + "\n"


def _said(outcome: Mapping[str, Any]) -> str:
    if "value" in outcome:
        return f"returned {outcome['value']!r}"
    name, message = outcome.get("error"), outcome.get("message")
    return f"raised {name}: {message}" if name else str(message)

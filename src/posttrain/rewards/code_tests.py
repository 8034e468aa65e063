"""Test cases of a programming problem, and the comparison of outputs and returned values with the expected ones.

The code here runs outside the sandbox, on texts and plain JSON values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from posttrain.libraries import json_text

Form = Literal["auto", "stdin", "function"]
Block = Literal["last_python", "last", "first_def"]

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_LONGEST_NUMBER = 400  # characters; longer ones are compared as texts
# Absolute difference allowed between numbers near 0, besides the relative one.
_NEAR_ZERO = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One test case. With ``function`` None the program reads ``stdin``, and its output is compared with ``expected``."""

    function: str | None = None
    stdin: str = ""
    arguments: tuple[Any, ...] = ()
    expected: Any


def code_of(response: str, block: Block) -> str | None:
    """Extract the program from a response; None when there is none.

    last_python: the text after the last ```python up to the next fence, else the whole response (verl); last: the last
    fenced block (SkyRL); first_def: after the last <|begin_of_solution|> and the last </think>, the first fenced block with
    "def ", else the first one, else the whole text (ROLL).
    """
    if block == "last_python":
        _, fence, after = response.rpartition("```python")
        return after.partition("```")[0] if fence else response
    if block == "last":
        blocks = _FENCE.findall(response)
        return blocks[-1] if blocks else None
    text = response.rpartition("<|begin_of_solution|>")[2].rpartition("</think>")[2]
    blocks = _FENCE.findall(text)
    return next((each for each in blocks if "def " in each), blocks[0] if blocks else text)


def cases_of(truth: object, form: Form, function: str | None = None) -> list[Case]:
    """Parse the test cases of a reference, given as a value or as its JSON text: {inputs, outputs, fn_name} (verl),
    [{input, output, testtype, metadata}] (LiveCodeBench, SkyRL) or [{stdin, expected_stdout}] (ROLL). ``function`` names the
    function to call when the tests do not.

    Raises: ValueError for any other form, and when there is no test.
    """
    if isinstance(truth, str):
        try:
            truth = json_text.loads(truth)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the ground truth is not JSON: {error}") from error
    if isinstance(truth, Mapping):
        cases = _of_lists(truth, form, function)
    elif isinstance(truth, (list, tuple)) and all(isinstance(each, Mapping) for each in truth):
        cases = [_of_mapping(each, form, function) for each in truth]
    else:
        raise ValueError("the ground truth is neither a mapping with inputs and outputs nor a list of tests")
    if not cases:
        raise ValueError("the ground truth holds no test")
    return cases


def _of_lists(truth: Mapping[str, Any], form: Form, function: str | None) -> list[Case]:
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)) or len(inputs) != len(outputs):
        raise ValueError("the ground truth has no lists inputs and outputs of the same length")
    name = _function_name(truth.get("fn_name") or function, form)
    return [_case(name, given, expected) for given, expected in zip(inputs, outputs, strict=True)]


def _of_mapping(test: Mapping[str, Any], form: Form, function: str | None) -> Case:
    for given, expected in (("input", "output"), ("stdin", "expected_stdout")):
        if given in test and expected in test:
            metadata = test.get("metadata") or {}
            metadata = json_text.loads(metadata) if isinstance(metadata, str) else metadata
            name = metadata.get("func_name") if test.get("testtype") == "functional" else function
            return _case(_function_name(name, form), test[given], test[expected])
    if "assert_code" in test:
        raise ValueError(
            "tests written as code (assert_code) are not run: they hold the expected answers, and a program beside them could "
            "read or replace them; give them as input and output"
        )
    raise ValueError(f"a test has neither input and output nor stdin and expected_stdout (it has: {', '.join(test)})")


def _function_name(name: object, form: Form) -> str | None:
    if form == "stdin" or (form == "auto" and not name):
        return None
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the ground truth names the function {name!r}; a name is expected (fn_name)")
    return name


def _case(name: str | None, given: Any, expected: Any) -> Case:
    if name is None:
        return Case(stdin=_text(given), expected=_text(expected))
    if isinstance(given, str):  # one line of JSON per argument, and JSON for the result
        try:
            arguments = tuple(json_text.loads(line) for line in given.split("\n") if line.strip())
            return Case(function=name, arguments=arguments, expected=json_text.loads(expected))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a test of {name} is not JSON: {error}") from error
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"a test of {name} has {given!r} for arguments; a list is expected")
    return Case(function=name, arguments=tuple(given), expected=expected)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value))
    return "" if value is None else str(value)


def same_output(output: str, expected: str, tolerance: float) -> bool:
    """Compare two outputs line by line and word by word, ignoring blanks between words and around the text.

    Words are equal as texts or as decimal numbers; where the expected word has a decimal point, also as numbers within a
    relative ``tolerance``.
    """
    lines, wanted = output.strip().splitlines(), expected.strip().splitlines()
    return len(lines) == len(wanted) and all(
        _same_words(line.split(), other.split(), tolerance) for line, other in zip(lines, wanted, strict=True)
    )


def _same_words(words: Sequence[str], wanted: Sequence[str], tolerance: float) -> bool:
    return len(words) == len(wanted) and all(
        word == other or _same_number(word, other, tolerance) for word, other in zip(words, wanted, strict=True)
    )


def _same_number(word: str, wanted: str, tolerance: float) -> bool:
    if max(len(word), len(wanted)) > _LONGEST_NUMBER or not _NUMBER.fullmatch(word) or not _NUMBER.fullmatch(wanted):
        return False
    if Decimal(word) == Decimal(wanted):
        return True
    return not wanted.lstrip("+-").isdecimal() and _close(float(word), float(wanted), tolerance)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Return True when two JSON values are equal: booleans only to booleans, numbers by value (floats within a relative
    ``tolerance``), lists in order, mappings by key. Tuples count as lists."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        both_whole = isinstance(value, int) and isinstance(expected, int)
        return value == expected or (not both_whole and _close(value, expected, tolerance))
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(
            same_value(one, other, tolerance) for one, other in zip(value, expected, strict=True)
        )
    if isinstance(value, Mapping) and isinstance(expected, Mapping):
        wanted = {str(key): each for key, each in expected.items()}  # JSON keys are strings
        return value.keys() == wanted.keys() and all(same_value(value[key], wanted[key], tolerance) for key in wanted)
    return type(value) is type(expected) and bool(value == expected)


def _close(value: float, wanted: float, tolerance: float) -> bool:
    try:
        return tolerance > 0 and math.isclose(value, wanted, rel_tol=tolerance, abs_tol=_NEAR_ZERO)
    except OverflowError:  # an integer beyond the range of a float
        return False


def returned(result: bytes) -> tuple[bool, Any]:
    """Parse the JSON that a function's process wrote. Returns: True and the value; (False, None) for anything that is not
    a single JSON value (several values, NaN, no output)."""
    try:
        return True, json_text.loads(result, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False, None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

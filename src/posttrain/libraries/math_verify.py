r"""The sole importer of math-verify: equality of mathematical answers by computer algebra.

Only its LaTeX parser is used. Its parser of plain expressions passes text to sympy's ``parse_expr``, which is Python's eval,
and text from a model is never evaluated; plain numbers are enclosed in dollar signs instead. (sympy itself creates numbers
from digits that way: ``Integer(14)`` is evaluated, and a test checks that only digits are. Seen in math-verify 0.9.)

Its own time limits are disabled: they are signals, which work in the main thread only and do not interrupt a long
multiplication. ``9^{9^{9^9}}`` can therefore take forever; rewards that use it need processes that can be killed.
"""

from __future__ import annotations

import functools
import importlib
import logging
from importlib.util import find_spec
from typing import Any

from posttrain.errors import MissingDependency
from posttrain.registry import missing_library


def check_installed(needed_by: str) -> None:
    """Raises: MissingDependency, with the install command, when math-verify is absent. Does not import it."""
    if find_spec("math_verify") is None:
        raise MissingDependency(missing_library("math_verify", needed_by))


def preload() -> None:
    """Import math-verify, which takes seconds. Raises: MissingDependency."""
    _library()


def parse(text: str) -> Any | None:
    r"""Parse a text with LaTeX ($…$, \boxed{…}). Returns: the first expression that math-verify finds; None without one."""
    found = _library().parse(
        text,
        extraction_config=[_library().LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=False,
    )
    return found[0] if found else None


def same(reference: Any, answer: Any) -> bool:
    """Return True when two parsed expressions are equal; not symmetric, as math-verify's verify."""
    return bool(_library().verify(reference, answer, timeout_seconds=None, raise_on_error=False))


@functools.cache
def _library() -> Any:
    check_installed("rewards that use math-verify")
    library = importlib.import_module("math_verify")
    # Each warns once that its time limit is disabled
    for name in (
        "math_verify.parser",
        "math_verify.grader",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    return library

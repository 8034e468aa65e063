r"""The sole importer of math-verify: whether two mathematical answers are the same, by computer algebra.

Only its LaTeX reader is used. Its reader of plain expressions hands text to sympy's ``parse_expr``, which is Python's eval,
and text from a model is never evaluated; plain numbers are put between dollar signs instead. (sympy itself makes numbers of
digits that way: ``Integer(14)`` is evaluated, and a test makes sure that nothing but digits is. Seen in math-verify 0.9.)

Its own time limits are off: they are signals, which work in the main thread only and do not interrupt a long multiplication.
``9^{9^{9^9}}`` can therefore take forever here; a run that uses it needs its rewards in processes that can be killed.
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
    """Raises MissingDependency, with the line that installs it, when math-verify is absent. Does not import it."""
    if find_spec("math_verify") is None:
        raise MissingDependency(missing_library("math_verify", needed_by))


def preload() -> None:
    """Import it now: it takes seconds. Raises: MissingDependency."""
    _library()


def parse(text: str) -> Any | None:
    r"""The expression that a text with LaTeX ($…$, \boxed{…}) gives: the first result of math-verify; None when it finds
    none that it understands."""
    found = _library().parse(
        text,
        extraction_config=[_library().LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=False,
    )
    return found[0] if found else None


def same(reference: Any, answer: Any) -> bool:
    """Whether two parsed expressions are the same; not symmetric, as math-verify's verify."""
    return bool(_library().verify(reference, answer, timeout_seconds=None, raise_on_error=False))


@functools.cache
def _library() -> Any:
    check_installed("rewards that use math-verify")
    library = importlib.import_module("math_verify")
    for name in (
        "math_verify.parser",
        "math_verify.grader",
    ):  # each warns once that its time limit is off, as it should be
        logging.getLogger(name).setLevel(logging.ERROR)
    return library

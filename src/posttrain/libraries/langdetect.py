"""The sole importer of langdetect: the language of a text."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

from posttrain.errors import MissingDependency
from posttrain.registry import missing_library

# Characters of a text that suffice to detect its language.
_LONGEST = 10_000


def language(text: str) -> str | None:
    """Detect the language. Returns: its code (ISO 639-1, zh-cn and zh-tw); None when the text gives no evidence. Deterministic.

    Raises: MissingDependency without langdetect.
    """
    library = _library()
    try:
        return str(library.detect(text[:_LONGEST]))
    except library.LangDetectException:
        return None


@functools.cache
def _library() -> Any:
    if find_spec("langdetect") is None:
        raise MissingDependency(missing_library("langdetect", "the constraint validate_response_language"))
    library = importlib.import_module("langdetect")
    library.DetectorFactory.seed = 0  # it samples parts of the text
    return library

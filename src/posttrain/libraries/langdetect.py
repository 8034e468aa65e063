"""The sole importer of langdetect: the language of a text."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

from posttrain.errors import MissingDependency
from posttrain.registry import missing_library

# Languages do not need more of a text than this, in characters.
_LONGEST = 10_000


def language(text: str) -> str | None:
    """The code of the language (ISO 639-1, zh-cn and zh-tw), None when nothing in the text tells. The same text gives the
    same answer.

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
    library.DetectorFactory.seed = 0  # it draws samples of the text
    return library

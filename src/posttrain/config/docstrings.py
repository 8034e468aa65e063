"""Docstrings of the fields of a configuration's sections, read from the source when somebody asks for them.

pydantic can collect them too (``use_attribute_docstrings``), but does so for every class as soon as it is defined, which is a
tenth of the time of ``posttrain plan``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise


@cache
def field_docstrings(section: type) -> dict[str, str]:
    """The string under each field of a class and of the classes it is derived from, by the field's name."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if "__annotations__" in vars(cls) and cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            found |= _own_docstrings(cls)
    return found


def _own_docstrings(cls: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }

r"""Digits in groups of three: 10\,000 and 10 000 are 10000, not a product of 10 and 000."""

from __future__ import annotations

import re

# Blanks between groups: those of LaTeX, and the characters that typesetters use (no-break, thin, narrow no-break).
_LATEX = r"\\[,;:! ]|\\(?:thin|med|thick|neg)space(?![A-Za-z])|\{\s*(?:\\[,;:! ]|,)\s*\}|~|[\u00a0\u2007\u2009\u202f]"
_GAP = rf"(?: ?(?:{_LATEX}) ?| )"
_TIGHT = rf" ?(?:{_LATEX}) ?"  # a plain blank alone may separate two numbers
# The head of a number is not the end of another one, of an exponent, or of \frac12.
_HEAD = r"(?<![0-9.^_])(?<!frac)(?<!sqrt)(?<!binom)"
_WHOLE = re.compile(rf"{_HEAD}[0-9]{{1,3}}(?:{_GAP}[0-9]{{3}})+(?![0-9])")
_DECIMALS = re.compile(rf"(?<![0-9.])[0-9]+\.(?:[0-9]{{3}}{_TIGHT})+[0-9]{{1,3}}(?![0-9])")
_NO_DIGIT = re.compile(r"[^0-9.]+")


def joined(text: str) -> str:
    r"""Join the groups of every number: 10\,000.125\,5 becomes 10000.1255."""
    text = _WHOLE.sub(lambda found: _NO_DIGIT.sub("", found[0]), text)
    return _DECIMALS.sub(lambda found: _NO_DIGIT.sub("", found[0]), text)

"""Instructions that a program can verify: the functions of RLVR-IFEval (Lambert et al., arXiv:2411.15124), by their names.

Each takes a response that is not blank, and its arguments by keyword: ``N`` a count, ``quantifier`` "at least", "at most"
or "around". The docstring notes where the original deviates from its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from posttrain.libraries.langdetect import language as language_of
from posttrain.rewards.spans import spans

Constraint = Callable[..., bool]

_WORD = re.compile(r"\w+")
_CAPITAL_WORD = re.compile(r"\b[A-Z]+\b")
# A sentence ends at . or ? before a blank, but not after one capital and small letters as in "Mr." or "a.b.".
_SENTENCE_END = re.compile(r"(?<=[.?])\s")
_ABBREVIATION = re.compile(r"(?:\b[A-Z][a-z]|\w\.\w)\.$")


def _compare(count: int, wanted: int, quantifier: str, around: int) -> bool:
    if quantifier == "at least":
        return count >= wanted
    if quantifier == "at most":
        return count <= wanted
    if quantifier == "around":
        return abs(count - wanted) <= around
    raise ValueError(f"quantifier is {quantifier!r}; at least, at most or around is expected")


def verify_keywords(text: str, *, keyword_list: Sequence[str]) -> bool:
    """Every keyword occurs in the text, ignoring case."""
    return all(word.lower() in text.lower() for word in keyword_list)


def verify_keyword_frequency(text: str, *, word: str, N: int) -> bool:  # noqa: N803 - the data's own name
    """The word occurs N times in the text, ignoring case. (The original compares every word with itself.)"""
    return sum(each == word.lower() for each in _WORD.findall(text.lower())) == N


def validate_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """No forbidden word occurs in the text, not even inside another word, ignoring case."""
    return not any(word.lower() in text.lower() for word in forbidden_words)


def verify_letter_frequency(text: str, *, letter: str, N: int) -> bool:  # noqa: N803
    """The letter occurs N times in the text; case matters."""
    return text.count(letter) == N


def validate_response_language(text: str, *, language: str) -> bool:
    """The language that langdetect detects is this one (a code such as en)."""
    return language_of(text) == language


def verify_paragraph_count(text: str, *, N: int) -> bool:  # noqa: N803
    """The text has N paragraphs separated by "* * *", none of them blank."""
    paragraphs = text.split("* * *")
    return len(paragraphs) == N and all(each.strip() for each in paragraphs)


def validate_word_constraint(text: str, *, N: int, quantifier: str) -> bool:  # noqa: N803
    """The text has N words separated by blanks; around allows a tenth more or less, at least 1."""
    return _compare(len(text.split()), N, quantifier, around=max(round(0.1 * N), 1))


def verify_sentence_constraint(text: str, *, N: int, quantifier: str) -> bool:  # noqa: N803
    """The text has N sentences; around allows one more or less."""
    count, start = 0, 0
    for end in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[max(end.start() - 4, 0) : end.start()]) and text[start : end.start()].strip():
            count += 1
            start = end.end()
    return _compare(count + bool(text[start:].strip()), N, quantifier, around=1)


def validate_paragraphs(text: str, *, N: int, first_word: str, i: int) -> bool:  # noqa: N803
    """The text has N paragraphs separated by blank lines, and the i-th (from 1) begins with the word."""
    paragraphs = text.split("\n\n")
    return len(paragraphs) == N and 1 <= i <= N and paragraphs[i - 1].strip().startswith(first_word)


def verify_postscript(text: str, *, postscript_marker: str) -> bool:
    """The text contains the marker, followed by more text."""
    return bool(text.partition(postscript_marker)[2].strip())


def validate_placeholders(text: str, *, N: int) -> bool:  # noqa: N803
    """The text has at least N placeholders in [square brackets]."""
    return sum(len(spans(line, "[", "]")) for line in text.splitlines()) >= N


def verify_bullet_points(text: str, *, N: int) -> bool:  # noqa: N803
    """The text has N lines that begin with * or -."""
    return sum(line.strip().startswith(("*", "-")) for line in text.splitlines()) == N


def validate_title(text: str) -> bool:
    """The text has a title in <<double angle brackets>>."""
    return any(title.strip() for title in spans(text, "<<", ">>"))


def validate_choice(text: str, *, options: Sequence[str]) -> bool:
    """The text is contained in one of the options."""
    return any(text.strip() in option for option in options)


def validate_highlighted_sections(text: str, *, N: int) -> bool:  # noqa: N803
    """The text has at least N passages *highlighted* or **highlighted**, each within a line."""
    parts = [part for line in text.splitlines() for part in re.split(r"\*+", line)[1:-1:2]]
    return sum(bool(part.strip()) for part in parts) >= N


def validate_sections(text: str, *, N: int, section_splitter: str) -> bool:  # noqa: N803
    """The text has N sections, each beginning with the splitter."""
    return text.count(section_splitter) == N


def validate_json_format(text: str) -> bool:
    """The text is JSON, with or without a code fence."""
    inside = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        inside = inside.removeprefix(fence)
    try:
        json.loads(inside.removesuffix("```"))
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, *, original_prompt: str) -> bool:
    """The text begins with the prompt."""
    return text.startswith(original_prompt)


def validate_two_responses(text: str) -> bool:
    """The text holds two different responses separated by ******."""
    halves = [half.strip() for half in text.split("******")]
    return len(halves) == 2 and all(halves) and halves[0] != halves[1]


def validate_uppercase(text: str) -> bool:
    """The text has no lower-case letter."""
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    """The text has no upper-case letter."""
    return text == text.lower()


def validate_frequency_capital_words(text: str, *, N: int, quantifier: str) -> bool:  # noqa: N803
    """The text has N words in capitals (A to Z); around means exactly."""
    return _compare(len(_CAPITAL_WORD.findall(text)), N, quantifier, around=0)


def validate_end(text: str, *, end_phrase: str) -> bool:
    """The text ends with the phrase, ignoring trailing blanks."""
    return text.rstrip().endswith(end_phrase.rstrip())


def validate_quotation(text: str) -> bool:
    """The text is enclosed in double quotes."""
    quoted = text.strip()
    return len(quoted) >= 2 and quoted.startswith('"') and quoted.endswith('"')


def validate_no_commas(text: str) -> bool:
    return "," not in text


CONSTRAINTS: dict[str, Constraint] = {
    function.__name__: function
    for function in (
        *(verify_keywords, verify_keyword_frequency, validate_forbidden_words, verify_letter_frequency),
        *(validate_response_language, verify_paragraph_count, validate_word_constraint, verify_sentence_constraint),
        *(validate_paragraphs, verify_postscript, validate_placeholders, verify_bullet_points, validate_title),
        *(validate_choice, validate_highlighted_sections, validate_sections, validate_json_format),
        *(validate_repeat_prompt, validate_two_responses, validate_uppercase, validate_lowercase),
        *(validate_frequency_capital_words, validate_end, validate_quotation, validate_no_commas),
    )
}

"""Text between two markers, found in one pass: a regular expression with .*? takes quadratic time on markers that never
close, and a response may consist of nothing else."""

from __future__ import annotations


def spans(text: str, opening: str, closing: str) -> list[str]:
    """Return the texts between each ``opening`` and the next ``closing`` after it, in order, without overlaps."""
    found = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            break
        found.append(text[start + len(opening) : end])
        position = end + len(closing)
    return found


def braced(text: str, start: int, *, skip_quoted: bool = False) -> tuple[str, int] | None:
    """Return the content of the first {…} at or after ``start`` whose braces match, and its end; None when there is no brace
    or it never closes. ``skip_quoted``: braces between double quotes are not counted."""
    first = text.find("{", start)
    depth, quoted = 0, False
    for position in range(first, len(text)) if first >= 0 else ():
        character = text[position]
        if skip_quoted and character == '"':
            quoted = not quoted
        elif character == "{" and not quoted:
            depth += 1
        elif character == "}" and not quoted:
            depth -= 1
            if depth == 0:
                return text[first + 1 : position], position + 1
    return None


def last_boxed(text: str, *, skip_quoted: bool = False, command: str = r"\boxed") -> str | None:
    r"""Return the content of the last \boxed{…}; None when there is none or its braces do not match."""
    start = text.rfind(command + "{")
    found = braced(text, start, skip_quoted=skip_quoted) if start >= 0 else None
    return found[0] if found else None


def after_think(response: str) -> str:
    """Return the text after the last </think>; the whole text when there is none."""
    return response.rpartition("</think>")[2]


def thinks_then_boxes(response: str) -> bool:
    r"""Return True when a response begins with <think>, closes it, and has a \boxed{…} with a closing brace after that."""
    closed = response.find("</think>") if response.startswith("<think>") else -1
    box = response.find("\\boxed{", closed) if closed >= 0 else -1
    return box >= 0 and "}" in response[box:]

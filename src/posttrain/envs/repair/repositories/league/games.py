"""Games as [home, guest, home's goals, guest's goals]."""

from __future__ import annotations

WIN, DRAW = 3, 1


def points(game: list) -> dict[str, int]:
    """Return the points of both teams."""
    home, guest, scored, lost = game
    if scored == lost:
        return {home: DRAW, guest: DRAW}
    return {home: WIN, guest: 0} if scored > lost else {home: 0, guest: WIN}


def goals(games: list[list], team: str) -> list[int]:
    """Return the goals that a team has scored and taken in all games."""
    scored = taken = 0
    for home, guest, first, second in games:
        if team == home:
            scored, taken = scored + first, taken + second
        elif team == guest:
            scored, taken = scored + second, taken + first
    return [scored, taken]

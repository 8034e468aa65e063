"""The table of a league."""

from __future__ import annotations

from .games import goals, points


def table(games: list[list]) -> list[list]:
    """Return [team, points, difference of goals], by points, then by difference, then by name."""
    total: dict[str, int] = {}
    for game in games:
        for team, won in points(game).items():
            total[team] = total.get(team, 0) + won
    rows = []
    for team, won in total.items():
        scored, taken = goals(games, team)
        rows.append([team, won, scored - taken])
    return sorted(rows, key=lambda row: (-row[1], -row[2], row[0]))


def places(games: list[list]) -> dict[str, int]:
    """Return every team's place from 1; teams with equal points and difference share one, and the next is left out."""
    found: dict[str, int] = {}
    before: list = []
    place = 0
    for number, (team, won, difference) in enumerate(table(games)):
        if [won, difference] != before:
            place = number + 1
        found[team] = place
        before = [won, difference]
    return found


def streak(games: list[list], team: str) -> int:
    """Return the longest row of games of a team without a defeat."""
    now = longest = 0
    for game in games:
        if team not in game[:2]:
            continue
        now = now + 1 if points(game)[team] > 0 else 0
        longest = max(longest, now)
    return longest

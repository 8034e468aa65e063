"""Sokoban: push every box onto a target."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Unpack

from posttrain.config.environment import TextGameWording
from posttrain.envs.pictures import BLUE, BROWN, GREEN, GREY, RED, Tile, drawn
from posttrain.envs.text_game import Played, TextGame
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.registry import ENVS

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}  # rows grow downwards
SYMBOLS = {
    "wall": "#",
    "floor": "_",
    "target": "O",
    "box": "X",
    "box on target": "√",
    "player": "P",
    "player on target": "S",
}
TILES = {
    "wall": Tile(GREY),
    "floor": Tile(),
    "target": Tile(shapes=(("ring", RED),)),
    "box": Tile(shapes=(("square", BROWN),)),
    "box on target": Tile(shapes=(("square", GREEN),)),
    "player": Tile(shapes=(("disc", BLUE),)),
    "player on target": Tile(shapes=(("ring", RED), ("disc", BLUE))),
}
LEGEND = (
    "walls are dark grey cells, a target is a red ring, a box a brown square, a box on a target a green square, and you are a "
    "blue disc"
)
TURN_REWARD, PLACED_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0  # as in gym_sokoban
_TRIES = 200  # rooms drawn before giving up
_STEPS = 100  # longest random walk per pull

Cell = tuple[int, int]  # row, column


@ENVS.register("sokoban")
def sokoban(
    spec: EnvSpec,
    *,
    rows: int = 6,
    columns: int = 6,
    boxes: int = 1,
    pulls: int = 10,
    symbols: Mapping[str, str] | None = None,
    **wording: Unpack[TextGameWording],
) -> Env:
    """A solvable room of ``rows`` x ``columns`` cells, walls included.

    Reward per turn: -0.1, +1 for a box that moved onto a target, -1 for one that left it, +10 when every box is on one, which
    ends the episode.

    Args: pulls, how often the random walk that builds a room pulls a box away: more pulls make harder rooms; symbols replace
        those in SYMBOLS; wording is TextGame's, with 20 turns by default.
    Raises: ConfigError.
    Source: rewards as in gym_sokoban, actions and text as in ROLL's sokoban; the rooms are our own.
    """
    cells = max(rows - 2, 0) * max(columns - 2, 0)
    if boxes < 1 or pulls < 1 or cells < 2 * boxes + 2:
        what = (
            f"a room of {rows} x {columns} has {cells} cells within its walls, and {boxes} boxes, as many targets and the player "
            f"need {2 * boxes + 2} to move in"
        )
        raise ConfigError(
            Problem(what, fix="use a larger room, or fewer boxes (at least 1, and pulls of at least 1)", field="rows")
        )
    if unknown := sorted(set(symbols or {}) - set(SYMBOLS)):
        raise ConfigError(Problem(f"a room has no {unknown[0]!r} (known: {', '.join(SYMBOLS)})"))
    return TextGame(
        spec, Sokoban(rows, columns, boxes, pulls, {**SYMBOLS, **(symbols or {})}), usual_turns=20, **wording
    )


class Sokoban:
    """The rules of the game."""

    def __init__(self, rows: int, columns: int, boxes: int, pulls: int, symbols: Mapping[str, str]):
        self.actions = tuple(MOVES)
        signs = ", ".join(f"{sign} {name}" for name, sign in symbols.items())
        begin, rest = (
            f"You are in a store, a grid of {rows} x {columns} cells",
            "Push every box onto a target: you push a box by "
            "walking into it when the cell behind it is free, and you cannot pull. Each turn choose one of "
            f"{', '.join(MOVES)} and answer <answer>{self.actions[0]}</answer>, with your choice.",
        )
        self.instruction = f"{begin}: {signs}. {rest}"
        self.picture_instruction = f"{begin}, shown as a picture: {LEGEND}. {rest}"
        self._rows, self._columns, self._count, self._pulls = rows, columns, boxes, pulls
        self._symbols = symbols
        self.player: Cell
        self.walls: frozenset[Cell]
        self.boxes: frozenset[Cell]
        self.targets: frozenset[Cell]

    def begin(self, seed: int) -> str:
        drawn_by = random.Random(f"sokoban/{seed}")
        for _ in range(_TRIES):
            self._draw(drawn_by)
            if not self.boxes & self.targets:
                return self.state()
        raise RuntimeError(
            f"none of {_TRIES} rooms of {self._rows} x {self._columns} had all {self._count} boxes off their targets; use a "
            "larger room, fewer boxes or more pulls"
        )

    def act(self, action: str | None) -> Played:
        before, placed = (self.player, self.boxes), len(self.boxes & self.targets)
        if action is not None:
            self._move(*MOVES[action])
        change = len(self.boxes & self.targets) - placed
        solved = self.boxes == self.targets
        return Played(
            seen=self.state(),
            reward=TURN_REWARD + PLACED_REWARD * change + SOLVED_REWARD * solved,
            done=solved,
            success=solved,
            effective=(self.player, self.boxes) != before,
        )

    def state(self) -> str:
        """Render the grid, a line per row."""
        columns = range(self._columns)
        return "\n".join(
            "".join(self._symbols[self._kind((row, column))] for column in columns) for row in range(self._rows)
        )

    def picture(self, pixels_per_cell: int) -> str:
        """Draw the grid; see LEGEND."""
        kinds = [[self._kind((row, column)) for column in range(self._columns)] for row in range(self._rows)]
        return drawn(kinds, TILES, pixels_per_cell)

    def _move(self, down: int, right: int) -> None:
        ahead = (self.player[0] + down, self.player[1] + right)
        behind = (ahead[0] + down, ahead[1] + right)
        if ahead in self.walls or (ahead in self.boxes and (behind in self.walls or behind in self.boxes)):
            return
        if ahead in self.boxes:
            self.boxes = self.boxes - {ahead} | {behind}
        self.player = ahead

    def _kind(self, cell: Cell) -> str:
        on = " on target" if cell in self.targets else ""
        if cell == self.player:
            return f"player{on}"
        if cell in self.boxes:
            return f"box{on}"
        return "target" if on else "wall" if cell in self.walls else "floor"

    def _draw(self, drawn_by: random.Random) -> None:
        """Build a room backwards: boxes start on targets and are pulled away on a random walk, so that the reverse walk, which
        pushes, solves it."""
        inside = [(row, column) for row in range(1, self._rows - 1) for column in range(1, self._columns - 1)]
        floor = _walked(drawn_by, inside, at_least=max(2 * self._count + 2, round(0.6 * len(inside))))
        cells = ((row, column) for row in range(self._rows) for column in range(self._columns))
        self.walls = frozenset(cell for cell in cells if cell not in floor)
        *targets, self.player = drawn_by.sample(sorted(floor), self._count + 1)
        self.boxes = self.targets = frozenset(targets)
        pulled = 0
        for _ in range(_STEPS * self._pulls):
            pulled += self._step_back(*drawn_by.choice(list(MOVES.values())))
            if pulled == self._pulls:
                return

    def _step_back(self, down: int, right: int) -> bool:
        """Move the player, pulling the box behind, if there is one: a reversed push. Returns: True when a box was pulled."""
        ahead = (self.player[0] + down, self.player[1] + right)
        behind = (self.player[0] - down, self.player[1] - right)
        if ahead in self.walls or ahead in self.boxes:
            return False
        drags = behind in self.boxes
        if drags:
            self.boxes = self.boxes - {behind} | {self.player}
        self.player = ahead
        return drags


def _walked(drawn_by: random.Random, inside: list[Cell], at_least: int) -> set[Cell]:
    """Return the first ``at_least`` cells visited by a random walk: a connected floor."""
    cell, room = drawn_by.choice(inside), set(inside)
    floor = {cell}
    while len(floor) < at_least:
        down, right = drawn_by.choice(list(MOVES.values()))
        ahead = (cell[0] + down, cell[1] + right)
        if ahead in room:
            cell = ahead
            floor.add(cell)
    return floor

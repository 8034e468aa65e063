"""Frozen lake: cross the ice from the start to the goal without falling into a hole."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Unpack

from posttrain.config.environment import TextGameWording
from posttrain.envs.pictures import BLUE, GREEN, ICE, RED, Tile, drawn
from posttrain.envs.text_game import Played, TextGame
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.registry import ENVS

MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}  # rows grow downwards
TURNS = tuple(MOVES)  # gymnasium's action numbers: slippery ice moves to a neighbour in this circle
SYMBOLS = {"player": "P", "ice": "_", "hole": "O", "goal": "G", "fallen": "X", "arrived": "√"}

TILES = {
    "player": Tile(ICE, (("disc", RED),)),
    "ice": Tile(ICE),
    "hole": Tile(BLUE),
    "goal": Tile(GREEN),
    "fallen": Tile(BLUE, (("disc", RED),)),
    "arrived": Tile(GREEN, (("disc", RED),)),
}
LEGEND = "ice is light blue, a hole dark blue, the goal green, and you are a red disc"

Cell = tuple[int, int]  # row, column


@ENVS.register("frozen_lake")
def frozen_lake(
    spec: EnvSpec,
    *,
    size: int = 4,
    ice_share: float = 0.8,
    slippery: bool = True,
    map_seed: int | None = None,
    symbols: Mapping[str, str] | None = None,
    **wording: Unpack[TextGameWording],
) -> Env:
    """A lake of ``size`` x ``size`` cells with a reachable goal: reward 1 there, else 0; a hole ends the episode.

    Args: ice_share, the chance of a cell to be ice instead of a hole; slippery, a move goes in the chosen direction in one of
        three cases, and to either side in the others; map_seed gives all episodes one lake; symbols replace those in SYMBOLS;
        wording is TextGame's, with 20 turns by default.
    Raises: ConfigError.
    Source: the game is that of gymnasium's FrozenLake-v1, the maps and their text are as in ROLL's frozen_lake.
    """
    if size < 2 or not 0.0 < ice_share <= 1.0:
        what = f"a lake of size {size} with an ice_share of {ice_share:g} has no path from a start to a goal"
        raise ConfigError(Problem(what, fix="use size=4 and ice_share=0.8", field="size"))
    if unknown := sorted(set(symbols or {}) - set(SYMBOLS)):
        raise ConfigError(Problem(f"a lake has no {unknown[0]!r} (known: {', '.join(SYMBOLS)})", field="symbols"))
    game = FrozenLake(size, ice_share, slippery, map_seed, {**SYMBOLS, **(symbols or {})})
    return TextGame(spec, game, usual_turns=20, **wording)


class FrozenLake:
    """The rules of the game."""

    def __init__(self, size: int, ice_share: float, slippery: bool, map_seed: int | None, symbols: Mapping[str, str]):
        self.actions = TURNS
        signs = ", ".join(f"{sign} {name}" for name, sign in symbols.items())
        begin, rest = (
            f"You walk over a frozen lake, a grid of {size} x {size} cells",
            "Reach the goal without falling into a hole"
            f"{'; the ice is slippery, so a move may lead to the side' if slippery else ''}. Each turn choose one of "
            f"{', '.join(TURNS)} and answer <answer>{TURNS[2]}</answer>, with your choice.",
        )
        self.instruction = f"{begin}: {signs}. {rest}"
        self.picture_instruction = f"{begin}, shown as a picture: {LEGEND}. {rest}"
        self._size = size
        self._ice_share = ice_share
        self._slippery = slippery
        self._map_seed = map_seed
        self._symbols = symbols

    def begin(self, seed: int) -> str:
        self._random = random.Random(f"frozen_lake/{seed}")
        drawn_by = self._random if self._map_seed is None else random.Random(f"frozen_lake/{self._map_seed}")
        self.player, self.goal, self.holes = _lake(drawn_by, self._size, self._ice_share)
        return self.state()

    def act(self, action: str | None) -> Played:
        before = self.player
        if action is not None:
            turn = TURNS.index(action) + (self._random.choice((-1, 0, 1)) if self._slippery else 0)
            self.player = self._beside(before, TURNS[turn % len(TURNS)])
        arrived, fallen = self.player == self.goal, self.player in self.holes
        return Played(
            seen=self.state(),
            reward=float(arrived),
            done=arrived or fallen,
            success=arrived,
            effective=self.player != before,
        )

    def state(self) -> str:
        """Render the grid, a line per row."""
        cells = range(self._size)
        return "\n".join("".join(self._symbols[self._kind((row, column))] for column in cells) for row in cells)

    def picture(self, pixels_per_cell: int) -> str:
        """Draw the grid; see LEGEND."""
        cells = range(self._size)
        return drawn([[self._kind((row, column)) for column in cells] for row in cells], TILES, pixels_per_cell)

    def _beside(self, cell: Cell, move: str) -> Cell:
        """Return the next cell in a direction; at the edge, the cell itself."""
        down, right = MOVES[move]
        last = self._size - 1
        return min(max(cell[0] + down, 0), last), min(max(cell[1] + right, 0), last)

    def _kind(self, cell: Cell) -> str:
        if cell == self.player:
            return "arrived" if cell == self.goal else "fallen" if cell in self.holes else "player"
        return "goal" if cell == self.goal else "hole" if cell in self.holes else "ice"


def _lake(drawn_by: random.Random, size: int, ice_share: float) -> tuple[Cell, Cell, frozenset[Cell]]:
    """Draw start, goal and holes, repeatedly until a path connects start and goal."""
    cells = [(row, column) for row in range(size) for column in range(size)]
    while True:
        start, goal = drawn_by.sample(cells, 2)
        holes = frozenset(cell for cell in cells if cell not in (start, goal) and drawn_by.random() >= ice_share)
        if _connected(start, goal, holes, size):
            return start, goal, holes


def _connected(start: Cell, goal: Cell, holes: frozenset[Cell], size: int) -> bool:
    reached, border = {start}, [start]
    while border:
        row, column = border.pop()
        for down, right in MOVES.values():
            cell = (row + down, column + right)
            if cell not in reached and cell not in holes and 0 <= cell[0] < size and 0 <= cell[1] < size:
                reached.add(cell)
                border.append(cell)
    return goal in reached

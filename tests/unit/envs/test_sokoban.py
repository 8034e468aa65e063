"""Sokoban: moves and rewards by hand, and every room can be solved."""

from __future__ import annotations

import pytest

from posttrain.envs.sokoban import MOVES, SYMBOLS, Sokoban, sokoban
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

SPEC = EnvSpec(name="sokoban")


def room(text: str) -> Sokoban:
    """The game in the room that is drawn."""
    rows = text.split()
    game = Sokoban(len(rows), len(rows[0]), 1, 1, SYMBOLS)
    cells = {(row, column): sign for row, line in enumerate(rows) for column, sign in enumerate(line)}

    def at(signs: str) -> frozenset[tuple[int, int]]:
        return frozenset(cell for cell, sign in cells.items() if sign in signs)

    game.walls, game.boxes, game.targets = at("#"), at("X√"), at("O√S")
    [game.player] = at("PS")
    assert game.state() == "\n".join(rows)
    return game


def test_pushes_and_their_rewards() -> None:
    game = room("####### #PXOX_# #__O__# #######")
    first = game.act("Right")  # the box comes onto a target: -0.1 + 1
    assert first.seen.split()[1] == "#_P√X_#" and first.reward == pytest.approx(0.9) and first.effective
    blocked = game.act("Right")  # two boxes in a row
    assert (blocked.reward, blocked.effective) == (-0.1, False)
    assert game.act(None).reward == -0.1
    wall = game.act("Up")
    assert (wall.reward, wall.effective) == (-0.1, False)


def test_a_box_that_leaves_its_target_and_the_last_one() -> None:
    game = room("###### #P√O_# ######")
    left = game.act("Right")  # off one target, onto the other: -0.1 - 1 + 1
    assert left.reward == pytest.approx(-0.1) and not left.done and left.seen.split()[1] == "#_S√_#"
    game = room("##### #P√_# #####")
    assert game.act("Right").reward == pytest.approx(-1.1)
    game = room("##### #PXO# #####")
    solved = game.act("Right")
    assert solved.reward == pytest.approx(10.9) and solved.done and solved.success  # -0.1 + 1 + 10


def test_every_room_can_be_solved() -> None:
    for seed in range(30):
        game, again = Sokoban(6, 6, 1, 10, SYMBOLS), Sokoban(6, 6, 1, 10, SYMBOLS)
        assert game.begin(seed) == again.begin(seed)
        assert len(game.boxes) == len(game.targets) == 1 and not game.boxes & game.targets
        start = (game.player, game.boxes)
        reached, border, solved = {start}, [start], False
        while border and not solved:
            state = border.pop()
            for move in MOVES:
                game.player, game.boxes = state
                solved |= game.act(move).success
                after = (game.player, game.boxes)
                if after not in reached:
                    reached.add(after)
                    border.append(after)
        assert solved, seed


def test_its_turns_and_what_makes_no_sense() -> None:
    env = sokoban(SPEC, rows=6, columns=7, max_turns=2, format_penalty=-0.15, symbols={"wall": "W", "player": "C"})
    text = env.reset(2).messages[0]["content"]
    assert "grid of 6 x 7 cells: W wall" in text and "C player" in text
    assert env.step("Up").reward == pytest.approx(-0.25)  # -0.1 - 0.15
    assert env.step("<answer>up</answer>").stop == "max_turns"
    with pytest.raises(ConfigError, match="a room of 4 x 4 has 4 cells within its walls, and 2 boxes"):
        sokoban(SPEC, rows=4, columns=4, boxes=2)
    with pytest.raises(ConfigError, match="a room has no 'exit'"):
        sokoban(SPEC, symbols={"exit": "E"})
    crammed = sokoban(SPEC, rows=4, columns=4)
    with pytest.raises(RuntimeError, match="none of 200 rooms of 4 x 4 had all 1 boxes off their targets"):
        crammed.reset(0)

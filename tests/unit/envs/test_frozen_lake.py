"""Frozen lake: its maps, its moves, and the same transitions as gymnasium's."""

from __future__ import annotations

from collections import Counter

import pytest

from posttrain.envs.frozen_lake import MOVES, SYMBOLS, TURNS, FrozenLake, _connected, frozen_lake
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

SPEC = EnvSpec(name="frozen_lake")


def lake(*, slippery: bool = False) -> FrozenLake:
    """P _ O / _ O _ / _ _ G, rows from the top."""
    game = FrozenLake(3, 0.8, slippery, None, SYMBOLS)
    game.begin(0)
    game.player, game.goal, game.holes = (0, 0), (2, 2), frozenset({(0, 2), (1, 1)})
    return game


def test_a_walk_to_the_goal() -> None:
    game = lake()
    assert game.state() == "P_O\n_O_\n__G"
    played = [game.act(move) for move in ("Left", "Down", None, "Down", "Right", "Right")]
    assert [one.effective for one in played] == [False, True, False, True, True, True]
    assert [one.reward for one in played] == [0, 0, 0, 0, 0, 1]
    assert played[1].seen == "__O\nPO_\n__G"
    assert played[-1].done and played[-1].success and played[-1].seen == "__O\n_O_\n__√"


def test_a_hole_ends_it_without_a_reward() -> None:
    game = lake()
    game.act("Right")
    fallen = game.act("Down")
    assert (fallen.reward, fallen.done, fallen.success, fallen.seen) == (0.0, True, False, "__O\n_X_\n__G")


def test_slippery_ice_leads_to_a_side_in_two_of_three_cases() -> None:
    landed = Counter[tuple[int, int]]()
    game = lake(slippery=True)
    for _ in range(3000):
        game.player = (1, 0)
        game.act("Right")
        landed[game.player] += 1
    assert set(landed) == {(1, 1), (0, 0), (2, 0)}  # right, up, down
    assert all(900 < count < 1100 for count in landed.values())  # 1000 each, +- 4 standard deviations (26)


def test_every_lake_has_a_way_and_seeds_repeat() -> None:
    seen = set()
    for seed in range(100):
        game, again = (FrozenLake(4, 0.5, False, None, SYMBOLS) for _ in range(2))
        assert game.begin(seed) == again.begin(seed)
        seen.add(game.state())
        assert game.player != game.goal and not {game.player, game.goal} & game.holes
        assert _connected(game.player, game.goal, game.holes, 4)
    assert len(seen) > 90
    assert not _connected((0, 0), (2, 2), frozenset({(0, 1), (1, 0)}), 3)
    one = {FrozenLake(4, 0.8, True, 7, SYMBOLS).begin(seed) for seed in range(5)}
    assert len(one) == 1  # map_seed


def test_the_transitions_are_those_of_gymnasium() -> None:
    toy_text = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    theirs = toy_text.FrozenLakeEnv(desc=["SFF", "FFF", "FFG"], is_slippery=False)
    for number, move in enumerate(TURNS):
        for cell in [(row, column) for row in range(3) for column in range(3)]:
            if cell == (2, 2):
                continue
            game = lake()
            game.player, game.holes = cell, frozenset()
            played = game.act(move)
            [(_, state, reward, done)] = theirs.P[cell[0] * 3 + cell[1]][number]
            assert (divmod(int(state), 3), float(reward), done) == (game.player, played.reward, played.done)
    assert list(MOVES) == ["Left", "Down", "Right", "Up"]


def test_its_text_and_what_makes_no_sense() -> None:
    env = frozen_lake(SPEC, slippery=False, symbols={"ice": "."}, max_turns=3)
    text = env.reset(5).messages[0]["content"]
    assert "grid of 4 x 4 cells: P player, . ice, O hole" in text and "slippery" not in text and "_" not in text
    assert env.step("<answer>jump</answer>").reward == 0.0
    with pytest.raises(ConfigError, match=r"a lake of size 1 with an ice_share of 0\.8 has no path"):
        frozen_lake(SPEC, size=1)
    with pytest.raises(ConfigError, match="ice_share of 0 has no path"):
        frozen_lake(SPEC, ice_share=0.0)
    with pytest.raises(ConfigError, match=r"a lake has no 'rock' \(known: player, ice"):
        frozen_lake(SPEC, symbols={"rock": "#"})

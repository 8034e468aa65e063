"""Pictures of games: cells by their colours, messages around them, and what cannot be shown."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from posttrain.envs.frozen_lake import SYMBOLS, FrozenLake, frozen_lake
from posttrain.envs.guess_number import guess_number
from posttrain.envs.sokoban import sokoban
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

SPEC = EnvSpec(name="game")
ICE, BLUE, GREEN, RED = (0xCF, 0xE8, 0xFF), (0x20, 0x40, 0xD0), (0x20, 0x90, 0x40), (0xD0, 0x20, 0x20)


def decoded(url: str) -> Image.Image:
    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(BytesIO(base64.b64decode(content)))


def test_a_lake_by_its_colours() -> None:
    game = FrozenLake(2, 0.8, False, None, SYMBOLS)
    game.player, game.goal, game.holes = (0, 0), (1, 1), frozenset({(0, 1)})
    image = decoded(game.picture(16))
    assert image.size == (32, 32)
    # Middles of the four cells: the player on ice, a hole, ice, the goal; and beside the player's disc, ice.
    places = [(8, 8), (24, 8), (8, 24), (24, 24), (2, 2)]
    assert [image.getpixel(place) for place in places] == [RED, BLUE, ICE, GREEN, ICE]
    game.player = (0, 1)
    assert [decoded(game.picture(16)).getpixel(place) for place in [(24, 8), (18, 2)]] == [RED, BLUE]  # fallen


def test_messages_hold_the_picture_between_the_texts() -> None:
    template = "Turn {turn_idx}: {observation} {actions_left} left"
    env: Any = sokoban(SPEC, pictures=True, template=template, max_turns=3, instruction="Go.")
    start = env.reset(1)
    before, picture, behind = start.messages[0]["content"]
    assert (before["text"], behind["text"]) == ("Go.\nTurn 1: ", " 3 left")
    assert decoded(picture["image"]).size == (6 * 32, 6 * 32)
    assert "_" in start.state_key  # states are compared as texts
    step = env.step("no action")
    assert step.messages[0]["content"][1] == picture  # the same state, the same file
    assert [part["type"] for part in step.messages[0]["content"]] == ["text", "image", "text"]
    assert (
        "shown as a picture: walls are dark grey"
        in sokoban(SPEC, pictures=True).reset(1).messages[0]["content"][0]["text"]
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "settings", "problem"),
    [
        (guess_number, {}, "this game has no pictures"),
        (sokoban, {"template": "Move!"}, "the template of a turn has 0 places for its picture"),
        (sokoban, {"template": "{state} {observation}"}, "has 2 places"),
        (frozen_lake, {"pixels_per_cell": 2}, "a cell of 2 pixels"),
    ],
)
def test_what_cannot_be_shown(make: Any, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(SPEC, pictures=True, **settings)

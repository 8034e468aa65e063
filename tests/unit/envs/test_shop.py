"""The text shop, with a scripted customer."""

from __future__ import annotations

import re

import pytest

from posttrain.envs.shop import Order, Product, Shop, catalogue, score, search, shop
from posttrain.errors import ConfigError
from posttrain.interfaces.env import EnvSpec

SPEC = EnvSpec(name="shop")
PRODUCT = Product(
    number="b1", category="kitchen", kind="kettle", brand="Alder", attributes=("foldable", "waterproof", "non slip"),
    colors=("red", "teal"), sizes=("1 litre", "2 litre"), price=25.0,
)  # fmt: skip
ORDER = Order(
    category="kitchen", kind="kettle", attributes=("foldable", "non slip"), color="red", size="1 litre", limit=30.0
)


def test_a_purchase_is_worth_what_it_meets() -> None:
    right = {"color": "red", "size": "1 litre"}
    assert score(ORDER, PRODUCT, right) == 1.0  # 2 attributes, color, size, price: 5 of 5
    assert score(ORDER, PRODUCT, {"color": "teal"}) == 3 / 5  # 2 attributes and the price
    pan = Product(
        **{name: getattr(PRODUCT, name) for name in PRODUCT.__slots__} | {"kind": "frying pan", "price": 31.0}
    )
    assert score(ORDER, pan, right) == 0.5 * 4 / 5  # of the category, and too expensive
    assert score(
        ORDER, Product(**{name: getattr(pan, name) for name in pan.__slots__} | {"category": "garden"}), right
    ) == (pytest.approx(0.1 * 4 / 5))


def test_every_order_can_be_met_by_searching_and_clicking() -> None:
    for seed in range(5):
        env = shop(SPEC)
        first = env.reset(seed).messages[0]["content"]
        assert env.reset(seed).messages[0]["content"] == first
        asked = re.search(
            r"for a (.+) that is (.+) and (.+), in color (\S+) and size (.+), at a price below (\S+) dol", first
        )
        assert asked is not None
        kind, one, other, color, size, limit = asked.groups()
        wanted = next(
            each
            for each in catalogue(500)
            if each.kind == kind and {one, other} <= {*each.attributes} and color in each.colors and size in each.sizes
            and each.price <= float(limit)
        )  # fmt: skip
        page = _say(env, f"search[{wanted.title}]")
        while f"click[{wanted.number}]" not in page:
            page = _say(env, "click[next >]")
        for button in (wanted.number, color, size):
            _say(env, f"click[{button}]")
        step = env.step("<answer>click[buy now]</answer>")
        assert (step.reward, step.done, step.stop) == (1.0, True, "solved")


def _say(env, action: str) -> str:
    step = env.step(f"<answer>{action}</answer>")
    assert not step.done and step.reward == 0.0
    return str(step.messages[0]["content"])


def test_buttons_of_other_pages_do_nothing_and_count_as_turns() -> None:
    env = shop(SPEC, format_penalty=-0.05)
    start = env.reset(1).messages[0]["content"].partition("\n")[2]  # behind the game's own instruction
    for action in ("click[buy now]", "click[b00001]", "look around"):
        assert _say(env, action) == start
    assert env.step("no action").reward == -0.05
    metrics = env.close()
    assert metrics["num_actions"] == 4 and metrics["action_is_valid"] == 3 / 4 and metrics["action_is_effective"] == 0


def test_search_prefers_rare_words_and_pages_hold_five() -> None:
    products = catalogue(50)
    found = search(products, products[7].title)
    assert found[0].title == products[7].title
    assert search(products, "zzz") == ()
    game = Shop(products)
    game.begin(0)
    shown = game.act("search[waterproof]").seen
    assert shown.count(" | $") == 5 and "click[next >]" in shown and "click[< prev]" not in shown
    assert "click[< prev]" in game.act("click[next >]").seen


def test_a_shop_needs_products() -> None:
    with pytest.raises(ConfigError, match="use at least 10"):
        shop(SPEC, products=3)

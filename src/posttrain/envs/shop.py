"""A text shop: search, look at products, choose their options and buy the one that an order describes."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import Unpack

from posttrain.config.environment import TextGameWording
from posttrain.envs.text_game import Played, TextGame
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.env import Env, EnvSpec
from posttrain.registry import ENVS

# Kinds of products, by category.
KINDS = {
    "clothing": ("t-shirt", "jacket", "hiking boots", "running shoes", "sweater", "raincoat"),
    "kitchen": ("kettle", "frying pan", "coffee grinder", "lunch box", "cutting board", "water bottle"),
    "office": ("desk lamp", "notebook", "office chair", "fountain pen", "monitor stand", "backpack"),
    "garden": ("watering can", "garden hose", "plant pot", "pruning shears", "bird feeder", "solar light"),
}
ATTRIBUTES = (
    "lightweight", "waterproof", "machine washable", "non slip", "heavy duty", "easy to clean", "space saving", "long lasting",
    "eco friendly", "dishwasher safe", "foldable", "noise free",
)  # fmt: skip
COLORS = ("black", "white", "navy", "olive", "red", "grey", "sand", "teal")
SIZES = {
    "clothing": ("small", "medium", "large", "x-large"),
    "kitchen": ("0.5 litre", "1 litre", "2 litre"),
    "office": ("compact", "standard", "wide"),
    "garden": ("3 metre", "5 metre", "10 metre"),
}
BRANDS = ("Alder", "Brightway", "Corvo", "Dunlin", "Everlow", "Fenwick", "Galen", "Harrow")
SEARCH, BACK, NEXT, PREVIOUS, BUY = "search", "back to search", "next >", "< prev", "buy now"
_PAGE = 5  # products of a page
_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of the catalogue."""

    number: str
    category: str
    kind: str
    brand: str
    attributes: tuple[str, ...]
    colors: tuple[str, ...]
    sizes: tuple[str, ...]
    price: float

    @property
    def title(self) -> str:
        return f"{self.brand} {self.kind}, {', '.join(self.attributes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The product that the customer wants."""

    category: str
    kind: str
    attributes: tuple[str, ...]
    color: str
    size: str
    limit: float

    def __str__(self) -> str:
        return (
            f"I am looking for a {self.kind} that is {' and '.join(self.attributes)}, in color {self.color} and size "
            f"{self.size}, at a price below {self.limit:.2f} dollars."
        )


@ENVS.register("shop")
def shop(spec: EnvSpec, *, products: int = 500, **wording: Unpack[TextGameWording]) -> Env:
    """A shop of ``products`` products. ``search[words]`` on the first page, ``click[button]`` on any; buying ends the episode.

    Reward of the purchase, 0 to 1: 1 for a product of the wanted kind, 0.5 for one of its category, else 0.1, times the share of
    the wanted attributes, options and price that it meets; 0 for every other turn. The catalogue is the same in every run, the
    order is drawn by the episode's seed.

    Args: wording is TextGame's, with 15 turns by default.
    Raises: ConfigError.
    Source: the task and its reward are those of WebShop (arXiv:2207.01206, equation 1); products and pages are our own.
    """
    if products < 10:
        raise ConfigError(Problem(f"a shop of {products} products", fix="use at least 10", field="products"))
    return TextGame(spec, Shop(catalogue(products)), usual_turns=15, **wording)


class Shop:
    """The rules of the shop."""

    actions: tuple[str, ...] = ()
    instruction = (
        "You are shopping on the web. Find the product that the instruction asks for, choose its options and buy it. An action "
        "is search[words], where there is a search bar, or click[button], with a button of the page. Answer "
        "<answer>search[words]</answer> or <answer>click[button]</answer>."
    )

    def __init__(self, products: Sequence[Product]):
        self._products = products

    def begin(self, seed: int) -> str:
        self._order = order(random.Random(f"shop/{seed}"), self._products)
        self._found: Sequence[Product] = ()
        self._page = 0
        self._product: Product | None = None
        self._chosen: dict[str, str] = {}  # color and size
        self._searching = True
        return self.state()

    def act(self, action: str | None) -> Played:
        before = self.state()
        match = None if action is None else _ACTION.fullmatch(action)
        if match is None:
            return Played(seen=before, reward=0.0, effective=False)
        verb, words = match[1].lower(), match[2].strip().lower()
        if verb == SEARCH:
            if self._searching:
                self._found, self._page, self._searching = search(self._products, words), 0, False
        elif words == BUY and self._product is not None:
            worth = score(self._order, self._product, self._chosen)
            return Played(seen="Thank you for your purchase.", reward=worth, done=True, success=worth >= 1.0)
        elif words in self._buttons():
            self._click(words)
        return Played(seen=self.state(), reward=0.0, effective=self.state() != before)

    def state(self) -> str:
        """Render the page."""
        if self._searching:
            page = "Search"
        elif self._product is not None:
            page = _item(self._product, self._chosen)
        else:
            shown = [f"{each.number} | {each.title} | ${each.price:.2f}" for each in self._shown()]
            page = f"Page {self._page + 1} ({len(self._found)} results)\n" + "\n".join(shown or ["Nothing was found."])
        actions = ["search[<words>]"] if self._searching else [f"click[{button}]" for button in self._buttons()]
        return f"Instruction: {self._order}\n{page}\nAvailable actions: {', '.join(actions)}"

    def _shown(self) -> Sequence[Product]:
        return self._found[self._page * _PAGE : (self._page + 1) * _PAGE]

    def _buttons(self) -> list[str]:
        if self._searching:
            return []
        if self._product is not None:
            return [BACK, PREVIOUS, *self._product.colors, *self._product.sizes, BUY]
        turn = [*([PREVIOUS] if self._page else []), *([NEXT] if len(self._found) > (self._page + 1) * _PAGE else [])]
        return [BACK, *turn, *(each.number for each in self._shown())]

    def _click(self, button: str) -> None:
        if button == BACK:
            self._searching, self._product, self._chosen = True, None, {}
        elif button in (NEXT, PREVIOUS):
            if self._product is None:
                self._page += 1 if button == NEXT else -1
            self._product, self._chosen = None, {}
        elif self._product is None:
            self._product = next(each for each in self._shown() if each.number == button)
        else:
            self._chosen["color" if button in self._product.colors else "size"] = button


def _item(product: Product, chosen: dict[str, str]) -> str:
    options = (("color", product.colors), ("size", product.sizes))
    listed = "\n".join(f"{name}: {', '.join(values)} (chosen: {chosen.get(name, 'none')})" for name, values in options)
    return f"{product.title}\nPrice: ${product.price:.2f}\n{listed}"


def score(wanted: Order, product: Product, chosen: dict[str, str]) -> float:
    """The reward of a purchase, 0 to 1 (see ``shop``)."""
    kind = 1.0 if product.kind == wanted.kind else 0.5 if product.category == wanted.category else 0.1
    met = len({*wanted.attributes} & {*product.attributes})
    met += (chosen.get("color") == wanted.color) + (chosen.get("size") == wanted.size) + (product.price <= wanted.limit)
    return kind * met / (len(wanted.attributes) + 3)


@lru_cache(maxsize=4)
def catalogue(products: int) -> tuple[Product, ...]:
    """Draw the products of a shop, equal for equal numbers."""
    drawn, made = random.Random(f"shop/catalogue/{products}"), []
    for number in range(products):
        category = drawn.choice(sorted(KINDS))
        made.append(
            Product(
                number=f"b{number:05d}",
                category=category,
                kind=drawn.choice(KINDS[category]),
                brand=drawn.choice(BRANDS),
                attributes=tuple(drawn.sample(ATTRIBUTES, 3)),
                colors=tuple(drawn.sample(COLORS, 3)),
                sizes=tuple(drawn.sample(SIZES[category], 2)),
                price=drawn.randint(500, 9999) / 100,
            )
        )
    return tuple(made)


def order(drawn: random.Random, products: Sequence[Product]) -> Order:
    """Draw an order that one of the products meets."""
    product = drawn.choice(products)
    return Order(
        category=product.category,
        kind=product.kind,
        attributes=tuple(drawn.sample(product.attributes, 2)),
        color=drawn.choice(product.colors),
        size=drawn.choice(product.sizes),
        limit=float(int(product.price / 10 + 1) * 10),
    )


def search(products: Sequence[Product], words: str) -> tuple[Product, ...]:
    """The products that share words with a query, those with more and rarer ones first."""
    texts = [_words(f"{each.title} {each.category} {' '.join(each.colors)}") for each in products]
    common = Counter(word for text in texts for word in text)
    weights = {word: log(1 + len(products) / common[word]) for word in _words(words) if word in common}
    worth = [sum(weight for word, weight in weights.items() if word in text) for text in texts]
    best = sorted(range(len(products)), key=lambda index: (-worth[index], index))
    return tuple(products[index] for index in best if worth[index] > 0)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))

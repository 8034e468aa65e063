"""Draws from several sources by their weights."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from posttrain.data.weighted_loader import WeightedLoader
from posttrain.errors import ConfigError
from posttrain.records.texts import Text

SIZES = {"small": 3, "large": 300}


def texts() -> list[Text]:
    ids, learned = np.array([1, 2], np.int32), np.array([False, True])
    return [
        Text(name=f"{source}:{row}", source=source, token_ids=ids, learned=learned)
        for source, rows in SIZES.items()
        for row in range(rows)
    ]


def loader(weights: dict[str, float], seed: int = 1) -> WeightedLoader:
    return WeightedLoader(texts(), 10, weights, seed=seed)


def drawn(source: WeightedLoader, steps: int) -> list[str]:
    return [text.name for _ in range(steps) for text in source.next()]


def test_a_source_has_its_share_whatever_its_size() -> None:
    names = drawn(loader({"small": 3.0, "large": 1.0}), 900)
    small = [name for name in names if name.startswith("small")]
    # 9000 draws of probability 3/4: mean 6750, standard deviation 41
    assert abs(len(small) - 6750) < 5 * 41
    # within a source all rows alike: 3 of probability 1/3, standard deviation of each below sqrt(6750 * 2/9) = 39
    assert all(abs(count - len(small) / 3) < 5 * 39 for count in Counter(small).values())
    assert (
        len(set(names)) == 303
    )  # 2250 draws of 300 rows miss one with probability 300 * e^-7.5 = 0.16, not with this seed


def test_an_epoch_is_as_many_draws_as_rows_and_another_one_each_time() -> None:
    source = loader({"small": 1.0, "large": 1.0})
    assert source.steps_per_epoch == 30  # 303 // 10
    first, second = drawn(source, 30), drawn(source, 30)
    assert source.epochs == 2.0 and first != second
    assert drawn(loader({"small": 2.0, "large": 2.0}), 60) == first + second  # the scale of weights is nothing
    assert drawn(loader({"small": 1.0, "large": 1.0}, seed=2), 30) != first


def test_a_position_is_resumed_and_one_of_other_weights_is_refused() -> None:
    source = loader({"small": 1.0, "large": 1.0})
    drawn(source, 37)
    state = source.state()
    expected = drawn(source, 40)
    again = loader({"small": 1.0, "large": 1.0})
    again.restore(state)
    assert drawn(again, 40) == expected
    with pytest.raises(ConfigError) as caught:
        loader({"small": 1.0, "large": 3.0}).restore(state)
    assert [problem.field for problem in caught.value.problems] == ["data.source_weights"]


def test_a_source_without_rows_is_named() -> None:
    with pytest.raises(ConfigError, match="the source third has no row to draw from"):
        loader({"small": 1.0, "third": 1.0})

"""A loader that draws from several sources by their weights, whatever their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.data.loader import ShuffledLoader
from posttrain.errors import ConfigError, Problem
from posttrain.records.texts import Text

FIELD = "data.source_weights"


class WeightedLoader(ShuffledLoader[Text]):
    """A StepLoader whose draws are independent, with replacement: a source by its weight, then a row of it, all alike.

    An epoch is as many draws as there are rows, of which those that do not fill the last step are left out. The draws of an epoch
    depend on (seed, epoch) alone.

    Raises: ConfigError when a source has no row.
    Source: SkyRL, skyrl/train/dataset/samplers.py, DataMixingSampler, whose distribution this is.
    """

    def __init__(self, texts: Sequence[Text], per_step: int, weights: Mapping[str, float], *, seed: int):
        total = sum(weights.values())
        self._weights = {name: weight / total for name, weight in weights.items()}
        self._rows = {name: [i for i, text in enumerate(texts) if text.source == name] for name in weights}
        if problems := [_no_rows(name) for name, rows in self._rows.items() if not rows]:
            raise ConfigError(problems)
        super().__init__(texts, per_step, seed=seed, shuffle=True, kind="sequences")

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "weights": self._weights}

    def _fields(self) -> tuple[str, ...]:
        return (*super()._fields(), FIELD)

    def _order_of(self, epoch: int) -> list[int]:
        """Return the indices of an epoch's draws."""
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        sources = list(self._rows.values())
        chosen = generator.choice(len(sources), size=len(self._items), p=list(self._weights.values()))
        places = generator.random(len(self._items))
        drawn = zip((sources[source] for source in chosen), places, strict=True)
        return [rows[int(place * len(rows))] for rows, place in drawn]


def _no_rows(name: str) -> Problem:
    what = (
        f"the source {name} has no row to draw from: data.overlong and data.max_rows leave none, or its files hold none"
    )
    return Problem(what, fix="remove it from data.train_sources and data.source_weights, or add rows", field=FIELD)

"""Properties of every tuning method of the registry, with its default settings: rows do not touch each other, and a better
completion is never punished for being likelier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.registry import TUNE_METHODS

METHODS = TUNE_METHODS.names()


def inputs_of(method: str, seed: int, rows: int = 6) -> dict[str, Tensor]:
    """Draw everything that a method may read, by the names of its parameters."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=generator, dtype=torch.float64)

    found = {
        name: draw(1, 9).floor() if name.endswith("tokens") else draw(-40, -0.5)
        for name in TUNE_METHODS.describe(method).inputs
    }
    drawn = {"margins": draw(0, 2), "desirable": torch.arange(rows) % 2 == 0, "kl": torch.tensor(1.5).double()}
    return found | {name: value for name, value in drawn.items() if name in found}


def losses_of(method: str, inputs: dict[str, Tensor]) -> Tensor:
    found: Tensor = TUNE_METHODS.get(method)(**inputs)[0]
    return found


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_rows_do_not_touch_each_other(method: str, seed: int) -> None:
    """A step that is cut or shuffled has the same losses, row by row."""
    inputs = inputs_of(method, seed)
    whole = losses_of(method, inputs)
    assert whole.shape == (6,) and torch.isfinite(whole).all()
    for rows in ([4, 0, 5, 2, 1, 3], [3], [1, 2]):
        part = {name: value if value.ndim == 0 else value[rows] for name, value in inputs.items()}
        assert torch.allclose(losses_of(method, part), whole[rows], rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_a_likelier_good_completion_and_a_less_likely_bad_one_never_cost_more(method: str, seed: int) -> None:
    inputs = inputs_of(method, seed)
    learned = [name for name in inputs if name.endswith(("logps", "scores")) and not name.startswith("ref_")]
    for name in learned:
        inputs[name].requires_grad_()
    losses_of(method, inputs).sum().backward()
    for name in learned:
        gradient = inputs[name].grad
        assert gradient is not None and gradient.any()
        # Downhill is up for a good completion. kto has both kinds in one column.
        good = inputs["desirable"] if "desirable" in inputs else torch.full((6,), name.startswith("chosen"))
        assert (gradient[good] <= 0).all() and (gradient[~good] >= 0).all()

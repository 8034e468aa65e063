"""AdamW in one pass makes torch's updates, with torch's state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from posttrain.backends.torch_training.one_pass_adamw import one_pass
from posttrain.libraries.cpu_kernels import load
from posttrain.libraries.cpu_kernels.load import load_update_kernels, without_kernels

pytestmark = pytest.mark.skipif(isinstance(load_update_kernels(torch.float32), str), reason="no kernels")
SETTINGS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "fused": True}


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run of another test has set, and afterwards again."""
    monkeypatch.setattr(load, "_allowed", True)


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in ((5, 7), (1,), (40_001,))]


def gradients(of: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for each in of:
        each.grad = torch.randn(each.shape, generator=generator)
    of[1].grad = None if number == 1 else of[1].grad  # one without a gradient


def test_three_updates() -> None:
    """Begun by torch, continued in one pass, and the other way around; clipped in the second."""
    results: dict[str, list[Tensor]] = {}
    for order in ("ttt", "ooo", "too", "oot"):
        own = parameters()
        copies = {each: each.detach().bfloat16() for each in own[::2]}
        optimizer = torch.optim.AdamW(own, **SETTINGS)
        for number, by in enumerate(order):
            gradients(own, number)
            clip = 0.25 if number == 1 else 1.0
            if by == "o":
                assert one_pass(optimizer, copies, clip)
            else:
                for each in own:
                    if each.grad is not None:
                        each.grad *= clip
                optimizer.step()
        if order[-1] == "o":
            assert all(torch.equal(copy, each.detach().bfloat16()) for each, copy in copies.items())
        states = [optimizer.state[each] for each in own]
        results[order] = [
            value.detach() for each, state in zip(own, states, strict=True) for value in (each, *state.values())
        ]
        assert [int(state["step"]) for state in states] == [3, 2, 3]
        assert list(states[0]) == ["step", "exp_avg", "exp_avg_sq"]
    for order in ("ooo", "too", "oot"):
        for found, expected in zip(results[order], results["ttt"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_it_leaves_to_torch() -> None:
    own = parameters()
    before = [each.detach().clone() for each in own]
    gradients(own, 0)
    others = [torch.optim.SGD(own), torch.optim.AdamW(own, amsgrad=True), torch.optim.AdamW(own, maximize=True)]
    assert not any(one_pass(optimizer, {}, 1.0) for optimizer in others)
    with without_kernels():
        assert not one_pass(torch.optim.AdamW(own), {}, 1.0)
    wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
    assert not one_pass(torch.optim.AdamW([*own, wide]), {}, 1.0)
    assert all(torch.equal(each, old) for each, old in zip(own, before, strict=True))

"""A checkpoint before the end of a rented machine: when the longest step and the margin no longer fit."""

from __future__ import annotations

import pytest

from posttrain.run.expiry import ENDS, Expiry


@pytest.mark.parametrize("name", ENDS)
def test_it_is_near_when_the_longest_step_and_the_margin_do_not_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is at 1000 s; the longest step took 100 s and the margin is 60 s: near from 840 s on, and past the end too."""
    said: list[str] = []
    monkeypatch.setenv(name, "1000")
    times = iter([0.0, 839.0, 840.0, 999.0, 1001.0])
    expiry = Expiry(60.0, said.append, lambda: next(times))
    answers = [expiry.near(step_s) for step_s in (100.0, 10.0, 10.0, 1.0, 1.0)]
    assert answers == [False, False, True, True, True]
    assert said == [f"{name}: this machine ends in 160 s; every step is saved from here on"]


def test_it_is_never_near_without_an_end_or_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDS:
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    assert not Expiry(60.0, said.append).near(1.0)
    monkeypatch.setenv(ENDS[0], "1")
    assert not Expiry(None, said.append).near(1.0)
    assert Expiry(0.0, said.append).near(1.0) and said.pop()
    monkeypatch.setenv(ENDS[0], "tomorrow")
    broken = Expiry(60.0, said.append)
    assert not broken.near(1.0) and not broken.near(1.0)
    assert len(said) == 1 and "'tomorrow' is no time in Unix seconds" in said[0]

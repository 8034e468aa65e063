"""Threads of a run on a CPU."""

from __future__ import annotations

import pytest

from posttrain.libraries import cores


@pytest.mark.parametrize(
    ("configured", "variable", "threads"),
    [(3, "2", 3), (None, "2", 2), (None, "2,4", 2), (None, None, 8), (None, "", 8), (None, "0", 8), (None, "all", 8)],
)
def test_the_configuration_comes_before_the_variable_and_the_variable_before_the_cores(
    monkeypatch: pytest.MonkeyPatch, configured: int | None, variable: str | None, threads: int
) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: 8)
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cores.threads_of_a_process(configured) == threads

"""The environment that libraries read when they are imported."""

from __future__ import annotations

import pytest

from posttrain.cli import process
from posttrain.config import RunConfig


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "available_cores", lambda: 4)


def prepared(environment: dict[str, str], **placement: object) -> dict[str, str]:
    values = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "placement": placement}
    process.prepare(RunConfig.model_validate(values), environment)
    return environment


def test_a_cpu_run_gets_a_thread_per_core_and_short_waits() -> None:
    assert prepared({}, device="cpu") == {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "4",
        "GOMP_SPINCOUNT": "1000",
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def test_a_run_of_some_cores_gets_as_many_threads() -> None:
    assert prepared({}, device="cpu", cpu_threads=2)["OMP_NUM_THREADS"] == "2"


def test_what_the_user_has_set_stays() -> None:
    mine = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "active",
        "TOKENIZERS_PARALLELISM": "true",
        "THP_MEM_ALLOC_ENABLE": "0",
    }
    assert prepared(dict(mine), device="cpu") == mine


def test_an_accelerator_run_keeps_its_threads() -> None:
    assert prepared({}, device="cuda") == {"TOKENIZERS_PARALLELISM": "false"}

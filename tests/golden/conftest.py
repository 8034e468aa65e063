"""Golden cases: ``@pytest.mark.golden("kl.json")`` runs a test once per case of that file, as the argument ``case``.

The files hold what verl 0.9.1 and SkyRL 0.3.0 computed; ``about`` in each says by which function and formula. Where
upstream is wrong, ``outputs`` is what is wanted and ``upstream_outputs`` what upstream gives. ``null`` in an expected value
is a masked place that is not compared; ``also_accept`` holds other outputs that are right too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    content: dict[str, Any]
    rtol: float
    atol: float

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def right(self, column: str) -> list[Any]:
        """The expected output of that name, and the others that are right too."""
        return [self.outputs[column], *self.content.get("also_accept", {}).get(column, [])]

    @property
    def inputs(self) -> dict[str, Any]:
        return self.content["inputs"]

    @property
    def outputs(self) -> dict[str, Any]:
        return self.content["outputs"]

    @property
    def params(self) -> dict[str, Any]:
        return self.content.get("params") or {}

    def tensor(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(numbers(self.inputs[name]), dtype=dtype)

    def mask(self) -> Tensor:
        return torch.tensor(self.inputs["mask"]).bool()

    def matches(self, actual: Any, expected: Any, *, relative_to_largest: bool = False) -> bool:
        """Whether every entry that is not null agrees within the file's tolerance."""
        expected = flat(expected)
        actual = flat(actual.tolist() if isinstance(actual, Tensor) else actual)
        assert len(actual) == len(expected)
        known = [(float(a), float(e)) for a, e in zip(actual, expected, strict=True) if e is not None]
        assert known
        largest = max(abs(e) for _, e in known)
        return all(abs(a - e) <= self.atol + self.rtol * (largest if relative_to_largest else abs(e)) for a, e in known)

    def check(self, actual: Any, expected: Any, **how: bool) -> None:
        assert self.matches(actual, expected, **how), f"\n{actual}\nis not\n{expected}"


def numbers(value: Any) -> Any:
    """Nested lists with the texts "nan", "inf" and "-inf" read as numbers."""
    return [numbers(item) for item in value] if isinstance(value, list) else float(value)


def flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in flat(item)] if isinstance(value, list) else [value]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden(file, *prefixes): run once per case whose name starts like this")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("golden")
    if marker is None:
        return
    file, *prefixes = marker.args
    content = json.loads((DATA / file).read_text(encoding="utf-8"))
    said = content["about"]["tolerance"]
    tolerance = {"rtol": 0.0, "atol": 0.0} | ({} if said == "exact" else said)
    cases = [
        Case(case, rtol=tolerance.get("rtol", 0.0), atol=max(case.get("atol", 0.0), tolerance["atol"]))
        for case in content["cases"]
        if not prefixes or case["name"].startswith(tuple(prefixes))
    ]
    assert cases, f"{file} has no case {prefixes}"
    metafunc.parametrize("case", cases, ids=[case["name"] for case in cases])

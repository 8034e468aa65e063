"""Models that QLoRA is refused for, by their config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.plan.rounding import unroundable

DENSE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (DENSE, None),
        ({"text_config": DENSE, "hidden_size": 100}, None),
        (DENSE | {"num_key_value_heads": 1}, None),
        (DENSE | {"n_routed_experts": 8}, "has experts"),
        ({"text_config": DENSE | {"num_experts": 8}}, "has experts"),
        (DENSE | {"num_local_experts": 0}, None),
        (DENSE | {"hidden_size": 96}, r"96 inputs \(hidden_size\)"),
        (DENSE | {"head_dim": 24}, r"96 inputs \(heads x head_dim\)"),
        (DENSE | {"intermediate_size": 100}, r"100 inputs \(intermediate_size\)"),
        ({"n_embd": 100}, None),  # not known: the model says so when it is loaded
    ],
)
def test_what_keeps_a_model_from_4_bits(tmp_path: Path, values: dict[str, Any], reason: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = unroundable(str(tmp_path))
    assert (found is None) == (reason is None) and (reason is None or re.search(reason, found or ""))

"""float16: a loss that is multiplied so that small gradients survive, and updates that are skipped where it was too much."""

from __future__ import annotations

import json
from typing import Any

from posttrain.backends.torch_training.loss_scale import LARGEST, LossScale
from posttrain.config import RunConfig
from posttrain.plan.checks.train import check


def test_the_factor_halves_and_doubles() -> None:
    scale = LossScale()
    scale.after(finite=False)
    assert (scale.value, scale.good) == (2.0**15, 0)
    for _ in range(999):
        scale.after(finite=True)
    assert scale.value == 2.0**15
    resumed = LossScale()
    resumed.restore(json.loads(json.dumps(scale.saved())))
    for each in (scale, resumed):
        each.after(finite=True)
        assert (each.value, each.good) == (2.0**16, 0)
    low, high = LossScale(value=1.0), LossScale(value=LARGEST, good=999)
    low.after(finite=False)
    high.after(finite=True)
    assert (low.value, high.value) == (1.0, LARGEST)
    resumed.restore(None)
    assert resumed == LossScale()


def test_engines_that_do_not_scale_say_so() -> None:
    def said(engine: str, **model: Any) -> list[str]:
        sections = {"model": {"path": "x", "compute_dtype": "float16"} | model, "data": {"train_files": ["x"]}}
        placed = {"placement": {"devices": 2}, "policy": {"engine": engine}}
        return [problem.what for problem in check(RunConfig.model_validate(sections | placed))]

    assert said("fsdp") == []
    for engine in ("deepspeed", "megatron"):
        assert f"model.compute_dtype is float16, and the engine {engine} does not scale losses" in said(engine)
    assert said("fsdp", master_dtype="bfloat16") == [
        "float16 compute with bfloat16 master weights would round what it has computed"
    ]

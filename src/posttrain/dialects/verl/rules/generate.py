"""generation.yaml: what several of its keys decide together."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import kind_of_device
from posttrain.dialects.verl.rules.sampling import concurrency, first_token

_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float32", "fp32"), "float32"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
}


def generate_rules(keys: Reader) -> dict[str, Any]:
    """GenerateConfig fields by dotted name."""
    nodes, per_node = keys["trainer.nnodes"], keys["trainer.n_gpus_per_node"]
    fields: dict[str, Any] = {
        "placement.nodes": nodes,
        "placement.devices": nodes * per_node,
        "data.overlong_prompts": "truncate_right",
        "rollout.temperature": keys["rollout.temperature"] if keys["rollout.do_sample"] else 0.0,
    }
    if not keys["rollout.do_sample"]:
        keys.ignore("rollout.temperature", "rollout.do_sample is false")
    if keys.ledger.find("trainer.device") and keys.written("trainer.device"):
        fields["placement.device"] = kind_of_device(keys)
    fields |= first_token(keys, "rollout")
    fields |= concurrency(keys, "rollout", keys["rollout.name"])
    return fields | {"model.compute_dtype": _DTYPES[keys["rollout.dtype"]]}

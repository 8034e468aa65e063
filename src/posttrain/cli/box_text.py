"""Description of the sandbox for model-written code, printed before a run whose rewards execute it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.config.reward_placement import runs_code

if TYPE_CHECKING:
    from posttrain.config import RunConfig
    from posttrain.config.evaluate import EvaluateConfig


def box_text(config: RunConfig | EvaluateConfig) -> list[str]:
    """Describe the sandbox in lines; none when no term runs code, or the rewards (which detect the sandbox) are unchecked."""
    if not runs_code(config.reward):
        return []
    from posttrain.sandbox.layers import describe, probed

    layers = probed()
    if layers is None:
        return []
    lines = describe(layers).splitlines()
    if not layers.enough:
        return [*lines, "It runs anyway, because reward.allow_unboxed_code is true"]
    if config.reward.allow_unboxed_code:
        lines.append("reward.allow_unboxed_code has no effect: the box holds")
    return lines

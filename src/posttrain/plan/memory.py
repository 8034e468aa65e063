"""Memory of a role on each of its devices: the value, and the numbers that every engine's estimate is made from."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.plan.placement import Phase

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
AVERAGES = 2  # values per trained weight that Adam keeps
ADAM = 1 + AVERAGES  # values per trained weight: the gradient and Adam's two averages, in the dtype of the masters


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Bytes on each device of a role. Estimates: good to tell 10 GiB from 20, not 10 from 11."""

    role: str
    weights: int  # held here all the time, unless they rest
    optimizer: int = 0  # gradients, float32 masters, Adam's averages
    packed: int = 0  # copies of the sampler's weights, as its products read them
    gathered: int = 0  # other devices' weights, while they are computed with
    activations: int = 0
    cache: int = 0  # keys and values of the sampler
    host: int = 0  # in CPU memory instead

    def used(self, phase: Phase) -> int:
        """Return the bytes while the role works: only an update keeps activations for a backward pass."""
        working = self.activations if phase == "update" else 0
        return self.weights + self.packed + self.optimizer + self.gathered + self.cache + working

    def kept(self, rests: tuple[str, ...]) -> int:
        """Return the bytes that stay while another role works."""
        return (
            (0 if "weights" in rests else self.weights + self.packed)
            + (0 if "optimizer" in rests else self.optimizer)
            + (0 if "cache" in rests else self.cache)
        )

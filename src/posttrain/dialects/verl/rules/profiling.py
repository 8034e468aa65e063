"""Steps and roles to profile."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.names import ACTOR, REF, ROLLOUT

# What a role does in a step, by the names of our phases.
PHASES = {
    ROLLOUT: ("rollout",),
    "reward_model": ("reward",),
    REF: ("logprobs",),
    "critic": ("values", "critic_update"),
    ACTOR: ("logprobs", "update"),
}


def profiling(keys: Reader) -> dict[str, Any]:
    """Steps, phases, ranks and kind of profile; nothing where no step is to be profiled. Ranks are one set here for all roles:
    those that any of them names."""
    steps = get(keys, "global_profiler.steps") or get(keys, "trainer.profile_steps")
    tool = get(keys, "global_profiler.tool")
    off = "no step is to be profiled"
    if get(keys, "global_profiler.steps") and tool is None:
        off, steps = "global_profiler.tool is null, which profiles nothing", None
    if not steps:
        keys.ignore("global_profiler", off)
        for role in PHASES:
            keys.ignore(f"{role}.profiler", off)
        return {}
    if tool in ("nsys", "npu"):
        keys.warn(f"global_profiler.tool={tool}: torch's own profiler records here; nsys can be put before the command")
    phases = [phase for role, done in PHASES.items() if _asks(keys, role) for phase in done]
    fields: dict[str, Any] = {"profiling.steps": steps, "profiling.phases": list(dict.fromkeys(phases))}
    if tool == "torch_memory":
        fields |= {"profiling.operators": False, "profiling.memory": True}
    asked = [role for role in PHASES if _asks(keys, role)]
    if any(get(keys, f"{role}.profiler.all_ranks") for role in asked):
        fields["profiling.ranks"] = "all"
    elif ranks := {rank for role in asked for rank in get(keys, f"{role}.profiler.ranks") or ()}:
        fields["profiling.ranks"] = sorted(ranks)
    folder = get(keys, "global_profiler.save_path")
    return fields | ({"profiling.folder": folder} if folder else {})


def _asks(keys: Reader, role: str) -> bool:
    return any(get(keys, f"{role}.profiler.{name}") for name in ("enable", "all_ranks", "ranks"))

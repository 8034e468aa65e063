"""The part of a plan about sampling ahead of training."""

from __future__ import annotations

from posttrain.config import RunConfig


def asynchronous_text(config: RunConfig) -> str:
    """Describe the mode and its bound, in lines; "" for a synchronous run."""
    section, prompts = config.asynchronous, config.data.prompts_per_step
    if not section.is_on:
        return ""
    if section.mode == "one_step":
        return "one_step: while a step trains, the responses of the next are sampled; 1 step stale"
    most = int(prompts * (section.max_staleness_steps + 1))
    steps = f"{section.max_staleness_steps} step{'' if section.max_staleness_steps == 1 else 's'}"
    lines = [
        f"{section.mode}: a step trains when {prompts} groups are complete; others continue",
        f"at most {steps} stale: started - trained <= ({section.max_staleness_steps} + 1) x {prompts} = {most} groups",
        f"{section.max_running_groups or most} groups sampled at a time; a group that is late is "
        + ("dropped, and sampled again once" if section.on_stale == "drop" else "waited for"),
    ]
    return f"\n{'':<11}".join(lines)

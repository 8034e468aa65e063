"""The part of a plan about sampling ahead of training."""

from __future__ import annotations

from posttrain.config import RunConfig
from posttrain.config.asynchronous import groups_in
from posttrain.config.roles import samples_beside_training
from posttrain.dialects.loaded import UserWords


def asynchronous_text(config: RunConfig, words: UserWords | None = None) -> str:
    """Describe the mode and its bound, in lines, with the user's own count where it is another one; "" for a synchronous run."""
    counted = words.counts("asynchronous.max_staleness_steps") if words else []
    section, prompts = config.asynchronous, config.data.prompts_per_step
    if not section.is_on:
        return ""
    if section.mode == "one_step":
        if samples_beside_training(config):
            return "one_step: while a step trains, the responses of the next are sampled; 1 step stale"
        lines = ["one_step: the responses of the next step are sampled before this one's updates; 1 step stale"]
        own = "placement.devices=2 policy.devices=[0] rollout.devices=[1]"
        lines.append(
            f"nothing overlaps: the sampler shares the policy's weights or devices; with its own ({own}) it does"
        )
        return f"\n{'':<11}".join(lines)
    most = prompts + groups_in(section.max_staleness_steps, prompts)
    steps = f"{section.max_staleness_steps} step{'' if section.max_staleness_steps == 1 else 's'}"
    others = "samplers go on meanwhile" if section.mode == "separate" else "others continue"
    lines = [
        f"{section.mode}: a step trains when {prompts} groups are complete; {others}",
        f"at most {steps} stale: started - trained <= ({section.max_staleness_steps} + 1) x {prompts} = {most} groups",
        f"{section.max_running_groups or most} groups sampled at a time; a group that is late is "
        + ("dropped, and sampled again once" if section.on_stale == "drop" else "waited for"),
    ]
    if (
        section.mode == "colocate"
        and len(policy_devices := config.policy.devices or range(config.placement.devices)) > 1
    ):
        lines.append(
            f"{len(policy_devices)} workers sample, each the same number of passes, so that decisions count no seconds"
        )
    if section.mode == "separate":
        after = "every step" if section.sync_every_steps == 1 else f"every {section.sync_every_steps} steps"
        how = "between two tokens" if section.sync_between_tokens else "once the responses that have begun have ended"
        lines.append(f"new weights after {after}, {how}")
    return f"\n{'':<11}".join([*lines, *counted])

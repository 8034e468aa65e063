"""Rules over several keys of SkyRL."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules import algorithm, arctic, run
from posttrain.dialects.skyrl.rules.asynchronous import asynchronous, weights
from posttrain.dialects.skyrl.rules.batches import batches
from posttrain.dialects.skyrl.rules.environment import environment
from posttrain.dialects.skyrl.rules.look import two_names
from posttrain.dialects.skyrl.rules.loss import loss
from posttrain.dialects.skyrl.rules.placement import placement
from posttrain.dialects.skyrl.rules.roles import roles
from posttrain.dialects.skyrl.rules.sampling import sampling
from posttrain.dialects.skyrl.rules.teachers import on_devices, teachers
from posttrain.dialects.skyrl.rules.trial import trial


def rules(keys: Reader) -> dict[str, Any]:
    """RunConfig fields by dotted name. Roles that a run does without keep our defaults, so that equal runs are equal."""
    by_arctic = arctic.is_arctic(keys)
    if by_arctic:
        arctic.read_as_arctic(keys)
    fields = two_names(keys)
    has_critic = algorithm.uses_critic(keys)
    teaching = teachers(keys)
    kl = {} if teaching else algorithm.kl(keys)
    places, copies = placement(keys, has_critic=has_critic, has_reference=bool(kl or teaching))
    if teaching:  # the reference of SkyRL is the teacher here
        teaching = on_devices(teaching, places)
    fields |= places | kl
    fields |= teaching or algorithm.advantages(keys)
    fields |= algorithm.dynamic_sampling(keys)
    fields |= asynchronous(keys)
    fields |= loss(keys)
    fields |= weights(keys, fields)
    fields |= batches(keys, copies, has_critic=has_critic)
    fields |= roles(keys, has_critic=has_critic, has_reference=bool(kl))
    fields |= sampling(keys)
    for part in (run.data, run.reward, run.validation, run.checkpoints, run.trackers, run.profiling):
        fields |= part(keys)
    fields |= environment(keys)
    if by_arctic:
        fields |= arctic.warmup(keys)
    run.precision(keys)
    return fields | trial(keys)


__all__ = ["rules"]

"""Rules over several keys of ROLL, and contradictions between them."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.agentic import advantage as agentic_advantage
from posttrain.dialects.roll.rules.agentic import agentic
from posttrain.dialects.roll.rules.asynchronous import asynchronous
from posttrain.dialects.roll.rules.batches import batches
from posttrain.dialects.roll.rules.look import is_agentic, plain, uses_critic, uses_reference, warmup
from posttrain.dialects.roll.rules.lora import lora
from posttrain.dialects.roll.rules.objective import advantage, correction, critic, kl, loss
from posttrain.dialects.roll.rules.pipelines import refuse_another_pipeline
from posttrain.dialects.roll.rules.placement import layout
from posttrain.dialects.roll.rules.rewards import rewards
from posttrain.dialects.roll.rules.run import cadence, data, lengths, model, sampling, validation
from posttrain.dialects.roll.rules.teachers import prepare, teachers
from posttrain.dialects.roll.rules.templates import of_episodes, template


def rules(keys: Reader) -> dict[str, Any]:
    """The RunConfig fields of all rows by rule."""
    refuse_another_pipeline(keys)
    prepare(keys)
    has_critic, has_reference = uses_critic(keys), uses_reference(keys)
    sizes, placed = layout(keys, has_critic=has_critic, has_reference=has_reference)
    fields = placed | model(keys) | cadence(keys) | sampling(keys)
    fields |= of_episodes(keys) if is_agentic(keys) else template(keys)
    fields |= agentic_advantage(keys) if is_agentic(keys) else advantage(keys) | lengths(keys)
    fields |= asynchronous(keys)
    fields |= kl(keys) | loss(keys) | correction(keys) | critic(keys)
    fields["policy.optimizer.betas"] = _betas(keys, "actor_train")
    fields |= warmup(keys, "actor_train", "policy") | lora(keys, "actor_train", "policy")
    if has_critic:
        fields |= warmup(keys, "critic", "critic") | lora(keys, "critic", "critic")
        fields |= plain(keys, "critic") | {"critic.optimizer.betas": _betas(keys, "critic")}
    else:
        keys.ignore("critic", f"there is no critic: adv_estimator is {keys['adv_estimator']}")
    if not has_reference:
        keys.ignore("reference", "no KL is configured (add_token_level_kl, use_kl_loss), so no reference is loaded")
    fields = teachers(keys, fields)
    if is_agentic(keys):
        return fields | agentic(keys, sizes, has_reference=has_reference)
    fields |= batches(keys, sizes, has_reference=has_reference)
    return fields | data(keys) | validation(keys) | rewards(keys)


def _betas(keys: Reader, section: str) -> list[float]:
    return [keys[f"{section}.training_args.adam_beta1"], keys[f"{section}.training_args.adam_beta2"]]

"""Rules over several keys of verl."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.heads import refuse_joint_loss
from posttrain.dialects.reader import Reader
from posttrain.dialects.verl.rules import algorithm, recipes, records
from posttrain.dialects.verl.rules.agent_runner import agent_runner
from posttrain.dialects.verl.rules.asynchronous import asynchronous, set_generation
from posttrain.dialects.verl.rules.batches import batches, count_generated
from posttrain.dialects.verl.rules.distillation import distillation
from posttrain.dialects.verl.rules.gkd import set_sizes
from posttrain.dialects.verl.rules.later_names import read_later_names
from posttrain.dialects.verl.rules.layout import Layout, layout
from posttrain.dialects.verl.rules.look import get
from posttrain.dialects.verl.rules.lora import lora
from posttrain.dialects.verl.rules.managers import managers, set_group
from posttrain.dialects.verl.rules.names import ACTOR, MODEL
from posttrain.dialects.verl.rules.optimizer import optimizers, routing, shuffles
from posttrain.dialects.verl.rules.own_loop import own_loop, repeat_prompts
from posttrain.dialects.verl.rules.profiling import profiling
from posttrain.dialects.verl.rules.reward import reward, served_judge
from posttrain.dialects.verl.rules.sampling import name_of_engine, sampling
from posttrain.dialects.verl.rules.spin import is_spin
from posttrain.dialects.verl.rules.sppo import set_estimator
from posttrain.dialects.verl.rules.turns import turns

DEVICES = frozenset({"trainer.n_gpus_per_node", "trainer.nnodes"})


def rules(keys: Reader) -> dict[str, Any]:
    """RunConfig fields by dotted name. Roles that a run does without keep our defaults, so that equal runs are equal."""
    _check_version(keys)
    renamed = read_later_names(keys)
    set_group(keys)
    name_of_engine(keys)
    recipes.set_step(keys)
    set_sizes(keys)
    set_estimator(keys)
    set_generation(keys)
    step = count_generated(keys)
    repeat_prompts(keys)
    has_critic = algorithm.uses_critic(keys)
    kl = algorithm.kl_in_loss(keys) | algorithm.kl_in_reward(keys)
    has_reference = bool(kl) or is_spin(keys)
    judge = served_judge(keys)
    places, fields = layout(keys, has_critic=has_critic)
    fields |= renamed | step
    scoring, scorer = reward(keys, places, judge)
    loss = algorithm.loss(keys)
    estimator = algorithm.estimator(keys)
    read_by_own = [*scoring.get("data.extra_columns", []), *estimator.pop("data.extra_columns", [])]
    fields |= scoring | loss | kl | estimator
    fields |= algorithm.resampling(keys)
    fields |= algorithm.terms(keys, scorer)
    fields |= algorithm.group_filter(keys, scorer)
    fields |= distillation(keys, loss, places.teacher_devices, fields.get("policy.devices"))
    fields |= algorithm.rollout_correction(keys)
    fields |= asynchronous(keys)
    fields |= _sizes(keys, places, has_critic=has_critic, has_reference=has_reference)
    fields |= optimizers(keys, has_critic=has_critic)
    fields |= shuffles(keys, has_critic=has_critic)
    fields |= routing(keys)
    fields |= lora(keys, MODEL, "policy")
    refuse_joint_loss(keys, MODEL)
    if has_critic:
        fields |= lora(keys, "critic.model", "critic")
    fields |= sampling(keys)
    fields |= records.data(keys)
    fields |= turns(keys)
    if read_by_own:
        columns = [*fields.get("data.extra_columns", []), *read_by_own]
        fields["data.extra_columns"] = list(dict.fromkeys(columns))
    fields |= records.model(keys, has_critic=has_critic, has_reference=has_reference)
    fields |= records.trainer(keys)
    fields |= recipes.recipe(keys)
    fields |= managers(keys)
    fields |= profiling(keys)
    fields |= records.contents(keys)
    fields |= own_loop(keys)
    fields |= agent_runner(keys)
    if has_critic:
        mode = get(keys, "critic.loss_agg_mode", "token-mean")
        fields |= records.critic(keys, algorithm.AGGREGATIONS[mode])
    else:
        records.without_critic(keys)
    if not has_reference:
        records.without_reference(keys)
    return fields


def _sizes(keys: Reader, places: Layout, *, has_critic: bool, has_reference: bool) -> dict[str, Any]:
    """All sizes of a step; problems between them count only where the number of devices is known."""
    before = len(keys.problems)
    fields = batches(keys, places, has_critic=has_critic, has_reference=has_reference)
    if not DEVICES.isdisjoint(keys.bad):
        del keys.problems[before:]
    return fields


def _check_version(keys: Reader) -> None:
    """Report keys that verl 0.2 has and does not read, but this program does."""
    if keys.ledger.version != "0.2":
        return
    for key, default, does in (
        (f"{ACTOR}.ppo_epochs", 1, "makes one pass over a step"),
        (f"{ACTOR}.optim.warmup_style", "constant", "keeps the learning rate constant after warm-up"),
    ):
        if keys[key] != default:
            keys.warn(f"{key}={keys[key]} counts here; verl 0.2 itself {does} whatever it says")


__all__ = ["rules"]

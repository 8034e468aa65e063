"""Fields of a configuration that only some engines read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from posttrain.config.policy import ONE_DEVICE
from posttrain.config.rollout import RolloutConfig
from posttrain.dialects.reader import Reader
from posttrain.dialects.trees import nested
from posttrain.errors import Problem
from posttrain.facts import RolloutEngineFacts
from posttrain.plan.engine import engine_plan
from posttrain.plan.options import read_options
from posttrain.registry import ENGINE_PLANS, ROLLOUT_ENGINES

# Sections that only some rollout engines read.
SAMPLER_FIELDS: Mapping[str, Callable[[RolloutEngineFacts], bool]] = {
    "rollout.engine_options": lambda engine: engine.reads_options,
    "rollout.engine_sampling": lambda engine: engine.reads_sampling,
    "rollout.weight_bucket_mib": lambda engine: not engine.shares_weights,
    "validation.engine_sampling": lambda engine: engine.reads_sampling,
}

# Options of training engines: the field that names the engine.
TRAINING_FIELDS = {
    "policy.engine_options": "policy.engine",
    "reference.engine_options": "policy.engine",
    "critic.engine_options": "critic.engine",
}


def engine_without(name: str, fields: Mapping[str, Any], *, here: bool) -> str | None:
    """Return the chosen engine where a field is in a section that this engine does not read."""
    for section, reads in SAMPLER_FIELDS.items():
        if f"{name}.".startswith(f"{section}."):
            default = RolloutConfig.model_fields["engine"].default
            chosen: str = default if here else fields.get("rollout.engine", default)
            facts = ROLLOUT_ENGINES.facts(chosen)
            return None if reads(facts) and name.rpartition(".")[2] not in facts.lacks_options else chosen
    for section, engine in TRAINING_FIELDS.items():
        if f"{name}.".startswith(f"{section}."):
            chosen = ONE_DEVICE if here else fields.get(engine, ONE_DEVICE)
            return None if engine_plan(chosen).reads_options else chosen
    return None


def wrong_options(fields: Mapping[str, Any], reader: Reader) -> Iterator[Problem]:
    """Find options of the chosen training engines whose values these do not take, at the keys that were written."""
    for section, engine in TRAINING_FIELDS.items():
        given = {
            name.removeprefix(f"{section}."): value for name, value in fields.items() if name.startswith(f"{section}.")
        }
        chosen = fields.get(engine, ONE_DEVICE)
        if not given or chosen not in ENGINE_PLANS.names() or (kind := engine_plan(chosen).options) is None:
            continue
        _, problems = read_options(kind, nested(given), at=section, engine=chosen)
        for problem in problems:
            key = _written_as(problem.field.removeprefix(section), section, reader)
            if key and " must be " in problem.what and not any(f"{key}.".startswith(f"{bad}.") for bad in reader.bad):
                yield replace(problem, where=reader.sources.where(key), field=key)


def _written_as(option: str, section: str, reader: Reader) -> str:
    """Return the written key of an option of an engine, whose name begins with a dot; "" without one."""
    rows = ((key, reader.ledger.find(key)) for key in reader.sources.places if key.endswith(option))
    return next((key for key, row in rows if row and any(field.startswith(section) for field in row.fields)), "")

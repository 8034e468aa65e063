"""A configuration as a native YAML file, and the JSON schema that editors check and complete such a file with."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from pydantic.json_schema import models_json_schema

from posttrain.config import RunConfig
from posttrain.config.base import Section
from posttrain.config.shown import shown
from posttrain.dialects.native.untranslated import SECTION, entries
from posttrain.errors import Problem
from posttrain.plan.engine import engine_plans

# Sections with options of a training engine.
OF_TRAINING_ENGINES = ("PolicyConfig", "SftPolicyConfig", "CriticConfig", "ReferenceConfig")


def to_yaml(config: Section, lost: Sequence[Problem] = ()) -> str:
    """The complete configuration, defaults included, sections in schema order. Reading it gives an equal one; secrets are
    references to environment variables (``config.shown``).

    Args: ``lost`` is what it cannot say; the file then plans, and does not train until that is settled.
    """
    values = _escape(config.model_dump(mode="json"), shown(config))
    if lost:
        listed = entries(lost)
        values = {SECTION: _escape(listed, listed), **values}
    # OmegaConf writes, because OmegaConf reads: it quotes the texts that it would take for numbers, such as "1e-6".
    return OmegaConf.to_yaml(OmegaConf.create(values))


def _escape(node: Any, safe: Any) -> Any:
    """Put a backslash before ``${`` in every text, which would be read as an interpolation, and double those that stand there.

    Args: ``safe`` is the same value as it may be shown; a text that differs there is a reference, and stays one.
    """
    if isinstance(node, dict):
        return {key: _escape(value, safe[key]) for key, value in node.items()}
    if isinstance(node, list):
        return [_escape(item, shown_item) for item, shown_item in zip(node, safe, strict=True)]
    if isinstance(node, str):
        if safe != node:
            return safe
        return re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", node)
    return node


def json_schema(root: type[Section] = RunConfig) -> str:
    """The JSON schema of a native configuration; ``docs/posttrain.schema.json`` is this text, and ``posttrain.sft.schema.json``
    and so on are those of the other entries."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | root.model_json_schema()
    _describe_engine_options(schema)
    return json.dumps(schema, indent=2) + "\n"


def _describe_engine_options(schema: dict[str, Any]) -> None:
    """Offer the options of every training engine where a trained role or the reference has options; others are accepted, too."""
    kinds = [plan.options for plan in engine_plans() if plan.options is not None]
    fields = [
        definition["properties"]["engine_options"]
        for name, definition in schema.get("$defs", {}).items()
        if name in OF_TRAINING_ENGINES and "engine_options" in definition["properties"]
    ]
    if not fields:
        return
    _, options = models_json_schema([(kind, "validation") for kind in kinds], ref_template="#/$defs/{model}")
    for definition in options["$defs"].values():
        for described in definition["properties"].values():
            for ours in ("fix", "ignored"):  # said in messages, and no keywords of JSON schema
                described.pop(ours, None)
    schema["$defs"] |= options["$defs"]
    offered = [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds]
    for field in fields:
        field["anyOf"] = [*offered, {"type": "object"}]

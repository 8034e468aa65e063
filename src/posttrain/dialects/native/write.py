"""A configuration as a native YAML file, and the JSON schema that editors check and complete such a file with."""

from __future__ import annotations

import json
import re
from typing import Any

from omegaconf import OmegaConf

from posttrain.config import RunConfig
from posttrain.config.base import Section
from posttrain.config.shown import shown


def to_yaml(config: Section) -> str:
    """The complete configuration, defaults included, sections in schema order. Reading it gives an equal one; secrets are
    references to environment variables (``config.shown``)."""
    values = _escape(config.model_dump(mode="json"), shown(config))
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
    return json.dumps(schema, indent=2) + "\n"

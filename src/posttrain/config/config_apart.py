"""A model's configuration that stands apart from its weights: its fields, over those of the weights' own folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.config.model import ModelConfig
from posttrain.errors import ConfigError, Problem

FIELD = "model.config_path"
# Fields about a file, and not about the model.
OF_THE_FILE = ("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype")


def overrides_of(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that are set before the weights are loaded: those in which ``config_path`` differs from the
    weights' own file, and ``config_overrides`` above them.

    Raises: ConfigError when there is no such file, or it describes another kind of model.
    """
    if model.config_path is None:
        return dict(model.config_overrides)
    file = Path(model.config_path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    wanted, own = _read(file, needed=True), _read(Path(model.path).expanduser() / "config.json", needed=False)
    kinds = wanted.get("model_type"), own.get("model_type", wanted.get("model_type"))
    if kinds[0] != kinds[1]:
        what = f"{file} is of a {kinds[0]}, and the weights in {model.path} are of a {kinds[1]}"
        raise ConfigError(Problem(what, fix="name the configuration of the same kind of model", field=FIELD))
    changed = {
        name: value
        for name, value in wanted.items()
        if name not in (*OF_THE_FILE, "model_type") and own.get(name) != value
    }
    return changed | model.config_overrides


def _read(file: Path, *, needed: bool) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if not needed:
            return {}
        fix = "name a folder that holds config.json, or the file itself"
        raise ConfigError(Problem(f"{file} cannot be read: {error}", fix=fix, field=FIELD)) from error
    return values if isinstance(values, dict) else {}

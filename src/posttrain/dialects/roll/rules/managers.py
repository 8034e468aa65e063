"""Environment managers of the checkout (``env_manager_cls``) whose own class plays, in a Python with ROLL."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.roll.rules.run import model
from posttrain.dialects.words import OUR_SECTION

ENVIRONMENT = "roll_manager"
# Of the values, these are no manager's affair; trackers' hold passwords
_UNREAD = (OUR_SECTION, "hydra", "defaults", "track_with", "tracker_kwargs", "checkpoint_config", "system_envs")
_OTHER_WEIGHTS = "lora_name"  # of a request, in forks whose opponents are earlier policies


def own_manager(keys: Reader, tag: str, name: str) -> dict[str, Any] | None:
    """Return name and settings of the environment that lets a tag's manager play, a class of this name; None where it is not in
    the checkout."""
    key = f"custom_envs.{tag}.env_manager_cls"
    module, _, _ = name.rpartition(".")
    found = _file_of(keys.sources.file, module)
    if found is None:
        return None
    root, file = found
    if _OTHER_WEIGHTS in _texts(file):
        keys.plan_only(f"{key}={name} asks for responses of other weights ({_OTHER_WEIGHTS} in {file}), and the policy alone "
                       "answers here", key=key, fix="use a manager that asks the policy alone")  # fmt: skip
    else:
        keys.warn(
            f"{key}={name} is a class of yours: it plays in a Python that has ROLL, and its requests are sampled here"
        )
    settings = {
        "folder": str(root),
        "tag": tag,
        "manager": name,
        "values": {name: value for name, value in keys.values.items() if name not in _UNREAD},
        "model": model(keys).get("model.path"),
    }
    return {"name": ENVIRONMENT, "settings": settings}


def has_manager(keys: Reader, tag: str) -> bool:
    """Return True when the class of a tag's manager is in the checkout."""
    module, _, _ = str(keys[f"custom_envs.{tag}.env_manager_cls"] or "").rpartition(".")
    return _file_of(keys.sources.file, module) is not None


def _file_of(config: str | None, module: str) -> tuple[Path, Path] | None:
    """Return the folder above a configuration, or the current one, that holds a module, and the module's file."""
    if not module:
        return None
    path = Path(*module.split(".")).with_suffix(".py")
    above = Path(config).resolve().parents if config else ()
    return next(((folder, folder / path) for folder in (*above, Path.cwd()) if (folder / path).is_file()), None)


def _texts(file: Path) -> set[str]:
    """Return the texts in a file's code; none where it cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return set()
    return {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant) and isinstance(each.value, str)}

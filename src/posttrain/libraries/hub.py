"""The Hugging Face hub: tell before anything is loaded if the models that a run takes from it can be had."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from posttrain.errors import ModelError, Problem

TIMEOUT_S = 5.0
NOT_THERE = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND)


def settle_hub(models: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Check that the models of the hub can be downloaded or are in its cache. Call it before transformers is imported.

    Without a network transformers retries every file for minutes: then this process and its children use the cache alone.

    Args: ``models`` maps the field that names a model (``model.path``) to its hub id.
    Returns: notes for the user.
    Raises: ModelError for models that are neither in the cache nor to be had.
    """
    from huggingface_hub import constants

    if not models:
        return []
    missing = {field: name for field, name in models.items() if not _is_cached(name, Path(constants.HF_HUB_CACHE))}
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        reason, problems = _unreachable(constants.ENDPOINT, missing)
        if problems:
            raise ModelError(problems)
        if not reason:
            return []
    if missing:
        raise ModelError(
            [
                Problem(
                    f"{name} is neither a folder here nor in the cache of the hub, which cannot be reached ({reason})",
                    fix=f"where there is a network: hf download {name} --local-dir FOLDER; then {field}=FOLDER",
                    field=field,
                )
                for field, name in missing.items()
            ]
        )
    if constants.HF_HUB_OFFLINE:
        return []
    environment["HF_HUB_OFFLINE"] = "1"  # read by worker processes
    constants.HF_HUB_OFFLINE = True
    return [f"the hub cannot be reached ({reason}): {', '.join(models.values())} from its cache"]


def _is_cached(name: str, cache: Path) -> bool:
    return any((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))


def _unreachable(endpoint: str, missing: Mapping[str, str]) -> tuple[str, list[Problem]]:
    """Return the reason why the hub cannot be reached, "" when it can, and the problems of models that it does not have."""
    problems = []
    for field, name in (missing or {"": ""}).items():
        url = f"{endpoint}/{name}/resolve/main/config.json" if name else endpoint
        try:
            with urlopen(Request(url, method="HEAD"), timeout=TIMEOUT_S):  # the hub's own address
                continue
        except HTTPError as error:
            if name and error.code in NOT_THERE and not _logged_in():
                what = f"the hub has no model {name}, or it is private (HTTP {error.code})"
                fix = "check the spelling, or log in with hf auth login; a folder is named by its path"
                problems.append(Problem(what, fix=fix, field=field))
        except (URLError, OSError) as error:
            return str(getattr(error, "reason", error)), []
    return "", problems


def _logged_in() -> bool:
    from huggingface_hub import constants

    return bool(os.environ.get("HF_TOKEN")) or Path(constants.HF_TOKEN_PATH).is_file()

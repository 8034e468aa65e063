"""Upload of a model folder to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.errors import ModelError, Problem

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def check_repository(name: str) -> None:
    """Raises: ModelError for a name that is not of the form org/name, or where the hub is switched off."""
    from huggingface_hub import constants

    if not REPOSITORY.fullmatch(name):
        raise ModelError(
            Problem(f"{name!r} is not a repository of the hub", fix="write it as org/name", field="--push")
        )
    if constants.HF_HUB_OFFLINE:
        fix = "unset it, or upload the folder where there is a network: hf upload " + name + " OUT_DIR"
        raise ModelError(Problem(f"HF_HUB_OFFLINE is set, so nothing can be pushed to {name}", fix=fix, field="--push"))


def push(folder: Path, name: str, *, private: bool) -> str:
    """Create the repository where it is missing and upload every file of ``folder`` in one commit. Returns: its address.

    Raises: ModelError when the hub cannot be reached, or does not allow it.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    check_repository(name)
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model with posttrain")
    except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        fix = f"log in with: hf auth login; the model itself is in {folder}: hf upload {name} {folder}"
        raise ModelError(Problem(f"{name} could not be pushed: {reason}", fix=fix, field="--push")) from error
    return str(address)

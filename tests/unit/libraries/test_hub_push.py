"""A model folder on the hub: small files in the commit, weights by LFS, and read back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.hub import folder_files, point_at, running_hub

from posttrain.errors import ModelError
from posttrain.libraries.hub import fetch_model
from posttrain.libraries.hub_names import HubName
from posttrain.libraries.hub_push import push


def test_what_is_pushed_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# me/sums\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    with running_hub() as hub:
        point_at(hub.address, monkeypatch)
        assert push(folder, "me/sums", private=True).endswith("/me/sums")
        assert hub.pushed["me/sums"] == folder_files(folder)
        assert list(hub.large.values()) == [(folder / "model.safetensors").read_bytes()]
        fetched = fetch_model(HubName(name="me/sums"), "model.path")
        assert (fetched.folder / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        with pytest.raises(ModelError, match=r"could not be pushed.*log in with: hf auth login.*hf upload me/sums"):
            push(folder, "me/sums", private=True)

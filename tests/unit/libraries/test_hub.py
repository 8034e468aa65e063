"""A model that the hub does not have, or that cannot be had without a network: known before anything is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from posttrain.errors import ModelError
from posttrain.libraries.hub import settle_hub

MODEL = {"model.path": "org/name"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path


def cached(cache: Path) -> None:
    folder = cache / "models--org--name/snapshots/0a1b"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()


@contextmanager
def hub(status: int) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status if self.path.endswith("/org/name/resolve/main/config.json") else 200)
            self.end_headers()

        def log_message(self, *about: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_without_a_network_a_missing_model_is_one_problem() -> None:
    with pytest.raises(ModelError) as caught:
        settle_hub(MODEL, {})
    (problem,) = caught.value.problems
    assert "org/name is neither a folder here nor in the cache of the hub, which cannot be reached (" in problem.what
    assert problem.fix == "where there is a network: hf download org/name --local-dir FOLDER; then model.path=FOLDER"
    assert problem.field == "model.path"


def test_without_a_network_the_cache_is_used_alone(cache: Path) -> None:
    cached(cache)
    environment: dict[str, str] = {}
    (note,) = settle_hub(MODEL, environment)
    assert "org/name from its cache" in note
    assert environment == {"HF_HUB_OFFLINE": "1"}
    assert constants.HF_HUB_OFFLINE


def test_offline_by_request(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        settle_hub(MODEL, {})
    cached(cache)
    assert settle_hub(MODEL, {}) == []


def test_folders_need_no_hub() -> None:
    assert settle_hub({}, {}) == []


@pytest.mark.parametrize("status", [401, 404])
def test_a_model_that_the_hub_does_not_have(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(status) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(
            ModelError, match=f"the hub has no model org/name, or it is private .HTTP {status}.*check the spelling"
        ):
            settle_hub(MODEL, {})


def test_a_model_that_the_hub_has(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(200) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert settle_hub(MODEL, {}) == []
        cached(cache)
        assert settle_hub(MODEL, {}) == []
    assert not constants.HF_HUB_OFFLINE


def test_a_private_model_of_someone_who_is_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question goes without the token, which is only for the libraries that download."""
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with hub(401) as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert settle_hub(MODEL, {}) == []

"""Models and data sets of the hub: their commit, their files, and what is said when they cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.hub import Hub, point_at, running_hub

from posttrain.errors import DataError, ModelError
from posttrain.libraries.hub import cached_data, fetch_data, fetch_model, restored
from posttrain.libraries.hub_names import HubName, data_name, model_name, portable

MODEL = HubName(name="org/name")
ROWS = HubName(name="org/rows", kind="dataset")
FILES = {"config.json": b"{}", "model.safetensors": b"w", "pytorch_model.bin": b"old", "onnx/model.onnx": b"x"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    unplug(monkeypatch)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as served:
        point_at(served.address, monkeypatch)
        yield served


def unplug(monkeypatch: pytest.MonkeyPatch) -> None:
    point_at("http://127.0.0.1:1", monkeypatch)  # nothing listens there


def test_a_model_is_fetched_at_one_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.put("org/name", FILES)
    fetched = fetch_model(MODEL, "model.path")
    assert fetched.commit == first and fetched.folder.name == first
    # One format of weights, and no other folder.
    assert sorted(file.name for file in fetched.folder.iterdir()) == ["config.json", "model.safetensors"]
    second = hub.put("org/name", {**FILES, "config.json": b'{"a": 1}'})
    assert fetch_model(MODEL, "model.path", commit=first).commit == first
    assert fetch_model(MODEL, "model.path").commit == second
    unplug(monkeypatch)
    assert fetch_model(MODEL, "model.path", commit=first).commit == first
    away = fetch_model(MODEL, "model.path")
    assert away.commit == second and "org/name from its cache" in away.note


def test_revisions(hub: Hub) -> None:
    hub.put("org/name", FILES)
    old = hub.put("org/name", {"config.json": b"old"}, revision="v1/a")
    for revision in ("v1/a", old):
        assert fetch_model(HubName(name="org/name", revision=revision), "model.path").commit == old
    with pytest.raises(ModelError, match="has no revision v9"):
        fetch_model(HubName(name="org/name", revision="v9"), "model.path")


def test_a_tokenizer_comes_without_weights(hub: Hub) -> None:
    hub.put("org/name", FILES)
    assert fetch_model(MODEL, "model.tokenizer_path", weights=False).files == ("config.json",)


def test_without_a_network_a_missing_model_is_one_problem() -> None:
    with pytest.raises(ModelError) as caught:
        fetch_model(MODEL, "model.path")
    (problem,) = caught.value.problems
    assert "org/name is neither a folder here nor in the cache of the hub, which cannot be reached (" in problem.what
    assert problem.fix == "where there is a network: hf download org/name --local-dir FOLDER; then model.path=FOLDER"
    assert problem.field == "model.path"


def test_a_half_downloaded_model_is_not_in_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("org/name", FILES)
    (fetch_model(MODEL, "model.path").folder / "model.safetensors").unlink()
    unplug(monkeypatch)
    with pytest.raises(ModelError, match="nor in the cache"):
        fetch_model(MODEL, "model.path")


def test_offline_by_request(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("org/name", FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        fetch_model(MODEL, "model.path")
    assert hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fetch_model(MODEL, "model.path")
    asked = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model(MODEL, "model.path").note == ""
    assert len(hub.asked) == asked


def test_a_model_that_the_hub_does_not_have(hub: Hub) -> None:
    said = (
        r"the hub has no model org/name, or it is private .HTTP 401.*check the spelling, or log in with hf auth login"
    )
    with pytest.raises(ModelError, match=said):
        fetch_model(MODEL, "model.path")


def test_a_gated_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("org/name", FILES)
    hub.gated.add("org/name")
    with pytest.raises(ModelError, match=r"gated on the hub .HTTP 401.*accept them at https.*org/name, then log in"):
        fetch_model(MODEL, "model.path")
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert "config.json" in fetch_model(MODEL, "model.path").files


def test_a_snapshot_that_another_machine_names_is_fetched(hub: Hub, tmp_path: Path) -> None:
    commit = hub.put("org/name", FILES)
    there = f"/elsewhere/models--org--name/snapshots/{commit}"
    assert Path(restored(there)) == tmp_path / "models--org--name/snapshots" / commit
    assert restored("/elsewhere/model") == "/elsewhere/model"


def test_the_split_of_a_data_set(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet",
    ]
    hub.put("datasets/org/rows", dict.fromkeys(names, b"PAR1") | {"README.md": b"# rows"})
    fetched = fetch_data(ROWS, "data.train_files")
    assert fetched.files == tuple(names[:2]) and all(Path(path).is_file() for path in fetched.paths)
    unplug(monkeypatch)
    assert cached_data(ROWS, "data.train_files").paths == fetched.paths
    # The other split was not downloaded.
    with pytest.raises(DataError, match=r"hf download org/rows --repo-type dataset --local-dir FOLDER; then data.val"):
        fetch_data(HubName(name="org/rows", kind="dataset", split="test"), "data.validation_files")


def test_validation_names_its_split(hub: Hub) -> None:
    hub.put("datasets/org/rows", {"train.jsonl": b"{}", "test.jsonl": b"{}"})
    with pytest.raises(DataError, match="several splits: test, train; name the one to validate on: org/rows:SPLIT"):
        fetch_data(ROWS, "data.validation_files")
    test = HubName(name="org/rows", kind="dataset", split="test")
    assert fetch_data(test, "data.validation_files").files == ("test.jsonl",)


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("org/rows", "datasets/org/rows", ""),
        ("org/rows@v1", "datasets/org/rows@v1", ""),
        ("org/rows@v1:test", "datasets/org/rows@v1", "test"),
        ("org/rows@v1/main:test", "datasets/org/rows@v1", "main test"),
        ("org/rows/main:test", "datasets/org/rows", "main test"),
        ("hf://datasets/org/rows@refs%2Fpr%2F1/a/*.parquet", "datasets/org/rows@refs/pr/1", "a/*.parquet"),
        ("hf://datasets/org/rows/train.jsonl", "datasets/org/rows", "train.jsonl"),
    ],
)
def test_names_of_data_sets(text: str, key: str, part: str) -> None:
    name = data_name(text)
    assert name is not None
    assert (name.key, " ".join(filter(None, (name.config, name.split, name.files)))) == (key, part)


def test_what_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for text in ("data/train", "org/rows.parquet", "rows.jsonl", "/org/rows", "s3://org/rows", "a/b/c/d"):
        assert data_name(text) is None
    assert model_name("data") is None
    assert model_name("org/name@v1") == HubName(name="org/name", revision="v1")


def test_paths_in_the_cache_have_the_hubs_names() -> None:
    sha = "a" * 40
    commits = {"org/na--me@v1": sha, "datasets/org/rows@a/b": sha}
    assert portable(f"/x/models--org--na--me/snapshots/{sha}", commits) == "org/na--me@v1"
    assert (
        portable(f"/x/datasets--org--rows/snapshots/{sha}/d/t.jsonl", commits)
        == "hf://datasets/org/rows@a%2Fb/d/t.jsonl"
    )
    theirs = f"/x/models--org--other/snapshots/{sha}"
    assert portable(theirs, commits) == theirs

"""The folder of saved adapters: whole or absent, and what is replaced is there until its successor is."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.backends.tinker.adapters import AdapterShape
from posttrain.backends.tinker.store import SavedAbout, Store

ABOUT = SavedAbout(base_model="m", shape=AdapterShape(rank=1, attention=True, mlp=True, output=False), created=1.0)


def save(store: Store, text: str) -> str:
    def write(folder: Path) -> None:
        (folder / "adapter").write_text(text, encoding="utf-8")

    return store.write("run", "weights", "state", ABOUT, write, overwrite=True)


def content(store: Store, path: str) -> str:
    return (store.find(path).folder / "adapter").read_text(encoding="utf-8")


@pytest.mark.parametrize("survived", [0, 1])
def test_a_server_that_dies_while_a_state_is_replaced_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """It dies at the rename after so many: before the old state moves aside, and before the new one takes its place."""
    store = Store(tmp_path)
    path = save(store, "first")
    renames: list[Path] = []
    plain = Path.rename

    def dying(source: Path, target: Path) -> Path:
        renames.append(source)
        if len(renames) > survived:
            raise SystemExit("the server dies")
        return plain(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        patch.setattr("posttrain.backends.tinker.store.shutil.rmtree", lambda *_, **__: None)  # nothing is tidied up
        with pytest.raises(SystemExit):
            save(store, "second")
    assert content(Store(tmp_path), path) == "first"
    assert save(Store(tmp_path), "third") == path and content(store, path) == "third"
    assert [each.name for each in (tmp_path / "run" / "weights").iterdir()] == ["state"]

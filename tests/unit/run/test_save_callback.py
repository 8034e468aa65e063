"""A class of the user's own is called after every checkpoint, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.run.test_checkpoint import save

from posttrain.config import RunConfig
from posttrain.config.checkpoint import CheckpointConfig
from posttrain.errors import ConfigError, RunStopped
from posttrain.plan.checks.own_classes import check_callback
from posttrain.run.checkpoint import Checkpoints
from posttrain.run.save_callback import save_callback

CLASSES = """
import json, os
from pathlib import Path
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

class Notes(CheckpointCallback):
    def on_save(self, trainer, global_step, checkpoint_dir, async_save=False, **kwargs):
        said = [global_step, sorted(os.listdir(checkpoint_dir)), async_save, os.environ.get("MY_SECRET_KEY")]
        with Path(self.config.notes).open("a") as file:
            file.write(json.dumps([*said, os.getpid()]) + "\\n")

class Awaited:
    def __init__(self, config):
        self.place = Path(config["notes"])
    async def on_save(self, global_step, **kwargs):
        self.place.write_text(str(global_step))

class Broken(CheckpointCallback):
    def on_save(self, trainer, global_step, checkpoint_dir, **kwargs):
        trainer.log(global_step)

class Sleeps(CheckpointCallback):
    def on_save(self, **kwargs):
        import time
        time.sleep(3600)

class Elsewhere:
    def __init__(self, config, bucket):
        pass
    def on_load(self):
        pass
"""


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(CLASSES)
    return file


def rules(classes: Path, name: str, **more: object) -> CheckpointConfig:
    options = {"notes": str(classes.with_name("notes"))}
    return CheckpointConfig.model_validate({"callback": f"{classes}:{name}", "callback_options": options} | more)


def saved(classes: Path, name: str, *steps: int, **more: object) -> None:
    with save_callback(rules(classes, name, **more)) as after_save:
        save(Checkpoints(classes.with_name("checkpoints"), after_save=after_save), *steps)


def test_it_gets_every_complete_checkpoint_and_the_variables_that_are_named(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_KEY", "k")
    saved(classes, "Notes", 1, 2)
    saved(classes, "Notes", 3, callback_environment_variables=["MY_SECRET_KEY"])
    lines = [json.loads(line) for line in classes.with_name("notes").read_text().splitlines()]
    files = ["manifest.json", "policy", "run.json"]
    assert [line[:4] for line in lines] == [
        [1, files, False, None],
        [2, files, False, None],
        [3, files, False, "k"],
    ]
    assert lines[0][4] == lines[1][4] != lines[2][4]  # a process per run


def test_a_coroutine_is_awaited(classes: Path) -> None:
    saved(classes, "Awaited", 4)
    assert classes.with_name("notes").read_text() == "4"


def test_an_error_in_it_ends_the_run_after_the_checkpoint_is_whole(classes: Path) -> None:
    with pytest.raises(RunStopped) as error:
        saved(classes, "Broken", 1)
    text = str(error.value)
    assert text.startswith("the checkpoint of step 1 is complete, and checkpoint.callback (")
    assert "'NoneType' object has no attribute 'log'" in text and f"({classes}:20)" in text
    assert Checkpoints(classes.with_name("checkpoints")).holds(1)
    with pytest.raises(RunStopped, match="did not answer within"), save_callback(rules(classes, "Notes")) as call:
        assert call is not None
        call._child.close()
        with save_callback(rules(classes, "Sleeps")) as sleeps:
            assert sleeps is not None
            sleeps._child._call_s = 0.5
            sleeps(2, classes.parent)


def test_wrong_classes_are_found_before_anything_runs(classes: Path) -> None:
    def said(where: str) -> list[str]:
        plain = {"model": {"path": "x"}, "data": {"train_files": ["x"]}, "checkpoint": {"callback": where}}
        problems = check_callback(RunConfig.model_validate(plain))
        assert {problem.field for problem in problems} <= {"checkpoint.callback"}
        return [f"{problem.what}; {problem.fix}" for problem in problems]

    assert said(f"{classes}:Notes") == said(f"{classes}:Awaited") == []
    assert "defines no 'Note'" in said(f"{classes}:Note")[0] and "did you mean Notes?" in said(f"{classes}:Note")[0]
    [method, argument] = said(f"{classes}:Elsewhere")
    assert "has no method 'on_save' (it has: on_load)" in method
    assert "Elsewhere needs bucket, and is constructed with config" in argument
    assert said("no_such_module.Mine")[0].startswith("there is no module no_such_module")
    with pytest.raises(ConfigError) as error, save_callback(rules(classes, "Elsewhere")):
        pass
    assert error.value.problems[0].field == "checkpoint.callback"

"""Code of a fork that cannot be loaded is reported by plan and by train, before anything is sampled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.managed_fork import MANAGERS, managed_fork

from posttrain.cli.app import main
from posttrain.plan.checks.environment_code import code_problems
from toy import toy_tokenizer
from verl_fork import MAIN, PLAYER, write_fork

pytestmark = pytest.mark.usefixtures("warm_children")
ALIAS = "import torch\nimport no_such_lib as json\n"


def found(name: str, settings: dict[str, Any]) -> str:
    return "\n".join(str(each) for each in code_problems(name, settings, ()))


def managed(folder: Path, text: str, **config: Any) -> str:
    managed_fork(folder, managers=text)
    settings = {"file": str(folder / "plays/worlds/managers.py"), "folder": str(folder), "function": "make_worlds"}
    env = {"env_name": "Letters", "letters": "abcd", "max_steps": 3, **config}
    return found("env_manager", {**settings, "config": {"env": env}})


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("import numpy as np", "import numpy as np", ""),
        ("import numpy as np", "import numpy as np\nimport cv2_not_there.io", "managers.py:3: make_worlds of "),
        ("import numpy as np", "import numpy as np\nimport no_such_lib", "is not installed; pip install no-such-lib,"),
        ("import numpy as np", "import numpy as np\nfrom plays.worlds import games", "cannot import name 'games'"),
        ("import numpy as np", "import numpy as np\nimport plays.cards", "needs plays.cards, which is not in "),
        # of an actor, which is made late
        ("self.rng, self.letters", "import no_such_lib; self.rng, self.letters", "package no_such_lib"),
        ("return LetterManager(worlds, config)", "return LetterManager(worlds)", "1 required positional argument"),
    ],
)  # fmt: skip
def test_managers_that_cannot_be_made(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in MANAGERS
    problem = managed(tmp_path, MANAGERS.replace(old, new))
    assert said in problem and bool(said) == bool(problem)
    assert "plays" not in sys.modules


def test_a_world_that_is_not_there(tmp_path: Path) -> None:
    assert "for env.env_name=Chess, ends the program (exit code 3)" in managed(tmp_path, MANAGERS, env_name="Chess")


def test_a_server_that_is_not_there_yet_is_no_problem(tmp_path: Path) -> None:
    asks = "import numpy as np\nimport urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/')"
    assert managed(tmp_path, MANAGERS.replace("import numpy as np", asks)) == ""


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, ""),
        ({"player": PLAYER.replace("import torch\n", ALIAS)}, "player.py:7: Player needs the package no_such_lib"),
        ({"player": PLAYER.replace("from .joined import widened", "from .lost import widened")}, "which is not in "),
        ({"player": PLAYER.replace("limits, quiet=True)", "limits, loud, quiet=True)")}, "1 required positional argument"),
        ({"main": MAIN.replace("import ", "import no_such_lib\nimport ", 1)}, ""),
    ],
)  # fmt: skip
def test_classes_that_cannot_be_made(tmp_path: Path, files: dict[str, str], said: str) -> None:
    fork = write_fork(tmp_path / "fork", **files)
    toy_tokenizer().save_pretrained(tmp_path / "model")
    settings = {
        "trainer": f"{fork}/verl/trainer/ppo/ray_trainer.py:RayPPOTrainer.fit",
        "folder": str(fork),
        "program": f"{fork}/verl/trainer/main_ppo.py",
        "model": {"path": str(tmp_path / "model")},
        "config": {
            "seeker": {"turns": 2, "passage_tokens": 6, "url": "http://127.0.0.1:9", "worth": 0.5},
            "data": {"max_prompt_length": 500},
            "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
        },
    }
    problem = found("verl_loop", settings)
    assert said in problem and bool(said) == bool(problem), problem


def test_plan_and_train_end_with_the_package(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = MANAGERS.replace("import numpy as np", "import numpy as np\nimport no_such_lib")
    script = managed_fork(tmp_path, model=str(tiny_llama), managers=text)
    monkeypatch.chdir(tmp_path)
    for command in ("plan", "train"):
        monkeypatch.setattr("sys.argv", ["posttrain", command, str(script), "--here", "--drop-unknown"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and "pip install no-such-lib" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("sys.argv", ["posttrain", "plan", str(script), "--here", "--drop-unknown", "--skip-files"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0

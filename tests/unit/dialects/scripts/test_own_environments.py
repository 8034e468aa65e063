"""Environments that a package of a checkout on SkyRL registers: found by the imports of a program, with the class's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.scripts.launch import read_script

MAIN = "python -m skyrl.train.entrypoints.main_base"
LOOP = 'for _id in ("bird", "bird_sql"):\n    register(id=_id, entry_point=f"{__name__}.bird:BirdEnv")\n'


def checkout(folder: Path) -> Path:
    """A package ``extra.sql`` whose sub-package registers an environment when it is imported."""
    envs = folder / "extra" / "sql" / "envs"
    envs.mkdir(parents=True)
    (envs.parent / "__init__.py").write_text("from . import envs as _envs\nfrom .trainer import Trainer\n")
    (envs.parent / "entrypoint.py").write_text("def main(): ...\n")
    (envs / "__init__.py").write_text(f"from skyrl_gym.envs.registration import register\n{LOOP}")
    (envs / "bird.py").write_text("class BirdEnv: ...\n")
    return envs / "bird.py"


def added(folder: Path, command: str) -> list[str]:
    (folder / "run.sh").write_text(f"{command} trainer.epochs=1\n")
    arguments = read_script(str(folder / "run.sh"), (), {}, folder=folder).arguments
    return [each.partition("register.")[2] for each in arguments if "environment.settings.register" in each]


@pytest.mark.parametrize("word", ["extra.sql.entrypoint", "extra.sql.envs", "extra.sql"])
def test_a_package_of_the_overridden_entry_point_registers(tmp_path: Path, word: str) -> None:
    file = checkout(tmp_path)
    wanted = [f"bird='{file}:BirdEnv'", f"bird_sql='{file}:BirdEnv'"]
    assert added(tmp_path, f"{MAIN} trainer.override_entrypoint={word}") == wanted
    assert added(tmp_path, f'{MAIN} "trainer.override_entrypoint={word}"') == wanted
    assert added(tmp_path, MAIN) == []


def test_a_package_that_a_program_imports_registers(tmp_path: Path) -> None:
    file = checkout(tmp_path)
    program = "import extra.sql.envs\nfrom skyrl.train.entrypoints.main_base import BasePPOExp\n"
    (tmp_path / "mine.py").write_text(program)
    assert added(tmp_path, "python mine.py") == [f"bird='{file}:BirdEnv'", f"bird_sql='{file}:BirdEnv'"]


def test_a_class_whose_file_is_not_there_is_not_registered(tmp_path: Path) -> None:
    checkout(tmp_path).unlink()
    assert added(tmp_path, f"{MAIN} trainer.override_entrypoint=extra.sql.entrypoint") == []

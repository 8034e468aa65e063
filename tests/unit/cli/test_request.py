"""Files named as Hydra's programs name them, and files that a peer ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.request import load_request, named_by_hydra
from posttrain.errors import ConfigError

MEGATRON = "ppo_megatron_trainer"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/run.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    (tmp_path / "plain.yml").write_text("model: {path: m}\n")
    return tmp_path


@pytest.mark.usefixtures("here")
class TestNames:
    @pytest.mark.parametrize(
        ("typed", "meant"),
        [
            (["--config-path", "jobs", "--config-name", "run", "a=1"], ["jobs/run.yaml", "a=1"]),
            (["a=1", "--config-path=jobs", "--config-name=run.yaml"], ["jobs/run.yaml", "a=1"]),
            (["-cp", "jobs", "-cn", "run"], ["jobs/run.yaml"]),
            (["--config_path", "jobs", "--config_name", "run"], ["jobs/run.yaml"]),  # ROLL's own starter
            (["--config-name=plain.yml"], ["plain.yml"]),
            (["--config-path=./config", f"--config-name={MEGATRON}"], [f"{MEGATRON}.yaml"]),  # in verl's own folder
            (["jobs/run.yaml", "a=1"], ["jobs/run.yaml", "a=1"]),
        ],
    )
    def test_become_the_file(self, typed: list[str], meant: list[str]) -> None:
        assert named_by_hydra(typed) == meant

    @pytest.mark.parametrize(
        ("typed", "message"),
        [
            (["--config-name"], "--config-name has no value; write --config-name=VALUE"),
            (["--config-path=jobs"], "--config-path names a folder, and no file is named; write jobs/FILE.yaml"),
            (["jobs/run.yaml", "--config-name=plain"], "two files are named: jobs/run.yaml and --config-name=plain"),
        ],
    )
    def test_that_are_incomplete(self, typed: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            named_by_hydra(typed)

    def test_a_file_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match=r"there is no file jobs/other\.yaml"):
            load_request(["--config-path=jobs", "--config-name=other"], "verl")


@pytest.mark.usefixtures("here")
class TestShippedFiles:
    @pytest.mark.parametrize(
        ("name", "dialect", "entry"),
        [
            ("ppo_trainer", "verl", "train"),
            ("ppo_trainer.yaml", "verl", "train"),
            ("sft_trainer", "verl", "sft"),
            ("generation", "verl", "generate"),
            ("evaluation", "verl", "evaluate"),
            ("ppo_base_config", "skyrl", "train"),
        ],
    )
    def test_are_known_by_name(self, name: str, dialect: str, entry: str) -> None:
        loaded = load_request([name], None)
        assert (loaded.dialect, loaded.entry) == (dialect, entry)

    def test_hold_what_the_peers_file_says_otherwise(self) -> None:
        """verl's Megatron file trains both models with megatron, and its overrides need no +."""
        loaded = load_request([f"--config-name={MEGATRON}", "trainer.n_gpus_per_node=8"], "verl")
        assert loaded.config.policy.engine == loaded.config.critic.engine == "megatron"

    def test_a_file_of_the_users_wins(self, here: Path) -> None:
        (here / "ppo_trainer.yaml").write_text("defaults: [_self_]\ndata: {train_batch_size: 64}\n")
        assert load_request(["ppo_trainer.yaml"], "verl").config.data.prompts_per_step == 64

    def test_of_another_dialect(self) -> None:
        with pytest.raises(ConfigError, match="ppo_trainer is a file of verl, and --dialect says roll; --dialect verl"):
            load_request(["ppo_trainer"], "roll")

"""Trainers that programs put in the place of SkyRL's: taken as SkyRL's, or refused with their difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.request import load_request
from posttrain.dialects.scripts.launch import Launch, read_script
from posttrain.errors import ConfigError

MAIN = """
from skyrl_train.entrypoints.main_base import BasePPOExp
from .parts import OwnTrainer

class Exp(BasePPOExp):
    def get_trainer(self, *parts):
        return OwnTrainer(*parts)
"""
IMPORT = "import random\nfrom skyrl_train.trainer import RayPPOTrainer\n\nclass OwnTrainer(RayPPOTrainer):\n"
STEP = """    def train(self):
        for prompts in tqdm(self.train_dataloader):
            with Timer("step"):
                output = asyncio.run(self.generate(prompts))
                batch = self.convert_to_training_input(output)
                batch = self.fwd_logprobs_values_reward(batch)
                batch = self.compute_advantages_and_returns(batch)
                self.train_critic_and_policy(batch)
                self.tracker.log(self.all_metrics)
"""


def launched(folder: Path, trainer: str, **files: str) -> Launch:
    for name, text in {"mine": MAIN, "parts": trainer, **files}.items():
        (folder / f"{name}.py").write_text(text)
    script = folder / "run.sh"
    script.write_text("python3 mine.py trainer.logger=console\n")
    return read_script(str(script), (), {}, folder=folder)


def test_a_loop_that_makes_the_calls_of_skyrls_is_skyrls(tmp_path: Path) -> None:
    launch = launched(tmp_path, IMPORT + STEP)
    assert launch.arguments == ("trainer.logger=console",)
    assert "OwnTrainer makes the calls of SkyRL's trainer and no others; it is not called" in launch.notes


SHUFFLES = f"{IMPORT}{STEP}                random.shuffle_rows(batch)\n"
SAMPLES_ALONE = IMPORT + STEP.replace("self.train_critic_and_policy(batch)", "pass")
ESTIMATES = f"{IMPORT}    def compute_advantages_and_returns(self, batch): ...\n"
ANOTHER = "from other import RayPPOTrainer\nclass OwnTrainer(RayPPOTrainer): ...\n"


@pytest.mark.parametrize(
    ("trainer", "difference"),
    [
        (SHUFFLES, r"OwnTrainer.train \(line 5 of .*parts.py\) calls shuffle_rows \(line 14\)"),
        (SAMPLES_ALONE, "does not call train_critic_and_policy, which SkyRL's does"),
        (ESTIMATES, r"OwnTrainer.compute_advantages_and_returns \(line 5 of .*\) is not SkyRL's"),
        ("class OwnTrainer:\n    def train(self): ...\n", "does not derive from SkyRL's RayPPOTrainer alone"),
        (ANOTHER, "does not derive from SkyRL's RayPPOTrainer alone"),
        ("", "OwnTrainer is not here"),
    ],
)
def test_another_loop_is_refused_with_its_difference(tmp_path: Path, trainer: str, difference: str) -> None:
    with pytest.raises(ConfigError, match=difference) as raised:
        launched(tmp_path, trainer)
    assert "Exp.get_trainer (line 6 of" in str(raised.value)


def test_a_simulated_trainer_trains_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="FullyAsyncTrainerSim in the place of its own: it sleeps in the place of training"
    ):
        launched(tmp_path, "", mine=MAIN.replace("OwnTrainer", "FullyAsyncTrainerSim"))


MANAGED = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

class OwnTrainer(RayPPOTrainer):
    def init_workers(self):
        from {module} import {name}
        self.async_rollout_manager = {name}(self.config)
"""
MANAGER = "class OwnManager(AgentLoopManager):\n    def {method}(self, prompts): ...\n"


def test_episodes_of_a_trainers_own_manager_are_not_verls(tmp_path: Path) -> None:
    """skyrl-agent's trainer on verl: its loop makes verl's calls, and its manager plays by its own agents."""
    trainer = MANAGED.format(module=".managers", name="OwnManager")
    (asked,) = launched(
        tmp_path,
        trainer,
        mine="from .parts import OwnTrainer\n",
        managers=MANAGER.format(method="generate_sequences"),
    ).asks
    assert asked.field == "OwnTrainer"
    assert (
        "OwnManager (line 1 of" in asked.what and "plays its episodes, in a way of its own; a run samples" in asked.what
    )
    for module, method in ((".managers", "wake_up"), ("verl.experimental.agent_loop", "generate_sequences")):
        trainer = MANAGED.format(module=module, name="OwnManager")
        found = launched(
            tmp_path, trainer, mine="from .parts import OwnTrainer\n", managers=MANAGER.format(method=method)
        )
        assert (found.dialect, found.asks) == ("verl", ())


RUNS = """
from skyrl_agent import AutoAgentRunner

class OwnManager(AgentLoopManager):
    def __init__(self, config, worker_group):
        self.runner = AutoAgentRunner.from_task(task_yaml=config.skyrl_agent.task_yaml, infer_engine=None)

    def generate_sequences(self, prompts): ...
"""
COMMAND = [
    "python3", "mine.py", "algorithm.adv_estimator=loop", "data.train_files=a.parquet", "actor_rollout_ref.model.path=m",
    "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "data.max_prompt_length=100", "data.max_response_length=50", "data.val_files=b.parquet",
    "+skyrl_agent.task_yaml=task.yaml", "+skyrl_agent.num_trajectories=4", "+trainer.remote_upload_dir=there",
]  # fmt: skip
TASK = """
generator:
  num_trajectories: 4
  sampling_params: {temperature: 0.5, top_p: 0.9, top_k: -1, stop: [END]}
  val_config: {num_trajectories: 2, sampling_params: {temperature: 0.25}}
"""


def test_skyrl_agents_runner_plays_by_its_task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "skyrl_agent/integrations"
    package.mkdir(parents=True)
    (package / "trainer.py").write_text("remote_upload_dir = ''")
    for name, text in (("task", TASK), ("managers", RUNS)):
        (tmp_path / f"{name}.{'yaml' if name == 'task' else 'py'}").write_text(text)
    (tmp_path / "parts.py").write_text(MANAGED.format(module=".managers", name="OwnManager"))
    (tmp_path / "mine.py").write_text("from .parts import OwnTrainer\n")
    (tmp_path / "run.sh").write_text(" ".join(COMMAND) + "\n")
    launch = read_script("run.sh", (), {}, folder=tmp_path)
    assert any("loop is of NovaSky-AI's fork" in note for note in launch.notes)
    loaded = load_request(list(launch.arguments), "verl", here=True)
    assert not [str(each) for each in loaded.problems if "python" not in each.field and "file" not in each.field]
    config = loaded.config
    assert (config.environment.name, config.environment.settings["task"]) == ("skyrl_agent", "task.yaml")
    assert config.environment.settings["folder"] == str(tmp_path) and config.environment.settings["model"] == "m"
    assert (config.advantage.name, config.rollout.samples_per_prompt) == ("rloo", 4)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k) == (0.5, 0.9, 0)
    assert list(config.rollout.stop) == ["END"]
    assert (config.validation.temperature, config.validation.samples_per_prompt) == (0.25, 2)
    assert config.environment.max_context_tokens == 150 and not config.reward.terms
    assert any(each.startswith("trainer.remote_upload_dir is read by skyrl-agent's") for each in loaded.warnings)
    more = [*launch.arguments, "skyrl_agent.num_trajectories=3"]
    (problem,) = [each for each in load_request(more, "verl", here=True).problems if "num_trajectories" in each.field]
    assert "has num_trajectories=4, and the command 3" in problem.what

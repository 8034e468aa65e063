"""Programs of third parties that build a peer's trainer: recognised by their imports, what they replace is named or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.request import load_request
from posttrain.dialects.scripts.launch import Launch, read_script
from posttrain.errors import ConfigError

IMPORT = "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n"
MAIN = '@hydra.main(config_path="config", config_name="mine")\ndef main(config): ...\n'


def launched(folder: Path, program: str, command: str = "python3 mine.py", **files: str) -> Launch:
    (folder / "mine.py").write_text(program)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    script = folder / "run.sh"
    script.write_text(f"{command} algorithm.adv_estimator=grpo\n")
    return read_script(str(script), (), {}, folder=folder)


@pytest.mark.parametrize("command", ["python3 mine.py", "python -m mine", "torchrun --nnodes 1 ./mine.py"])
def test_a_program_that_builds_verls_trainer_is_verls_trainer(tmp_path: Path, command: str) -> None:
    launch = launched(tmp_path, IMPORT, command)
    assert (launch.dialect, launch.arguments) == ("verl", ("algorithm.adv_estimator=grpo",))
    assert "is a program of your own that builds verl's PPO trainer" in launch.notes[0]


def test_it_starts_from_the_file_that_its_decorator_names(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/mine.yaml").write_text("defaults: [ppo_trainer]\n")
    assert launched(tmp_path, IMPORT + MAIN).arguments[0] == str(tmp_path / "config/mine.yaml")


@pytest.mark.parametrize(
    ("program", "dialect"),
    [
        ("from verl.trainer.main_ppo import run_ppo\n", "verl"),
        ("from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer\n", "verl"),
        ("def main():\n    from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n", "verl"),
        ("from skyrl_train.entrypoints.main_base import BasePPOExp\n", "skyrl"),
        ("from skyrl.train.entrypoints.main_base import BasePPOExp as Base\nclass E(Base): ...\n", "skyrl"),
        ("from .inner import MineTrainer\n", "verl"),
    ],
)
def test_every_way_to_a_peers_trainer_is_seen(tmp_path: Path, program: str, dialect: str) -> None:
    inner = f"{IMPORT}class MineTrainer(RayPPOTrainer):\n    def _validate(self): ...\n"
    assert launched(tmp_path, program, inner=inner).dialect == dialect


@pytest.mark.parametrize("program", ["import torch\n", "from other.ray import RayPPOTrainer\n", "def broken(:\n"])
def test_other_programs_are_none(tmp_path: Path, program: str) -> None:
    with pytest.raises(ConfigError, match="no trainer is called"):
        launched(tmp_path, program)


LOOP = """
class Mine(RayPPOTrainer):
    def _save_checkpoint(self):
        anything(self)
    def fit(self):
        for batch in self.train_dataloader:
            batch = compute_advantage(batch)
            {call}
            self.actor_rollout_wg.update_actor(batch)
"""


def test_a_loop_that_calls_what_verls_calls_is_named_and_not_run(tmp_path: Path) -> None:
    launch = launched(tmp_path, IMPORT + LOOP.format(call="print(len(batch))"))
    assert "Mine of" in launch.notes[1] and "overrides _save_checkpoint (line 4), fit (line 6)" in launch.notes[1]


def test_a_loop_that_calls_something_else_is_to_be_confirmed_with_its_line(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, IMPORT + LOOP.format(call="batch = sort_by_lean(batch)")).asks
    assert asked.field == "Mine.fit" and "calls sort_by_lean (line 9), which verl's PPO" in asked.what


def test_a_loop_that_a_class_below_replaces_is_not_named(tmp_path: Path) -> None:
    above = IMPORT + LOOP.format(call="batch = sort_by_lean(batch)")
    below = LOOP.replace("Mine(RayPPOTrainer)", "Below(Mine)").format(call="batch = keep(batch)")
    launch = launched(tmp_path, f"from above import Mine\n{below}", above=above)
    assert [each.field for each in launch.asks] == ["Below.fit"]


def test_a_method_that_is_replaced_from_outside(tmp_path: Path) -> None:
    patch = f"from split import fit\n{IMPORT}RayPPOTrainer.fit = fit\n"
    launch = launched(tmp_path, patch, split="def fit(self):\n    self.actor_rollout_wg.update_actor(1)\n")
    assert "RayPPOTrainer.fit is replaced at" in launch.notes[1]
    (asked,) = launched(tmp_path, patch, split="def fit(self):\n    pairs(1)\n").asks
    assert asked.field == "RayPPOTrainer.fit" and "split.py) calls pairs (line 2)" in asked.what


def test_skyrls_trainer_of_the_users_own_is_refused(tmp_path: Path) -> None:
    program = "from skyrl_train.entrypoints.main_base import BasePPOExp\nclass E(BasePPOExp):\n    def {}(self): ...\n"
    with pytest.raises(ConfigError, match=r"E.get_trainer \(line 3"):
        launched(tmp_path, program.format("get_trainer"))
    assert "overrides get_tracker (line 3)" in launched(tmp_path, program.format("get_tracker")).notes[1]


SKYRL = "from skyrl_train.entrypoints.main_base import BasePPOExp\nclass E(BasePPOExp):\n"


@pytest.mark.parametrize(
    ("method", "part", "override"),
    [
        ("get_trainer", "FullyAsyncRayPPOTrainer", "++trainer.fully_async.enabled=true"),
        ("get_trainer", "AsyncRayPPOTrainer", "+posttrain.asynchronous.mode=one_step"),
        ("get_trainer", "FullCtxTrainer", "+posttrain.data.dataset_class_name=FullLengthPrompts"),
        ("get_generator", "StepWiseGenerator", "++trainer.step_wise_training=true"),
        ("get_generator", "SkyRLGymHTTPGenerator", "++generator.enable_http_endpoint=false"),
        ("get_generator", "VerifiersGenerator", "+posttrain.environment.name=verifiers"),
    ],
)
def test_parts_of_skyrls_own_become_the_keys_that_ask_for_them(
    tmp_path: Path, method: str, part: str, override: str
) -> None:
    launch = launched(tmp_path, f"{SKYRL}    def {method}(self, cfg):\n        return {part}(cfg.generator)\n")
    assert launch.arguments[-1] == override


GENERATES = f"{SKYRL}    def get_generator(self, cfg):\n        return BoxGenerator(cfg.generator)\n"


@pytest.mark.parametrize(
    ("command", "file", "folder"),
    [
        ("python3 mine.py", "mine.py", ""),
        ("python -m examples.own.main_mine", "examples/own/main_mine.py", ""),
        ("python examples/own/main_mine.py", "examples/own/main_mine.py", "examples/own"),
    ],
)
def test_another_generator_plays_under_any_name_of_the_program(
    tmp_path: Path, command: str, file: str, folder: str
) -> None:
    place = tmp_path / "examples" / "own"
    place.mkdir(parents=True)
    (place / "main_mine.py").write_text(GENERATES)
    launch = launched(tmp_path, GENERATES, command)
    assert list(launch.arguments[-3:]) == [
        "+posttrain.environment.name=skyrl_program",
        f"+posttrain.environment.settings.file='{tmp_path / file}'",
        f"+posttrain.environment.settings.folder='{tmp_path / folder}'",
    ]
    assert "get_generator" not in "".join(launch.notes)


def test_rows_that_only_the_program_reads_are_read_by_it(tmp_path: Path) -> None:
    """data.train_data then names what it likes, such as a folder of tasks; a section of its own is its own affair."""
    program = f"{GENERATES}    def get_train_dataset(self):\n        return Tasks(self.cfg.data, self.cfg.boxes)\n"
    launch = launched(tmp_path, program)
    assert list(launch.arguments[-2:]) == [
        "+posttrain.data.dataset_class_file='pkg://posttrain.envs.skyrl_program.rows'",
        "+posttrain.data.dataset_class_name=ProgramRows",
    ]
    added = [each for each in launch.arguments if each.startswith("+posttrain")]
    keys = ["data.train_data=[/tasks]", "data.val_data=[/held]", "boxes.count=3", *added]
    loaded = load_request(keys, "skyrl", here=True, skip_files=True)
    assert not loaded.problems and loaded.config.data.train_files == ["/tasks"]
    file, folder = str(tmp_path / "mine.py"), str(tmp_path)
    assert loaded.config.data.dataset_class_options == {
        "file": file, "folder": folder, "arguments": ["data.train_data=[/tasks]", "data.val_data=[/held]", "boxes.count=3"],
    }  # fmt: skip
    without = load_request(keys[:3], "skyrl", here=True, skip_files=True)
    assert {"data.train_data", "boxes.count"} <= {each.field for each in without.problems}


def test_an_experiment_with_a_run_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"E \(line 5 of .*mine.py\) has a run of its own"):
        launched(tmp_path, f"{GENERATES}    def run(self):\n        print(self.cfg)\n")
    # SkyRL's own programs that serve or generate have one, too, and play by its own generator
    assert launched(tmp_path, f"{SKYRL}    def run(self):\n        print(self.cfg)\n").dialect == "skyrl"


def test_a_run_that_only_trains_is_that_of_skyrls(tmp_path: Path) -> None:
    run = "    def run(self):\n        trainer = self._setup_trainer()\n        asyncio.run(trainer.train())\n"
    launch = launched(tmp_path, GENERATES + run)
    assert "+posttrain.environment.name=skyrl_program" in launch.arguments
    assert not any("validation.only" in each for each in launch.arguments)
    with pytest.raises(ConfigError, match="has a run of its own"):
        launched(tmp_path, f"{GENERATES}{run}        trainer.distil()\n")


def test_a_run_that_generates_alone_samples_the_validation_rows(tmp_path: Path) -> None:
    own = "    def make(self):\n        return self.get_generator(self.cfg)\n"
    run = "    def run(self):\n        asyncio.run(self.make().generate(self.rows))\n"
    launch = launched(tmp_path, GENERATES + own + run)
    assert {
        "+posttrain.environment.name=skyrl_program",
        "+posttrain.validation.only=true",
        "++trainer.eval_before_train=true",
    } <= set(launch.arguments)
    assert any("has a run that generates alone" in each for each in launch.notes)
    # One that trains behind it, in a method of its own, does more
    trains = "    def make(self):\n        return self._setup_trainer()\n"
    with pytest.raises(ConfigError, match="has a run of its own"):
        launched(tmp_path, GENERATES + trains + run)


def test_an_example_of_skyrls_may_make_its_samplers_in_its_own_way(tmp_path: Path) -> None:
    program = f"{SKYRL}    def get_inference_client(self):\n        return Client(self.cfg)\n"
    place = tmp_path / "examples" / "quantized"
    place.mkdir(parents=True)
    (place / "main_mine.py").write_text(program)
    assert launched(tmp_path, program, "python -m examples.quantized.main_mine").dialect == "skyrl"
    with pytest.raises(
        ConfigError, match=r"E.get_inference_client .line 3 .* puts another part in the place of its own"
    ):
        launched(tmp_path, program)


def test_options_that_a_program_of_skyrl_reads_itself_are_no_overrides(tmp_path: Path) -> None:
    program = "from skyrl.train.entrypoints.main_base import BasePPOExp\n"
    program += 'PLACES = {"sft": "envs:Quiet", "instruct": "envs:Loud"}\n'
    program += 'parser.add_argument("--env-variant", choices=list(PLACES))\n'
    program += 'parser.add_argument("--fast", action="store_true")\n'
    program += 'register(id="maze", entry_point=PLACES[args.env_variant])\n'
    for given in ("--env-variant instruct --fast", "--fast --env-variant=instruct"):
        launch = launched(tmp_path, program, f"python3 mine.py {given}")
        assert launch.arguments == (
            "algorithm.adv_estimator=grpo",
            "+posttrain.environment.settings.register.maze='envs:Loud'",
        )


def test_a_score_function_that_is_passed_on_scores_the_run(tmp_path: Path) -> None:
    program = "from verl.trainer.main_ppo import run_ppo\ndef score(solution_str, ground_truth):\n    return 1.0\n"
    program += "run_ppo(None, compute_score=score)\n"
    launch = launched(tmp_path, program)
    assert launch.arguments[-2:] == (
        f"++custom_reward_function.path={tmp_path / 'mine.py'}",
        "++custom_reward_function.name=score",
    )
    loaded = load_request([*launch.arguments, "data.train_files=x"], "verl", here=True, skip_files=True)
    assert loaded.config.reward.terms[0].path == str(tmp_path / "mine.py")


def test_reward_code_that_is_not_called_is_named(tmp_path: Path) -> None:
    launch = launched(tmp_path, f"{IMPORT}reward_fn = RewardManager(num_examine=0)\n")
    assert "reward_fn is made by RewardManager at" in launch.notes[1] and "which is not called" in launch.notes[1]


def test_environments_that_a_program_of_skyrl_registers_are_its_runs(tmp_path: Path) -> None:
    program = "from skyrl_train.entrypoints.main_base import BasePPOExp\n"
    program += 'register(id="multiply", entry_point="examples.multiply.env:MultiplyEnv")\n'
    launch = launched(tmp_path, program)
    assert (
        launch.arguments[-1] == "+posttrain.environment.settings.register.multiply='examples.multiply.env:MultiplyEnv'"
    )
    keys = ["environment.env_class=multiply", "data.train_data=[a.parquet]", launch.arguments[-1]]
    loaded = load_request(keys, "skyrl", here=True, skip_files=True)
    assert not [each for each in loaded.problems if "multiply" in str(each)]
    assert loaded.config.environment.settings["register"] == {"multiply": "examples.multiply.env:MultiplyEnv"}


def test_skyrls_dapo_is_not_verls_recipe_of_that_name(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("uv run -m examples.train.algorithms.dapo.main_dapo trainer.epochs=1\n")
    launch = read_script(str(script), (), {}, folder=tmp_path)
    assert (launch.dialect, launch.arguments) == ("skyrl", ("trainer.epochs=1",))


def test_a_trainers_file_that_another_program_changes_is_no_launch(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    patch = "python3 tools/patch.py --target /verl/verl/trainer/main_ppo.py --apply\n"
    script.write_text(f"{patch}python3 -m verl.trainer.main_ppo data.train_batch_size=8\n")
    assert read_script(str(script), (), {}, folder=tmp_path).arguments == ("data.train_batch_size=8",)
    script.write_text(patch)
    with pytest.raises(ConfigError, match="no trainer"):
        read_script(str(script), (), {}, folder=tmp_path)
    script.write_text("python3 tools/logged.py verl/trainer/main_ppo.py data.train_batch_size=8\n")
    assert read_script(str(script), (), {}, folder=tmp_path).arguments == ("data.train_batch_size=8",)


def test_a_program_with_a_configuration_of_its_own_is_refused_before_its_variables(tmp_path: Path) -> None:
    """As EasyR1, whose sections are worker.actor, worker.rollout, ..."""
    program = f"{IMPORT}config = OmegaConf.merge(OmegaConf.structured(PPOConfig()), OmegaConf.from_cli())\n"
    with pytest.raises(ConfigError) as error:
        launched(tmp_path, program, "python3 mine.py worker.actor.model.model_path=$1")
    [problem] = error.value.problems
    assert "its configuration is PPOConfig (line 2 of" in problem.what and "run.sh:1" in problem.where
    assert "worker.actor is actor_rollout_ref.actor" in problem.fix

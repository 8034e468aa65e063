"""The file that a program of a launch script starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.request import load_request
from posttrain.dialects.scripts.base_files import arguments_of
from posttrain.dialects.scripts.launch import read_script
from posttrain.dialects.scripts.recipes import RECIPES
from posttrain.dialects.scripts.trainers import Trainer, trainer_of
from posttrain.errors import ConfigError

MAIN = "import hydra\n\n@hydra.main(config_path={path!r}, config_name={name!r}, version_base=None)\ndef main(config): ...\n"
OWN = "defaults: [ppo_trainer, _self_]\ndata: {max_prompt_length: 77}\n"


def trainer(word: str) -> Trainer:
    found = trainer_of(word)
    assert found is not None
    return found


def write(folder: Path, program: str, config_path: str, name: str, file: str) -> Path:
    main, config = folder / program, folder / file
    for place in (main, config):
        place.parent.mkdir(parents=True, exist_ok=True)
    main.write_text(MAIN.format(path=config_path, name=name))
    config.write_text(OWN)
    return config


@pytest.mark.parametrize(
    ("program", "word", "config_path", "file"),
    [
        ("recipe/dapo/main_dapo.py", "recipe.dapo.main_dapo", "config", "recipe/dapo/config/mine.yaml"),
        ("recipe/own/main_own.py", "recipe/own/main_own.py", "config", "recipe/own/config/mine.yaml"),
        ("work/main_ppo.py", "work.main_ppo", "../settings", "settings/mine.yaml"),
        ("work/main_ppo.py", "work.main_ppo", ".", "work/mine.yaml"),
    ],
)
def test_a_program_starts_from_the_file_that_its_decorator_names(
    tmp_path: Path, program: str, word: str, config_path: str, file: str
) -> None:
    config = write(tmp_path, program, config_path, "mine", file)
    first, *rest = arguments_of(trainer(word), ["data.train_files=a.parquet"], [tmp_path / "elsewhere", tmp_path])
    assert Path(first).resolve() == config
    assert rest == ["data.train_files=a.parquet"]
    assert load_request([first, *rest], "verl", here=True, skip_files=True).config.data.max_prompt_tokens == 77


def test_a_named_file_stands_before_the_decorators(tmp_path: Path) -> None:
    config = write(tmp_path, "recipe/dapo/main_dapo.py", "config", "mine", "recipe/dapo/config/mine.yaml")
    other = config.with_name("other.yaml")
    other.write_text(OWN)
    found = arguments_of(trainer("recipe.dapo.main_dapo"), ["--config-name", "other", "a=1"], [tmp_path])
    assert [Path(found[0]).resolve(), *found[1:]] == [other, "a=1"]


@pytest.mark.parametrize(
    "text", ["def broken(:\n", "import hydra\n", "@hydra.main(config_name=NAME)\ndef main(): ...\n"]
)
def test_a_program_that_names_no_file_in_plain_text_starts_from_the_usual_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/main_ppo.py").write_text(text)
    assert arguments_of(trainer("work.main_ppo"), ["a=1"], [tmp_path]) == ("a=1",)


def test_a_recipe_that_is_not_on_this_disk_has_what_its_file_changes() -> None:
    words = ["data.train_files=a.parquet", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    found = arguments_of(trainer("recipe.dapo.main_dapo"), words, [])
    assert found == ("reward_model.reward_manager=dapo", *words)
    asynchronous = arguments_of(trainer("verl.experimental.fully_async_policy.fully_async_main"), [], [])
    sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"]
    sizes += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", "algorithm.adv_estimator=grpo"]
    sizes += ["actor_rollout_ref.rollout.n=4", "data.train_files=a.parquet", "trainer.n_gpus_per_node=8"]
    loaded = load_request([*asynchronous, *sizes], "verl", skip_files=True)
    assert loaded.config.asynchronous.mode == "separate"
    assert loaded.config.data.prompts_per_step == 8


@pytest.mark.parametrize("recipe", ["one_step_off_policy.main_ppo", "fully_async_policy.fully_async_main"])
def test_an_asynchronous_recipe_on_megatron_that_is_not_on_this_disk(recipe: str) -> None:
    found = trainer(f"verl.experimental.{recipe}")
    name = "one_step_off_ppo_megatron_trainer" if "one_step" in recipe else "fully_async_ppo_megatron_trainer"
    asked = arguments_of(found, ["--config-path=config", f"--config-name={name}.yaml"], [])
    assert asked == ("--config-name", "ppo_megatron_trainer.yaml", *arguments_of(found, [], []))


def test_the_recipe_sppo_without_its_file_has_its_loss_and_its_advantage() -> None:
    words = ["data.train_files=a.parquet", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    found = arguments_of(trainer("recipe.sppo.main_sppo"), [*words, "algorithm.sppo_eta=0.5"], [])
    config = load_request(found, "verl", here=True, skip_files=True).config
    assert (config.advantage.name, config.advantage.settings) == ("sppo", {"soft_mean_scale": 0.5})
    assert (config.loss.name, config.loss.settings) == ("sppo", {"advantage_scale": 1.0})
    assert config.policy.schedule.warmup_updates == 2 * 15


def test_the_recipe_spin_without_its_file_learns_from_pairs_and_moves_its_reference() -> None:
    words = ["data.train_files=a.parquet", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=2"]
    words += [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size=8",
    ]
    words += ["actor_rollout_ref.rollout.log_prob_micro_batch_size=8"]
    found = arguments_of(trainer("recipe.spin.main_spin"), words, [])
    config = load_request(found, "verl", here=True, skip_files=True).config
    assert (config.advantage.name, config.advantage.settings["beta"]) == ("online_dpo", 0.1)
    assert (config.loss.name, config.reference.update_every, config.validation.samples_per_prompt) == ("gpg", 1, 2)
    assert (config.policy.sequences_per_mini_batch, config.policy.schedule.warmup_updates) == (16, 15)


def test_the_recipe_gkd_is_known_by_the_name_of_its_module_alone() -> None:
    words = ["data.train_files=a.parquet", "data.train_batch_size=8", "actor_rollout_ref.actor.strategy=fsdp"]
    found = arguments_of(trainer("main_gkd"), ["--config-name", "on_policy_distill_trainer", *words], [])
    loaded = load_request(found, "verl", skip_files=True)
    config = loaded.config
    assert not loaded.problems and config.distillation.teachers["teacher"].endpoints == ["tcp://localhost:15555"]
    assert (config.policy.sequences_per_micro_batch_per_device, config.data.prompt_column) == (2, "question")
    assert config.rollout.devices == [4, 5, 6, 7]


def test_the_recipe_prime_without_its_file_trains_its_process_reward_model() -> None:
    words = ["data.train_files=a.parquet", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    words += ["reward_model.model.path=judge", "reward_model.micro_batch_size_per_gpu=2", "data.oversample_factor=2"]
    words += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "algorithm.use_kl_in_reward=True"]
    words += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2", "reward_model.model.optim.lr=2e-6"]
    loaded = load_request(
        arguments_of(trainer("recipe.prime.main_prime"), words, []), "verl", here=True, skip_files=True
    )
    config = loaded.config
    process = config.reward.process
    assert (process.path, process.reference_path, process.update) == ("judge", None, "before")
    assert (process.sequences_per_mini_batch, process.sequences_per_micro_batch) == (8, 2)  # sequences, not prompts
    assert (process.optimizer.lr, process.optimizer.max_grad_norm) == (2e-6, 10.0)
    assert (config.rollout.samples_per_prompt, config.policy.sequences_per_mini_batch) == (4, 32)
    chosen = config.group_filter
    assert (chosen.strategy, chosen.oversample) == ("prefer", 2)
    assert chosen.above_mean < 0.2 < 0.8 < chosen.below_mean and chosen.above_mean > 0.199
    assert config.reward.kl.coef == 0 and config.reward.model is None  # the recipe takes no KL from rewards
    assert [term.name for term in config.reward.terms] == ["by_data_source"]


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.refused])
def test_a_recipe_with_an_algorithm_of_its_own_is_refused_once(name: str) -> None:
    recipe = Trainer("verl.trainer.main_ppo", "verl", f"recipe.{name}")
    with pytest.raises(ConfigError) as raised:
        arguments_of(recipe, ["some.key=1"], [], "run.sh:3")
    assert len(raised.value.problems) == 1
    assert f"recipe.{name} is refused: " in str(raised.value)
    assert "run.sh:3" in str(raised.value)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.asks])
def test_a_recipe_with_a_loss_of_its_own_is_to_be_confirmed(name: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m recipe.{name} algorithm.adv_estimator=grpo\n")
    (asked,) = read_script(str(script), (), {}, folder=tmp_path).asks
    assert asked.field == name.rpartition(".")[2] and RECIPES[name].asks in asked.what
    assert f"PPO or GRPO with these keys is meant: +posttrain.own_keys=[{asked.field}]" in asked.fix


def test_the_generation_server_takes_the_keys_of_the_trainer() -> None:
    words = [
        "actor_rollout_ref.model.path=m",
        "actor_rollout_ref.rollout.n=4",
        "data.train_files=['a.parquet','b.parquet']",
    ]
    words += ["actor_rollout_ref.rollout.response_length=9", "+data.output_path=o.parquet"]
    found = arguments_of(trainer("verl.trainer.main_generation_server"), words, [])
    loaded = load_request(found, "verl", here=True, skip_files=True)
    assert loaded.entry == "generate"
    config = loaded.config
    assert (config.model.path, config.data.files, config.output.file) == ("m", ["a.parquet", "b.parquet"], "o.parquet")
    assert (config.rollout.samples_per_prompt, config.rollout.max_response_tokens, config.rollout.top_k) == (4, 9, 0)


RUN = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet actor_rollout_ref.model.path=m"
FORK = """
data: {train_batch_size: 64, own_mix: 0.3}
algorithm: {adv_estimator: rloo}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 4, own_coef: 2.0, optim: {lr: 5e-7}}
  rollout: {n: 8, log_prob_micro_batch_size_per_gpu: 8, max_num_batched_tokens: null}
"""


def in_checkout(folder: Path, file: str, run: str = RUN, below: str = "") -> list[str]:
    """Write a script, and the base file of the checkout that it stands in. Returns: the arguments of ``posttrain plan``."""
    config = folder / below / "verl/trainer/config/ppo_trainer.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(file, encoding="utf-8")
    script = folder / "run.sh"
    script.write_text(run, encoding="utf-8")
    return [str(script)]


@pytest.mark.parametrize("below", ["", "verl"])
def test_a_script_in_a_forks_checkout_starts_from_the_forks_own_values(tmp_path: Path, below: str) -> None:
    """64 prompts x 8 responses in mini-batches of 16 x 8 = 128: 4 updates. verl's own file has 1024, n=1 and 256."""
    loaded = load_request(in_checkout(tmp_path, FORK, below=below), None, here=True, skip_files=True)
    assert loaded.problems == () and loaded.unsupported == ()
    config = loaded.config
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (64, 8)
    assert config.policy.sequences_per_mini_batch == 128 and config.policy.optimizer.lr == 5e-7
    assert config.advantage.name == "rloo"
    dropped = {one.key: one.reason for one in loaded.ignored if "checkout's own file" in one.reason}
    assert dropped.keys() == {"data.own_mix", "actor_rollout_ref.actor.own_coef"}


def test_arguments_that_a_forks_file_keeps_for_its_own_manager_are_left_out(tmp_path: Path) -> None:
    """Where the launch chooses one of verl's; what the launch itself sets is reported."""
    fork = (
        FORK + "reward_model: {reward_manager: dapo, reward_kwargs: {n_votes_per_prompt: 4, reward_type: majority}}\n"
    )
    arguments = in_checkout(tmp_path, fork)
    loaded = load_request(arguments, None, here=True, skip_files=True)
    assert loaded.problems == ()
    section = "reward_model.reward_kwargs"
    assert {f"{section}.n_votes_per_prompt", f"{section}.reward_type"} <= {one.key for one in loaded.ignored}
    arguments = in_checkout(tmp_path / "set", fork, f"{RUN} {section}.reward_type=gt")
    [problem] = load_request(arguments, None, here=True, skip_files=True).problems
    assert problem.what == "verl's reward manager dapo takes no argument reward_type"


def test_a_count_of_all_devices_in_a_forks_file_gives_way_to_the_launchs_own_of_one(tmp_path: Path) -> None:
    fork = FORK.replace("ppo_micro_batch_size_per_gpu: 4", "ppo_micro_batch_size: 64")
    each = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    loaded = load_request(in_checkout(tmp_path, fork, f"{RUN} {each}"), None, here=True, skip_files=True)
    assert loaded.problems == () and loaded.config.policy.sequences_per_micro_batch_per_device == 2
    assert any("ppo_micro_batch_size=64 of the checkout's own file gives way" in text for text in loaded.warnings)
    both = f"{RUN} {each} actor_rollout_ref.actor.ppo_micro_batch_size=64"
    [problem] = load_request(in_checkout(tmp_path / "set", fork, both), None, here=True, skip_files=True).problems
    assert "are both given" in problem.what


def test_an_own_key_of_a_fork_that_the_launch_sets_is_reported(tmp_path: Path) -> None:
    arguments = in_checkout(tmp_path, FORK, f"{RUN} actor_rollout_ref.actor.own_coef=3.0")
    [problem] = load_request(arguments, None, here=True, skip_files=True).problems
    assert problem.field == "actor_rollout_ref.actor.own_coef" and "--drop-unknown" in problem.fix


def test_a_misspelt_key_in_a_checkouts_file_is_named_where_the_right_one_is_missing(tmp_path: Path) -> None:
    """Beside the right key it is one of the fork's own."""
    wrong = FORK.replace("train_batch_size: 64", "train_batch_siz: 64")
    [problem] = load_request(in_checkout(tmp_path, wrong), None, here=True, skip_files=True).problems
    assert problem.field == "data.train_batch_siz" and "did you mean data.train_batch_size?" in problem.fix
    both = FORK.replace("train_batch_size: 64", "train_batch_size: 64, train_batch_size2: 32")
    (tmp_path / "both").mkdir()
    assert load_request(in_checkout(tmp_path / "both", both), None, here=True, skip_files=True).problems == ()


def test_a_placeholder_before_a_folder_of_the_checkout_is_left_out(tmp_path: Path) -> None:
    config = write(tmp_path, "recipe/eyes/main_eyes.py", "config", "mine", "recipe/eyes/config/mine.yaml")
    words = ["--config-path=base_dir/recipe/eyes/config", "--config-name=mine"]
    assert arguments_of(trainer("verl.trainer.main_ppo"), words, [tmp_path]) == (str(config),)
    nowhere = ["--config-path=base_dir/recipe/ears/config", "--config-name=mine"]
    assert "--config-path" in arguments_of(trainer("verl.trainer.main_ppo"), nowhere, [tmp_path])

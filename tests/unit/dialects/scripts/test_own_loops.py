"""A checkout's own training loop behind verl's name of the program: named in the plan, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from posttrain.cli.request import load_request
from posttrain.config import RunConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.scripts.launch import Launch, read_script
from posttrain.errors import ConfigError
from posttrain.verl_episodes import NotPlayable, find_loop, find_reward
from verl_fork import PLAYER, TRAINER, write_fork

FIT = """
class RayPPOTrainer:
    def _compute(self, batch):
        return self.reward_fn(batch)
    def fit(self):
        for batch in self.train_dataloader:
            batch = self.actor_rollout_wg.generate_sequences(batch)
            {reward}
            {call}
            self.actor_rollout_wg.update_actor(batch)
"""
SCORES = "batch.union(compute_reward(batch, self.reward_fn))"


def launched(
    folder: Path, package: str, *, reward: str = SCORES, call: str = "print(batch)", within: str = ""
) -> Launch:
    """A launch of ``PACKAGE.main_ppo`` in a checkout whose trainer stands beside that program."""
    root = folder / within
    home = root.joinpath(*package.split("."))
    (home / "ppo").mkdir(parents=True)
    (home / "main_ppo.py").write_text(
        f"from {package}.ppo.ray_trainer import RayPPOTrainer\nRayPPOTrainer(config=1).fit()\n"
    )
    (home / "ppo/ray_trainer.py").write_text(FIT.format(reward=reward, call=call))
    script = folder / "run.sh"
    script.write_text(f"python3 -m {package}.main_ppo algorithm.adv_estimator=grpo\n")
    return read_script(str(script), (), {}, folder=folder)


@pytest.mark.parametrize("package", ["verl.trainer", "mine.trainer"])
@pytest.mark.parametrize(
    "call",
    [
        *("print(batch)", "self._save_samples(batch)", "compute_reward_metrics(batch)", "batch.clone()"),
        *("logger_instance.finish()", "self.wandb_run.alert(batch)"),
        "bar = tqdm(total=1); bar.set_postfix(loss=0); bar.refresh()",
    ],
)
def test_a_loop_that_differs_in_its_reports_alone_is_verls(tmp_path: Path, package: str, call: str) -> None:
    assert launched(tmp_path, package, call=call).asks == ()


@pytest.mark.parametrize("within", ["", "verl"])
def test_a_forks_loop_behind_verls_name_is_named_with_its_lines(tmp_path: Path, within: str) -> None:
    (asked,) = launched(tmp_path, "verl.trainer", call="batch = keep_the_middle(batch)", within=within).asks
    assert "RayPPOTrainer.fit (line 5 of" in asked.what
    assert "calls keep_the_middle (line 9), which verl's does not" in asked.what and "run.sh:1" in asked.where


def test_only_bars_of_tqdm_report(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, "verl.trainer", call="pool = Pool(total=1); pool.refresh()").asks
    assert "calls Pool (line 9), refresh (line 9)" in asked.what


def test_a_loop_of_another_package_is_to_be_confirmed(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, "mine.trainer", call="batch = keep_the_middle(batch)").asks
    assert "RayPPOTrainer.fit (line 5 of" in asked.what and "calls keep_the_middle (line 9)" in asked.what


@pytest.mark.parametrize("package", ["verl.trainer", "mine.trainer"])
def test_a_loop_whose_sampler_plays_episodes_of_its_own_is_to_be_confirmed(tmp_path: Path, package: str) -> None:
    (asked,) = launched(tmp_path, package, call="Manager(wg=self.actor_rollout_wg)").asks
    assert (
        "passes the sampler to Manager (line 9), which plays episodes of its own (the sampler is passed to"
        in asked.what
    )
    assert "where a run samples single responses" in asked.what and "calls Manager" not in asked.what


def test_a_loop_without_rewards_is_to_be_confirmed(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, "verl.agent_trainer", reward="batch.scores").asks
    assert "computes no rewards, because its own sampler scores, where a run calls reward functions" in asked.what


GUARDED = [
    # The condition around the call, a word of the launch, and whether the call may happen
    ('self.config.mine.get("enable", False)', "+mine.enable=true", True),
    ('self.config.mine.get("enable", False)', "+mine.enable=false", False),
    ('self.config.mine.get("enable", False)', "+mine.other=1", False),
    ('self.config.get("mine", {}).get("enable", False)', "", False),
    ('self.config.get("mine", None) and self.config.mine.enable', "", False),
    ("self.config.mine.enable", "", True),  # the loop would fail: nothing is known
    ('chosen.get("kind", None) == "middle"', "+mine.kind=middle", True),
    ('chosen.get("kind", None) == "middle"', "+mine.kind=rest", False),
    ("not self.config.algorithm.use_kl_in_reward", "", True),
    ("self.config.algorithm.use_kl_in_reward", "", False),
    ('self.config.algorithm.adv_estimator in ["gae", "rloo"]', "", False),
    ("self.config.algorithm.adv_estimator == Estimator.GRPO", "", True),
    ("self.config.algorithm.adv_estimator == Estimator.RLOO", "", False),
    ("self.step > 1", "", True),
    ("self.step > 1 and self.config.algorithm.use_kl_in_reward", "", False),
    ("self.step > 1 or self.config.algorithm.use_kl_in_reward", "", True),
    ("self.config.set_here.enable", "+set_here.enable=false", True),  # the program assigns it
    ("metrics.kind == 1", "", True),  # a name that the loop changes
]


@pytest.mark.parametrize(("test", "word", "happens"), GUARDED)
def test_a_call_that_the_configuration_switches_off_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, word: str, happens: bool
) -> None:
    launched(tmp_path, "verl.trainer", call=f"if {test}: batch = keep_the_middle(batch)")
    trainer = tmp_path / "verl/trainer/ppo/ray_trainer.py"
    text = trainer.read_text().replace(
        "        for batch in", "        chosen = self.config.mine\n        for batch in", 1
    )
    trainer.write_text(f"class Estimator:\n    GRPO = 'grpo'\n    RLOO = 'rloo'\n{text}")
    program = tmp_path / "verl/trainer/main_ppo.py"
    program.write_text(f"{program.read_text()}\ndef run(config):\n    config.set_here.enable = True\n")
    script = tmp_path / "run.sh"
    script.write_text(f"{script.read_text().strip()} {word}\n")
    monkeypatch.chdir(tmp_path)
    asked = load_request(["run.sh"], None, skip_files=True, drop_unknown=True).unsupported
    assert [each.field for each in asked] == (["RayPPOTrainer.fit"] if happens else [])


def test_what_is_confirmed_stays_in_the_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(tmp_path, "verl.trainer", call="batch = keep_the_middle(batch)")
    monkeypatch.chdir(tmp_path)
    loaded = load_request(["run.sh", "+posttrain.own_keys=[RayPPOTrainer.fit]"], None, skip_files=True)
    assert not loaded.unsupported
    (note,) = (each for each in loaded.warnings if "confirmed by name (RayPPOTrainer.fit)" in each)
    assert "calls keep_the_middle (line 9), which verl's does not: a run calls none, at run.sh:1" in note
    longer = load_request(["run.sh", "+posttrain.own_keys=[RayPPOTrainer.fits]"], None, skip_files=True)
    assert [each.field for each in longer.unsupported] == ["RayPPOTrainer.fit"]


def test_rewards_of_a_method_that_the_loop_calls_count(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, "verl.trainer", reward="batch = self._compute(batch)", call="batch").asks
    assert "calls _compute (line 8)" in asked.what


REWARDS = """
def _select_rm_score_fn(source): ...
def by_tests(text): ...
class RewardManager:
    def __init__(self, tokenizer, num_examine{given}): ...
    def __call__(self, data):
        return {calls}(data)
def run(config):
    reward_fn = RewardManager(tokenizer=1, num_examine=0)
"""


@pytest.mark.parametrize(
    ("calls", "given", "words", "said"),
    [
        ("by_tests", "", "", "own: by_tests, RewardManager), and does not pass it to its trainer"),
        ("_select_rm_score_fn", ", version=1", "", "the fork's own: _select_rm_score_fn, RewardManager), and"),
        ("by_tests", "", "custom_reward_function.path=mine.py", "a run does not call it"),
    ],
)
def test_rewards_in_the_main_program_of_a_fork_need_a_confirmation(
    tmp_path: Path, calls: str, given: str, words: str, said: str
) -> None:
    launched(tmp_path, "verl.trainer")
    program = tmp_path / "verl/trainer/main_ppo.py"
    program.write_text(program.read_text() + REWARDS.format(calls=calls, given=given))
    script = tmp_path / "run.sh"
    script.write_text(f"{script.read_text().strip()} {words}\n")
    asks = read_script(str(script), (), {}, folder=tmp_path).asks
    assert [said in each.what and "own_keys=[RewardManager]" in each.fix for each in asks] == ([True] if said else [])


def test_several_calls_are_listed_together(tmp_path: Path) -> None:
    (asked,) = launched(tmp_path, "verl.trainer", call="[one(), two(), three(), four(), five(), six()]").asks
    assert "one (line 9), two (line 9), three (line 9), four (line 9) and 2 more" in asked.what


def test_a_run_needs_a_forks_loop_confirmed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(tmp_path, "verl.trainer", call="batch = keep_the_middle(batch)")
    monkeypatch.chdir(tmp_path)
    given = ["run.sh", "data.train_files=t.parquet", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"]
    loaded = load_request(given, None, here=True, skip_files=True)
    (asked,) = [each for each in loaded.unsupported if "keep_the_middle" in each.what]
    assert asked.fix.endswith("+posttrain.own_keys=[RayPPOTrainer.fit]")
    confirmed = [*given, "+posttrain.own_keys=[RayPPOTrainer.fit]"]
    assert not load_request(confirmed, None, here=True, skip_files=True).unsupported


def fork_launched(folder: Path, **files: str) -> Launch:
    return read_script(str(write_fork(folder, **files) / "run.sh"), (), {}, folder=folder)


def test_a_class_that_plays_the_episodes_becomes_the_environment(tmp_path: Path) -> None:
    launch = fork_launched(tmp_path)
    assert (
        f"Player.play (line 18 of {tmp_path}/seeker/player.py) plays the episodes, in a process of its own"
        in launch.notes
    )
    ours = [word for word in launch.arguments if word.startswith("+posttrain")]
    assert ours == [
        "+posttrain.environment.name=verl_loop",
        f"+posttrain.environment.settings.trainer='{tmp_path}/verl/trainer/ppo/ray_trainer.py:RayPPOTrainer.fit'",
        f"+posttrain.environment.settings.folder='{tmp_path}'",
        f"+posttrain.environment.settings.program='{tmp_path}/verl/trainer/main_ppo.py'",
    ]
    assert launch.asks == ()  # its calls, the mask of observations among them, are the environment's affair


@pytest.mark.parametrize(
    ("otherwise", "plays"), [("rows = batch.pop(['ids', 'images'])", True), ("rows = batch", False)]
)
def test_a_batch_that_is_taken_out_in_every_branch_is_the_episodes(tmp_path: Path, otherwise: str, plays: bool) -> None:
    taken = next(line for line in TRAINER.splitlines() if ".pop(" in line)
    blank = taken[: len(taken) - len(taken.lstrip())]
    lines = [f"{blank}if batch.has_images:", f"{blank}    {otherwise}"]
    branches = "\n".join([*lines, f"{blank}else:", f"    {taken}"])
    folder = write_fork(tmp_path, trainer=TRAINER.replace(taken, branches))
    with nullcontext() if plays else pytest.raises(NotPlayable, match="gets no batch that is taken out"):
        assert find_loop(folder / "verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer", "fit", [folder]).name == "Player"


def test_what_the_class_is_built_with_and_where_it_cuts(tmp_path: Path) -> None:
    folder = write_fork(tmp_path)
    loop = find_loop(folder / "verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer", "fit", [folder])
    assert loop.stops == ("</find>", "</done>")
    assert loop.site.keys == {
        *("seeker.turns", "seeker.passage_tokens", "seeker.url", "data.max_prompt_length"),
        *("trainer.n_gpus_per_node", "trainer.nnodes"),
    }
    assert loop.site.optional == {"seeker.url"} and loop.copies == ("seeker.copies",)
    assert loop.guard == "seeker.active" and loop.masking == "actor_rollout_ref.actor.state_masking"
    reward = find_reward(folder / "verl/trainer/main_ppo.py", [folder])
    assert reward is not None and reward.name == "Scores"
    assert reward.site.keys == {"seeker.worth"}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            {"trainer": TRAINER.replace("rows, first)", "rows, first, self.global_steps)")},
            "reads self.global_steps (line 28)",
        ),
        (
            {"trainer": TRAINER.replace("rows, first)", "rows, batch_dict)")},
            "player.play gets batch_dict, which the trainer's loop makes (line 20)",
        ),
        (
            # changed behind the place, and not given anew in the loop
            {
                "trainer": TRAINER.replace("rows, first)", "rows, player_notes)")
                .replace("        for batch_dict", "        player_notes = []\n        for batch_dict")
                .replace(
                    "            self.actor_rollout_wg.update",
                    "            player_notes = [batch]\n            self.actor_rollout_wg.update",
                )
            },
            "player.play gets player_notes, which the trainer's loop makes (line 21)",
        ),
        (
            {"trainer": TRAINER.replace("rows, first)", "rows, self.train_dataloader)")},
            "reads self.train_dataloader (line 28)",
        ),
        ({"trainer": TRAINER.replace("seeker.player", "seeker_elsewhere.player")}, "Player (line 19 of"),
        ({"trainer": TRAINER.replace("rows, first)", "batch)")}, "gets no batch that is taken out of the step's"),
        (
            {"player": PLAYER.replace("generate_sequences", "compute_log_prob")},
            "calls actor_rollout_wg.compute_log_prob",
        ),
        (
            {"player": PLAYER.replace("first.shape[1] + len", "first.cuda().shape[1] + len")},
            "needs tensors on a GPU (line",
        ),
        ({"player": "import vllm\n" + PLAYER.replace("text = text", "vllm.run(); text = text")}, "it uses vllm (line"),
    ],
)
def test_a_class_that_an_episode_of_its_own_cannot_serve_is_named_with_the_line(
    tmp_path: Path, files: dict[str, str], why: str
) -> None:
    (asked,) = (each for each in fork_launched(tmp_path, **files).asks if each.field.endswith(".fit"))
    assert "passes the sampler to Player (line 19), which plays episodes of its own" in asked.what
    assert why in asked.what


def planned(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> LoadedConfig[RunConfig]:
    monkeypatch.chdir(write_fork(folder))
    return load_request(["run.sh", *words], None, skip_files=True)


def test_the_run_of_a_class_that_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 prompts, each twice (seeker.copies), and mini-batches of 8 responses: 4 prompts of 2."""
    loaded = planned(tmp_path, monkeypatch)
    config = loaded.config
    assert (loaded.problems, loaded.unsupported) == ((), ())
    assert config.environment.name == "verl_loop" and config.environment.max_turns is None
    assert config.environment.max_context_tokens == 512 and config.rollout.max_response_tokens == 16
    assert config.environment.settings["config"]["seeker"] == {
        "turns": 2, "passage_tokens": 6, "worth": 0.5, "url": "http://127.0.0.1:9/look",
    }  # fmt: skip
    assert config.environment.settings["config"]["trainer"] == {"n_gpus_per_node": 2, "nnodes": 1}
    assert config.environment.settings["model"] == {"path": "model"}
    assert config.rollout.stop == ["</find>", "</done>"] and config.reward.terms == []
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (4, 2)
    assert config.policy.sequences_per_mini_batch == 8
    assert config.policy.sequences_per_micro_batch_per_device == 4  # 8 on two devices
    assert any("rewards are those of Scores, as" in each for each in loaded.warnings)
    assert not [each for each in loaded.ignored if each.key.startswith("seeker")]  # they are read


def test_mini_batches_count_responses_where_the_trainer_repeats_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 prompts x 4 = 16 responses in two mini-batches of 8; 4 x 3 = 12 are none."""
    config = planned(tmp_path, monkeypatch, "seeker.copies=4").config
    assert (config.rollout.samples_per_prompt, config.policy.sequences_per_mini_batch) == (4, 8)
    (problem,) = planned(tmp_path, monkeypatch, "seeker.copies=3").problems
    assert "12 repeated prompts do not split into mini-batches of 8" in problem.what


def test_a_trainer_that_plays_nothing_or_trains_on_observations_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = planned(tmp_path, monkeypatch, "seeker.active=false").problems
    assert "seeker.active=false: the trainer lets the sampler answer alone" in problem.what
    (problem,) = planned(tmp_path, monkeypatch, "actor_rollout_ref.actor.state_masking=false").unsupported
    assert "state_masking=false trains on what the class writes into the conversation" in problem.what


def test_a_key_that_the_class_needs_and_nobody_gives_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = planned(tmp_path, monkeypatch, "~seeker.turns").problems
    assert "seeker.turns, which the configuration does not have" in problem.what and "Player" in problem.what


CHOOSES = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.other_trainer import OtherTrainer
if config.seeker.{key}:
    Trainer = OtherTrainer
else:
    Trainer = RayPPOTrainer
Trainer(config=config).fit()
"""


@pytest.mark.parametrize("value", ["true", "false", ""])
def test_a_trainer_that_the_program_chooses_by_a_key(tmp_path: Path, value: str) -> None:
    write_fork(tmp_path, main=CHOOSES.format(key="other"))
    other = FIT.format(reward=SCORES, call="batch = keep_the_middle(batch)").replace("RayPPO", "Other")
    (tmp_path / "verl/trainer/ppo/other_trainer.py").write_text(other)
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {f'+seeker.other={value}' if value else 'a=1'}\n")
    if not value:
        with pytest.raises(
            ConfigError, match=r"depends on seeker.other, .*write seeker.other=true or seeker.other=false"
        ):
            read_script(str(script), (), {}, folder=tmp_path)
        return
    launch = read_script(str(script), (), {}, folder=tmp_path)
    asked = [each.field for each in launch.asks]
    assert asked == (["OtherTrainer.fit"] if value == "true" else [])
    assert ("+posttrain.environment.name=verl_loop" in launch.arguments) == (value == "false")

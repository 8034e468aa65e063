"""A loss and an estimator of the user's own module are names like any other, in every dialect's own key for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.detect import read_config
from posttrain.registry import ADVANTAGES, POLICY_LOSSES

MODULE = '''
from posttrain.registry import ADVANTAGES, POLICY_LOSSES
raise SystemExit("a plan imports nothing")

@POLICY_LOSSES.register("plugged_loss")
def plugged_loss(policy_logprobs, old_logprobs, advantages, mask, *, factor: float = 1.0):
    """-A log pi."""

@ADVANTAGES.register("plugged_estimator")
def plugged_estimator(rewards, valid, group_index, response_mask):
    """r."""
'''
ROLL = Path(__file__).parents[3] / "examples/roll_rlvr.yaml"
VERL = ["actor_rollout_ref.model.path=m", "data.train_files=[a.parquet]", "data.val_files=[a.parquet]"]
SKYRL = ["trainer.policy.model.path=m", "data.train_data=[a.parquet]"]
NATIVE = ["model.path=m", "data.train_files=[a.parquet]"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module on the path, whose names are forgotten after the test."""
    (tmp_path / "my_plug_in.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (ADVANTAGES, POLICY_LOSSES):
        monkeypatch.setattr(registry, "_plugged", {})
    return "my_plug_in"


@pytest.mark.parametrize(
    ("dialect", "given", "modules", "loss", "estimator"),
    [
        ("native", NATIVE, "model.external_modules=[{}]", "loss.name", "advantage.name"),
        ("verl", VERL, "actor_rollout_ref.model.external_lib={}",
         "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"),
        ("skyrl", SKYRL, "+posttrain.model.external_modules=[{}]",
         "trainer.algorithm.policy_loss_type", "trainer.algorithm.advantage_estimator"),
        ("roll", [], "+posttrain.model.external_modules=[{}]", "+posttrain.loss.name", "+posttrain.advantage.name"),
    ],
)  # fmt: skip
def test_names_of_a_plug_in(
    module: str, dialect: str, given: list[str], modules: str, loss: str, estimator: str
) -> None:
    def problems(*more: str) -> list[str]:
        loaded = read_config(str(ROLL) if dialect == "roll" else None, [*given, *more], dialect)
        if more[:1] == (modules.format(module),) and not loaded.problems:
            assert (loaded.config.loss.name, loaded.config.advantage.name) == ("plugged_loss", "plugged_estimator")
        return [str(problem) for problem in loaded.problems if "plugged" in str(problem)]

    named = [f"{loss}=plugged_loss", f"{estimator}=plugged_estimator"]
    assert problems(*named), "without the module nobody knows them"
    assert problems(modules.format(module), *named) == []


def test_a_module_that_is_not_there_is_reported_by_plan() -> None:
    loaded = read_config(None, [*NATIVE, "model.external_modules=[no_such_plug_in]"], "native")
    assert loaded.problems == ()
    (problem,) = loaded.unsupported
    assert "there is no module no_such_plug_in" in str(problem) and "model.external_modules" in str(problem)


@pytest.mark.parametrize(("within", "below"), [("", ""), ("src/", ""), ("", "/further")])
def test_a_manager_that_a_fork_registers_is_found_in_its_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: str, below: str
) -> None:
    folder = tmp_path / f"{within}verl/workers/reward_manager{below}"
    folder.mkdir(parents=True)
    (folder / "votes.py").write_text('@register("majority")\nclass Votes:\n    pass\n')
    given = [*VERL, "reward_model.reward_manager=majority"]
    [problem] = [each for each in read_config(None, given, "verl").problems if "majority" in each.what]
    assert "name the file that holds it" in problem.fix
    monkeypatch.chdir(tmp_path)
    loaded = read_config(None, given, "verl")
    assert not [each for each in loaded.problems if "majority" in str(each)]
    assert (loaded.config.reward.terms[0].name, loaded.config.reward.terms[0].path) == (
        "majority", f"{within}verl/workers/reward_manager{below}/votes.py",
    )  # fmt: skip


def test_a_manager_that_a_recipe_registers_in_a_file_of_its_own_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe/mine"
    recipe.mkdir(parents=True)
    (tmp_path / "verl").mkdir()
    (recipe / "another.py").write_text('@register("majority")\nclass Loss:\n    pass\n')  # of something else
    (recipe / "votes.py").write_text(
        "from verl.workers.reward_manager import register as register_manager\n"
        '@register_manager("majority")\nclass Votes:\n    pass\n'
    )
    (recipe / "score.py").write_text("def score(solution_str, ground_truth):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    given = ["reward_model.reward_manager=majority", "custom_reward_function.path=recipe/mine/score.py"]
    term = read_config(None, [*VERL, *given, "custom_reward_function.name=score"], "verl").config.reward.terms[0]
    assert (term.name, term.path) == ("majority", "recipe/mine/votes.py")
    assert term.scores_with == "recipe/mine/score.py:score"


@pytest.mark.parametrize(
    ("file", "chooses"),
    [
        ("verl/workers/reward_manager/registry.py", 'from .votes import Votes\nREGISTRY = {"majority": Votes}\n'),
        ("verl/trainer/main_ppo.py", 'if name == "naive":\n  cls = Naive\nelif name == "majority":\n  cls = Votes\n'),
        ("verl/trainer/main_ppo.py", "if 'majority' == name:\n  from x import Votes\n  cls = Votes\n"),
    ],
)
def test_a_manager_that_a_forks_program_chooses_by_name_is_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, chooses: str
) -> None:
    folder = tmp_path / "verl/workers/reward_manager"
    folder.mkdir(parents=True)
    reads = 'data.non_tensor_batch["answer"], data.non_tensor_batch.get("level"), data.non_tensor_batch["uid"]'
    (folder / "votes.py").write_text(f"class Votes:\n    def __call__(self, data):\n        return {reads}\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(chooses)
    monkeypatch.chdir(tmp_path)
    loaded = read_config(None, [*VERL, "reward_model.reward_manager=majority"], "verl")
    term = loaded.config.reward.terms[0]
    assert (term.name, term.path, term.kind) == ("Votes", "verl/workers/reward_manager/votes.py", "manager")
    assert list(loaded.config.data.extra_columns) == ["answer", "level"]
    other = read_config(None, [*VERL, "reward_model.reward_manager=minority"], "verl")
    assert any("no file that registers 'minority'" in each.what for each in other.problems)


PROGRAM = """
if name == "naive":
    cls = Naive
    reward_fn = cls(tokenizer=tokenizer, num_examine=0, shift=9)
elif name == "majority":
    cls = Votes
reward_fn = cls(tokenizer=tokenizer, num_examine=0, scale=config.reward_model.get("scale", 2.0), kind="long", shift=shift(),
                bound=config.reward_model.bound, limit=config.data.max_response_length, unread=config.trainer.nnodes)
val_reward_fn = cls(tokenizer=tokenizer, num_examine=1, scale=7)
"""


@pytest.mark.parametrize(("written", "scale"), [((), 2.0), (("+reward_model.scale=0.5",), 0.5)])
def test_a_forks_program_hands_its_manager_what_its_keys_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: tuple[str, ...], scale: float
) -> None:
    """As verl's program would be called: constants, keys with what holds without them; no key of these is an unknown one."""
    folder = tmp_path / "verl/workers/reward_manager"
    folder.mkdir(parents=True)
    takes = "self, tokenizer, num_examine, kind, scale=1.0, shift=0, bound=None, limit=None"
    (folder / "votes.py").write_text(
        f"class Votes:\n    def __init__({takes}): ...\n    def __call__(self, data): ...\n"
    )
    (tmp_path / "verl/trainer").mkdir(parents=True)
    (tmp_path / "verl/trainer/main_ppo.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    given = [
        *VERL,
        "reward_model.reward_manager=majority",
        "+reward_model.bound=3",
        "data.max_response_length=100",
        *written,
    ]
    (asked,) = [each for each in read_config(None, given, "verl").problems if "reward_model" in str(each)]
    assert "main_ppo.py:7 hands shift=shift() to Votes" in asked.what and "null is what Votes does" in asked.fix
    loaded = read_config(None, [*given, "+reward_model.reward_kwargs.shift=4"], "verl")
    assert not [each for each in loaded.problems if "reward_model" in str(each)]
    wanted = {"kind": "long", "scale": scale, "bound": 3, "limit": 100, "shift": 4}
    assert loaded.config.reward.terms[0].options == wanted
    text = (folder / "votes.py").read_text().replace("shift=0", "shift").replace("scale=1.0, shift", "shift, scale=1.0")
    (folder / "votes.py").write_text(text)
    (needed,) = [each for each in read_config(None, given, "verl").problems if "hands shift=shift()" in each.what]
    assert needed.fix.endswith("shift=VALUE")


def test_a_manager_of_groups_reads_those_of_a_prompt(tmp_path: Path) -> None:
    """64 votes of a prompt that has 32 responses would be those of two prompts."""
    (tmp_path / "votes.py").write_text("class Votes:\n    def __call__(self, data): ...\n")
    manager = f"reward_manager={{name: votes, module: {{path: {tmp_path}/votes.py, name: Votes}}}}"
    given = [*VERL, f"++{manager}", "actor_rollout_ref.rollout.n=32"]

    def problems(votes: int) -> str:
        option = f"+reward_model.reward_kwargs.n_votes_per_prompt={votes}"
        return " ".join(map(str, read_config(None, [*given, option], "verl").problems))

    assert "n_votes_per_prompt=64, and a prompt has 32 responses" in problems(64)
    assert "n_votes_per_prompt" not in problems(32)


def test_an_estimator_for_verl_is_found_and_its_keys_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file that is named, else in the reward function's, else in the checkout."""
    text = "def compute_mine_advantage(token_level_rewards, response_mask, index, margin): raise SystemExit('it was run')\n"
    given = [*VERL, "algorithm.adv_estimator=mine", "algorithm.margin=0.5", "actor_rollout_ref.rollout.n=4"]

    def about_mine(*more: str) -> list[str]:
        return [
            str(each)
            for each in read_config(None, [*given, *more], "verl").problems
            if "mine" in str(each) or "margin" in str(each)
        ]

    assert any("+posttrain.advantage.path=FILE.py" in each for each in about_mine())
    (tmp_path / "own.py").write_text(text)
    assert about_mine(f"+posttrain.advantage.path={tmp_path}/own.py") == []
    assert about_mine(f"custom_reward_function.path={tmp_path}/own.py") == []
    (tmp_path / "verl/trainer/ppo").mkdir(parents=True)
    (tmp_path / "own.py").rename(tmp_path / "verl/trainer/ppo/core_algos.py")
    monkeypatch.chdir(tmp_path)
    loaded = read_config(None, given, "verl")
    assert about_mine() == [] and loaded.config.advantage.settings == {"margin": 0.5}
    assert any(
        "mine is yours: compute_mine_advantage of verl/trainer/ppo/core_algos.py, line 1" in text
        for text in loaded.warnings
    )
    assert any("margin" in text for text in about_mine("algorithm.adv_estimator=grpo"))


def test_columns_that_an_estimator_is_handed_are_read_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those that a reward manager of the same checkout reads."""
    folder = tmp_path / "verl/trainer/ppo"
    folder.mkdir(parents=True)
    (folder / "core_algos.py").write_text(
        "def compute_fair_advantage(token_level_rewards, response_mask, index, domains: Tensor): ...\n"
    )
    call = "compute_fair_advantage(domains=data.non_tensor_batch['dataset'])"
    (folder / "ray_trainer.py").write_text(f"def compute_advantage(data):\n    a, b = core_algos.{call}\n")
    managers = tmp_path / "verl/workers/reward_manager"
    managers.mkdir(parents=True)
    text = '@register("votes")\nclass Votes:\n    def __call__(self, data):\n        return data.non_tensor_batch["level"]\n'
    (managers / "votes.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    fair = [*VERL, "algorithm.adv_estimator=fair", "actor_rollout_ref.rollout.n=4"]
    assert read_config(None, fair, "verl").config.data.extra_columns == ["dataset"]
    both = read_config(None, [*fair, "reward_model.reward_manager=votes"], "verl")
    assert both.config.data.extra_columns == ["level", "dataset"]


def test_a_manager_of_a_package_that_builds_on_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "their_tool/workers/reward_manager"
    folder.mkdir(parents=True)
    (folder / "votes.py").write_text('@register("ballots")\nclass Ballots:\n    pass\n')
    monkeypatch.chdir(tmp_path)
    loaded = read_config(None, [*VERL, "reward_model.reward_manager=ballots"], "verl")
    assert loaded.config.reward.terms[0].path == "their_tool/workers/reward_manager/votes.py"


def test_a_module_below_the_folder_of_the_launch_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with python -m, of which scripts of verl's tests make use: external_lib=tests.e2e.envs."""
    (tmp_path / "my_own_tests/envs").mkdir(parents=True)
    (tmp_path / "my_own_tests/envs/__init__.py").write_text("raise SystemExit('it was run')")
    given = [*NATIVE, "model.external_modules=[my_own_tests.envs]"]
    assert read_config(None, given, "native").unsupported
    monkeypatch.chdir(tmp_path)
    assert not read_config(None, given, "native").unsupported

"""Scoring code of a fork that no version of verl has is called; verl's own is not, and what cannot be called is asked about."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from posttrain import verl_scoring
from posttrain.cli.request import load_request
from posttrain.config import RunConfig
from posttrain.dialects import own_scoring
from posttrain.dialects.loaded import LoadedConfig
from posttrain.verl_scoring import definitions
from verl_scores_fork import KNIGHTS, LATER_MAIN, MAIN, NAIVE, SCORES, write

PLAIN = NAIVE.format(arguments="")


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> None:
    own_scoring._program.cache_clear()
    own_scoring._own_scores.cache_clear()


def launched(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> LoadedConfig[RunConfig]:
    monkeypatch.chdir(folder)
    return load_request(["run.sh", *words], None, here=True, skip_files=True)


def verls_are(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Let the definitions of these files be verl's."""
    known = frozenset(digest for text in texts for _, digest in definitions(ast.parse(text)))
    monkeypatch.setattr(verl_scoring, "_known", lambda: known)


def test_the_reward_object_of_the_main_program_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "+algorithm.shaping.bonus=0.5", main=MAIN, scores="", knights=KNIGHTS)
    loaded = launched(tmp_path, monkeypatch)
    (term,) = loaded.config.reward.terms
    assert (term.kind, term.name, term.path) == ("program", "RewardManager", str(tmp_path / "verl/trainer/main_ppo.py"))
    assert term.options == {"algorithm": {"shaping": {"bonus": 0.5}}}  # which no verl has, and the program reads
    assert loaded.config.reward.timeout_s == 1800
    assert not loaded.unsupported
    said = "\n".join(loaded.warnings)
    assert "the fork's own: " in said and "_select_rm_score_fn" in said
    assert "validation is scored as training is; the fork's is made by RewardManager(" in said


def test_a_program_whose_scoring_is_verls_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verls_are(monkeypatch, MAIN, KNIGHTS)
    write(tmp_path, main=MAIN, scores="", knights=KNIGHTS)
    (term,) = launched(tmp_path, monkeypatch).config.reward.terms
    assert (term.name, term.path) == ("by_data_source", None)


@pytest.mark.parametrize("own", ["main", "knights"])
def test_one_definition_behind_the_object_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    verls_are(monkeypatch, MAIN, KNIGHTS)
    changed = (
        {"main": MAIN.replace("score / 2", "score / 3")} if own == "main" else {"knights": KNIGHTS + "\nOTHER = 1\n"}
    )
    write(tmp_path, **{"main": MAIN, "scores": "", "knights": KNIGHTS, **changed})
    (term,) = launched(tmp_path, monkeypatch).config.reward.terms
    assert term.kind == "program"


def test_a_word_of_the_users_takes_the_built_in_scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, main=MAIN, scores="", knights=KNIGHTS)
    (term,) = launched(tmp_path, monkeypatch, "+posttrain.own_keys=[RewardManager]").config.reward.terms
    assert term.name == "by_data_source"


def test_a_fork_is_found_in_the_current_folder_without_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, main=MAIN, scores="", knights=KNIGHTS)
    monkeypatch.chdir(tmp_path)
    keys = (tmp_path / "run.sh").read_text().replace("\\\n", "").split()[3:]
    (term,) = load_request(keys, "verl@0.2", here=True, skip_files=True).config.reward.terms
    assert term.kind == "program"


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_scorers_of_the_forks_own_are_called_by_its_plain_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: str
) -> None:
    verls_are(monkeypatch, PLAIN)
    write(tmp_path, f"reward_model.reward_manager={manager}", naive=PLAIN, scores=SCORES, knights=KNIGHTS)
    loaded = launched(tmp_path, monkeypatch)
    (term,) = loaded.config.reward.terms
    assert (term.kind, term.name) == ("manager", "NaiveRewardManager")
    assert term.path is not None and term.path.endswith("reward_manager/naive.py")
    assert "compute_score (" in "\n".join(loaded.warnings)


def test_a_function_of_the_users_takes_the_place_of_the_scorers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verls_are(monkeypatch, PLAIN)
    write(tmp_path, "custom_reward_function.path=mine.py", naive=PLAIN, scores=SCORES, knights=KNIGHTS)
    (term,) = launched(tmp_path, monkeypatch).config.reward.terms
    assert (term.kind, term.path) == ("function", "mine.py")


def test_a_changed_manager_gets_the_users_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "custom_reward_function.path=mine.py", naive=PLAIN, scores="")
    (term,) = launched(tmp_path, monkeypatch).config.reward.terms
    assert (term.kind, term.scores_with) == ("manager", "mine.py:compute_score")


OVERLONG = (
    "reward_model.reward_manager=dapo +reward_model.overlong_buffer.enable=True +reward_model.overlong_buffer.len=128 "
    "+reward_model.overlong_buffer.penalty_factor=0.5 data.max_response_length=512"
)


def test_the_penalty_of_length_stays_with_scorers_of_the_forks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verls_are(monkeypatch, PLAIN)
    write(tmp_path, OVERLONG, naive=PLAIN, scores=SCORES, knights=KNIGHTS)
    reward = launched(tmp_path, monkeypatch).config.reward
    assert (reward.overlong_buffer_tokens, reward.overlong_penalty) == (128, 0.5)
    assert reward.terms[0].options == {}


def test_a_changed_dapo_manager_has_the_penalty_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dapo = NAIVE.format(arguments=", max_resp_len=None, overlong_buffer_cfg=None").replace("Naive", "DAPO")
    write(tmp_path, OVERLONG, dapo=dapo.replace('"naive"', '"dapo"'), scores="")
    reward = launched(tmp_path, monkeypatch).config.reward
    assert reward.overlong_buffer_tokens is None
    assert reward.terms[0].options["max_resp_len"] == 512
    assert reward.terms[0].options["overlong_buffer_cfg"] == {"enable": True, "len": 128, "penalty_factor": 0.5}


def test_a_dapo_manager_whose_penalty_is_off_can_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dapo = NAIVE.format(arguments=", max_resp_len=None, overlong_buffer_cfg=None").replace("Naive", "DAPO")
    off = OVERLONG.replace("enable=True", "enable=False")
    assert off != OVERLONG
    write(tmp_path, off, dapo=dapo.replace('"naive"', '"dapo"'), scores="")
    buffer = launched(tmp_path, monkeypatch).config.reward.terms[0].options["overlong_buffer_cfg"]
    assert buffer["enable"] is False and buffer["len"] == 0


def test_what_only_the_program_computes_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, main=LATER_MAIN, naive=NAIVE.format(arguments=", judge=None"), scores="")
    loaded = launched(tmp_path, monkeypatch)
    (problem,) = loaded.unsupported
    assert not loaded.problems
    assert "main_ppo.py:7 hands judge=judge to NaiveRewardManager, which only that program computes" in problem.what
    assert "judge=VALUE; null is what NaiveRewardManager does without it; or confirm by name" in problem.fix
    confirmed = launched(tmp_path, monkeypatch, "+posttrain.own_keys=[NaiveRewardManager]")
    assert (confirmed.problems, confirmed.unsupported) == ((), ())
    assert any("confirmed by name (NaiveRewardManager)" in each for each in confirmed.warnings)
    assert [term.kind for term in confirmed.config.reward.terms] == ["function"]
    (term,) = launched(tmp_path, monkeypatch, "+reward_model.reward_kwargs.judge=null").config.reward.terms
    assert term.options == {"judge": None}


def test_a_manager_gets_the_section_that_the_program_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = LATER_MAIN.replace("judge=judge", "config=config.reward_model")
    write(tmp_path, "+reward_model.weight=3", main=main, naive=NAIVE.format(arguments=", config=None"), scores="")
    (term,) = launched(tmp_path, monkeypatch).config.reward.terms
    assert term.options["config"]["weight"] == 3


MODEL = "reward_model.enable=True reward_model.model.path=scorer reward_model.micro_batch_size=8"
RETURNS = '        if "rm_scores" in data.batch.keys():\n            return data.batch["rm_scores"]\n        rewards = '


@pytest.mark.parametrize(
    ("returns", "words", "asked"), [(False, (), True), (True, (), False), (False, ("own",), False)]
)
def test_a_reward_model_beside_the_forks_own_class_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returns: bool, words: tuple[str, ...], asked: bool
) -> None:
    naive = PLAIN.replace("        rewards = ", RETURNS, 1) if returns else PLAIN
    write(tmp_path, MODEL, naive=naive, scores="")
    confirmed = ["+posttrain.own_keys=[NaiveRewardManager]"] if words else []
    problems = [str(each) for each in launched(tmp_path, monkeypatch, *confirmed).problems]
    assert any("does not return the scores of the reward model" in each for each in problems) == asked


def test_keys_of_a_section_that_the_manager_gets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = LATER_MAIN.replace("judge=judge", "config=config.reward_model")
    naive = NAIVE.format(arguments=", config=None")
    write(tmp_path, "reward_model.num_turns=2", main=main, naive=naive, scores="")
    loaded = launched(tmp_path, monkeypatch)
    assert not any("num_turns" in str(each) for each in [*loaded.problems, *loaded.unsupported])
    assert loaded.config.reward.terms[0].options["config"]["num_turns"] == 2

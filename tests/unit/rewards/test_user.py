"""The texts and arguments that users' functions get: of verl's versions, and as many as they take."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from posttrain.config.reward import RewardConfig
from posttrain.dialects.detect import read_config
from posttrain.errors import ConfigError
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Reward, StopReason, Trajectory, TrajectoryGroup
from posttrain.rewards.load import check_rewards, load_rewards
from posttrain.rewards.scorer import ScorerHere, start_rewards
from posttrain.rewards.user import load_function

pytestmark = pytest.mark.usefixtures("warm_children")

# Token ids of a made-up vocabulary, special tokens included.
WORDS = {0: "<|user|>", 1: "What is 5 + 7?", 2: "<|assistant|>", 3: "Five.", 4: "#### 12", 5: "<|end|>"}
WHOLE = "<|user|>What is 5 + 7?<|assistant|>#### 12<|end|>"


def decode(ids) -> str:
    return "".join(WORDS[number] for number in ids)


def group(*responses: tuple[int, ...]) -> TrajectoryGroup:
    prompt = Prompt(prompt_id="a:0", token_ids=(0, 1, 2), text=decode((0, 1, 2)), data_source="s", ground_truth="12")
    return TrajectoryGroup(
        prompt=prompt,
        trajectories=tuple(
            Trajectory(
                sample_id=f"a:0/{number}",
                token_ids=ids,
                logprobs=(0.0,) * len(ids),
                text=decode(each for each in ids if each != 5),
                stop_reason=StopReason.EOS,
                policy_version=0,
            )
            for number, ids in enumerate(responses)
        ),
    )


def config(tmp_path: Path, source: str, **term) -> RewardConfig:
    (tmp_path / "mine.py").write_text(source)
    return RewardConfig(terms=[{"name": "compute_score", "path": str(tmp_path / "mine.py"), **term}], workers=1)


def scores(outcomes) -> list[float]:
    assert all(isinstance(outcome, Reward) for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


# As functions of research code on verl 0.1 and 0.2 do it: the answer stands between the assistant's mark and the end token.
OLD = f"""
def compute_score(solution_str, ground_truth):
    if solution_str != {WHOLE!r}:
        return -3
    answer = solution_str.split("<|assistant|>")[1].removesuffix("<|end|>")
    return float(answer == "#### " + ground_truth)
"""


class TestTexts:
    def test_the_sequence_is_prompt_and_response_with_special_tokens(self, tmp_path: Path) -> None:
        """In this process, and in a worker."""
        terms = config(tmp_path, OLD, reads="sequence")
        here = ScorerHere(load_rewards(terms, decode))
        assert [scores(found) for found in here.score([group((4, 5), (3, 5))])] == [[1.0, -3.0]]
        workers = start_rewards(terms, decode=decode)
        try:
            assert [scores(found) for found in workers.score([group((4, 5), (3, 5)), group((4, 5))])] == [
                [1.0, -3.0],
                [1.0],
            ]
        finally:
            workers.close()

    def test_a_batched_function_reads_it_too(self, tmp_path: Path) -> None:
        source = "def compute_score(solution_strs, **rest):\n    return [len(text) for text in solution_strs]\n"
        workers = start_rewards(config(tmp_path, source, reads="sequence", batched=True), decode=decode)
        try:
            [found] = workers.score([group((4, 5))])
        finally:
            workers.close()
        assert scores(found) == [len(WHOLE)]

    def test_the_response_stays_without_them(self, tmp_path: Path) -> None:
        source = "def compute_score(solution_str, ground_truth): return float(solution_str == '#### 12')\n"
        assert scores(ScorerHere(load_rewards(config(tmp_path, source), decode)).score([group((4, 5))])[0]) == [1.0]

    def test_responses_of_a_file_have_no_token_ids(self, tmp_path: Path) -> None:
        source = "def compute_score(solution_str, ground_truth): return len(solution_str)\n"
        [found] = ScorerHere(load_rewards(config(tmp_path, source, reads="sequence"))).score([group((4, 5))])
        assert scores(found) == [len(WHOLE) - len("<|end|>")]


POOLED = """
from concurrent.futures import ProcessPoolExecutor

pool = ProcessPoolExecutor(max_workers=2)

def equal(text, truth):
    return float(text == "#### " + truth)

def compute_score(solution_str, ground_truth):
    return pool.submit(equal, solution_str, ground_truth).result(timeout=5)
"""


def test_a_function_with_a_pool_of_processes_answers_every_call(tmp_path: Path) -> None:
    """The pool is made while the file is imported; its locks must not stay locked after the first call."""
    workers = start_rewards(config(tmp_path, POOLED))
    try:
        [found] = workers.score([group((4, 5), (3, 5), (4, 5))])
    finally:
        workers.close()
    assert scores(found) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("signature", "expression", "value"),
    [
        ("solution_str, ground_truth", "solution_str + ground_truth", "#### 1212"),
        ("solution_str, ground_truth, method='strict', format_score=0.1", "solution_str + method", "#### 12strict"),
        ("ground_truth, solution_str", "solution_str + ground_truth", "#### 1212"),
        ("solution_str", "solution_str", "#### 12"),
        ("data_source, solution_str, ground_truth", "data_source + ground_truth", "s12"),
        ("response, answer", "response + answer", "#### 1212"),
        (
            "model_output, ground_truth, timeout_score=0",
            "model_output + ground_truth",
            "#### 1212",
        ),  # verl's math_verify
        ("source, text, truth, more=None", "source + text + truth + str(more)", "s#### 1212{}"),
        ("solution_str, **rest", "solution_str + ','.join(sorted(rest))", "#### 12data_source,extra_info,ground_truth"),
    ],
)
def test_a_function_is_called_with_the_parameters_it_takes(
    tmp_path: Path, signature: str, expression: str, value: str
) -> None:
    source = f"def compute_score({signature}):\n    return float({expression} == {value!r})\n"
    assert scores(ScorerHere(load_rewards(config(tmp_path, source))).score([group((4, 5))])[0]) == [1.0]


def test_a_file_imports_what_lies_beside_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward in a checkout imports the checkout's own packages, as with ``python -m`` in its root."""
    checkout = tmp_path / "checkout"
    (checkout / "their_package_0107").mkdir(parents=True)
    (checkout / "their_package_0107/grading.py").write_text("def grade(text): return len(text)\n")
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = (
        "from their_package_0107.grading import grade\ndef compute_score(solution_str): return grade(solution_str)\n"
    )
    workers = start_rewards(config(tmp_path, source))
    try:
        [found] = workers.score([group((4, 5))])
    finally:
        workers.close()
    assert scores(found) == [7.0]  # characters of "#### 12"


@pytest.mark.parametrize(
    "signature", ["solution_str, gold", "a, b, c", "one", "", "solution_str, ground_truth, *, must"]
)
def test_a_function_that_cannot_be_called(tmp_path: Path, signature: str) -> None:
    with pytest.raises(ConfigError, match=r"compute_score\(.*\) in .*mine\.py cannot be called"):
        load_rewards(config(tmp_path, f"def compute_score({signature}): return 1\n"))


def test_verl_passes_the_response_since_0_3() -> None:
    loaded = read_config(None, ["custom_reward_function.path=mine.py"], "verl")
    assert loaded.config.reward.terms[0].reads == "response"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("question, gold, answer, clients", r"would get the data source as question, and the response as gold"),
        ("model_output, gold, row, extra", r"would get the data source as model_output"),
        ("source, text, gold, extra", ""),
    ],
)
def test_a_function_of_four_that_wants_no_data_source_first_is_refused(
    parameters: str, message: str, tmp_path: Path
) -> None:
    """verl calls by keywords, and stops; by position the wrong texts would be scored, in silence."""
    file = tmp_path / "mine.py"
    file.write_text(f"def score({parameters}): return 1.0\n")
    if not message:
        load_function(str(file), "score", {})
        return
    with pytest.raises(ConfigError, match=f"{message}.*name its parameters data_source, solution_str"):
        load_function(str(file), "score", {})


@pytest.mark.parametrize("parameters", ["prompt, response", "question, answer, weight"])
def test_a_function_that_wants_a_prompt_first_is_refused(parameters: str, tmp_path: Path) -> None:
    """By position it would score the reference answer as the response, in silence."""
    file = tmp_path / "mine.py"
    file.write_text(f"def score({parameters}): return 1.0\n")
    options = {"weight": 2} if "weight" in parameters else {}
    config = RewardConfig.model_validate({"terms": [{"name": "score", "path": str(file), "options": options}]})
    with pytest.raises(ConfigError, match=r"would get the response as .* name its parameters solution_str"):
        load_rewards(config)


# As verl's recipe fapo does it; neither verl nor a checkout of it is here.
ASKS = """
from verl.utils.ray_utils import get_event_loop
from verl.utils.reward_score.math_dapo import last_boxed_only_string, normalize_final_answer, remove_boxed

async def compute_score(solution_str, ground_truth, reward_router_address, reward_model_tokenizer):
    said = f"{reward_router_address} says \\\\boxed{{\\\\text{{{ground_truth}}}}}"
    box = await get_event_loop().run_in_executor(None, lambda: last_boxed_only_string(said))
    right = normalize_final_answer(remove_boxed(box)) == ground_truth
    return len(reward_model_tokenizer.encode(ground_truth)) + right
"""


def test_a_function_that_asks_a_judge_gets_its_address_and_its_tokenizer(tmp_path: Path, tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    judged = config(tmp_path, ASKS, options={"reward_router_address": "judge:8000"}, judge_tokenizer=str(tiny_llama))
    assert check_rewards(judged) == []
    tokens = len(AutoTokenizer.from_pretrained(tiny_llama).encode("12"))
    with closing(start_rewards(judged)) as workers:
        assert scores(workers.score([group((4, 5))])[0]) == [tokens + 1]
    [problem] = check_rewards(config(tmp_path, ASKS, options={"reward_router_address": "judge:8000"}))
    assert "missing a required argument: 'reward_model_tokenizer'" in problem.what


def test_a_checkout_s_own_helpers_take_the_place_of_stand_ins(tmp_path: Path) -> None:
    for name in ("__init__", "utils/__init__", "utils/reward_score/__init__"):
        (file := tmp_path / f"verl/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import a_library_that_is_not_installed\n")
    (tmp_path / "verl/utils/reward_score/math_dapo.py").write_text("def remove_boxed(text):\n    return 'theirs'\n")
    (tmp_path / "examples").mkdir()
    source = "from verl.utils.reward_score.math_dapo import remove_boxed\n"
    source += (
        "def compute_score(solution_str, ground_truth):\n    return float(remove_boxed(solution_str) == 'theirs')\n"
    )
    with closing(start_rewards(config(tmp_path / "examples", source))) as workers:
        assert scores(workers.score([group((4, 5))])[0]) == [1.0]

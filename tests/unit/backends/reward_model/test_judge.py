"""A judge of the run's own: its questions, its verdicts, and their place in the reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from posttrain.backends.reward_model.judge import LocalJudge, question_of
from posttrain.config.judge import JudgeConfig
from posttrain.config.reward import RewardConfig
from posttrain.errors import ConfigError
from posttrain.records.plans import JudgePlan
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import (
    Invalid,
    Outcome,
    Reward,
    SamplingParams,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from posttrain.rewards.load import check_data_sources
from posttrain.rewards.sources import NO_REWARD
from posttrain.steps.added_rewards import judged, with_judge
from posttrain.steps.score import score


class Tokenizer:
    """A token per character; the template wraps a question in brackets."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **options: Any) -> str:
        return f"[{messages[0]['content']}|{options.get('enable_thinking')}]"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}


class Scripted:
    """An engine that answers by the response it reads in the question."""

    def __init__(self, answers: dict[str, str], stop: StopReason = StopReason.EOS):
        self.answers, self.stop, self.read = answers, stop, list[Prompt]()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[TrajectoryGroup]:
        self.read += prompts
        return [
            TrajectoryGroup(
                prompt=prompt,
                trajectories=(
                    trajectory("a", next(a for r, a in self.answers.items() if r in prompt.text), self.stop),
                ),
            )
            for prompt in prompts
        ]


def trajectory(name: str, text: str, stop: StopReason = StopReason.EOS) -> Trajectory:
    return Trajectory(sample_id=name, token_ids=(1,), logprobs=(0.0,), text=text, stop_reason=stop, policy_version=0)


def group(source: str, *responses: str, truth: str | None = "4") -> TrajectoryGroup:
    prompt = Prompt(
        prompt_id="p", token_ids=(1,), text="[2+2]", data_source=source, ground_truth=truth,
        messages=({"role": "user", "content": "2+2"},),
    )  # fmt: skip
    return TrajectoryGroup(prompt=prompt, trajectories=tuple(trajectory(f"p/{text}", text) for text in responses))


class NoTerms:
    """A scorer without terms."""

    def begin(self, group: TrajectoryGroup) -> None:
        """No-op: there is nothing to score ahead."""

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        return [tuple(Invalid(NO_REWARD) for _ in each.trajectories) for each in groups]


def judge(engine: Scripted, name: str = "judge", **settings: Any) -> LocalJudge:
    config = JudgeConfig(path="m", prompt_template="{prompt}? {ground_truth}! {response}", **settings)
    sampling = SamplingParams(max_response_tokens=9, temperature=0.0)
    return LocalJudge(engine, Tokenizer(), question_of(config), sampling, config, name)  # type: ignore[arg-type]


def test_every_response_is_a_question_in_the_judges_own_template() -> None:
    engine = Scripted({"four": "It says 4.\nYES", "five": "no"})
    found = judge(engine, chat_template_options={"enable_thinking": False}).score([group("x", "four", "five")])
    assert [outcome.value for outcome in found[0]] == [1.0, 0.0]
    assert [prompt.text for prompt in engine.read] == ["[2+2? 4! four|False]", "[2+2? 4! five|False]"]
    assert [prompt.prompt_id for prompt in engine.read] == ["judge/p/four", "judge/p/five"]  # draws depend on the names
    assert found[0][0].texts == (("judge/answer", "It says 4.\nYES"),)


def test_thoughts_are_no_verdict_and_a_pattern_finds_its_own() -> None:
    engine = Scripted({"four": "<think>no, wait</think>Score: 8"})
    [[outcome]] = judge(engine, extract=r"Score: ([\d.]+)").score([group("x", "four")])
    assert outcome.value == 8.0


@pytest.mark.parametrize(
    ("engine", "settings", "truth", "reason", "detail"),
    [
        (Scripted({"four": "YE"}, StopReason.LENGTH), {}, "4", "no_verdict", "judge: cut at reward.judge.max_tokens"),
        (Scripted({"four": "perhaps"}), {}, "4", "no_verdict", "judge: the judge's last line is no verdict: 'perhaps'"),
        (
            Scripted({}),
            {"max_prompt_tokens": 5},
            "4",
            "too_long",
            "judge: 19 tokens, and reward.judge.max_prompt_tokens is 5",
        ),
        (Scripted({}), {}, None, "exception", "judge: the row has no ground_truth to show to the judge"),
    ],
)
def test_what_is_no_verdict_is_invalid(
    engine: Scripted, settings: dict[str, Any], truth: str | None, reason: str, detail: str
) -> None:
    [[outcome]] = judge(engine, **settings).score([group("x", "four", truth=truth)])
    assert outcome == Invalid(reason, detail)


def test_a_question_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        question_of(JudgeConfig(path="m", prompt_template="Right?", extract="("))
    assert [problem.field for problem in caught.value.problems] == [
        "reward.judge.prompt_template",
        "reward.judge.extract",
    ]


def test_a_judge_counts_for_its_data_sources_and_beside_their_terms() -> None:
    """0.5 (a term) + 2 x 1 = 2.5 in the first; x is not its; in the third it is the only reward."""
    engine = Scripted({"four": "yes"})
    groups = [group("y", "four"), group("x", "four"), group("y", "four")]
    outcomes: list[tuple[Outcome, ...]] = [(Reward(0.5, (("rule", 0.5),)),), (Reward(0.25),), (Invalid(NO_REWARD),)]
    first, other, alone = judged(groups, outcomes, judge(engine), JudgePlan(weight=2.0, data_sources=frozenset({"y"})))
    assert first[0] == Reward(2.5, (("rule", 0.5), ("judge", 1.0)), (("judge/answer", "yes"),))
    assert other == (Reward(0.25),)
    assert isinstance(alone[0], Reward) and (alone[0].value, alone[0].terms) == (2.0, (("judge", 1.0),))
    assert len(engine.read) == 2


def test_verdicts_of_several_judges_are_kept_under_their_names() -> None:
    """Of 2 x 1 and 3 x 0.5 on one row: 3.5; the other judge's questions have its name, on which its draws depend."""
    first, second = Scripted({"four": "yes"}), Scripted({"four": "0.5"})
    other = judge(second, name="style")
    [scored] = score(
        [group("y", "four")],
        NoTerms(),
        judges={"judge": judge(first), "style": other},
        judging={"judge": JudgePlan(weight=2.0), "style": JudgePlan(weight=3.0)},
    )
    [outcome] = scored.outcomes
    assert isinstance(outcome, Reward) and outcome.value == 3.5
    assert outcome.terms == (("judge", 1.0), ("style", 0.5))
    assert [name for name, _ in outcome.texts] == ["judge/answer", "style/answer"]
    assert [prompt.prompt_id for prompt in second.read] == ["style/p/four"]


def test_a_response_without_a_reward_or_a_verdict_has_no_reward() -> None:
    crashed, unread = Invalid("exception", "boom"), Invalid("no_verdict", "hm")
    assert with_judge(crashed, Reward(1.0), 1.0) is crashed
    assert with_judge(Reward(1.0), unread, 1.0) is unread


def test_rows_that_the_judge_grades_need_no_term() -> None:
    term = {"name": "exact_match", "data_sources": ["math"]}
    reward = RewardConfig.model_validate({"terms": [term], "judge": {"path": "j", "data_sources": ["essay"]}})
    assert check_data_sources(reward, {"math": "a", "essay": "a"}) == []
    [problem] = check_data_sources(reward, {"math": "a", "essay": "a", "chat": "b"})
    assert "no reward term counts for data source 'chat' of b" in problem.what
    [problem] = check_data_sources(reward, {"math": "a"})
    assert problem.what == "the judge is for data sources that no file holds (they hold: math)"
    assert problem.field == "reward.judge.data_sources"

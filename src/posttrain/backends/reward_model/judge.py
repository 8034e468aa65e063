"""A judge in this process: a language model that grades each response, sampled by one of the run's engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import regex
from transformers import PreTrainedTokenizerBase

from posttrain.config.judge import JUDGE, JudgeConfig, judge_field
from posttrain.data.templates import apply_template
from posttrain.errors import ConfigError, PosttrainError, Problem
from posttrain.interfaces.reward import NotScored
from posttrain.interfaces.rollout_engine import RolloutEngine
from posttrain.processes.limits import EXCEPTION
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
from posttrain.rewards.scorers.llm_judge import (
    NO_VERDICT,
    TEMPLATE,
    filled,
    last_line_verdict,
    matched_verdict,
)
from posttrain.rewards.spans import after_think

TOO_LONG = "too_long"  # value of Invalid.reason: the question has more tokens than the judge may read
SHOWN = 500  # characters of an answer that are kept beside the verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The text of a judge's question, and the reading of its answer."""

    template: str
    verdict: Callable[[str], float]


def question_of(config: JudgeConfig, at: str = judge_field(JUDGE)) -> Question:
    """Build the question. Args: at, the judge's section. Raises: ConfigError with all problems."""
    problems = []
    template = config.prompt_template or TEMPLATE
    if "{response}" not in template:
        what, fix = "prompt_template does not show the response", "write {response} where the response belongs"
        problems.append(Problem(what, fix=fix, field=f"{at}.prompt_template"))
    verdict: Callable[[str], float] = last_line_verdict
    if config.extract is not None:
        try:
            pattern = regex.compile(config.extract)
        except regex.error as error:
            what = f"extract is not a regular expression: {error}"
            problems.append(Problem(what, field=f"{at}.extract"))
        else:
            verdict = _matched(pattern)
    if problems:
        raise ConfigError(problems)
    return Question(template=template, verdict=verdict)


def _matched(pattern: regex.Pattern[str]) -> Callable[[str], float]:
    return lambda text: matched_verdict(text, pattern=pattern)


class LocalJudge:
    """See interfaces.reward.RewardModel: the verdict in the judge's answer to a question about each response.

    Args: ``tokenizer`` the judge's own. ``sampling``: one answer per question; its seed and the response's name fix the draws.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        question: Question,
        sampling: SamplingParams,
        config: JudgeConfig,
        name: str = JUDGE,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self._question = question
        self._sampling = sampling
        self._config = config
        self.name = name
        self._at = judge_field(name)

    note: str | None = None

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        found = [[self._asked(group.prompt, each) for each in group.trajectories] for group in groups]
        questions = [each for group in found for each in group if isinstance(each, Prompt)]
        answers = iter(self.engine.generate(questions, self._sampling) if questions else [])
        return [
            tuple(self._read(next(answers).trajectories[0]) if isinstance(each, Prompt) else each for each in group)
            for group in found
        ]

    def _asked(self, prompt: Prompt, response: Trajectory) -> Prompt | Invalid:
        """Return the question about a response, as the judge reads it."""
        try:
            content = filled(self._question.template, prompt, response.text)
            messages = [{"role": "user", "content": content}]
            text, ids = apply_template(self.tokenizer, messages, self._config.chat_template_options)
        except (PosttrainError, ValueError) as error:
            return Invalid(EXCEPTION, f"{self.name}: {error}"[:500])
        if len(ids) > self._config.max_prompt_tokens:
            what = (
                f"{self.name}: {len(ids)} tokens, and {self._at}.max_prompt_tokens is {self._config.max_prompt_tokens}"
            )
            return Invalid(TOO_LONG, what)
        name = f"{self.name}/{response.sample_id}"
        return Prompt(prompt_id=name, token_ids=tuple(ids), text=text, data_source=prompt.data_source)

    def _read(self, answer: Trajectory) -> Outcome:
        """Return the verdict in an answer."""
        if answer.stop_reason is StopReason.FAILED:
            return Invalid(answer.failure_reason or NO_VERDICT, f"{self.name}: {answer.failure}"[:500])
        if answer.stop_reason is StopReason.LENGTH:  # a truncated verdict reads as another one
            return Invalid(NO_VERDICT, f"{self.name}: cut at {self._at}.max_tokens")
        try:
            value = self._question.verdict(after_think(answer.text))
        except NotScored as error:
            return Invalid(error.reason, f"{self.name}: {error}"[:500])
        return Reward(value, texts=((f"{self.name}/answer", answer.text[-SHOWN:]),))

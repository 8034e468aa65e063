"""Agent loops written for verl: their requests become turns, and what their output marks is trained, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from posttrain.backends.environments.processes import ProcessHost
from posttrain.data.turns import TemplateTurns
from posttrain.envs.agent_loop.conversations import begun, learned
from posttrain.interfaces.env import EnvSpec
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.steps.play import play
from says import Says
from toy import ids, toy_tokenizer

pytestmark = pytest.mark.usefixtures("warm_children")

WHO = ({"role": "user", "content": "who"},)
PROMPT = "Uwho$\nA"
TOP = """
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

def tokens(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)
"""
# As verl 0.7 and later have them: columns by name, a response with token_ids
SEEKER = (
    TOP
    + """
@register("seeker")
class Seeker(AgentLoopBase):
    def __init__(self, *args, questions=2, **kwargs):
        super().__init__(*args, **kwargs)
        self.questions = questions
        self.longest = self.config.actor_rollout_ref.rollout.response_length

    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        seen, mask, metrics = list(prompt), [], {}
        for number in range(self.questions):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=seen, sampling_params=sampling_params
                )
            kept = output.token_ids[:5]
            seen, mask = seen + kept, mask + [1] * len(kept)
            if number + 1 < self.questions:
                told = tokens(self.tokenizer, f"[{kwargs['extra_info']['hint']}]")
                seen, mask = seen + told, mask + [0] * len(told)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=seen[len(prompt):][: self.longest], response_mask=mask[: self.longest],
            reward_score=0.5, num_turns=4, metrics=metrics,
        )
"""
)
# As verl 0.5 has them: messages, a response that is a list, what is shared made once
OLDER = (
    TOP
    + """
class Older(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.greeting = kwargs["greeting"]

    async def run(self, messages, sampling_params):
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        assert isinstance(prompt, list)
        prompt = prompt + tokens(self.tokenizer, self.greeting)
        answer = await self.server_manager.generate(uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=answer, response_mask=[1] * len(answer), metrics={})
"""
)
# Asks twice at once, trains one of the answers, and marks a token that it writes itself
PAIR = (
    TOP
    + """
import asyncio

class Pair(AgentLoopBase):
    async def run(self, sampling_params, *, raw_prompt, **kwargs):
        prompt = await self.apply_chat_template(list(raw_prompt))
        one, other = await asyncio.gather(*[
            self.server_manager.generate(request_id=uuid4().hex, prompt_ids=prompt + tokens(self.tokenizer, each),
                                         sampling_params={**sampling_params, "max_tokens": 4})
            for each in "12"
        ])
        written = tokens(self.tokenizer, "!")
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=tokens(self.tokenizer, "1") + one.token_ids + written,
            response_mask=[0] + [1] * len(one.token_ids) + [1], num_turns=2, metrics={},
        )
"""
)


# As verl 0.9 has them: messages are put behind responses by the base
TALKER = (
    TOP
    + """
class Talker(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        prompt = await self.ct_build_initial_tokens(messages)
        seen, mask, logprobs = prompt, [], []
        for number in range(2):
            output = await self.server_manager.generate(
                request_id="1", prompt_ids=seen, sampling_params=sampling_params, image_data=None
            )
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                seen, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs
            )
            seen = merged.token_ids
            if number == 0:
                said = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
                before = [*messages, {"role": "assistant", "content": said}]
                after = [*before, {"role": "user", "content": "more"}]
                merged, mask, logprobs = await self.ct_merge_non_assistant_msg(before, after, seen, mask, logprobs)
                seen = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=seen[len(prompt):], response_mask=mask, response_logprobs=logprobs, metrics={}
        )
"""
)


@pytest.fixture(scope="module")
def host() -> Iterator[ProcessHost]:
    made = ProcessHost(1, 60.0, ["agent_loop"])
    yield made
    made.close()


@pytest.fixture
def played(tmp_path: Path, host: ProcessHost) -> Callable[..., Trajectory]:
    def run(sampler: Says, source: str, name: str, **arguments: Any) -> Trajectory:
        file = tmp_path / f"{name.lower()}.py"
        file.write_text(source)
        toy_tokenizer().save_pretrained(tmp_path / "model")
        settings = {
            "class_name": f"{file}:{name}",
            "model": {"path": str(tmp_path / "model")},
            "arguments": arguments,
            "config": {"actor_rollout_ref": {"rollout": {"response_length": 12}}, "data": {}},
        }
        sampling = SamplingParams(max_response_tokens=40)
        spec = EnvSpec(
            name="agent_loop",
            settings=settings,
            messages=WHO,
            row={"data_source": "t", "hint": "ha"},
            sampling=sampling,
        )
        rules = EpisodeRules(max_response_tokens=40, max_context_tokens=1000, max_turns=None)
        worlds = Worlds(host=host, writer=TemplateTurns(toy_tokenizer(), {}), rules=rules, spec_of=lambda _: spec)
        prompt = Prompt(prompt_id="p", token_ids=ids(PROMPT), text=PROMPT, data_source="t", messages=WHO)
        [group] = play(sampler, [prompt], sampling, worlds)  # type: ignore[arg-type]
        [trajectory] = group.trajectories
        return trajectory

    return run


def test_what_the_output_marks_is_trained_as_it_was_sampled(played: Callable[..., Trajectory]) -> None:
    sampler = Says("abcdefg", "xyz$")
    trajectory = played(sampler, SEEKER, "Seeker", questions=2)
    # Five tokens of the first response stay, four are told, and the output ends after 12: three of the second's four
    assert [request.token_ids for request in sampler.asked] == [ids(PROMPT), ids(PROMPT + "abcde[ha]")]
    assert trajectory.token_ids == ids("abcde[ha]xyz$")
    assert trajectory.response_mask == (*[True] * 5, *[False] * 4, *[True] * 3, False)
    assert trajectory.logprobs[:5] == tuple(-0.5 - place for place in range(5))
    assert trajectory.env_reward == 0.5
    assert dict(trajectory.env_metrics)["num_turns"] == 4.0
    assert dict(trajectory.env_metrics)["unsampled_tokens"] == 0.0


def test_loops_of_older_versions_get_messages_and_lists(played: Callable[..., Trajectory]) -> None:
    sampler = Says("hello$")
    trajectory = played(sampler, OLDER, "Older", greeting="Hi:")
    assert [request.token_ids for request in sampler.asked] == [ids(PROMPT + "Hi:")]
    assert trajectory.token_ids == ids("hello$")
    assert trajectory.env_reward is None  # the run's terms score it


def test_messages_stand_behind_responses_as_the_template_writes_them(played: Callable[..., Trajectory]) -> None:
    sampler = Says("hello$", "bye$")
    trajectory = played(sampler, TALKER, "Talker")
    # The model has written the end of its turn, $, so the template goes on behind it
    assert sampler.asked[1].token_ids == ids(PROMPT + "hello$\nUmore$\nA")
    assert trajectory.token_ids == ids("hello$\nUmore$\nAbye$")
    assert trajectory.response_mask == (*[True] * 6, *[False] * 9, *[True] * 4)


def test_of_two_conversations_the_one_in_the_output_is_trained(played: Callable[..., Trajectory]) -> None:
    sampler = Says("yes$", "no$")
    trajectory = played(sampler, PAIR, "Pair")
    assert {request.token_ids for request in sampler.asked} == {ids(PROMPT + "1"), ids(PROMPT + "2")}
    assert trajectory.token_ids in (ids("yes$"), ids("no$"))
    assert dict(trajectory.env_metrics)["unsampled_tokens"] == 1.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("return AgentLoopOutput(", "return {}['tool'] or AgentLoopOutput("), "seeker.py:31: KeyError: 'tool'"),
        (("response_mask=mask[: self.longest]", "response_mask=[1]"), "returned 12 response_ids and 1 marks"),
        (("sampling_params=sampling_params", "sampling_params={'top_p': 0.5}"), "Seeker samples with top_p=0.5"),
        (("prompt_ids=prompt,", "prompt_ids=[1],"), "returned tokens of no conversation that it had with the model"),
    ],
)
def test_what_a_loop_does_wrong_is_named(played: Callable[..., Trajectory], change: tuple[str, str], says: str) -> None:
    assert change[0] in SEEKER
    trajectory = played(Says("abcdefg", "xyz$"), SEEKER.replace(*change), "Seeker")
    assert trajectory.stop_reason is StopReason.FAILED
    assert says in trajectory.failure


# Waits for its second turn no longer than the sampler takes to begin it, and asks again
IMPATIENT = (
    TOP
    + """
import asyncio

class Impatient(AgentLoopBase):
    async def run(self, sampling_params, *, raw_prompt, **kwargs):
        prompt = await self.apply_chat_template(list(raw_prompt))
        seen = list(prompt)

        async def asked(ids, **more):
            return await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=ids, sampling_params={**sampling_params, **more}
            )

        one = await asked(seen)
        seen += one.token_ids
        try:
            await asyncio.wait_for(asked(seen + tokens(self.tokenizer, "[hurry]")), 0.05)
        except asyncio.TimeoutError:
            seen += tokens(self.tokenizer, "[again]")
        two = await asked(seen)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=seen[len(prompt):] + two.token_ids,
            response_mask=[1] * len(one.token_ids) + [0] * 7 + [1] * len(two.token_ids), num_turns=2, metrics={},
        )
"""
)


class Slow(Says):
    """A sampler that samples requests that end in ] as soon as a later one is there, and forgets those that are withdrawn."""

    def __init__(self, *texts: str):
        super().__init__(*texts)
        self.cancelled: list[str] = []

    def cancel(self, sample_ids: Sequence[str]) -> None:
        self.cancelled += sample_ids
        self.waiting = [each for each in self.waiting if each.sample_id not in sample_ids]

    def wait(self, timeout_s: float) -> list[Trajectory]:
        held = [each for each in self.waiting if each.token_ids[-7:] == ids("[hurry]")]
        self.waiting = [each for each in self.waiting if each not in held]
        if held and not self.waiting:
            time.sleep(min(timeout_s, 0.05))
        found = super().wait(timeout_s)
        self.waiting = held
        return found


def test_a_turn_that_a_loop_waits_for_no_longer_is_withdrawn(
    played: Callable[..., Trajectory], capfd: pytest.CaptureFixture[str]
) -> None:
    sampler = Slow("one", "two$")
    trajectory = played(sampler, IMPATIENT, "Impatient")
    _, hurried, again = sampler.asked
    assert hurried.token_ids == ids(PROMPT + "one[hurry]") and sampler.cancelled == [hurried.sample_id]
    # The conversation continues as if it had not been asked for
    assert again.token_ids == ids(PROMPT + "one[again]")
    assert trajectory.token_ids == ids("one[again]two$")
    assert trajectory.response_mask == (*[True] * 3, *[False] * 7, *[True] * 4)
    assert dict(trajectory.env_metrics)["abandoned_turns"] == 1.0
    assert dict(trajectory.env_metrics)["num_actions"] == 2.0
    assert "Error" not in capfd.readouterr().err


def test_a_turn_whose_answer_comes_late_changes_nothing(
    played: Callable[..., Trajectory], capfd: pytest.CaptureFixture[str]
) -> None:
    """The sampler answers although the request was withdrawn, as one in another process may."""
    sampler = Says("one", "late", "two$")
    said = sampler._said
    sampler._said = lambda request, text: (time.sleep(0.2 if text == "late" else 0), said(request, text))[1]  # type: ignore[method-assign]
    trajectory = played(sampler, IMPATIENT, "Impatient")
    assert trajectory.token_ids == ids("one[again]two$")
    assert dict(trajectory.env_metrics)["abandoned_turns"] == 1.0
    assert "Error" not in capfd.readouterr().err


def test_tokens_of_a_branch_are_not_trained() -> None:
    def conversation(context: Sequence[int], response: Sequence[int], number: int) -> Any:
        made = begun(number, context)
        made.answered(response)
        return made

    # The first conversation goes on as the second begins, so the output 1 2 | 3 4 9 5 holds tokens of both
    first, second, third = (
        conversation([1, 2], [3, 4], 1),
        conversation([1, 2, 3, 4, 9], [5, 6], 2),
        conversation([1, 7], [3], 3),
    )
    found = learned([first, second, third], [1, 2], [3, 4, 9, 5], [1, 1, 0, 1])
    assert found.by_line == {1: [True, True], 2: [True, False]}
    assert found.unsampled == 0
    # A loop that leaves a turn out of its mask
    assert learned([first], [1, 2], [3, 4], [0, 0]).by_line == {1: [False, False]}

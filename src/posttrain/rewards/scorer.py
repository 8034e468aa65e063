"""The scorer of a run: in the training process when every term is quick, else in worker processes that can be killed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from posttrain.config.reward import RewardConfig
from posttrain.config.reward_placement import runs_here
from posttrain.interfaces.reward import GroupScorer
from posttrain.libraries.cores import available_cores
from posttrain.processes import wire
from posttrain.processes.limits import CRASHED, EXCEPTION, MEMORY, TIMEOUT, Limits
from posttrain.processes.pool import Answer, CallFailure, Reply, WorkerPool
from posttrain.processes.replies import Replies
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import Invalid, Outcome, Reward, TrajectoryGroup
from posttrain.rewards.bisection import call_with_bisection
from posttrain.rewards.in_worker import FACTORY, answer_of, plain_prompt
from posttrain.rewards.load import load_rewards, terms_of
from posttrain.rewards.score import (
    Decode,
    ResponseText,
    RewardTerms,
    SentAnswer,
    Term,
    TermValue,
    combine_each,
    response_texts,
)

MOST_WORKERS = 4  # default upper bound
# "package.module:function" and its argument, a plain value: called in the worker, where a term needs its result.
Factory = tuple[str, Any]


class Scorer(GroupScorer, Protocol):
    """A GroupScorer that may own processes."""

    def scorable(self, group: TrajectoryGroup) -> list[Future[bool]]:
        """Return, per response of a begun group, a future: True when no per-response term failed. Each resolves as soon as the
        terms that score one response at a time have answered."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


def start_rewards(
    config: RewardConfig,
    *,
    withheld: Collection[str] = (),
    decode: Decode | None = None,
    tokenizer: Factory | None = None,
) -> Scorer:
    """Start the scorer of a run; its workers, when needed, have loaded on return and do not see the environment variables
    called ``withheld``. ``decode`` gives the text of token ids to terms that read the sequence; ``tokenizer`` makes that of
    reward managers.

    Raises: ConfigError with the problems of all terms.
    """
    if runs_here(config):
        return ScorerHere(load_rewards(config, decode))
    return ScorerInWorkers(config, withheld=withheld, decode=decode, tokenizer=tokenizer)


class ScorerHere:
    """Scores synchronously, in this process."""

    def __init__(self, terms: RewardTerms):
        self._terms = terms

    def begin(self, group: TrajectoryGroup, *, keep: bool = False) -> None:
        """No-op: scoring in the background would only take time from the sampler."""

    def scorable(self, group: TrajectoryGroup) -> list[Future[bool]]:
        found: list[Future[bool]] = [Future() for _ in group.trajectories]
        for future, outcome in zip(found, self._terms.score(group), strict=True):
            future.set_result(isinstance(outcome, Reward))
        return found

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        return [self._terms.score(group) for group in groups]

    def forget(self, groups: Sequence[TrajectoryGroup]) -> None:
        """No-op: nothing is begun."""

    def at_step(self, step: int) -> None:
        """No-op: no built-in reward depends on the step."""

    def keep_in(self, folder: Path) -> None:
        """No-op: nothing is cached."""

    def take_costs(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """No-op: there is no process to end."""


class ScorerInWorkers:
    """Scores each response in workers as soon as its group is complete; batched terms run once all groups are complete."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        withheld: Collection[str] = (),
        decode: Decode | None = None,
        tokenizer: Factory | None = None,
    ):
        self._terms = terms_of(config)
        self._decode = decode
        self._may_be_none = config.model is not None
        self._overrun_is_zero = config.overrun_is_zero
        self._one_by_one = any(not term.batched for term in self._terms)
        # By id(group); None where all terms are batched
        self._begun: dict[int, tuple[TrajectoryGroup, Replies[Reply] | None]] = {}
        self._step = 0  # before the first one
        self._kept: set[int] = set()  # of these, the ones that stay until they are scored or forgotten
        limits = Limits(
            wall_s=config.timeout_s,
            memory_bytes=int(config.memory_gib * 2**30),
            answer_bytes=(16 if any(term.batched for term in self._terms) else 1) << 20,
            processes=160 if any(term.batched for term in self._terms) else 32,
        )
        workers = config.workers or min(MOST_WORKERS, available_cores())
        setup = {"reward": config.model_dump(mode="json"), "tokenizer": tokenizer and list(tokenizer)}
        self._pool = WorkerPool(
            FACTORY,
            setup,
            workers=workers,
            limits=limits,
            variables=config.environment_variables,
            withheld=withheld,
        )
        try:
            self._pool.check()
        except BaseException:
            self._pool.close()
            raise

    def begin(self, group: TrajectoryGroup, *, keep: bool = False) -> None:
        if keep:
            self._kept.add(id(group))
        if id(group) not in self._begun:
            self._begun[id(group)] = group, self._ask(group) if self._one_by_one else None

    def scorable(self, group: TrajectoryGroup) -> list[Future[bool]]:
        _, asked = self._begun[id(group)]
        found: list[Future[bool]] = [Future() for _ in group.trajectories]
        if asked:
            asked.watch(partial(self._resolve, found, group.prompt))
        else:
            for future in found:
                future.set_result(True)
        return found

    def _resolve(self, scorable: Sequence[Future[bool]], prompt: Prompt, number: int, reply: Reply) -> None:
        counting = self._counting(prompt)
        answers = _answers(reply, counting, self._named(counting))
        failed = any(isinstance(answer, Invalid) for answer in answers.values())
        failed = failed and not self._overran(reply, prompt)
        if scorable[number].set_running_or_notify_cancel():
            scorable[number].set_result(not failed)

    def score(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[Outcome, ...]]:
        for group in groups:
            self.begin(group)
        unwanted = [group for key, (group, _) in list(self._begun.items()) if key not in self._kept]
        batched = {
            index: self._call_batched(index, term, groups) for index, term in enumerate(self._terms) if term.batched
        }
        outcomes = [self._outcomes(group, batched) for group in groups]
        self.forget([*groups, *unwanted])
        return outcomes

    def forget(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            self._begun.pop(id(group), None)
            self._kept.discard(id(group))

    def at_step(self, step: int) -> None:
        self._step = step

    def keep_in(self, folder: Path) -> None:
        """No-op: nothing is cached."""

    def take_costs(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._pool.close()

    def _ask(self, group: TrajectoryGroup) -> Replies[Reply]:
        return self._submit(group, range(len(group.trajectories)), self._read(group))

    def _submit(
        self,
        group: TrajectoryGroup,
        numbers: Sequence[int],
        texts: Sequence[ResponseText],
        *,
        plain_answer: bool = False,
    ) -> Replies[Reply]:
        """Have the responses with these numbers scored. The prompt is written once for all of them; one that cannot be written
        is why each call fails."""
        shared = {"prompt": plain_prompt(group.prompt), "plain_answer": plain_answer}
        try:
            alike = wire.to_text(shared)
        except (TypeError, ValueError, RecursionError) as error:
            return _failed(error, len(numbers))
        calls = [
            f'{{"response": {wire.to_text(texts[number].response)}, "sequence": {wire.to_text(texts[number].sequence)}}}'
            for number in numbers
        ]
        return self._pool.submit_written(calls, [group.trajectories[number].sample_id for number in numbers], alike)

    def _read(self, group: TrajectoryGroup) -> list[ResponseText]:
        return response_texts(group, self._terms, self._decode, step=self._step)

    def _call_batched(self, index: int, term: Term, groups: Sequence[TrajectoryGroup]) -> Iterator[SentAnswer]:
        """Call a batched term on all responses that it counts for, on halves again where that fails. Yields: its answers, in the
        order of the responses."""
        counting = [
            (group.prompt, text.read_by(term))
            for group in groups
            if term.counts_for(group.prompt.data_source)
            for text in self._read(group)
        ]
        prompts, responses = [plain_prompt(prompt) for prompt, _ in counting], [response for _, response in counting]

        def call(ranges: Sequence[range]) -> list[list[SentAnswer] | Invalid]:
            calls = [
                {
                    "term": index,
                    "prompts": prompts[each.start : each.stop],
                    "responses": responses[each.start : each.stop],
                }
                for each in ranges
            ]
            replies = [self._pool.submit(call, seed=index) for call in calls]
            return [_batch_of(reply.result(), len(each)) for reply, each in zip(replies, ranges, strict=True)]

        return iter(call_with_bisection(len(counting), call, halve=term.halve))

    def _outcomes(self, group: TrajectoryGroup, batched: Mapping[int, Iterator[SentAnswer]]) -> tuple[Outcome, ...]:
        """Build the outcomes of a group. Consumes ``batched``, so groups must come in the order of the batched calls."""
        source = group.prompt.data_source
        _, asked = self._begun[id(group)]
        answers = self._answers_of(group, asked) if asked else [{} for _ in group.trajectories]
        for of_response in answers if batched else ():
            of_response |= {
                index: next(said) for index, said in batched.items() if self._terms[index].counts_for(source)
            }
        return tuple(combine_each(self._terms, answers, source, may_be_none=self._may_be_none))

    def _answers_of(self, group: TrajectoryGroup, asked: Replies[Reply]) -> list[dict[int, SentAnswer]]:
        """Return the answers of the terms that are not batched, per response.

        Where computer algebra exceeded a limit and ``overrun_is_zero``, the call is made again with a plain answer: when that
        succeeds the response is at fault and gets 0; when it fails the reference is, or this machine, and the response is
        invalid.
        """
        prompt = group.prompt
        replies = asked.all()
        counting = self._counting(prompt)
        overran = [
            number for number, reply in enumerate(replies) if type(reply) is not Answer and self._overran(reply, prompt)
        ]
        again: dict[int, Reply] = {}
        if overran:
            asked_again = self._submit(group, overran, self._read(group), plain_answer=True)
            again = dict(zip(overran, asked_again.all(), strict=True))
        named = self._named(counting)
        found = [_answers(reply, counting, named) for reply in replies]
        for number, second in again.items():
            plain = _answers(second, counting, named)
            if not any(isinstance(answer, Invalid) for answer in plain.values()):
                zero = TermValue(0.0, texts=(("overrun", _detail(replies[number])),))
                found[number] = {index: zero if self._terms[index].calculates else plain[index] for index in plain}
        return found

    def _counting(self, prompt: Prompt) -> Set[int]:
        """Return the terms that are not batched and count for a prompt, by their index."""
        source = prompt.data_source
        return {index for index, term in enumerate(self._terms) if not term.batched and term.counts_for(source)}

    def _named(self, counting: Set[int]) -> str:
        """The names of terms in a message."""
        return ", ".join(self._terms[index].called for index in sorted(counting))

    def _overran(self, reply: Reply, prompt: Prompt) -> bool:
        """Return True when computer algebra may have exceeded a limit, and that scores 0."""
        return (
            self._overrun_is_zero
            and isinstance(reply, CallFailure)
            and reply.reason in (TIMEOUT, MEMORY)
            and any(term.calculates and term.counts_for(prompt.data_source) for term in self._terms)
        )


def _answers(reply: Reply, counting: Set[int], named: str) -> dict[int, SentAnswer]:
    """Return the answers of the terms that count and are not batched; the failure of a worker is the answer of each, and names
    them where it had no time to."""
    if isinstance(reply, Answer):
        try:
            answers = {int(index): answer_of(values) for index, values in reply.value}
            if answers.keys() >= counting or any(isinstance(answer, Invalid) for answer in answers.values()):
                return answers
        except (KeyError, TypeError, ValueError):
            pass
        failed = Invalid(CRASHED, "the worker's answer is not one")
    else:
        late = reply.reason == TIMEOUT
        failed = Invalid(reply.reason, f"{named}: {reply.detail} (reward.timeout_s)" if late else reply.detail)
    return dict.fromkeys(counting, failed)


def _failed(error: Exception, count: int) -> Replies[Reply]:
    replies: Replies[Reply] = Replies(count)
    replies.put(0, [CallFailure(EXCEPTION, str(error))] * count)
    return replies


def _detail(reply: Reply) -> str:
    return reply.detail if isinstance(reply, CallFailure) else ""


def _batch_of(reply: Reply, count: int) -> list[SentAnswer] | Invalid:
    """Return the answers in a reply about many responses, or the reason why the call failed."""
    if not isinstance(reply, Answer):
        return Invalid(reply.reason, reply.detail)
    values: Any = reply.value
    try:
        if isinstance(values, list) and len(values) == count:
            return [answer_of(each) for each in values]
        if isinstance(values, dict) and isinstance(failure := answer_of(values), Invalid):
            return failure
    except (KeyError, TypeError, ValueError):
        pass
    return Invalid(CRASHED, "the worker's answer is not one")

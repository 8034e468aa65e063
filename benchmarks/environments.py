"""Many environments on one sampler: turns in flight against turns in lock-step.

    python benchmarks/environments.py [EPISODES] [TURNS]

64 environments (each in a process of its own) answer after log-normal times, median 40 ms, and the sampler is a stand-in that
gives every pass of up to 64 rows one token in 2 ms, as a server with continuous batching does. In lock-step all turns of a round
are sampled, then all environments answer, then the next round begins. Both ways give the same trajectories, which are compared.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from posttrain.backends.environments.processes import ProcessHost
from posttrain.data.turns import TemplateTurns
from posttrain.interfaces.env import EnvEvent, EnvSpec, EnvStart, EnvStep
from posttrain.interfaces.rollout_engine import Request
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from posttrain.steps.play import play

TOKEN_S = 0.002
MEDIAN_S, SPREAD = 0.04, 1.2  # of an environment's answer: log-normal, so a few take a second
SHORTEST, LONGEST = 4, 40  # tokens of a turn


class Slow:
    """Answers after a while."""

    def __init__(self, spec: EnvSpec, turns: int) -> None:
        self._turns, self._left = turns, turns

    def reset(self, seed: int) -> EnvStart:
        self._random = random.Random(seed)
        return EnvStart(messages=[{"role": "user", "content": f"begin {seed}"}])

    def step(self, action: str) -> EnvStep:
        time.sleep(MEDIAN_S * self._random.lognormvariate(0.0, SPREAD))
        self._left -= 1
        said = [{"role": "user", "content": f"{len(action)} letters, {self._left} left"}]
        return EnvStep(messages=said, reward=float(len(action)), done=self._left == 0)

    def close(self) -> Mapping[str, float]:
        return {}


@dataclass
class Batching:
    """A sampler: every pass gives each response under way its next token. ``lock_step`` waits for all to end."""

    lock_step: bool
    left: dict[str, tuple[Request, int]] = field(default_factory=dict)
    version: int = 0

    def open_stream(self, sampling: SamplingParams, on_tokens: object = None) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def cancel(self, sample_ids: Collection[str]) -> None: ...

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.left[request.sample_id] = request, random.Random(request.sample_id).randint(SHORTEST, LONGEST)

    def wait(self, timeout_s: float) -> list[Trajectory]:
        deadline, done = time.monotonic() + timeout_s, list[Trajectory]()
        while self.left and (self.lock_step or (not done and time.monotonic() < deadline)):
            time.sleep(TOKEN_S)
            for name, (request, tokens) in list(self.left.items()):
                self.left[name] = request, tokens - 1
                if tokens == 1:
                    del self.left[name]
                    done.append(said_by(request))
        return done


def said_by(request: Request) -> Trajectory:
    text = "x" * random.Random(request.sample_id).randint(SHORTEST, LONGEST)
    ids = (*text.encode(), 256)
    return Trajectory(
        sample_id=request.sample_id,
        token_ids=ids,
        logprobs=(-1.0,) * len(ids),
        text=text,
        stop_reason=StopReason.EOS,
        policy_version=0,
    )


class Together:
    """A host that tells answers only when every environment that is at work has answered."""

    def __init__(self, host: ProcessHost) -> None:
        self._host, self._held, self._busy = host, list[tuple[str, EnvEvent]](), 0

    def start(self, episode: str, spec: EnvSpec, seed: int) -> None:
        self._busy += 1
        self._host.start(episode, spec, seed)

    def step(self, episode: str, action: str, cut: bool = False) -> None:
        self._busy += 1
        self._host.step(episode, action, cut)

    def finish(self, episode: str) -> None:
        self._busy += 1
        self._host.finish(episode)

    def drop(self, episode: str) -> None:
        self._host.drop(episode)

    def wait(self, timeout_s: float) -> list[tuple[str, EnvEvent]]:
        self._held += self._host.wait(timeout_s)
        if len(self._held) < self._busy:
            return []
        told, self._held, self._busy = self._held, [], 0
        return told

    def abandon(self) -> None:
        self._host.abandon()

    def close(self) -> None:
        self._host.close()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=template)


def timed(episodes: int, turns: int, *, lock_step: bool) -> tuple[float, list[Trajectory]]:
    processes = ProcessHost(episodes, timeout_s=60.0)
    worlds = Worlds(
        host=Together(processes) if lock_step else processes,
        writer=TemplateTurns(byte_tokenizer(), {}),
        rules=EpisodeRules(max_response_tokens=LONGEST + 1, max_context_tokens=100_000),
        spec_of=lambda prompt: EnvSpec(name=f"{__file__}:Slow", settings={"turns": turns}),
    )
    prompts = [Prompt(prompt_id=f"p{number}", token_ids=(), text="", data_source="x") for number in range(episodes)]
    sampling = SamplingParams(max_response_tokens=LONGEST + 1)
    try:
        play(Batching(False), prompts, sampling, worlds)  # starts the processes
        start = time.perf_counter()
        groups = play(Batching(lock_step), prompts, sampling, worlds)
        return time.perf_counter() - start, [group.trajectories[0] for group in groups]
    finally:
        processes.close()


def main() -> None:
    episodes, turns = (int(text) for text in (sys.argv[1:] + ["64", "10"][len(sys.argv) - 1 :]))
    together_s, one_way = timed(episodes, turns, lock_step=True)
    in_flight_s, other_way = timed(episodes, turns, lock_step=False)
    assert one_way == other_way, "the same seeds gave other trajectories"
    print(f"{episodes} episodes of {turns} turns")
    print(f"lock-step  {together_s:6.2f} s  {episodes / together_s:6.1f} trajectories/s")
    print(f"in flight  {in_flight_s:6.2f} s  {episodes / in_flight_s:6.1f} trajectories/s")
    print(f"ratio      {together_s / in_flight_s:6.2f}")


if __name__ == "__main__":
    main()

"""Many environments on the native engine: episodes per minute, beside what their latencies and its passes allow.

    python benchmarks/environments_native.py [--model FOLDER] [--episodes 192] [--turns 6] [--median-s 0.3]

64 environments, each in a process of its own, answer after log-normal times while the native engine samples the turns of others
(a tiny random model, or a Hugging Face folder). Every pass of the engine is timed. Two bounds come from the same numbers of
tokens and the same answer times:

    schedule  the episodes played again in a simulation in which only passes and answers take time: passes as long as those of
              this run were on average with so many rows (prefill: tokens), the better of two orders of prefills
    hard      no schedule is faster: the longest of one episode's own time, all episodes' time over 64, and all tokens in
              full passes of 64
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import print_table
from slow_environment import delays

from posttrain.backends.environments.processes import ProcessHost
from posttrain.backends.rollout.native.engine import NativeEngine
from posttrain.cli.process import prepare_cpu
from posttrain.config.model import ModelConfig
from posttrain.data.turns import TemplateTurns
from posttrain.interfaces.env import EnvSpec
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.models.loading import load_causal_lm, load_tokenizer
from posttrain.models.tiny import write_tiny_model
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup
from posttrain.steps.play import play, seed_of

AT_ONCE = 64
WORLD = Path(__file__).with_name("slow_environment.py")


@dataclass
class Passes:
    """Times of an engine's passes: of prefills by tokens, of decodes by rows."""

    prefills: list[tuple[int, float]] = field(default_factory=list)
    decodes: list[tuple[int, float]] = field(default_factory=list)

    def watch(self, stream: Any) -> None:
        """Time every pass of a NativeStream."""
        step, prefill = stream.step, stream._prefill
        read: list[int] = []

        def counted(admitted: Sequence[Any]) -> None:
            read.append(sum(len(one.request.token_ids) for one in admitted))
            prefill(admitted)

        def timed() -> Any:
            read.clear()
            rows, start = len(stream._active), time.perf_counter()
            ended = step()
            taken = time.perf_counter() - start
            (self.prefills if read else self.decodes).append((read[0] if read else rows, taken))
            return ended

        stream.step, stream._prefill = timed, counted

    def fitted(self) -> tuple[Callable[[int], float], Callable[[int], float]]:
        """Return the mean time of a prefill by tokens and of a decode by rows: straight lines, not below the shortest pass."""
        return _line(self.prefills), _line(self.decodes)


def _line(timed: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    sizes, seconds = (np.array(each, dtype=float) for each in zip(*timed, strict=True))
    slope, base = np.polyfit(sizes, seconds, 1) if len(set(sizes)) > 1 else (0.0, seconds.mean())
    shortest = float(seconds.min())
    return lambda size: max(base + slope * size, shortest)


class Watched:
    """A sampler whose streams are timed."""

    def __init__(self, engine: NativeEngine, passes: Passes) -> None:
        self._engine, self._passes = engine, passes

    def open_stream(self, sampling: SamplingParams, on_tokens: Any = None) -> Any:
        stream = self._engine.open_stream(sampling, on_tokens)
        self._passes.watch(stream)
        return stream


@dataclass(frozen=True)
class Played:
    """One episode: of every turn the tokens read and sampled, and the time of the answer behind it."""

    turns: tuple[tuple[int, int, float], ...]


def played(groups: Sequence[TrajectoryGroup], sampling: SamplingParams, median_s: float) -> list[Played]:
    found = []
    for group in groups:
        [one] = group.trajectories
        prompt, begun = len(one.prompt_token_ids or ()), 0
        turns, waits = [], delays(seed_of(group.prompt, sampling), len(one.turns), median_s)
        for turn, wait in zip(one.turns, waits, strict=True):
            turns.append((prompt + turn.start - begun, turn.end - turn.start, wait))
        found.append(Played(tuple(turns)))
    return found


def simulated(
    episodes: Sequence[Played], prefill: Callable[[int], float], decode: Callable[[int], float], patient: bool
) -> float:
    """Play the episodes where nothing but passes and answers takes time. Returns: seconds. ``patient``: prefills wait until an
    eighth of those being sampled is there."""
    now, begun = 0.0, min(AT_ONCE, len(episodes))
    waiting = [(number, 0) for number in range(begun)]
    active: list[list[int]] = []  # [tokens left, episode, turn]
    answers: list[tuple[float, int, int]] = []
    while waiting or active or answers:
        while answers and answers[0][0] <= now:
            _, number, turn = heapq.heappop(answers)
            if turn + 1 < len(episodes[number].turns):
                waiting.append((number, turn + 1))
            elif begun < len(episodes):
                waiting.append((begun, 0))
                begun += 1
        if not waiting and not active:
            now = answers[0][0] if answers else now
            continue
        if waiting and not (patient and len(waiting) < len(active) // 8):
            now += prefill(sum(episodes[number].turns[turn][0] for number, turn in waiting))
            fresh = [[episodes[number].turns[turn][1], number, turn] for number, turn in waiting]
            waiting, active, grown = [], active + fresh, fresh
        else:
            now += decode(len(active))
            grown = active
        for row in grown:
            row[0] -= 1
        for _, number, turn in [row for row in active if row[0] <= 0]:
            heapq.heappush(answers, (now + episodes[number].turns[turn][2], number, turn))
        active = [row for row in active if row[0] > 0]
    return now


def hard_bound(episodes: Sequence[Played], decode: Callable[[int], float]) -> float:
    alone = [sum(wait + tokens * decode(1) for _, tokens, wait in one.turns) for one in episodes]
    tokens = sum(tokens for one in episodes for _, tokens, _ in one.turns)
    return max(max(alone), sum(alone) / AT_ONCE, tokens / AT_ONCE * decode(AT_ONCE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: a tiny random model")
    parser.add_argument("--episodes", type=int, default=192)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24, help="of a turn, at most")
    parser.add_argument("--median-s", type=float, default=0.3, help="of an environment's answer")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, arguments.model or write_tiny_model(Path(folder)))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    prepare_cpu()
    model = load_causal_lm(str(folder), dtype=torch.float32)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    engine = NativeEngine(model, tokenizer, max_concurrent_sequences=AT_ONCE, max_prefill_tokens=8192)
    host = ProcessHost(AT_ONCE, timeout_s=600.0)
    worlds = Worlds(
        host=host,
        writer=TemplateTurns(tokenizer, {}),
        rules=EpisodeRules(max_response_tokens=arguments.tokens, max_context_tokens=100_000),
        spec_of=lambda prompt: EnvSpec(
            name=f"{WORLD}:Slow", settings={"turns": arguments.turns, "median_s": arguments.median_s}
        ),
    )
    prompts = [
        Prompt(prompt_id=f"p{number}", token_ids=(), text="", data_source="x") for number in range(arguments.episodes)
    ]
    sampling = SamplingParams(max_response_tokens=arguments.tokens, temperature=1.0)
    passes = Passes()
    try:
        play(Watched(engine, Passes()), prompts[: min(AT_ONCE, len(prompts))], sampling, worlds)  # starts all processes
        start = time.perf_counter()
        groups = play(Watched(engine, passes), prompts, sampling, worlds)
        taken = time.perf_counter() - start
    finally:
        host.close()
    episodes = played(groups, sampling, arguments.median_s)
    prefill, decode = passes.fitted()
    schedule = min(simulated(episodes, prefill, decode, patient) for patient in (False, True))
    in_passes = sum(seconds for _, seconds in (*passes.prefills, *passes.decodes))
    print_table(
        ["", "seconds", "episodes a minute", "measured / bound"],
        [
            ["measured", f"{taken:.1f}", f"{60 * len(episodes) / taken:.0f}", ""],
            *(
                [name, f"{bound:.1f}", f"{60 * len(episodes) / bound:.0f}", f"{bound / taken:.1%}"]
                for name, bound in (("schedule bound", schedule), ("hard bound", hard_bound(episodes, decode)))
            ),
        ],
    )
    sampled = sum(tokens for one in episodes for _, tokens, _ in one.turns)
    print(
        f"{len(episodes)} episodes of {arguments.turns} turns, {sampled} tokens, {AT_ONCE} environments at once; engine busy"
    )
    print(f"{in_passes / taken:.0%} of the time: {len(passes.prefills)} prefills, {len(passes.decodes)} decodes")


if __name__ == "__main__":
    main()

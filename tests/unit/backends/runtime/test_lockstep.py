"""A stream over workers that advance by the same passes: workers of this process, with copies of a tiny model."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.backends.rollout.native import NativeEngine
from posttrain.interfaces.rollout_engine import Request, ResumableStream
from posttrain.models.loading import load_causal_lm
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished

pytest.importorskip("ray")
from lockstep_workers import Workers
from posttrain.backends.runtime.ray.lockstep import PASSES

SAMPLING = SamplingParams(max_response_tokens=40, ignore_eos=True, seed=7)
PROMPTS = [tuple(b"first question"), tuple(b"and another"), tuple(b"a third"), tuple(b"the last of them")]
# Lengths of 3 to 36 tokens, so that every prompt has a long response.
REQUESTS = [
    Request(f"{place}/{number}", ids, 3 + 11 * number, seed=11 + place, draws_as=f"p{place}/{number}")
    for place, ids in enumerate(PROMPTS)
    for number in range(4)
]


def workers_of(count: int, folder: Path, *, backwards: bool = False, slots: int = 6) -> Workers:
    """Workers that read one model."""
    model, tokenizer = load_causal_lm(str(folder), dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    return Workers(
        [NativeEngine(model, tokenizer, max_concurrent_sequences=slots, max_prefill_tokens=300) for _ in range(count)],
        backwards=backwards,
    )


def in_streams(workers: Workers, waits: int, *, keep_cache: bool = False) -> tuple[dict[str, Trajectory], list[str]]:
    """All requests, taken back after so many waits; the version of the weights is the number of the stream."""
    waiting, ended, order = list(REQUESTS), dict[str, Trajectory](), list[str]()
    for version in range(200):
        workers.weights_changed(version)
        with workers.open_stream(SAMPLING) as stream:
            assert isinstance(stream, ResumableStream)
            stream.submit(waiting)
            for _ in range(waits):
                for one in stream.wait(0.0):
                    ended[one.sample_id] = one
                    order.append(one.sample_id)
            left = stream.take_back(keep_cache=keep_cache)
        by_name = {request.sample_id: request for request in waiting}
        assert [one.sample_id for one in left] == [name for name in by_name if name not in ended]
        waiting = [continued(by_name[one.sample_id], one) for one in left]
        if not waiting:
            return ended, order
    raise AssertionError("not all have ended")


def continued(request: Request, left: Unfinished) -> Request:
    return replace(request, begun=left if left.token_ids else None)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("keep_cache", [False, True])
def test_cut_responses_continue_with_true_versions(count: int, keep_cache: bool, tiny_llama: Path) -> None:
    """The weights stay the same, so each response is that of one stream, whoever samples it and wherever it is cut; every
    stream has a version. No cache is left behind."""
    [whole, _] = in_streams(workers_of(1, tiny_llama), 10_000)
    workers = workers_of(count, tiny_llama)
    found, _ = in_streams(workers, 2, keep_cache=keep_cache)
    assert found.keys() == whole.keys()
    for name, one in found.items():
        assert one.token_ids == whole[name].token_ids
        assert one.logprobs == pytest.approx(whole[name].logprobs, abs=1e-5)
        assert [span.version for span in one.spans] == sorted({span.version for span in one.spans})
    assert any(len(one.spans) > 1 for one in found.values())
    gc.collect()
    workers.open_stream(SAMPLING).take_back()
    assert not any(member.led._caches for member in workers.members)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_the_order_of_answers_makes_no_difference(keep_cache: bool, tiny_llama: Path) -> None:
    """To the bit: log-probs, spans, and the order in which responses end."""
    forward = in_streams(workers_of(3, tiny_llama), 2, keep_cache=keep_cache)
    backward = in_streams(workers_of(3, tiny_llama, backwards=True), 2, keep_cache=keep_cache)
    assert forward == backward


def test_one_worker_makes_the_passes_of_an_engine_alone(tiny_llama: Path) -> None:
    """To the bit, with requests that come while others are sampled."""
    workers = workers_of(1, tiny_llama)
    engine = workers_of(1, tiny_llama).engines[0]
    found = []
    for opened in (workers.open_stream(SAMPLING), engine.open_stream(SAMPLING)):
        with opened as stream:
            waiting, said = list(REQUESTS), []
            while waiting or not said or said[-1]:
                stream.submit(waiting[:3])
                waiting = waiting[3:]
                said.append([*stream.wait(1e6)])
            found.append((said, stream.passes, stream.slots))
    assert found[0] == found[1] and found[0][1] > 20


def test_a_turn_is_a_number_of_passes_for_everybody(tiny_llama: Path) -> None:
    """By hand: 4 prompts on 2 workers, so 8 responses each, and a slot for each. The first pass is a prefill; every pass gives a
    token. A prompt's responses have 3, 14, 25 and 36 tokens."""
    tokens: list[int] = []
    workers = workers_of(2, tiny_llama, slots=8)
    with workers.open_stream(SAMPLING, tokens.append) as stream:
        assert stream.slots == 16
        stream.submit(REQUESTS)
        # 8 passes: 4 responses of 3 tokens have ended, in pass 3; the others have 8 tokens each.
        ended = stream.wait(0.0)
        assert stream.passes == PASSES == 8 and sorted(each.sample_id for each in ended) == ["0/0", "1/0", "2/0", "3/0"]
        assert tokens == [4 * 3 + 12 * 8]
        grown = stream.progress({request.sample_id: 0 for request in REQUESTS})
        assert [len(each.token_ids) for each in grown] == [8] * 12
        # 6 more passes: 14 tokens, and the 4 responses of so many end in the last one.
        assert len(stream.wait(1e6, passes=6)) == 4 and stream.passes == 14


def test_requests_that_share_a_prompt_stay_together_and_loads_are_even(tiny_llama: Path) -> None:
    workers = workers_of(2, tiny_llama)
    with workers.open_stream(SAMPLING) as stream:
        stream.submit(REQUESTS[:12])
        homes = {place: {stream._asked[f"{place}/{number}"].name for number in range(4)} for place in range(3)}
        assert all(len(names) == 1 for names in homes.values())
        # Prompts of 14, 11 and 7 tokens and 78 tokens of responses: 92 against 89 + 85 is the evenest.
        assert homes[1] == homes[2] != homes[0]
        stream.submit(REQUESTS[12:])
        assert {stream._asked[f"3/{number}"].name for number in range(4)} == homes[0]  # 4 requests against 8


def test_a_conversation_stays_where_its_first_turn_was(tiny_llama: Path) -> None:
    with workers_of(3, tiny_llama).open_stream(SAMPLING) as stream:
        first = [replace(each, conversation=each.sample_id) for each in REQUESTS[:6]]
        stream.submit(first)
        homes = {name: member.name for name, member in stream._asked.items()}
        assert len(set(homes.values())) == 3
        stream.cancel([each.sample_id for each in first])
        stream.submit([replace(each, sample_id=f"{each.sample_id}@1") for each in reversed(first)])
        assert {name.removesuffix("@1"): member.name for name, member in stream._asked.items()} == homes


def test_cancelled_requests_are_not_returned(tiny_llama: Path) -> None:
    workers = workers_of(2, tiny_llama)
    with workers.open_stream(SAMPLING) as stream:
        stream.submit(REQUESTS)
        stream.cancel(["0/3", "unknown"])  # before it is sent
        stream.submit([REQUESTS[3]])  # again under its name
        stream.wait(0.0)
        stream.cancel(["1/3", "2/3"])
        with pytest.raises(ValueError, match="0/3 is already in progress"):
            stream.submit([REQUESTS[3]])
        ended = {each.sample_id for _ in range(40) for each in stream.wait(0.0)}
        assert {"0/3", "3/3"} <= ended and not {"1/3", "2/3"} & ended
        assert stream.wait(1e6) == [] and stream.take_back() == []
    with pytest.raises(RuntimeError, match="the stream is closed"):
        stream.submit(REQUESTS)


def test_a_cache_that_nothing_continues_is_released(tiny_llama: Path) -> None:
    """A dropped group's: the worker lets it go with the next call."""
    workers = workers_of(2, tiny_llama)
    with workers.open_stream(SAMPLING) as stream:
        stream.submit(REQUESTS)
        stream.wait(0.0)
        left = stream.take_back(keep_cache=True)
    assert sum(len(member.led._caches) for member in workers.members) == len(left) == 12
    kept = [each for each in left if each.sample_id.startswith("0/")]
    del left
    gc.collect()
    with workers.open_stream(SAMPLING) as stream:
        by_name = {request.sample_id: request for request in REQUESTS}
        stream.submit([continued(by_name[each.sample_id], each) for each in kept])
        stream.take_back()
    assert not any(member.led._caches for member in workers.members)

"""Responses that are taken back while they are sampled, and continued: under the same weights, and under newer ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from posttrain.backends.rollout.native import NativeEngine
from posttrain.interfaces.rollout_engine import Request
from posttrain.models.loading import load_causal_lm
from posttrain.records.trajectories import SamplingParams, Trajectory, Unfinished, VersionSpan

SAMPLING = SamplingParams(max_response_tokens=24, ignore_eos=True, seed=7)
PROMPTS = [tuple(b"first question"), tuple(b"and another")]
REQUESTS = [
    Request(f"{place}/{number}", ids, 8 + 4 * number, seed=11 + place, draws_as=f"p{place}/{number}")
    for place, ids in enumerate(PROMPTS)
    for number in range(4)
]


def engine_of(folder: Path, slots: int = 6) -> NativeEngine:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    return NativeEngine(
        model, AutoTokenizer.from_pretrained(folder), max_concurrent_sequences=slots, max_prefill_tokens=300
    )


def sample(
    engine: NativeEngine, requests: list[Request], passes: int, *, keep_cache: bool = False
) -> tuple[list[Trajectory], list[Unfinished]]:
    """So many passes in a stream of its own."""
    ended: list[Trajectory] = []
    with engine.open_stream(SAMPLING) as stream:
        stream.submit(requests)
        for _ in range(passes):
            ended += stream.wait(0.0)
        return ended, stream.take_back(keep_cache=keep_cache)


def in_pieces(engine: NativeEngine, passes: int, change: bool, *, keep_cache: bool = False) -> dict[str, Trajectory]:
    """All requests, taken back after every so many passes; the weights change each time, if they are to."""
    waiting, ended = list(REQUESTS), dict[str, Trajectory]()
    while waiting:
        done, left = sample(engine, waiting, passes, keep_cache=keep_cache)
        ended |= {one.sample_id: one for one in done}
        by_name = {request.sample_id: request for request in waiting}
        assert [one.sample_id for one in left] == [name for name in by_name if name not in ended]
        waiting = [replace(by_name[one.sample_id], begun=one if one.token_ids else None) for one in left]
        if change:
            change_weights(engine)
    return ended


@torch.no_grad()
def change_weights(engine: NativeEngine) -> None:
    torch.manual_seed(engine.version)
    for parameter in engine.model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    engine.weights_changed(engine.version + 1)


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
@pytest.mark.parametrize(("passes", "keep_cache"), [(1, False), (3, False), (7, False), (1, True), (4, True)])
def test_under_the_same_weights_nothing_changes(
    request: pytest.FixtureRequest, folder: str, passes: int, keep_cache: bool
) -> None:
    path: Path = request.getfixturevalue(folder)
    whole = in_pieces(engine_of(path), 1000, change=False)
    pieces = in_pieces(engine_of(path), passes, change=False, keep_cache=keep_cache)
    assert pieces.keys() == whole.keys()
    for name, one in pieces.items():
        assert one.token_ids == whole[name].token_ids
        assert one.logprobs == pytest.approx(whole[name].logprobs, abs=1e-5)
        assert one.version_spans == ()


def test_every_token_has_the_log_prob_of_its_own_weights(tiny_llama: Path) -> None:
    """By plain transformers, with the weights of each version made again."""
    found = in_pieces(engine_of(tiny_llama), 5, change=True)
    again, plain = engine_of(tiny_llama), AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    versions = max(span.version for one in found.values() for span in one.spans)
    assert versions >= 4 and all(one.version_spans for one in found.values())
    seen = 0
    for version in range(versions + 1):
        plain.load_state_dict(again.model.state_dict())
        for name, one in found.items():
            prompt = PROMPTS[int(name[0])]
            ids = torch.tensor([[*prompt, *one.token_ids]])
            logprobs = plain(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            ends = [span.first_token for span in one.spans[1:]] + [len(one.token_ids)]
            for span, end in zip(one.spans, ends, strict=True):
                if span.version == version:
                    own = range(span.first_token, end)
                    expected = [logprobs[place, one.token_ids[place]].item() for place in own]
                    assert [one.logprobs[place] for place in own] == pytest.approx(expected, abs=1e-5)
                    seen += len(own)
        change_weights(again)
    assert seen == sum(len(one.token_ids) for one in found.values())


def test_the_version_of_a_response_is_that_of_its_oldest_token(tiny_llama: Path) -> None:
    """Of five passes the first is the prefill of six, each pass gives a token: 5 tokens of version 0, the rest of version 1."""
    engine = engine_of(tiny_llama)
    _, left = sample(engine, REQUESTS[:2], 5)
    assert [one.spans for one in left] == [(VersionSpan(0, 0),)] * 2
    engine.weights_changed(1)
    [one, _], _ = sample(engine, [replace(r, begun=b) for r, b in zip(REQUESTS[:2], left, strict=True)], 100)[:2]
    assert one.policy_version == 0 and one.version_spans == (VersionSpan(0, 0), VersionSpan(5, 1))


def test_a_request_that_has_no_token_yet_starts_with_the_new_weights(tiny_llama: Path) -> None:
    engine = engine_of(tiny_llama)
    _, left = sample(engine, REQUESTS, 2)  # of 8 requests, 6 have slots
    assert [len(one.token_ids) for one in left] == [2] * 6 + [0] * 2
    engine.weights_changed(1)
    ended, _ = sample(engine, [replace(REQUESTS[7], begun=left[7])], 100)
    assert ended[0].spans == (VersionSpan(0, 1),) and ended[0].policy_version == 1


def test_with_a_kept_cache_log_probs_are_those_of_new_weights_on_old_keys_and_values(tiny_llama: Path) -> None:
    """By plain transformers: each span continues on the cache that the spans before it left, of all tokens but the newest. The
    weights of a span alone, which recompute what came before, give other numbers: the gap that docs/async.md speaks of."""
    found = in_pieces(engine_of(tiny_llama), 5, change=True, keep_cache=True)
    again, plain = engine_of(tiny_llama), AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    versions = max(span.version for one in found.values() for span in one.spans)
    caches = {name: DynamicCache(config=plain.config) for name in found}
    gaps: list[float] = []
    seen = 0
    for version in range(versions + 1):
        plain.load_state_dict(again.model.state_dict())
        for name, one in found.items():
            ids = [*PROMPTS[int(name[0])], *one.token_ids]
            prompt = len(ids) - len(one.token_ids)
            ends = [span.first_token for span in one.spans[1:]] + [len(one.token_ids)]
            for span, end in zip(one.spans, ends, strict=True):
                if span.version != version:
                    continue
                cached = caches[name].get_seq_length()
                assert cached == (prompt + span.first_token - 1 if span.first_token else 0)
                on_cache = logprobs_of(plain, ids, cached, prompt + end - 1, caches[name])[-(end - span.first_token) :]
                alone = logprobs_of(plain, ids, 0, prompt + end - 1)[-(end - span.first_token) :]
                assert list(one.logprobs[span.first_token : end]) == pytest.approx(on_cache, abs=1e-5)
                gaps += [abs(a - b) for a, b in zip(on_cache, alone, strict=True)] if cached else []
                seen += len(on_cache)
        change_weights(again)
    assert seen == sum(len(one.token_ids) for one in found.values())
    assert sum(gaps) / len(gaps) > 1e-3


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int], start: int, end: int, cache: Any = None) -> list[float]:
    """Log-probs of the tokens after ids[start:end], each given all before it."""
    output = model(torch.tensor([ids[start:end]]), past_key_values=cache, use_cache=cache is not None)
    logprobs = output.logits[0].log_softmax(-1)
    return [logprobs[place, ids[start + place + 1]].item() for place in range(end - start)]


def prefilled(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Watch an engine. Returns: the tokens of each of its prefills from now on."""
    sizes: list[int] = []
    prefill = engine.token_pass.prefill

    def counted(inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        sizes.append(inputs["input_ids"].numel())
        return prefill(inputs, *rest, **named)

    monkeypatch.setattr(engine.token_pass, "prefill", counted)
    return sizes


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
@pytest.mark.parametrize("passes", ["compiled", "torch", "modules"])
def test_a_prompt_is_prefilled_once_for_all_continued_siblings(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: str, passes: str
) -> None:
    """Four siblings with 2 tokens each under new weights: 14 + 4 x 2 tokens for the first prompt, not 4 x 16; and log-probs as
    each of them has alone. Every way to compute a pass does it."""
    path: Path = request.getfixturevalue(folder)

    def changed() -> tuple[NativeEngine, list[int]]:
        engine = engine_of(path, slots=8)
        if passes == "modules":
            engine.token_pass.decoder = None
        elif passes == "torch" and engine.token_pass.decoder:
            engine.token_pass.decoder.kernels = None
        return engine, prefilled(engine, monkeypatch)

    engine, sizes = changed()
    _, left = sample(engine, REQUESTS[:4], 2)
    change_weights(engine)
    again = [replace(one, begun=begun) for one, begun in zip(REQUESTS[:4], left, strict=True)]
    fresh = replace(REQUESTS[0], sample_id="fresh", draws_as="fresh")  # computes its last prompt token again
    sizes.clear()
    together, _ = sample(engine, [*again, fresh], 40)
    prompt = len(PROMPTS[0])
    assert sizes == [prompt + 4 * 2 + 1] and prompt == 14
    alone, sizes = changed()
    change_weights(alone)
    expected = {one.sample_id: one for request in (*again, fresh) for one in sample(alone, [request], 40)[0]}
    assert sizes == [prompt + 2] * 4 + [prompt]
    assert len(together) == 5
    for one in together:
        assert one.token_ids == expected[one.sample_id].token_ids
        assert one.logprobs == pytest.approx(expected[one.sample_id].logprobs, abs=1e-5)


def test_a_sibling_that_joins_later_copies_its_prompt(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two slots the third continued response is prefilled when one has ended: 2 tokens, over a copy of the 14 of a slot."""
    engine = engine_of(tiny_llama, slots=3)
    _, left = sample(engine, REQUESTS[:3], 2)
    change_weights(engine)
    again = [replace(one, begun=begun) for one, begun in zip(REQUESTS[:3], left, strict=True)]
    expected = {one.sample_id: one for request in again for one in sample(engine, [request], 40)[0]}
    sizes = prefilled(engine, monkeypatch)
    engine.max_concurrent_sequences = 2
    ended, _ = sample(engine, again, 40)
    assert sizes == [14 + 2 * 2, 2]
    for one in ended:
        assert one.token_ids == expected[one.sample_id].token_ids
        assert one.logprobs == pytest.approx(expected[one.sample_id].logprobs, abs=1e-5)

"""What only the native stream has: the past of conversations, and a cache that grows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.rollout.native.stream import NativeStream
from posttrain.interfaces.rollout_engine import Request
from posttrain.models.attention import CachedRows
from posttrain.models.loading import load_causal_lm
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory

MANY_STOPS = tuple(range(0, 256, 8))


class CountingModel:
    """After token i comes token i + 1, almost surely. Notes what it prefills, and how many rows it decodes."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        sizes = SimpleNamespace(
            num_attention_heads=1, num_key_value_heads=1, head_dim=1, num_hidden_layers=1, vocab_size=259
        )
        self.config = SimpleNamespace(get_text_config=lambda: sizes, eos_token_id=None)
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.prefilled: list[bytes] = []
        self.decoded: list[int] = []

    def __call__(self, input_ids: Tensor, attention_layout: object, logits_to_keep: Any = None, **unused: Any) -> Any:
        if isinstance(attention_layout, CachedRows):
            self.decoded.append(len(input_ids))
            newest = input_ids
        elif logits_to_keep is None:  # in the trial at the start
            newest = input_ids
        else:
            self.prefilled.append(bytes(input_ids[0].tolist()))
            newest = input_ids[:, logits_to_keep]
        return SimpleNamespace(logits=50.0 * torch.nn.functional.one_hot((newest + 1) % 259, 259).float())


def counting(slots: int = 4) -> tuple[CountingModel, NativeEngine]:
    model = CountingModel()
    engine = NativeEngine(model, tiny_tokenizer(), max_concurrent_sequences=slots, max_prefill_tokens=100)  # type: ignore[arg-type]
    model.decoded.clear()  # in the trial at the start
    return model, engine


def sampler(folder: Path, slots: int = 64) -> NativeEngine:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return NativeEngine(model, tokenizer, max_concurrent_sequences=slots, max_prefill_tokens=300)


def all_of(stream: NativeStream) -> list[Trajectory]:
    ended: list[Trajectory] = []
    while more := stream.wait(60.0):
        ended += more
    return ended


def test_only_what_is_new_of_a_conversation_is_prefilled() -> None:
    """Turn 1: abc -> def. Of f there are no keys and values yet, since nothing was drawn after it; then follows xy."""
    model, engine = counting()
    with engine.open_stream(SamplingParams(max_response_tokens=3)) as stream:
        stream.submit([Request("1", tuple(b"abc"), 3, "c"), Request("2", tuple(b"k"), 3, "d")])
        assert [one.text for one in all_of(stream)] == ["def", "lmn"]
        stream.submit([Request("3", tuple(b"abcdefxy"), 2, "c"), Request("4", tuple(b"klm"), 1, "d")])
        assert [one.text for one in all_of(stream)] == ["n", "z{"]
        stream.submit([Request("5", tuple(b"abcdQ"), 1, "c"), Request("6", tuple(b"abcdQ"), 1)])
        assert {one.text for one in all_of(stream)} == {"R"}
    assert model.prefilled == [b"abck", b"fxy" + b"m", b"Q"]  # klm was all there, but its last logits are wanted again


def test_nothing_is_kept_without_a_name_or_over_new_weights_or_beyond_the_slots() -> None:
    model, engine = counting(slots=2)
    with engine.open_stream(SamplingParams(max_response_tokens=1)) as stream:
        for number, conversation in enumerate(["", "c", "d", "e"]):
            stream.submit([Request(str(number), tuple(b"abc"), 1, conversation)])
            all_of(stream)
        model.prefilled.clear()
        for number, conversation in enumerate(["", "d", "c"]):  # two are kept: c is the oldest of three
            stream.submit([Request(str(number), tuple(b"abcd"), 1, conversation)])
            all_of(stream)
        assert model.prefilled == [b"abcd", b"d", b"abcd"]
        model.prefilled.clear()
        engine.weights_changed(1)
        stream.submit([Request("5", tuple(b"abcde"), 1, "d")])
        assert [one.policy_version for one in all_of(stream)] == [1]
        assert model.prefilled == [b"abcde"]


def test_a_request_joins_one_that_is_under_way() -> None:
    model, engine = counting(slots=16)
    with engine.open_stream(SamplingParams(max_response_tokens=20)) as stream:
        stream.submit([Request("1", tuple(b"A"), 10)])
        for _ in range(3):  # a prefill, then two passes
            assert stream.wait(0.0) == []
        stream.submit([Request("2", tuple(b"a"), 3)])
        assert [one.text for one in stream.wait(60.0)] == ["bcd"]
        assert [one.text for one in stream.wait(60.0)] == ["BCDEFGHIJK"]
    assert model.prefilled == [b"A", b"a"]
    assert len(model.decoded) == 9  # of 10 and 3 tokens, the first of each from a prefill: 2 were drawn beside the 9


def test_a_prefill_waits_for_company_but_not_for_long() -> None:
    """With 16 under way: two requests are an eighth of them and join at once; one alone is left waiting for four passes."""
    model, engine = counting(slots=64)
    with engine.open_stream(SamplingParams(max_response_tokens=60)) as stream:
        stream.submit([Request(f"long {n}", (65,), 60) for n in range(16)])
        stream.wait(0.0)
        for names, passes in ((["1", "2"], 0), (["3"], 4)):
            before = len(model.decoded)
            stream.submit([Request(name, (97,), 1) for name in names])
            assert [one.sample_id for one in stream.wait(60.0)] == names
            assert len(model.decoded) - before == passes


def test_requests_with_the_same_prompt_share_it() -> None:
    model, engine = counting()
    with engine.open_stream(SamplingParams(max_response_tokens=2)) as stream:
        stream.submit([Request(str(number), tuple(b"abc"), 2, f"c{number}") for number in range(4)])
        assert [one.text for one in all_of(stream)] == ["de"] * 4
        stream.submit([Request(f"{number}@", tuple(b"abcde"), 2, f"c{number}") for number in range(4)])
        assert [one.text for one in all_of(stream)] == ["fg"] * 4
    assert model.prefilled == [b"abc", b"e"]


def play(engine: NativeEngine, sampling: SamplingParams, *, named: bool) -> dict[str, Trajectory]:
    """Three turns of each conversation."""
    ended: dict[str, Trajectory] = {}
    texts = {f"c{n}": tuple(b"question %d" % (n % 4)) for n in range(12)}
    turns = dict.fromkeys(texts, 0)
    late = list(texts)[7:]

    def ask(name: str) -> Request:
        return Request(f"{name}@{turns[name]}", texts[name], 20, name if named else "")

    with engine.open_stream(sampling) as stream:
        stream.submit([ask(name) for name in texts if name not in late])
        while more := stream.wait(60.0):
            for one in more:
                ended[one.sample_id] = one
                name = one.sample_id.partition("@")[0]
                kept = texts[name][:-3] if int(name[1:]) % 3 == 0 else texts[name]
                texts[name] = (*kept, *one.token_ids, *b" so?")
                turns[name] += 1
                stream.submit([ask(name)] if turns[name] < 3 else [])
            stream.submit([ask(late.pop())] if late else [])
    return ended


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
def test_conversations_over_few_slots_equal_fresh_prefills(request: pytest.FixtureRequest, folder: str) -> None:
    """Twelve conversations of ragged turns over five slots, started one after the other; each third edits its history, so
    that only a part of what is kept holds."""
    path: Path = request.getfixturevalue(folder)
    sampling = SamplingParams(max_response_tokens=20, stop_token_ids=MANY_STOPS, seed=4)
    runs = [play(sampler(path, slots=5), sampling, named=named) for named in (True, False)]
    assert len(runs[0]) == 36 and runs[0].keys() == runs[1].keys()
    for name, one in runs[0].items():
        assert one.token_ids == runs[1][name].token_ids
        assert one.logprobs == pytest.approx(runs[1][name].logprobs, abs=1e-4)


def test_a_cancelled_request_changes_nothing_for_the_others(tiny_llama: Path) -> None:
    sampling = SamplingParams(max_response_tokens=20, ignore_eos=True, seed=2)
    prompts = {str(n): tuple(b"%d and some more" % n) for n in range(6)}
    found = []
    for cancelled in (set(), {"1", "4"}):
        with sampler(tiny_llama, slots=4).open_stream(sampling) as stream:
            stream.submit([Request(name, ids, 10 + int(name)) for name, ids in prompts.items()])
            for _ in range(5):
                assert stream.wait(0.0) == []
            stream.cancel(cancelled)  # one is under way, the other waits for a slot
            found.append({one.sample_id: one.token_ids for one in all_of(stream)})
    assert found[1] == {name: ids for name, ids in found[0].items() if name not in {"1", "4"}}
    assert len(found[0]) == 6


def test_the_cache_grows_with_what_is_sampled_and_not_with_what_may_be(tiny_llama: Path) -> None:
    """Of 2000 tokens that a response may have, a slot has room for 16 at a time: for 64, and for 80 from the 65th on."""
    engine = sampler(tiny_llama, slots=200)
    with engine.open_stream(SamplingParams(max_response_tokens=2000, ignore_eos=True)) as stream:
        stream.submit([Request(str(n), tuple(b"some number"), 2000) for n in range(4)])
        keys = []
        for _ in range(66):  # a prefill, and 65 passes
            keys.append(stream._cache.responses.keys[0])
            assert stream.wait(0.0) == []
        assert keys[-1].shape == (4, 2, 8, 64)
        assert stream._cache.responses.keys[0].shape == (4, 2, 8, 80)
        assert stream._cache.responses.values[0].shape == (4, 2, 80, 8)
        assert stream._cache.prompts.keys[0].shape == (1, 2, 8, 16)  # 11 tokens
        stream.submit([Request(f"more {n}", tuple(b"some number"), 5) for n in range(50)])
        assert len(stream.wait(60.0)) == 50
        assert stream._cache.responses.keys[0].shape == (56, 2, 8, 80)  # rows above 8 are filled up to a multiple of it
    assert stream._cache.responses.keys[0].numel() == 0  # given back


def test_requests_with_sampling_of_their_own_share_batches_and_draw_as_alone(tiny_llama: Path) -> None:
    """Each response equals that of a stream with its parameters; temperature 0 is the same for every seed."""
    plain = SamplingParams(max_response_tokens=12, ignore_eos=True, seed=2)
    own = {
        "plain": None,
        "greedy": replace(plain, temperature=0.0),
        "cold": replace(plain, temperature=0.3, top_p=0.8),
        "few": replace(plain, top_k=3),
    }
    requests = [Request(name, tuple(b"some text"), 12, sampling=each) for name, each in own.items()]
    with sampler(tiny_llama).open_stream(plain) as stream:
        stream.submit(requests)
        mixed = {one.sample_id: one for one in all_of(stream)}
    assert len({one.token_ids for one in mixed.values()}) == 4
    for request in requests:
        with sampler(tiny_llama).open_stream(request.sampling or plain) as stream:
            stream.submit([replace(request, sampling=None)])
            [alone] = all_of(stream)
        assert mixed[alone.sample_id].token_ids == alone.token_ids
        assert mixed[alone.sample_id].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_stop_text_of_a_request_ends_it_alone() -> None:
    """Of A come B, C, ...: one request ends at E, which the other runs past."""
    _, engine = counting()
    plain = SamplingParams(max_response_tokens=6)
    with engine.open_stream(plain) as stream:
        stream.submit([Request("1", (65,), 6, sampling=replace(plain, stop=("DE",))), Request("2", (65,), 6)])
        found = {one.sample_id: (one.text, one.stop_reason) for one in all_of(stream)}
    assert found == {"1": ("BCDE", StopReason.STOP_TEXT), "2": ("BCDEFG", StopReason.LENGTH)}


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_k": 3}, {"temperature": 0.0}])
def test_the_likeliest_tokens_are_those_of_the_distribution_by_plain_transformers(
    tiny_llama: Path, options: dict[str, float]
) -> None:
    """top_k=3 leaves three, although four are wanted; temperature 0 reports the distribution at 1."""
    prompt, plain = tuple(b"some text"), SamplingParams(max_response_tokens=5, ignore_eos=True, **options)
    engine = sampler(tiny_llama)
    with engine.open_stream(plain) as stream:
        stream.submit([Request("1", prompt, 5, top_logprobs=4), Request("2", prompt, 5)])
        found = {one.sample_id: one for one in all_of(stream)}
    assert found["2"].top_logprobs == ()
    tokens = torch.tensor([[*prompt, *found["1"].token_ids]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)(tokens).logits[
            0, len(prompt) - 1 : -1
        ]
    values, ids = (logits / (plain.temperature or 1)).topk(plain.top_k or logits.shape[1])
    expected = values.log_softmax(dim=1)[:, :4]
    assert len(found["1"].top_logprobs) == 5
    for place, wanted, wanted_ids in zip(found["1"].top_logprobs, expected.tolist(), ids.tolist(), strict=True):
        assert [token for token, _ in place] == wanted_ids[: len(wanted)]
        assert [value for _, value in place] == pytest.approx(wanted, abs=1e-4)


def test_a_request_for_its_prompts_log_probs_gets_those_of_plain_transformers(tiny_llama: Path) -> None:
    """Two requests for one prompt differ in what they ask for, and a third asks for nothing."""
    prompt = tuple(b"some text")
    with sampler(tiny_llama).open_stream(SamplingParams(max_response_tokens=2, temperature=0.0)) as stream:
        scored = [Request(str(top), prompt, 2, top_logprobs=top, prompt_logprobs=True) for top in (0, 3)]
        stream.submit([Request("plain", prompt, 2), *scored])
        found = {one.sample_id: one for one in all_of(stream)}
    assert (found["plain"].prompt_logprobs, found["plain"].prompt_top_logprobs) == ((), ())
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=1)
    wanted = [row[token].item() for row, token in zip(expected, prompt[1:], strict=True)]
    for name in ("0", "3"):
        assert found[name].prompt_logprobs == pytest.approx(wanted, abs=1e-4)
    assert found["0"].prompt_top_logprobs == ()
    for place, row in zip(found["3"].prompt_top_logprobs, expected, strict=True):
        assert [token for token, _ in place] == row.topk(3).indices.tolist()
        assert [value for _, value in place] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


class Unread(deque[Any]):
    """A queue that is read from its ends only."""

    def __iter__(self) -> Iterator[Any]:
        if self:
            yield self[0]
            pytest.fail("the whole queue is read")


def test_what_waits_is_not_read_again_for_every_request_and_pass() -> None:
    """Neither when requests come, one by one, nor when responses leave."""
    _, engine = counting(slots=2)
    with engine.open_stream(SamplingParams(max_response_tokens=2)) as stream:
        stream._waiting = Unread()
        for number in range(20):
            stream.submit([Request(str(number), (65 + number,), 2)])
        assert len(all_of(stream)) == 20


def test_names_are_free_again_when_responses_have_left() -> None:
    _, engine = counting(slots=2)
    with engine.open_stream(SamplingParams(max_response_tokens=2)) as stream:
        for leave in (lambda: all_of(stream), lambda: stream.cancel(["1", "2", "3", "4"]), stream.take_back):
            stream.submit([Request(str(number), tuple(b"abc"), 2) for number in range(1, 4)])
            with pytest.raises(ValueError, match="1"):
                stream.submit([Request("1", tuple(b"abc"), 2)])
            stream.wait(0.0, passes=1)
            leave()
        assert not stream._names

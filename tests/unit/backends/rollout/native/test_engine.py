"""The native sampler, as a user of the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from posttrain.backends.rollout.native import NativeEngine
from posttrain.backends.rollout.native.products import product_kernels
from posttrain.backends.rollout.native.sampling import restrict
from posttrain.backends.rollout.native.token_pass import TokenPass
from posttrain.errors import RunStopped
from posttrain.models.attention import CachedRows
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import packed_layout
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup

TOKENIZER = tiny_tokenizer()
TURN_END = TOKENIZER.eos_token_id
# Ends responses of a random model after some 8 tokens, so that slots come free at different times.
MANY_STOPS = tuple(range(0, 256, 8))


def prompt(text: str | Sequence[int], name: str = "") -> Prompt:
    ids = tuple(text.encode()) if isinstance(text, str) else tuple(text)
    return Prompt(prompt_id=name or f"p:{text}", token_ids=ids, text=str(text), data_source="t")


PROMPTS = [prompt(text) for text in ("3+4=", "a", "What is the sum of 12 and 30?", "xy", "Hello there")]


def make_engine(folder: Path, *, slots: int = 64, prefill: int = 8192) -> NativeEngine:
    model = load_causal_lm(str(folder), dtype=torch.float32)
    return NativeEngine(
        model, AutoTokenizer.from_pretrained(folder), max_concurrent_sequences=slots, max_prefill_tokens=prefill
    )


def drawn(groups: list[TrajectoryGroup]) -> dict[str, tuple[int, ...]]:
    return {t.sample_id: t.token_ids for group in groups for t in group.trajectories}


# ------------------------------------------------------------------------------------------- against plain PyTorch


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen"])
def test_greedy_is_what_transformers_generates(request: pytest.FixtureRequest, folder: str) -> None:
    path: Path = request.getfixturevalue(folder)
    engine = make_engine(path, slots=3)
    groups = engine.generate(PROMPTS, SamplingParams(max_response_tokens=30, temperature=0.0))
    plain = AutoModelForCausalLM.from_pretrained(path)
    for group in groups:
        ids = torch.tensor([group.prompt.token_ids])
        expected = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        assert list(group.trajectories[0].token_ids) == expected[0, ids.shape[1] :].tolist()


def plain_logits(model: PreTrainedModel, group: TrajectoryGroup, trajectory: Trajectory) -> Tensor:
    """What the unmodified model says before each response token, [T, vocabulary]."""
    start = len(group.prompt.token_ids)
    with torch.no_grad():
        return model(torch.tensor([[*group.prompt.token_ids, *trajectory.token_ids]])).logits[0, start - 1 : -1]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.02}]
)
def test_logprobs_are_those_of_the_distribution_sampled_from_while_slots_change_hands(
    tiny_qwen: Path, options: dict[str, Any]
) -> None:
    """30 requests over 7 slots, ended at different times: a slot that moved wrongly or was read too far shows at once."""
    engine = make_engine(tiny_qwen, slots=7, prefill=20)
    sampling = SamplingParams(
        samples_per_prompt=6, max_response_tokens=25, stop_token_ids=MANY_STOPS, seed=3, **options
    )
    groups = engine.generate(PROMPTS, sampling)
    assert len({len(t.token_ids) for group in groups for t in group.trajectories}) > 8  # ragged indeed
    plain = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    for group in groups:
        for trajectory in group.trajectories:
            logits = restrict(plain_logits(plain, group, trajectory) / sampling.temperature, sampling)
            tokens = torch.tensor(trajectory.token_ids)
            expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
            torch.testing.assert_close(torch.tensor(trajectory.logprobs), expected, rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------- seeds, sharing


def test_response_does_not_depend_on_what_shares_its_batch(tiny_llama: Path) -> None:
    sampling = SamplingParams(samples_per_prompt=4, max_response_tokens=20, stop_token_ids=MANY_STOPS, seed=11)
    together = drawn(make_engine(tiny_llama).generate(PROMPTS, sampling))
    assert len(together) == 20
    for slots, prefill in [(1, 8192), (3, 1), (3, 30), (64, 12)]:
        assert drawn(make_engine(tiny_llama, slots=slots, prefill=prefill).generate(PROMPTS, sampling)) == together
    alone = drawn(make_engine(tiny_llama).generate([PROMPTS[2]], replace(sampling, samples_per_prompt=1)))
    assert alone == {"p:What is the sum of 12 and 30?/0": together["p:What is the sum of 12 and 30?/0"]}


@pytest.mark.slow
def test_nor_do_its_last_bits(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with sums over 1,536 numbers and two threads: of a single row the matrix library cuts them, now and then with
    another last bit, so that with it no pass has so few rows."""
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    config = AutoConfig.from_pretrained(tiny_llama, intermediate_size=1536, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, tokenizer = load_causal_lm(str(tmp_path), dtype=torch.bfloat16), AutoTokenizer.from_pretrained(tiny_llama)
    engine = NativeEngine(model, tokenizer, max_concurrent_sequences=64, max_prefill_tokens=8192)
    rows, step = [], TokenPass.__call__
    monkeypatch.setattr(TokenPass, "__call__", lambda *given: (rows.append(len(given[1])), step(*given))[1])
    sampling = SamplingParams(samples_per_prompt=16, max_response_tokens=60, ignore_eos=True, seed=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (together,) = engine.generate([PROMPTS[2]], sampling)
        for count in (1, 2, 3, 5):
            (few,) = engine.generate([PROMPTS[2]], replace(sampling, samples_per_prompt=count))
            assert few.trajectories[0].token_ids == together.trajectories[0].token_ids
            assert few.trajectories[0].logprobs == together.trajectories[0].logprobs
        assert set(rows) == ({1, 2, 3, 5, 16} if product_kernels(model.lm_head.weight) else {4, 5, 16})
    finally:
        torch.set_num_threads(threads)


def test_same_engine_twice_gives_the_same_and_another_seed_another(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=20, seed=1)
    first = engine.generate(PROMPTS, sampling)
    assert engine.generate(PROMPTS, sampling) == first
    assert drawn(engine.generate(PROMPTS, replace(sampling, seed=2))) != drawn(first)


def test_samples_of_a_prompt_differ_and_groups_keep_the_order_of_prompts(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, slots=2)
    groups = engine.generate(PROMPTS, SamplingParams(samples_per_prompt=5, max_response_tokens=12))
    assert [group.prompt for group in groups] == PROMPTS
    for group in groups:
        assert [t.sample_id for t in group.trajectories] == [f"{group.prompt.prompt_id}/{n}" for n in range(5)]
        assert len({t.token_ids for t in group.trajectories}) == 5


def test_first_token_does_not_depend_on_the_token_limit(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    long = engine.generate(PROMPTS, SamplingParams(max_response_tokens=20))
    short = engine.generate(PROMPTS, SamplingParams(max_response_tokens=5))
    for one, other in zip(long, short, strict=True):
        assert other.trajectories[0].token_ids == one.trajectories[0].token_ids[:5]


# --------------------------------------------------------------------------------------------------- how they end


class CountingModel:
    """Stands in for a language model: after token i comes token i + 1, almost surely."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        sizes = SimpleNamespace(
            num_attention_heads=1, num_key_value_heads=1, head_dim=1, num_hidden_layers=1, vocab_size=259
        )
        self.config = SimpleNamespace(get_text_config=lambda: sizes, eos_token_id=None)
        self.generation_config = SimpleNamespace(eos_token_id=TURN_END)
        self.prefilled: list[list[int]] = []

    def __call__(
        self,
        input_ids: Tensor,
        attention_layout: object,
        logits_to_keep: Tensor | None = None,
        **unused: object,
    ) -> SimpleNamespace:
        if isinstance(attention_layout, CachedRows) or logits_to_keep is None:  # None: in the trial at the start
            newest = input_ids
        else:
            self.prefilled.append(input_ids[0].tolist())
            newest = input_ids[:, logits_to_keep]
        return SimpleNamespace(logits=50.0 * torch.nn.functional.one_hot((newest + 1) % 259, 259).float())


@pytest.fixture
def counting() -> NativeEngine:
    return NativeEngine(CountingModel(), TOKENIZER, max_concurrent_sequences=4, max_prefill_tokens=100)  # type: ignore[arg-type]


def only(engine: NativeEngine, text: str | Sequence[int], **options: Any) -> Trajectory:
    (group,) = engine.generate([prompt(text)], SamplingParams(**{"max_response_tokens": 10, **options}))
    (trajectory,) = group.trajectories
    return trajectory


def test_token_limit_ends_a_response(counting: NativeEngine) -> None:
    response = only(counting, "a", max_response_tokens=3)
    assert (response.text, response.stop_reason) == ("bcd", StopReason.LENGTH)
    assert response.logprobs == pytest.approx([0.0] * 3, abs=1e-6)
    one = only(counting, "a", max_response_tokens=1)
    assert (one.text, one.stop_reason) == ("b", StopReason.LENGTH)


def test_end_token_ends_a_response_and_stays_in_its_ids_but_not_in_its_text(counting: NativeEngine) -> None:
    response = only(counting, [TURN_END - 3])
    assert response.token_ids == (TURN_END - 2, TURN_END - 1, TURN_END)
    assert response.stop_reason is StopReason.EOS
    assert "<|im_end|>" not in response.text
    # As the very first token, and as the last one allowed: the turn has ended, nothing was cut off.
    assert only(counting, [TURN_END - 1]).token_ids == (TURN_END,)
    assert only(counting, [TURN_END - 3], max_response_tokens=3).stop_reason is StopReason.EOS


def test_ignore_eos_goes_on(counting: NativeEngine) -> None:
    response = only(counting, [TURN_END - 2], max_response_tokens=4, ignore_eos=True)
    assert response.token_ids == tuple((TURN_END - 1 + n) % 259 for n in range(4))
    assert response.stop_reason is StopReason.LENGTH


def test_stop_token_ids_end_a_response_even_with_ignore_eos(counting: NativeEngine) -> None:
    for ignore_eos in (False, True):
        response = only(counting, "a", stop_token_ids=(ord("d"),), ignore_eos=ignore_eos)
        assert (response.text, response.stop_reason) == ("bcd", StopReason.EOS)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("def",), "bcdef"),  # spans three tokens
        (("d",), "bcd"),
        (("zzz", "ef"), "bcdef"),  # the first to appear
        (("bcd",), "bcd"),  # from the very first token
        (("ab",), "bcdefghijk"),  # the prompt's a is not part of the response
    ],
)
def test_stop_text_ends_a_response_and_stays_in_it(counting: NativeEngine, stop: tuple[str, ...], text: str) -> None:
    response = only(counting, "a", stop=stop)
    assert response.text == text
    assert response.stop_reason is (StopReason.LENGTH if len(text) == 10 else StopReason.STOP_TEXT)


def test_stop_text_is_found_in_a_long_response(counting: NativeEngine) -> None:
    response = only(counting, [31], stop=("~",), max_response_tokens=200)
    assert response.text == "".join(map(chr, range(32, 127)))  # ~ is character 126


def test_responses_of_all_lengths_together(counting: NativeEngine) -> None:
    """Ten requests on four slots end after 1 to 10 tokens; every one counts on from its own prompt."""
    starts = [ord("z") - n for n in (3, 9, 1, 10, 5, 2, 8, 4, 7, 6)]
    sampling = SamplingParams(max_response_tokens=50, stop=("z",))
    ticks: list[int] = []
    groups = counting.generate([prompt([start]) for start in starts], sampling, ticks.append)
    for start, group in zip(starts, groups, strict=True):
        assert group.trajectories[0].text == "".join(map(chr, range(start + 1, ord("z") + 1)))
    assert sum(ticks) == sum(range(1, 11))  # every token is reported once
    assert max(ticks) == 4


def test_groups_are_handed_on_when_their_last_response_ends(counting: NativeEngine) -> None:
    """Two slots, two samples per prompt: 5, 1 and 3 tokens to z, one group after the other; then 9 and 2 side by side."""
    done: list[tuple[int, TrajectoryGroup]] = []
    drawn: list[int] = []
    starts = [ord("z") - n for n in (5, 1, 3)]
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=50, stop=("z",))
    engine = NativeEngine(counting.model, TOKENIZER, max_concurrent_sequences=2, max_prefill_tokens=40)
    groups = engine.generate(
        [prompt([start]) for start in starts], sampling, drawn.append, lambda group: done.append((sum(drawn), group))
    )
    assert [group for _, group in done] == groups
    assert [tokens for tokens, _ in done] == [10, 12, 18]  # drawn by then, of 2 x (5 + 1 + 3)
    done.clear()
    groups = engine.generate(
        [prompt([ord("z") - n]) for n in (9, 2)],
        replace(sampling, samples_per_prompt=1),
        on_group=lambda group: done.append((0, group)),
    )
    assert [group for _, group in done] == [groups[1], groups[0]]


def test_prompt_is_prefilled_once_for_all_its_samples(counting: NativeEngine) -> None:
    counting.generate([prompt("abc"), prompt("xyz")], SamplingParams(samples_per_prompt=2, max_response_tokens=3))
    assert counting.model.prefilled == [[*b"abcxyz"]]


def test_logprobs_of_prompts_do_not_take_the_logits_of_all_their_tokens(tiny_llama: Path) -> None:
    """They are added up in tiles; logits are made of the last token of each prompt. The numbers are those of whole logits."""
    engine = make_engine(tiny_llama)
    asked = SamplingParams(samples_per_prompt=1, max_response_tokens=2, temperature=0, prompt_logprobs=True)
    rows: list[int] = []
    head = engine.model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, given, output: rows.append(output.shape[-2]))
    prompts = [prompt([5 + n % 50 for n in range(length)], str(length)) for length in (200, 300)]
    groups = engine.generate(prompts, asked)
    hook.remove()
    assert not rows  # the fast pass's own product was used, for the last token of each
    for group in groups:
        ids = torch.tensor(group.prompt.token_ids)
        with torch.no_grad():
            logits = engine.model(
                input_ids=ids[None], attention_layout=packed_layout([len(ids)], ids.device), use_cache=False
            ).logits[0]
        wanted = logits[:-1].log_softmax(dim=1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(group.trajectories[0].prompt_logprobs), wanted, atol=1e-5, rtol=1e-5)


def test_prompt_is_kept_for_samples_that_wait() -> None:
    """Ten samples of two prompts on four slots: the second half of each prompt's samples starts when others have ended."""
    model = CountingModel()
    engine = NativeEngine(model, TOKENIZER, max_concurrent_sequences=4, max_prefill_tokens=100)  # type: ignore[arg-type]
    sampling = SamplingParams(samples_per_prompt=5, max_response_tokens=3)
    groups = engine.generate([prompt("abc"), prompt("xyz")], sampling)
    assert sorted(token for row in model.prefilled for token in row) == sorted(b"abcxyz")
    assert {t.text for t in groups[0].trajectories} == {"def"}


def test_prompt_slots_that_stragglers_hold_are_waited_for(tiny_llama: Path) -> None:
    """Two samples per prompt on four slots: four prompt slots for five prompts. Responses end at random."""
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=40, stop_token_ids=MANY_STOPS, seed=5)
    many = [prompt(f"{number} and {number}") for number in range(30)]
    few_slots, all_at_once = (make_engine(tiny_llama, slots=slots).generate(many, sampling) for slots in (4, 64))
    assert drawn(few_slots) == drawn(all_at_once)


CUTS = [{}, {"temperature": 0.5}, {"top_k": 10}, {"top_p": 0.7}, {"min_p": 0.2}]


@pytest.mark.slow
@pytest.mark.parametrize("options", CUTS, ids=str)
def test_frequencies_of_20_000_samples_are_those_of_the_models_softmax(
    tiny_llama: Path, options: dict[str, float]
) -> None:
    """The second token, so that it comes from the cache: Pearson's chi-square over tokens
    expected at least 5 times stays within 5 deviations of its degrees of freedom."""
    engine = make_engine(tiny_llama, slots=4000)
    sampling = SamplingParams(samples_per_prompt=20_000, max_response_tokens=2, ignore_eos=True, seed=2, **options)
    (group,) = engine.generate([PROMPTS[0]], sampling)
    counts = torch.zeros(259, 259)
    for one in group.trajectories:
        counts[one.token_ids] += 1
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama)
    first = torch.nonzero(counts.sum(1))[:, 0]
    sequences = torch.tensor([[*PROMPTS[0].token_ids, token] for token in first.tolist()])
    with torch.no_grad():
        logits = plain(sequences).logits[:, -2:]
    of_first, of_second = (restrict(logits[:, n] / sampling.temperature, sampling).softmax(-1) for n in (0, 1))
    expected = 20_000 * of_first[:1].T[first] * of_second
    often = expected >= 5
    observed = counts[first]
    assert not observed[expected == 0].any()
    chi_square = float(((observed - expected) ** 2 / expected)[often].sum())
    freedom = int(often.sum())
    assert freedom > 20
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_prefill_takes_no_more_tokens_than_allowed_but_at_least_one_prompt() -> None:
    model = CountingModel()
    engine = NativeEngine(model, TOKENIZER, max_concurrent_sequences=8, max_prefill_tokens=4)  # type: ignore[arg-type]
    engine.generate([prompt("ab"), prompt("cd"), prompt("efghij"), prompt("k")], SamplingParams(max_response_tokens=2))
    assert model.prefilled == [[*b"abcd"], [*b"efghij"], [*b"k"]]


# ------------------------------------------------------------------------------------------------------- the rest


def test_trajectories_carry_the_version_of_the_weights(counting: NativeEngine) -> None:
    assert only(counting, "a").policy_version == counting.version == 0
    counting.weights_changed(7)
    assert only(counting, "a").policy_version == counting.version == 7


def test_weights_that_are_not_finite_stop_the_run_with_words(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(torch.nan)
    engine.weights_changed(12)
    for temperature in (0.0, 1.0):
        with pytest.raises(RunStopped, match="logits are not finite while sampling, with weights of version 12"):
            engine.generate(PROMPTS, SamplingParams(max_response_tokens=4, temperature=temperature))


def test_sampling_leaves_global_random_state_and_gradients_alone(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    before = torch.get_rng_state()
    engine.generate(PROMPTS, SamplingParams(max_response_tokens=4))
    assert torch.equal(torch.get_rng_state(), before)
    # What sampling leaves in the model (caches of positions, for instance) can be trained with.
    engine.model(torch.tensor([[1, 2, 3]]), attention_layout=packed_layout([3])).logits.sum().backward()
    assert all(weight.grad is not None for weight in engine.model.parameters())

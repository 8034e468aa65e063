"""What only the hf engine has: transformers' own processors, and a model that is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.backends.rollout.hf import HuggingFaceEngine
from posttrain.errors import ConfigError, RunStopped
from posttrain.models.attention import NAME
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import packed_layout
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup

PROMPTS = [
    Prompt(prompt_id=f"p{n}", token_ids=tuple(text.encode()), text=text, data_source="t")
    for n, text in enumerate(("3+4=", "a", "What is the sum of 12 and 30?"))
]


@pytest.fixture
def engine(tiny_llama: Path) -> HuggingFaceEngine:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    return HuggingFaceEngine(model, tokenizer, max_concurrent_sequences=4, max_prefill_tokens=1)


def greedy(engine: HuggingFaceEngine, **options: Any) -> list[tuple[int, ...]]:
    sampling = SamplingParams(temperature=0.0, max_response_tokens=30, ignore_eos=True, engine_sampling=options)
    return [group.trajectories[0].token_ids for group in engine.generate(PROMPTS, sampling)]


def test_generation_config_of_the_model_is_honoured_and_settings_come_before_it(engine: HuggingFaceEngine) -> None:
    plain = greedy(engine)
    engine.model.generation_config.suppress_tokens = [plain[0][0]]
    assert all(plain[0][0] not in ids for ids in greedy(engine))
    assert greedy(engine, suppress_tokens=[]) == plain
    engine.model.generation_config.temperature = 5.0  # ours decides
    engine.model.generation_config.suppress_tokens = None
    assert greedy(engine) == plain


def test_processors_of_generate_act_on_the_log_probs_too(engine: HuggingFaceEngine) -> None:
    """Two tokens are allowed, so their probabilities add up to 1."""
    allowed = [65, 66]
    forbidden = [token for token in range(259) if token not in allowed]
    sampling = SamplingParams(max_response_tokens=8, engine_sampling={"suppress_tokens": forbidden}, ignore_eos=True)
    [group] = engine.generate(PROMPTS[:1], sampling)
    assert set(group.trajectories[0].token_ids) <= set(allowed)
    assert all(value > -20 for value in group.trajectories[0].logprobs)
    only = SamplingParams(max_response_tokens=8, engine_sampling={"suppress_tokens": [*forbidden, 66]}, ignore_eos=True)
    [group] = engine.generate(PROMPTS[:1], only)
    assert group.trajectories[0].token_ids == (65,) * 8
    assert group.trajectories[0].logprobs == pytest.approx([0.0] * 8)


def test_shortest_length_is_given_in_either_word(engine: HuggingFaceEngine) -> None:
    end = next(iter(engine.end_tokens))
    with torch.no_grad():
        engine.model.get_output_embeddings().weight[end] *= 0
    for name in ("min_tokens", "min_new_tokens"):
        sampling = SamplingParams(temperature=2.0, max_response_tokens=12, engine_sampling={name: 12}, seed=1)
        for group in engine.generate(PROMPTS, sampling):
            assert len(group.trajectories[0].token_ids) == 12


def test_a_word_that_generate_does_not_know_is_refused(engine: HuggingFaceEngine) -> None:
    with pytest.raises(ConfigError, match="presence_penalty is unknown"):
        greedy(engine, presence_penalty=1.0)


def test_groups_are_handed_on_batch_by_batch(engine: HuggingFaceEngine) -> None:
    """Batches of four of 3 x 3 responses: after four the first group is whole, after eight the second, after nine the third."""
    handed: list[tuple[int, TrajectoryGroup]] = []
    tokens: list[int] = []
    sampling = SamplingParams(samples_per_prompt=3, max_response_tokens=5, ignore_eos=True)
    groups = engine.generate(PROMPTS, sampling, tokens.append, lambda group: handed.append((sum(tokens), group)))
    assert [group for _, group in handed] == groups
    assert [drawn for drawn, _ in handed] == [20, 40, 45]


def test_sampling_leaves_the_model_and_the_random_state_as_they_were(engine: HuggingFaceEngine) -> None:
    before = torch.get_rng_state()
    engine.generate(PROMPTS, SamplingParams(max_response_tokens=4))
    assert torch.equal(torch.get_rng_state(), before)
    assert engine.model.config._attn_implementation == NAME
    engine.model(torch.tensor([[1, 2, 3]]), attention_layout=packed_layout([3])).logits.sum().backward()
    assert all(weight.grad is not None for weight in engine.model.parameters())


def test_weights_that_are_not_finite_stop_the_run_with_words(engine: HuggingFaceEngine) -> None:
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(torch.nan)
    engine.weights_changed(12)
    for temperature in (0.0, 1.0):
        with pytest.raises(RunStopped, match="logits are not finite while sampling, with weights of version 12"):
            engine.generate(PROMPTS, SamplingParams(max_response_tokens=4, temperature=temperature))
    assert engine.model.config._attn_implementation == NAME

"""However a mini-batch is ordered, padded, cut and packed, its loss and gradient stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer

from batches import sequence_batch, train_batch
from posttrain.backends.torch_training.memory import Cutter
from posttrain.backends.train.local import LocalTrainEngine
from posttrain.config.policy import OptimizerConfig
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import shared_layout
from posttrain.models.tiny import write_tiny_model
from posttrain.records.batches import TrainBatch
from posttrain.records.plans import LossPlan

PLAN = LossPlan(
    name="ppo_clip",
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    aggregation="token_mean",
    temperature=0.9,
    entropy_coef=0.01,
    kl_coef=0.1,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalTrainEngine:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    return LocalTrainEngine(
        load_causal_lm(str(folder), dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(),
        learning_rate_factor=lambda update_number: 1.0,
        sequences_per_micro_batch=100,
        sequences_per_scoring_batch=3,
    )


lengths = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=4
)


def make_batch(groups: list[tuple[int, list[int]]], extra_left: int = 0, extra_right: int = 0) -> TrainBatch:
    """Groups of (prompt length, response lengths), with more padding than needed where asked for. The padding is noise."""
    generator = torch.Generator().manual_seed(0)
    rows = [(number, prompt, response) for number, (prompt, responses) in enumerate(groups) for response in responses]
    width, length = max(p for _, p, _ in rows) + extra_left, max(r for *_, r in rows) + extra_right
    tokens = torch.randint(0, 256, (len(rows), width + length))
    reference = torch.full((len(rows), length), torch.nan)
    advantages = torch.full((len(rows), length), torch.nan)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    prompts = [torch.randint(0, 256, (prompt,), generator=generator) for prompt, _ in groups]
    for row, (group, prompt, response) in enumerate(rows):
        tokens[row, width - prompt : width] = prompts[group]
        tokens[row, width : width + response] = torch.randint(0, 256, (response,), generator=generator)
        reference[row, :response] = torch.randn(response, generator=generator) - 5
        advantages[row, :response] = torch.randn(1, generator=generator)
        mask[row, :response] = True
    valid = torch.arange(len(rows)) % 5 != 3
    sequences = sequence_batch(
        tokens=tokens,
        prompt_lengths=torch.tensor([prompt for _, prompt, _ in rows]),
        response_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        group_index=torch.tensor([group for group, *_ in rows]),
        sample_ids=tuple(str(row) for row in range(len(rows))),
    )
    return train_batch(sequences, advantages=advantages, loss_mask=mask & valid[:, None], ref=reference)


def loss_and_gradient(
    engine: LocalTrainEngine, batch: TrainBatch, micro: int, share: bool, max_tokens: int | None = None
) -> tuple[float, Tensor]:
    engine.zero_grad()
    engine.cutter = Cutter(micro, max_tokens, share_prompts=share)
    stats = engine.forward_backward(batch, PLAN, batch.counts())
    gradient = torch.cat([weight.grad.flatten() for weight in engine.model.parameters() if weight.grad is not None])
    return stats.loss, gradient


@settings(max_examples=25)
@given(
    groups=lengths,
    micro=st.integers(1, 20),
    max_tokens=st.none() | st.integers(21, 150),  # the longest sequence has 12 + 9 tokens
    share=st.booleans(),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    order=st.randoms(use_true_random=False),
)
def test_loss_and_gradient_do_not_depend_on_how_the_rows_are_handled(
    engine: LocalTrainEngine,
    groups: list[tuple[int, list[int]]],
    micro: int,
    max_tokens: int | None,
    share: bool,
    padding: tuple[int, int],
    order,
) -> None:
    expected_loss, expected = loss_and_gradient(engine, make_batch(groups), 1, False)
    other = make_batch(groups, *padding)
    rows = list(range(len(other)))
    order.shuffle(rows)
    loss, gradient = loss_and_gradient(engine, other.rows(rows), micro, share, max_tokens)
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-5)
    assert torch.isfinite(gradient).all()
    assert (gradient - expected).norm() <= 1e-4 * expected.norm() + 1e-7


def test_a_budget_of_tokens_cuts_otherwise_than_a_number_of_rows(engine: LocalTrainEngine) -> None:
    """Three prompts of 9 tokens with two responses of 6: 21 tokens each with the prompt shared, and 15 a row without."""
    passes: list[int] = []
    hook = engine.model.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    for micro, max_tokens, share, expected in ((20, None, True, 1), (20, 21, True, 3), (20, 21, False, 6)):
        passes.clear()
        loss_and_gradient(engine, make_batch([(9, [6, 6])] * 3), micro, share, max_tokens)
        assert len(passes) == expected
    hook.remove()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 20), max_size=4)), min_size=1, max_size=8))
def test_layout_reads_every_token_of_the_row_once(groups: list[tuple[int, list[int]]]) -> None:
    """Buckets cover the row, places in a bucket are distinct, and ``order`` brings the row back."""
    layout = shared_layout([(prompt, tuple(responses)) for prompt, responses in groups])
    total = sum(prompt + sum(responses) for prompt, responses in groups)
    tokens = torch.cat([bucket.tokens for bucket in layout.buckets])
    assert tokens[layout.order].tolist() == list(range(total))
    for bucket in layout.buckets:
        assert len(bucket.places.unique()) == len(bucket.places) == len(bucket.tokens)
        assert int(bucket.places.max()) < bucket.rows * bucket.length
        if bucket.prefix is not None:
            groups_here = len(bucket.prefix.visible)
            assert bucket.rows % groups_here == 0
            assert int(bucket.prefix.visible.sum()) == len(bucket.prefix.tokens)

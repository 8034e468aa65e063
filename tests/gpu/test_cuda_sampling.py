"""The sampler on a GPU: its kernels and recorded passes give the model's own log-probs, for every family of decoders.

`pytest -m gpu`; POSTTRAIN_TEST_DEVICE=cpu runs the same lines without a GPU, to see that the test itself is right.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from posttrain.backends.rollout.native.engine import NativeEngine
from posttrain.models.packed_attention import packed_layout
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "unit/backends/rollout/native"))
from test_token_pass import FAST, build

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("POSTTRAIN_TEST_DEVICE", "cuda")


@pytest.fixture(autouse=True)
def there_is_a_gpu() -> None:
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")


def logprobs_of(model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    """Those of the response's tokens, by the model's own modules on the CPU in float32, [tokens] nats."""
    tokens = torch.tensor([*prompt, *response])
    positions = torch.arange(len(tokens))[None]
    layout = packed_layout([len(tokens)])
    logits = model(tokens[None], position_ids=positions, attention_layout=layout, use_cache=False).logits[0]
    found = logits.float().log_softmax(dim=1)[len(prompt) - 1 : -1]
    return found.gather(1, tokens[len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_sampled_logprobs_are_the_models(family: str, dtype: torch.dtype) -> None:
    """Ragged responses to three prompts, in more and then fewer rows: first passes, recorded ones and replayed ones."""
    model = build(family, dtype, **FAST[family])
    engine = NativeEngine(model.to(DEVICE), tiny_tokenizer(), max_concurrent_sequences=16, max_prefill_tokens=1000)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [
        Prompt(prompt_id=str(n), token_ids=tuple((7 * n + i) % (vocabulary - 2) + 1 for i in range(3 + 20 * n)), text="",
               data_source="")
        for n in range(3)
    ]  # fmt: skip
    sampling = SamplingParams(samples_per_prompt=6, max_response_tokens=40, seed=3, stop_token_ids=(1, 2, 3))
    groups = engine.generate(prompts, sampling)
    graphed = engine.token_pass.graphed
    assert DEVICE == "cpu" or engine.token_pass.decoder is not None
    if DEVICE != "cpu":
        assert graphed is None or not graphed.fails
        assert (graphed is None) == bool(engine.note), engine.note
    own = model.to("cpu").float()
    apart = torch.cat(
        [
            (torch.tensor(one.logprobs) - logprobs_of(own, group.prompt.token_ids, one.token_ids)).abs()
            for group in groups
            for one in group.trajectories
        ]
    )
    if dtype is torch.float32:
        assert apart.max() < 2e-4
    else:
        assert apart.mean() < 0.05
    assert len({len(one.token_ids) for group in groups for one in group.trajectories}) > 3  # ragged

"""The sampler's log-probs of a run that cuts responses, beside those of the stored weights by plain transformers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from test_async_runs import COLOCATE, STEPS, ragged
from test_runs import maker
from transformers import AutoModelForCausalLM

from posttrain.build.train import train_run
from posttrain.run.batch_files import batch_path

UPDATES_PER_STEP = 2  # six samples in mini-batches of three; versions count updates


def test_each_token_has_the_log_prob_of_its_version(tmp_path: Path, tiny_llama: Path) -> None:
    """I7: in float32, also where older weights sampled the tokens before it. Those of the version before or after differ."""
    make = ragged(maker(tmp_path, tiny_llama))
    tracking = {"batches_every_steps": 1}
    run = train_run(make("run", asynchronous=COLOCATE, checkpoint={"every_steps": 1}, tracking=tracking))
    models = {0: model_of(tiny_llama)}
    for step in range(1, STEPS + 1):
        weights = load_file(run / f"checkpoints/global_step_{step}/policy/model.safetensors")
        models[step * UPDATES_PER_STEP] = model_of(tiny_llama, weights)

    several, differences = 0, []
    for step in range(1, STEPS + 1):
        tensors = load_file(batch_path(run, step))
        tokens, logprobs = tensors["sampled.tokens"], tensors["sampled.rollout_logprobs"]
        width = tokens.shape[1] - logprobs.shape[1]
        lines = [json.loads(line) for line in (run / f"samples/step_{step}.jsonl").read_text().splitlines()]
        for row, line in enumerate(lines):
            length = line["response_tokens"]
            ids = tokens[row, width - line["prompt_tokens"] : width + length]
            spans = line.get("version_spans", [[0, line["policy_version"]]])
            several += len(spans) > 1
            assert spans[0][0] == 0
            for (begin, version), (end, next_version) in pairwise([*spans, [length, None]]):
                sampled = logprobs[row, begin:end]
                expected = logprobs_of(models[version], ids)[-length:][begin:end]
                torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-5)
                if next_version is not None:
                    other = logprobs_of(models[next_version], ids)[-length:][begin:end]
                    differences.append((other - sampled).abs().max().item())
    assert several and min(differences) > 1e-3


def model_of(folder: Path, weights: dict[str, torch.Tensor] | None = None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        found = model.load_state_dict(weights, strict=False)
        assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}  # tied to the embedding
        assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@torch.no_grad()
def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[n - 1] nats of all tokens but the first."""
    logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, ids[1:, None])[:, 0]

"""One step of KTO, ORPO, SimPO and of a reward model by hand: the papers' formulas on float64 logits of transformers' own model,
plain gradient descent. The run computes in float32, packs its rows and shares prompts; loss, gradient and weights agree.
DPO's two steps are in test_tune_runs.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.build.tune import tune_run
from posttrain.config.tune import TuneConfig
from posttrain.data.preferences import load_preferences
from posttrain.models.tiny import write_tiny_model
from posttrain.records.preferences import Preference

LR = 0.05
Found = tuple[Tensor, dict[str, float]]  # loss, and what the run logs beside it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The policy, another model as its reference, and a classifier whose head is not 0: with 0 the body has no gradient."""
    folder = tmp_path_factory.mktemp("models")
    found = {name: write_tiny_model(folder / name, seed=seed) for seed, name in enumerate(("reference", "policy"))}
    scorer = AutoModelForSequenceClassification.from_pretrained(found["policy"], num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        scorer.score.weight.copy_(torch.linspace(-0.3, 0.4, scorer.score.weight.numel())[None])
    tokenizer = AutoTokenizer.from_pretrained(found["policy"])
    scorer.config.pad_token_id = tokenizer.eos_token_id
    scorer.save_pretrained(folder / "scorer")
    tokenizer.save_pretrained(folder / "scorer")
    return found | {"scorer": folder / "scorer"}


def logps(model: Any, ids: Any, learned: Any) -> Tensor:
    """The sum of the log-probs of the learned tokens, each predicted by those before it."""
    tokens = torch.tensor(np.asarray(ids, dtype=np.int64))
    each = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return each[torch.tensor(learned[1:])].sum()


def sides(model: Any, row: Preference) -> list[Tensor]:
    return [logps(model, side.token_ids, side.learned) for side in row.sides]


def kto(policy: Any, reference: Any, rows: list[Preference]) -> Found:
    """w (1 - sigma(r - z)) where desirable, w (1 - sigma(z - r)) elsewhere, r = beta log [pi / ref], z = beta max(0, KL), the KL
    being the mean of log [pi / ref] over the rows, each with the completion of the next row, the last with that of the first."""
    beta, weights = 0.5, {True: 1.5, False: 0.5}
    differences = []
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        (text,), (next_text,) = row.sides, other.sides
        start, begins = int(text.learned.argmax()), int(next_text.learned.argmax())
        ids = np.concatenate([text.token_ids[:start], next_text.token_ids[begins:]])
        learned = np.arange(len(ids)) >= start
        with torch.no_grad():
            differences.append(float(logps(policy, ids, learned) - logps(reference, ids, learned)))
    kl = max(0.0, sum(differences) / len(differences))
    assert kl > 0, "another pair of models: a KL of 0 would hide an error in it"
    total, rewards = torch.zeros((), dtype=torch.float64), dict[bool, list[float]]({True: [], False: []})
    for row in rows:
        with torch.no_grad():
            of_reference = sides(reference, row)[0]
        reward = beta * (sides(policy, row)[0] - of_reference)
        gain = reward - beta * kl if row.desirable else beta * kl - reward
        total = total + weights[row.desirable] * (1 - 1 / (1 + torch.exp(-gain)))
        rewards[row.desirable].append(reward.item())
    logged = {"kl": kl, "rewards/chosen": np.mean(rewards[True]), "rewards/rejected": np.mean(rewards[False])}
    return total / len(rows), logged


def orpo(policy: Any, reference: Any, rows: list[Preference]) -> Found:
    """-m_chosen - beta log sigma(log [p / (1 - p)] of the chosen side - that of the other), p = exp(m), m the mean log-prob."""
    beta, losses, chosen = 0.3, [], []
    for row in rows:
        means = [logp / int(side.learned.sum()) for logp, side in zip(sides(policy, row), row.sides, strict=True)]
        odds = [torch.log(torch.exp(m) / (1 - torch.exp(m))) for m in means]
        losses.append(-means[0] + beta * torch.log(1 + torch.exp(-(odds[0] - odds[1]))))
        chosen.append(beta * means[0].item())
    return torch.stack(losses).mean(), {"rewards/chosen": np.mean(chosen)}


def simpo(policy: Any, reference: Any, rows: list[Preference]) -> Found:
    """log(1 + exp(-(beta m_chosen - beta m_rejected - gamma)))"""
    beta, gamma, losses, margins = 2.0, 0.7, [], []
    for row in rows:
        means = [logp / int(side.learned.sum()) for logp, side in zip(sides(policy, row), row.sides, strict=True)]
        losses.append(torch.log(1 + torch.exp(-(beta * means[0] - beta * means[1] - gamma))))
        margins.append(beta * (means[0] - means[1]).item())
    return torch.stack(losses).mean(), {"rewards/margins": np.mean(margins)}


def reward_model(scorer: Any, reference: Any, rows: list[Preference]) -> Found:
    """log(1 + exp(-(s_chosen - s_rejected - margin))) + 0.1 (s_chosen + s_rejected)^2, s = w h of the last token."""
    losses, margins = [], []
    for row in rows:
        hidden = [
            scorer.model(input_ids=torch.tensor(side.token_ids.astype("int64"))[None])[0][0, -1] for side in row.sides
        ]
        chosen, rejected = (scorer.score.weight[0] @ each for each in hidden)
        losses.append(torch.log(1 + torch.exp(-(chosen - rejected - row.margin))) + 0.1 * (chosen + rejected) ** 2)
        margins.append((chosen - rejected).item())
    return torch.stack(losses).mean(), {"rewards/margins": np.mean(margins)}


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        ({"name": "kto", "beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5}, kto),
        ({"name": "orpo", "beta": 0.3}, orpo),
        ({"name": "simpo", "beta": 2.0, "gamma": 0.7}, simpo),
        ({"name": "reward_model", "center_coef": 0.1}, reward_model),
    ],
    ids=["kto", "orpo", "simpo", "reward_model"],
)
def test_one_step_by_hand_in_float64(
    tmp_path: Path, models: dict[str, Path], settings: dict[str, Any], by_hand: Callable[..., Found]
) -> None:
    start = models["scorer" if by_hand is reward_model else "policy"]
    config = one_step(tmp_path, start, models["reference"], settings)
    folder = tune_run(config)
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])

    rows = load_preferences(config.data.train_files, config, AutoTokenizer.from_pretrained(start), what="training").rows
    kind = AutoModelForSequenceClassification if by_hand is reward_model else AutoModelForCausalLM
    model: Any = kind.from_pretrained(start, dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(models["reference"], dtype=torch.float64)
    loss, logged = by_hand(model, reference, list(rows))
    loss.backward()

    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
    assert norm > 0.01
    assert line["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, value in logged.items():
        assert line[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    saved = load_file(folder / "checkpoints/global_step_1/policy/model.safetensors")
    weights = dict(model.named_parameters())
    for name, gradient in gradients.items():
        after = (weights[name].detach() - LR * gradient).float()
        torch.testing.assert_close(saved[name], after, rtol=1e-5, atol=2e-6, msg=lambda said, at=name: f"{at}: {said}")


def one_step(folder: Path, start: Path, reference: Path, settings: dict[str, Any]) -> TuneConfig:
    """A configuration of a step on four pairs of different lengths and margins, which KTO takes apart, in two micro-batches."""
    pairs = [
        {"prompt": f"say {n} " + "please " * n, "chosen": f"{n}! " * (n + 1), "rejected": f"no {n}", "margin": n / 4}
        for n in range(4)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return TuneConfig.model_validate(
        {
            "run": {"folder": str(folder / "run"), "total_steps": 1},
            "model": {"path": str(start), "compute_dtype": "float32"},
            "data": {
                "train_files": [str(folder / "pairs.jsonl")],
                "sequences_per_step": 8,
                "max_tokens": 128,
                "shuffle": False,
            },
            "method": settings,
            "reference": {"path": str(reference)} if settings["name"] == "kto" else {},
            "policy": {
                "optimizer": {"name": "sgd", "lr": LR, "weight_decay": 0.0, "max_grad_norm": None},
                "schedule": {"name": "constant"},
                "sequences_per_micro_batch_per_device": 4,
            },
            "tracking": {"trackers": []},
            "placement": {"device": "cpu", "cpu_threads": 1},
        }
    )

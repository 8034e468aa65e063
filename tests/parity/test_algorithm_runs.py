"""Whole runs on a tiny model of what needs more than rewards: greedy baselines, reward terms, probabilities, corrections."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.plan.checks.train import check

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(solution_str.encode()) % 5 / 4

def short(data_source, solution_str, ground_truth, extra_info):
    return -len(solution_str) / 8
"""

EPS = 1e-4  # large, so that AdamW does not blow rounding errors of tiny gradients up to whole steps

Make = Callable[..., RunConfig]
Loss = Callable[["Row", Tensor, Tensor, Tensor], Tensor]  # of a row's log-probs, old log-probs and advantages, each [T]


@pytest.fixture
def make(tmp_path: Path, tiny_llama: Path) -> Make:
    """A configuration of two steps of two prompts x four samples, one update each; keyword arguments replace sections."""
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"data_source": "sums", "prompt": f"{n}+{n}=", "reward_model": {"ground_truth": "0"}} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 8, "stop_token_ids": [*range(0, 256, 12)]},
        "reward": {
            "workers": 1,
            "terms": [{"name": name, "path": str(tmp_path / "reward.py")} for name in ("score", "short")],
        },
        "policy": {"sequences_per_micro_batch_per_device": 4, "optimizer": {"lr": 1e-3, "eps": EPS}},
        "checkpoint": {"at_end": False},
        "tracking": {"trackers": [], "batches_every_steps": 1},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }

    def make_config(folder: str, **changes: Any) -> RunConfig:
        run = {"seed": 1, "total_steps": 2, "folder": str(tmp_path / folder)}
        config = RunConfig.model_validate(sections | {"run": run} | changes)
        assert check(config) == []
        return config

    return make_config


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all("nonfinite" not in line for line in lines)
    return [line for line in lines if line["step"] > 0]


def samples(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]


CORRECTION = {"weights": "token", "reject": ["sequence_mean_k3"], "reject_bounds": ["5.0"]}
RUNS: dict[str, dict[str, Any]] = {
    "remax": {"advantage": {"name": "remax"}},
    "gdpo": {"advantage": {"name": "gdpo", "terms": ["short", "score"], "term_weights": [0.5, 1.0]}},
    "optimal_token_baseline": {"advantage": {"name": "optimal_token_baseline"}},
    "tir_optimal_token_baseline": {"advantage": {"name": "tir_optimal_token_baseline"}},
    "agentic_reinforce": {"advantage": {"name": "agentic_reinforce", "gamma": 0.9, "whiten": True}},
    "topr": {"loss": {"name": "topr"}},
    "rollout_is": {"loss": {"name": "rollout_is"}},
    "prompt mean": {"loss": {"aggregation": "prompt_mean"}},
    "sum over a norm": {"loss": {"aggregation": "sequence_mean_token_sum_norm", "sft_coef": 0.1}},
    "critic's sum over a norm": {
        "advantage": {"name": "gae"},
        "critic": {"aggregation": "sequence_mean_token_sum_norm"},
    },
    "correction": {"loss": {"rollout_correction": CORRECTION}},
    "sppo": {
        "advantage": {"name": "sppo", "soft_mean_scale": 2.0},
        "loss": {"name": "sppo", "advantage_scale": 0.5, "aggregation": "sequence_mean_token_mean"},
        "policy": {
            "sequences_per_mini_batch": 4,
            "sequences_per_micro_batch_per_device": 2,
            "optimizer": {"lr": 1e-3, "eps": EPS},
        },
    },
    "sampler's log-probs, two updates": {
        "loss": {"rollout_correction": {"use_rollout_logprobs": True}},
        "policy": {
            "sequences_per_mini_batch": 4,
            "sequences_per_micro_batch_per_device": 4,
            "optimizer": {"lr": 1e-3, "eps": EPS},
        },
    },
}


# ---------------------------------------------------------------------------------------------- the plain calculation


@dataclass
class Row:
    """A response, with what the calculation starts from."""

    group: int
    prompt: list[int]
    response: list[int]
    reward: float
    terms: dict[str, float]


def rows_of(batch: dict[str, Tensor]) -> list[Row]:
    rows = []
    width = batch["sampled.tokens"].shape[1] - batch["sampled.response_mask"].shape[1]
    for number, tokens in enumerate(batch["sampled.tokens"].tolist()):
        prompt, response = (
            int(batch["sampled.prompt_lengths"][number]),
            int(batch["sampled.response_mask"][number].sum()),
        )
        terms = {name: float(batch[f"sampled.reward_terms.{name}"][number]) for name in ("score", "short")}
        group = int(batch["sampled.group_index"][number])
        rows.append(
            Row(group, tokens[width - prompt : width], tokens[width : width + response], sum(terms.values()), terms)
        )
    return rows


class Plain:
    """The unmodified model in float64, and the rows that it learns from."""

    def __init__(self, folder: Path, rows: list[Row]):
        self.rows = rows
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")

    def distributions(self, row: Row) -> Tensor:
        """Log-probs of the whole vocabulary before each response token, [T, V]."""
        logits = self.model(torch.tensor([row.prompt + row.response])).logits[0, len(row.prompt) - 1 : -1]
        return logits.log_softmax(-1)

    def logprobs(self, row: Row) -> Tensor:
        return self.distributions(row)[torch.arange(len(row.response)), torch.tensor(row.response)]

    def over_groups(self, values: list[float], compare: Callable[[Tensor], Tensor]) -> list[float]:
        """Values compared within each prompt's responses."""
        found = torch.zeros(len(values), dtype=torch.float64)
        for group in {row.group for row in self.rows}:
            members = [number for number, row in enumerate(self.rows) if row.group == group]
            found[members] = compare(torch.tensor([values[number] for number in members], dtype=torch.float64))
        return found.tolist()

    def on_tokens(self, values: list[float]) -> list[Tensor]:
        return [
            torch.full((len(row.response),), value, dtype=torch.float64)
            for row, value in zip(self.rows, values, strict=True)
        ]

    def updates(
        self,
        advantages: list[Tensor],
        loss_of: Loss,
        aggregation: Callable[[list[Row], list[Tensor]], Tensor],
        size: int,
    ) -> tuple[list[float], list[float]]:
        """AdamW over the rows, ``size`` at a time, the gradient cut to norm 1. Returns each update's loss and norm (uncut)."""
        with torch.no_grad():
            old = [self.logprobs(row) for row in self.rows]
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=EPS, weight_decay=0.01)
        losses, norms = [], []
        for start in range(0, len(self.rows), size):
            part = range(start, start + size)
            rows = [self.rows[number] for number in part]
            found = [loss_of(self.rows[n], self.logprobs(self.rows[n]), old[n], advantages[n]) for n in part]
            loss = aggregation(rows, found)
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            optimizer.step()
            losses.append(loss.item())
        return losses, norms


def standardized(plain: Plain) -> list[Tensor]:
    """GRPO: (r - mean) / (std + 1e-6), with the sample standard deviation."""
    rewards = [row.reward for row in plain.rows]
    return plain.on_tokens(plain.over_groups(rewards, lambda r: (r - r.mean()) / (r.std() + 1e-6)))


def over_greedy(plain: Plain) -> list[Tensor]:
    """ReMax: r - the reward of the greedy response, whose rewards are computed here."""
    found = []
    for row in plain.rows:
        ids = torch.tensor([row.prompt])
        stops = [plain.tokenizer.eos_token_id, *range(0, 256, 12)]
        with torch.no_grad():
            out = plain.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=stops
            )
        text = plain.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        found.append(row.reward - (sum(text.encode()) % 5 / 4 - len(text) / 8))
    return plain.on_tokens(found)


def whitened(values: list[Tensor]) -> list[Tensor]:
    """(x - mean) / sqrt(variance + 1e-8) over all tokens, with the sample variance."""
    every = torch.cat(values)
    return [(each - every.mean()) / (every.var() + 1e-8).sqrt() for each in values]


def terms_apart(plain: Plain) -> list[Tensor]:
    """GDPO: every term standardized in its group, weighted, summed, whitened."""
    total = torch.zeros(len(plain.rows), dtype=torch.float64)
    for name, weight in (("short", 0.5), ("score", 1.0)):
        values = [row.terms[name] for row in plain.rows]
        total += weight * torch.tensor(
            plain.over_groups(values, lambda r: (r - r.mean()) / (r.std() + 1e-6)), dtype=torch.float64
        )
    return whitened(plain.on_tokens(total.tolist()))


def optimal_baseline(plain: Plain) -> list[Tensor]:
    """r - sum(r W_t) / sum(W_t) over the group's responses that have a token t, with W_t the sum up to t of 1 - 2 pi + sum pi^2;
    without a baseline where a response is alone."""
    found = []
    with torch.no_grad():
        paths = []
        for row in plain.rows:
            log_p = plain.distributions(row)
            chosen = log_p[torch.arange(len(row.response)), torch.tensor(row.response)].exp()
            paths.append((1 - 2 * chosen + log_p.exp().square().sum(-1)).cumsum(0))
    for row in plain.rows:
        values = []
        for t in range(len(row.response)):
            peers = [
                (other.reward, float(path[t]))
                for other, path in zip(plain.rows, paths, strict=True)
                if other.group == row.group and len(other.response) > t
            ]
            baseline = sum(r * w for r, w in peers) / sum(w for _, w in peers) if len(peers) > 1 else 0.0
            values.append(row.reward - baseline)
        found.append(torch.tensor(values, dtype=torch.float64))
    return found


def whitened_rewards(plain: Plain) -> list[Tensor]:
    """REINFORCE over turns (here one), and GAE with values of 0 and no discount: the reward, whitened."""
    return whitened(plain.on_tokens([row.reward for row in plain.rows]))


def over_soft_mean(plain: Plain) -> list[Tensor]:
    """SPPO: r - log(mean of exp(2 r)) / 2, over the whole step."""
    rewards = torch.tensor([row.reward for row in plain.rows], dtype=torch.float64)
    return plain.on_tokens((rewards - (2 * rewards).exp().mean().log() / 2).tolist())


ADVANTAGES: dict[str, Callable[[Plain], list[Tensor]]] = {
    "sppo": over_soft_mean,
    "remax": over_greedy,
    "gdpo": terms_apart,
    "optimal_token_baseline": optimal_baseline,
    "tir_optimal_token_baseline": optimal_baseline,
    "agentic_reinforce": whitened_rewards,
    "critic's sum over a norm": whitened_rewards,
}


def clipped(row: Row, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """PPO's: the larger of -A r and -A clip(r, 0.8, 1.2)."""
    ratio = (logprobs - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


def weighted(row: Row, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """TOPR on-policy, and rollout_is with the trainer's own weights: -A log pi, with weights of 1."""
    return -advantages * logprobs


def imitating(row: Row, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """PPO's, and 0.1 x -r log pi on the responses whose reward is above 0."""
    return clipped(row, logprobs, old, advantages) + 0.1 * max(row.reward, 0.0) * -logprobs


def squared(row: Row, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """SPPO: (log pi(y) - log pi_old(y) - A / 2)^2 of the whole response."""
    return (logprobs.sum() - old.sum() - 0.5 * advantages[0]).square()[None]


LOSSES: dict[str, Loss] = {
    "sppo": squared,
    "topr": weighted,
    "rollout_is": weighted,
    "sum over a norm": imitating,
}


def token_mean(rows: list[Row], losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def mean_of_prompts(rows: list[Row], losses: list[Tensor]) -> Tensor:
    """The mean over prompts of the mean over their tokens."""
    groups = [
        torch.cat([loss for row, loss in zip(rows, losses, strict=True) if row.group == g])
        for g in {row.group for row in rows}
    ]
    return torch.stack([each.mean() for each in groups]).mean()


def mean_of_sums_over_8(rows: list[Row], losses: list[Tensor]) -> Tensor:
    """The mean over responses of the sum over their tokens / rollout.max_response_tokens."""
    return torch.stack([each.sum() / 8 for each in losses]).mean()


AGGREGATIONS: dict[str, Callable[[list[Row], list[Tensor]], Tensor]] = {
    "prompt mean": mean_of_prompts,
    "sum over a norm": mean_of_sums_over_8,
}
SIZE = {"sampler's log-probs, two updates": 4, "sppo": 4}  # sequences per update


@pytest.mark.parametrize("name", RUNS)
def test_the_first_step_is_that_of_a_plain_calculation(make: Make, tiny_llama: Path, name: str) -> None:
    """From the tokens and rewards of the step: advantages, loss and norm of the gradient, in float64 and row by row, with the
    unmodified model. The second step starts from the updated weights and has to go through."""
    folder = train_run(make("run", **RUNS[name]))
    lines = steps(folder)
    for line in lines:
        assert line["policy/skipped_updates"] == 0 and line["policy/grad_norm"] > 0
        assert line["gap/max"] < 1e-4  # the same weights in the same precision
    batch = load_file(folder / "batches/step_1.safetensors")
    rows = rows_of(batch)
    assert len({len(row.response) for row in rows}) > 2  # else the ways of averaging would not differ
    assert any(row.reward > 0 for row in rows)  # else nothing would be imitated
    plain = Plain(tiny_llama, rows)
    advantages = ADVANTAGES.get(name, standardized)(plain)
    for row, mine, theirs in zip(rows, advantages, batch["trained.advantages"], strict=True):
        assert theirs[: len(row.response)].tolist() == pytest.approx(mine.tolist(), abs=2e-5)
        assert not theirs[len(row.response) :].any()
    losses, norms = plain.updates(
        advantages, LOSSES.get(name, clipped), AGGREGATIONS.get(name, token_mean), SIZE.get(name, 8)
    )
    assert lines[0]["policy/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4, abs=1e-6)
    assert lines[0]["policy/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    if (
        "critic" in name
    ):  # values begin at 0, so with lambda 1 the critic's loss is half the squared return, over the norm of 8
        squares = [0.5 * row.reward**2 * len(row.response) / 8 for row in rows]
        assert lines[0]["critic/loss"] == pytest.approx(sum(squares) / len(rows), rel=1e-4)


ONLINE_DPO: dict[str, Any] = {
    "advantage": {"name": "online_dpo", "beta": 0.5, "equal_rewards": "first"},
    "loss": {"name": "gpg", "aggregation": "sequence_mean_token_sum"},
}


def test_pairs_of_a_step_are_learned_from_by_dpo(make: Make, tiny_llama: Path) -> None:
    """Two steps with a frozen reference: the second one's weights are those of the policy after the first update, calculated in
    float64 with autograd of the loss, against the starting weights."""
    folder = train_run(make("run", **ONLINE_DPO))
    plain: Plain | None = None
    for number, line in enumerate(steps(folder), start=1):
        batch = load_file(folder / f"batches/step_{number}.safetensors")
        rows = rows_of(batch)
        start = Plain(tiny_llama, rows)
        plain = Plain(tiny_llama, rows) if plain is None else plain
        plain.rows = rows
        with torch.no_grad():
            reference = [start.logprobs(row).sum() for row in rows]
        optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=EPS, weight_decay=0.01)
        logprobs = [plain.logprobs(row) for row in rows]
        losses = []
        for i in range(0, len(rows), 2):
            better, worse = (i, i + 1) if rows[i].reward >= rows[i + 1].reward else (i + 1, i)
            assert rows[better].group == rows[worse].group
            h = logprobs[better].sum() - reference[better] - logprobs[worse].sum() + reference[worse]
            losses.append(-torch.nn.functional.logsigmoid(0.5 * h))
            weight = float(torch.sigmoid(-0.5 * h.detach()))  # 0.5 x 2 rows for each pair
            for row, sign in ((better, 1), (worse, -1)):
                found = batch["trained.advantages"][row][: len(rows[row].response)].tolist()
                assert found == pytest.approx([sign * weight] * len(found), abs=1e-5)
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0))
        assert line["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)
        optimizer.step()
    assert len({round(abs(float(a)), 6) for a in batch["trained.advantages"][:, 0]}) > 1  # else nothing has moved
    moved = train_run(make("moved", **ONLINE_DPO, reference={"update_every": 1}))
    again = load_file(moved / "batches/step_2.safetensors")["trained.advantages"][:, 0]
    assert again.abs().tolist() == pytest.approx(
        [0.5] * len(again), abs=1e-5
    )  # policy and reference are the same again


def test_the_greedy_baseline_is_taken_from_every_reward(make: Make) -> None:
    folder = train_run(make("run", advantage={"name": "remax"}))
    assert steps(folder)[0]["time/baseline_s"] > 0
    drawn = samples(folder)
    by_prompt: dict[str, set[float]] = {}
    for sample in drawn:
        by_prompt.setdefault(sample["prompt_id"], set()).add(round(sample["reward"] - sample["advantage"], 5))
    assert len(by_prompt) == 2 and all(len(baselines) == 1 for baselines in by_prompt.values())


def test_a_correction_of_nothing_changes_next_to_nothing(make: Make) -> None:
    """Sampler and trainer are the same weights in float32: all weights are 1, and nothing is rejected."""
    plain = steps(train_run(make("plain")))
    fixed = steps(train_run(make("fixed", loss={"rollout_correction": CORRECTION})))
    for left, right in zip(plain, fixed, strict=True):
        assert right["correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert right["correction/effective_token_share"] == pytest.approx(1, abs=1e-4)
        assert right["correction/rejected_token_share"] == right["correction/rejected_response_share"] == 0
        assert left["policy/loss"] == pytest.approx(right["policy/loss"], abs=1e-4)
        assert left["policy/grad_norm"] == pytest.approx(right["policy/grad_norm"], rel=1e-3)


def test_a_narrow_rule_takes_tokens_out_of_the_loss(make: Make) -> None:
    """With top-k the sampler draws from a cut distribution, and the trainer scores by the whole one."""
    rollout = {"samples_per_prompt": 4, "max_response_tokens": 8, "top_k": 20}
    correction = {"reject": ["token_k1"], "reject_bounds": ["0.9_1.1"], "weights": "sequence"}
    folder = train_run(make("run", rollout=rollout, loss={"rollout_correction": correction}))
    for line in steps(folder):
        assert 0 < line["correction/rejected_token_share"] <= 1
        assert line["correction/weight_max"] <= 2

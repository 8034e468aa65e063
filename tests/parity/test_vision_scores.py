"""Critics and reward models that see the policy's images: their numbers are plain transformers', and whole runs use them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_vision_runs import Make, files, lines_of, make, model
from test_vision_step import FAMILIES, plain_inputs, prompt_with, scored_groups
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from batches import train_batch
from posttrain.backends.reward_model.local import LocalRewardModel
from posttrain.backends.train.local import LocalValueEngine
from posttrain.build.train import train_run
from posttrain.config.policy import OptimizerConfig
from posttrain.config.reward import RewardModelConfig
from posttrain.errors import ConfigError
from posttrain.models.loading import load_causal_lm
from posttrain.models.reward_model import load_reward_model
from posttrain.models.saving import save_model
from posttrain.models.tiny_vision import VisionFamily, write_tiny_vision_model
from posttrain.models.value_head import load_value_model, value_head
from posttrain.records.plans import ValueLossPlan
from posttrain.records.trajectories import Invalid, Reward, ScoredGroup
from posttrain.steps.assemble import assemble

__all__ = ["files", "make", "model"]  # fixtures


def with_a_head(folder: Path, seed: int = 5) -> PreTrainedModel:
    """A model of one number per token whose head is random."""
    found = load_value_model(str(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in value_head(found).parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: VisionFamily = request.param
    return write_tiny_vision_model(tmp_path_factory.mktemp(family), family)


def plain_numbers(folder: Path, critic: PreTrainedModel, group: ScoredGroup, row: int) -> tuple[Any, Tensor]:
    """The plain model in float64, and the numbers of prompt and response by its own forward pass and the head of ``critic``."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    plain: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64, **eager)
    prompt, response = group.group.prompt, group.group.trajectories[row].token_ids
    inputs = plain_inputs(prompt, response, plain.config.image_token_id)
    states = plain(**inputs, output_hidden_states=True).hidden_states[-1][0]
    head = value_head(critic)
    return plain, states @ head.weight[0].detach().double() + head.bias.detach().double()


@pytest.mark.parametrize("how", [{}, {"share_prompts": False}, {"padded": True}], ids=["shared", "packed", "padded"])
@pytest.mark.slow
def test_values_and_their_gradients_are_the_plain_model_s(folder: Path, how: dict[str, bool]) -> None:
    groups = scored_groups(folder)
    critic = LocalValueEngine(
        with_a_head(folder),
        AutoTokenizer.from_pretrained(folder),
        optimizer=OptimizerConfig(lr=1e-3),
        learning_rate_factor=lambda update: 1.0,
        sequences_per_micro_batch=4,
        **how,
    )
    batch = assemble(groups)
    values = critic.values(batch.sequences)
    for number, group in enumerate(groups):
        for row, trajectory in enumerate(group.group.trajectories):
            _, numbers = plain_numbers(folder, critic.model, group, row)
            wanted = numbers[len(group.group.prompt.token_ids) - 1 : -1].detach()  # before each response token
            found = values[3 * number + row, : len(trajectory.token_ids)]
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    # The loss looks at one token, the second of the first response: 0.5 (V - R)^2 has the gradient (V - R) dV.
    mask = torch.zeros_like(batch.sequences.response_mask)
    mask[0, 1] = True
    train = train_batch(
        batch.sequences, advantages=torch.zeros(mask.shape), loss_mask=mask, values=values, returns=values + 2.0
    )
    critic.forward_backward(train, ValueLossPlan(value_clip=None, aggregation="token_mean"), train.counts())
    plain, numbers = plain_numbers(folder, critic.model, groups[0], 0)
    (numbers[len(groups[0].group.prompt.token_ids)] * -2.0).backward()
    wanted_gradients = dict(plain.named_parameters())
    seen = 0.0
    for name, weight in critic.model.named_parameters():
        if name.startswith("score.") or weight.grad is None:
            continue
        gradient = wanted_gradients[name].grad
        torch.testing.assert_close(weight.grad.double(), gradient, rtol=1e-3, atol=1e-4, msg=name)
        seen = max(seen, float(gradient.abs().max()) if "vis" in name else 0.0)
    assert seen > 1e-3  # the tower learns, too


@pytest.mark.slow
def test_a_reward_model_sees_the_images(folder: Path, tmp_path: Path) -> None:
    groups = scored_groups(folder)
    classifier = with_a_head(folder)
    save_model(classifier, tmp_path / "judge")
    loaded = load_reward_model(RewardModelConfig(path=str(tmp_path / "judge")), dtype=torch.float32)
    scorer = LocalRewardModel(loaded, None, sequences_per_micro_batch=4)
    outcomes = scorer.score([group.group for group in groups])
    for group, scored in zip(groups, outcomes, strict=True):
        for row, outcome in enumerate(scored):
            assert isinstance(outcome, Reward)
            wanted = float(plain_numbers(folder, classifier, group, row)[1][-1].detach())
            assert outcome.value == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    # A conversation without images may be cut, one with images not.
    short = LocalRewardModel(loaded, None, sequences_per_micro_batch=4, max_tokens=4)
    first, _, last = short.score([group.group for group in groups])
    assert all(isinstance(one, Invalid) and "with images is not cut" in one.detail for one in first)
    assert all(isinstance(one, Reward) for one in last)


def test_other_images_get_other_scores(folder: Path) -> None:
    scorer = LocalRewardModel(with_a_head(folder), None, sequences_per_micro_batch=8)
    group = scored_groups(folder)[0].group
    other = replace(group, prompt=replace(group.prompt, images=prompt_with(folder, "x", [(32, 24)], seed=99).images))
    (first, second) = ([one.value for one in scored] for scored in scorer.score([group, other]))  # type: ignore[union-attr]
    assert min(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-3


def classifier_folder(model: Path, folder: Path) -> Path:
    save_model(with_a_head(model), folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_ppo_with_a_reward_model_runs_and_resumes(make: Make, model: Path, tmp_path: Path) -> None:
    judge = classifier_folder(model, tmp_path / "judge")
    sections: dict[str, Any] = {
        "advantage": {"name": "gae"},
        "loss": {"kl_coef": 0.0},
        "critic": {"sequences_per_micro_batch_per_device": 2, "optimizer": {"lr": 1e-3}},
        "reward": {"terms": [], "model": {"path": str(judge)}},
    }
    train_run(make("one", **sections))
    train_run(make("half", run={"total_steps": 1}, **sections))
    train_run(make("half", **sections), allow_config_change=True)
    lines = [json.loads(line) for line in (tmp_path / "one/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["critic/loss"] > 0 and lines[2]["critic/grad_norm"] > 0 and lines[1]["reward/std"] > 0
    for role in ("policy", "critic"):
        newest = f"checkpoints/global_step_2/{role}/model.safetensors"
        assert (tmp_path / "half" / newest).read_bytes() == (tmp_path / "one" / newest).read_bytes()


@pytest.mark.slow
def test_parts_of_the_critic_stay_as_they_are(make: Make, model: Path, tmp_path: Path) -> None:
    frozen = {"freeze_vision": True, "freeze": ["model.language_model.layers.0.", "score"]}
    critic = {"sequences_per_micro_batch_per_device": 6, "optimizer": {"lr": 1e-2}, **frozen}
    train_run(make("run", advantage={"name": "gae"}, critic=critic, policy={"sequences_per_mini_batch": 3}))
    start = load_value_model(str(model), dtype=torch.float32)
    save_model(start, tmp_path / "start")
    before = load_file(tmp_path / "start/model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/global_step_2/critic/model.safetensors")
    same = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    wanted = {name for name in after if "visual" in name or "layers.0." in name}
    assert same == wanted and wanted and any("layers.1." in name for name in after.keys() - same)
    assert "score.weight" not in same  # a critic without a head to train learns nothing


def test_a_critic_of_another_family_is_refused(
    make: Make, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.build.train.RUNTIMES.get", None)
    changes: dict[str, Any] = {"advantage": {"name": "gae"}, "critic": {"path": str(tiny_llama)}}
    with pytest.raises(ConfigError, match=r"prepared for qwen2_vl, and the model at .* is llama") as refused:
        train_run(make("run", **changes))
    assert [problem.field for problem in refused.value.problems] == ["critic.path"]


def test_the_policy_of_a_critic_s_family_is_unchanged(folder: Path) -> None:
    """A class that is made here for a critic leaves the policy's own way of loading alone."""
    policy = load_causal_lm(str(folder), dtype=torch.float32)
    load_value_model(str(folder), dtype=torch.float32)
    again = load_causal_lm(str(folder), dtype=torch.float32)
    assert type(policy) is type(again)
    assert all(torch.equal(one, other) for one, other in zip(policy.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_two_workers_make_the_run_of_one_process(make: Make, model: Path, tmp_path: Path) -> None:
    """With a reference, a critic and a reward model, which all see the pictures; and the sampler does."""
    pytest.importorskip("ray")
    judge = classifier_folder(model, tmp_path / "judge")
    ppo: dict[str, dict[str, Any]] = {
        "advantage": {"name": "gae"},
        "critic": {"path": str(model), "sequences_per_mini_batch": 6, "optimizer": {"lr": 1e-3}},
        "reward": {"model": {"path": str(judge)}},
    }
    alone = train_run(make("alone", **ppo))
    two = {
        **ppo,
        "policy": {"engine": "fsdp"},
        "critic": ppo["critic"] | {"engine": "fsdp"},
        "reward": {"model": {"path": str(judge), "engine": "fsdp"}},
        "placement": {"devices": 2, "runtime": "ray"},
    }
    shared = train_run(make("shared", **two))

    def first_of(run: Path, name: str = "samples/step_1.jsonl") -> list[Any]:
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        return [(row["sample_id"], row["response"], row["images"]) for row in rows]

    assert first_of(shared) == first_of(alone)
    steps = [[line for line in lines_of(run) if "gap/mean" in line] for run in (shared, alone)]
    assert len(steps[0]) == 2
    for mine, theirs in zip(*steps, strict=True):
        assert mine["gap/mean"] < 1e-5
        for name in (
            "reward/mean",
            "policy/loss",
            "policy/grad_norm",
            "critic/loss",
            "critic/grad_norm",
        ):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name

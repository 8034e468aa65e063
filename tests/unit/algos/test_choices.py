"""What a user can choose, what each choice reads, and what is said about choices that cannot work."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from batches import advantages_of, scored_batch, sequence_batch, shaped_batch, train_batch
from posttrain.algos.objective import policy_objective
from posttrain.cli.algorithms import SECTIONS, settings_rows
from posttrain.config import RunConfig
from posttrain.config.algorithm import AdvantageConfig, Aggregation, AlgorithmSection, LossConfig
from posttrain.config.roles import (
    needs_old_logprobs,
    needs_ref_logprobs,
    needs_values,
    scores_tokens_before,
    uses_reference,
)
from posttrain.descriptions import describe_object
from posttrain.dialects.detect import read_config
from posttrain.errors import RequestError
from posttrain.plan.checks.train import check, warnings_of
from posttrain.records.batches import ScoredBatch, TrainBatch
from posttrain.records.plans import AdvantagePlan, LossPlan
from posttrain.registry import ADVANTAGES, POLICY_LOSSES, Registry
from posttrain.steps.mini_batches import with_choice

OF_STEPS = ADVANTAGES.taking("trajectory_index")  # estimators whose rows are turns


@pytest.mark.parametrize("section", [AdvantageConfig, LossConfig])
def test_settings_are_read_from_the_source_as_the_functions_have_them(section: type[AlgorithmSection]) -> None:
    registry = section.registry
    for name in registry.names():
        live, read = describe_object(registry.get(name), None).settings, registry.settings(name)
        assert [(each.name, repr(each.type), each.default) for each in live.values()] == [
            (each.name, repr(each.type), each.default) for each in read.values()
        ], name
        assert not set(read) & set(section.model_fields), name


@pytest.mark.parametrize("registry", [ADVANTAGES, POLICY_LOSSES])
def test_a_setting_has_one_type_and_one_default_whoever_reads_it(registry: Registry[Any]) -> None:
    for key, shared in registry.all_settings().items():
        for name in registry.names():
            if key in registry.settings(name):
                one = registry.settings(name)[key]
                assert (repr(one.type), one.default) == (repr(shared.type), shared.default), (name, key)


def test_inputs_are_read_from_the_source_as_the_functions_have_them() -> None:
    for name in ADVANTAGES.names():
        parameters = inspect.signature(ADVANTAGES.get(name)).parameters.values()
        expected = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        assert ADVANTAGES.inputs(name) == expected, name
    assert ADVANTAGES.taking("values") == ["gae"] and needs_values(config(advantage={"name": "gae"}))
    assert not needs_values(config(advantage={"name": "nobody"}))  # an unknown name is refused elsewhere


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "x"}, "data": {"train_files": ["x"]}} | sections)


def test_defaults_are_accepted_without_a_word() -> None:
    assert check(config()) == []
    assert warnings_of(config()) == []


def test_weighting_by_the_ratio_is_for_estimates_that_it_makes_unbiased() -> None:
    loss = {"kl_coef": 0.1, "kl_importance_weighted": True}
    assert check(config(loss=loss)) == check(config(loss=loss | {"kl_estimator": "k1"})) == []
    for estimator in ("k2", "abs", "k3+", "full"):
        [problem] = check(config(loss=loss | {"kl_estimator": estimator}))
        assert problem.field == "loss.kl_importance_weighted" and problem.what.endswith(f"is {estimator}")
    said = warnings_of(config(loss={"kl_importance_weighted": True}))
    assert said == ["loss.kl_importance_weighted has no effect: loss.kl_coef is 0"]


def test_a_choice_by_entropy_scores_the_step_before_the_update() -> None:
    assert scores_tokens_before(config(loss={"high_entropy_share": 0.2}))
    assert not scores_tokens_before(config())


WORLD = {"name": "guess_number"}


@pytest.mark.parametrize("name", OF_STEPS)
def test_an_estimator_of_turns_needs_turns(name: str) -> None:
    def said(**sections: Any) -> list[tuple[str, str]]:
        return [(problem.what, problem.field) for problem in check(config(advantage={"name": name}, **sections))]

    [(what, field)] = said()
    assert (
        what == f"{name} compares the turns of episodes, and this run has no environment" and field == "advantage.name"
    )
    [(what, field)] = said(environment=WORLD)
    assert what == f"{name} needs every turn as a sample of its own" and field == "environment.sample_per_turn"
    world = WORLD | {"sample_per_turn": True}
    assert said(environment=world) == []
    [(what, field)] = said(environment=world, reward={"kl": {"coef": 0.1}})
    assert what.endswith("as the environment gave them, without a KL") and field == "reward.kl.coef"
    assert [field for _, field in said(environment=world, reward={"normalize_mean": "group"})] == [
        "reward.normalize_mean"
    ]


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_estimator_is_supplied_with_what_it_needs(name: str) -> None:
    world = {"environment": WORLD | {"sample_per_turn": True}} if name in OF_STEPS else {}
    process = {"reward": {"process": {}}} if "process_rewards" in ADVANTAGES.inputs(name) else {}
    assert check(config(advantage={"name": name}, **world, **process)) == []
    supplied = {  # by the loop, when the estimator names them
        "values": torch.zeros(4, 3),
        "old_logprobs": torch.full((4, 3), -1.0),
        "ref_logprobs": torch.full((4, 3), -2.0),
        "sum_pi_squared": torch.full((4, 3), 0.5),
        "greedy_rewards": torch.zeros(4),
        "reward_terms": {"first": torch.tensor([1.0, 0.0, 2.0, math.nan])},
        "step_rewards": torch.tensor([1.0, 0.0, 2.0, 0.0]),
        "state_index": torch.tensor([0, 0, 1, 1]),
        "process_rewards": torch.zeros(4, 3),
    }
    wanted: dict[str, Any] = {key: value for key, value in supplied.items() if key in ADVANTAGES.inputs(name)}
    values, old, ref = (wanted.pop(each, None) for each in ("values", "old_logprobs", "ref_logprobs"))
    scored = replace(batch(), reward_terms=wanted.pop("reward_terms", {}))
    if "step_rewards" in wanted:
        first = torch.tensor([1.0, 0.0, 0.0])  # a row's rewards stand on its first token
        scored = replace(scored, turn_rewards=wanted.pop("step_rewards")[:, None] * first)
    train = advantages_of(replace(scored, extras=wanted), AdvantagePlan(name=name), values, old=old, ref=ref)
    assert (train.critic is None) == ("values" not in ADVANTAGES.inputs(name))
    assert train.advantages.shape == (4, 3)
    assert (train.advantages[~train.loss_mask] == 0).all() and not train.loss_mask[3].any()


def test_pairs_are_of_one_prompt_and_learned_from_in_one_update() -> None:
    def problems(prompts: int, samples: int, **policy: Any) -> list[tuple[str, str]]:
        sections = {
            "rollout": {"samples_per_prompt": samples},
            "data": {"train_files": ["x"], "prompts_per_step": prompts},
        }
        found = check(config(advantage={"name": "online_dpo"}, loss=PAIRS, policy=policy, **sections))
        return [(problem.field, problem.fix) for problem in found]

    assert problems(4, 2) == problems(4, 1) == problems(3, 4) == []
    assert problems(4, 3) == [
        ("rollout.samples_per_prompt", "use rollout.samples_per_prompt=2, or another even number")
    ]
    assert problems(3, 1) == [("data.prompts_per_step", "use data.prompts_per_step=4")]
    mini = "policy.sequences_per_mini_batch"
    assert problems(4, 2, sequences_per_mini_batch=4) == [(mini, f"use {mini}=8")]
    assert problems(4, 2, epochs_per_step=2) == [("policy.epochs_per_step", "use policy.epochs_per_step=1")]


PAIRS = {"name": "gpg", "aggregation": "sequence_mean_token_sum"}


def test_weights_of_pairs_are_a_source_s_with_its_aggregation() -> None:
    assert warnings_of(config(advantage={"name": "online_dpo"}, loss=PAIRS)) == []
    (said,) = warnings_of(config(advantage={"name": "online_dpo"}, loss={"name": "gpg"}))
    assert said == "online_dpo is its source's with loss.aggregation=sequence_mean_token_sum, and it is token_mean"


def test_an_estimator_that_compares_with_the_reference_has_one() -> None:
    chosen = config(advantage={"name": "online_dpo"}, loss=PAIRS)
    assert uses_reference(chosen) and needs_ref_logprobs(chosen) and needs_old_logprobs(chosen)
    assert not uses_reference(config(loss=PAIRS)) and not needs_ref_logprobs(config(loss=PAIRS))


def test_the_stage_says_what_an_estimator_lacks() -> None:
    with pytest.raises(RequestError, match="gae needs values, and this run has no role that computes it"):
        advantages_of(batch(), AdvantagePlan(name="gae"))
    with pytest.raises(RequestError, match="gigpo needs step_rewards and state_index"):
        advantages_of(batch(), AdvantagePlan(name="gigpo"))
    with pytest.raises(RequestError, match=r"needs old_logprobs and sum_pi_squared, .* computes them"):
        advantages_of(batch(), AdvantagePlan(name="optimal_token_baseline"))


def batch() -> ScoredBatch:
    """Two groups of two; the second response has tool output inside, the last one has no valid reward."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0], [1, 1, 0]]).bool()
    sequences = sequence_batch(
        tokens=torch.zeros(4, 5, dtype=torch.int64),
        prompt_lengths=torch.full((4,), 2),
        response_mask=mask,
        group_index=torch.tensor([0, 0, 1, 1]),
    )
    valid = torch.tensor([True, True, True, False])
    return scored_batch(sequences, rewards=torch.tensor([1.0, 0.0, 2.0, 0.0]), valid=valid)


def test_a_reward_stands_on_the_last_sampled_token() -> None:
    scored = replace(batch(), rewards=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert shaped_batch(scored).rewards_on_tokens().tolist() == [[0, 0, 1], [0, 0, 2], [3, 0, 0], [0, 4, 0]]


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk"])
def test_one_sample_per_prompt_teaches_nothing(name: str) -> None:
    (problem,) = check(config(advantage={"name": name}, rollout={"samples_per_prompt": 1}))
    assert problem.what.startswith(f"{name} compares the samples of a prompt")
    assert check(config(advantage={"name": "reinforce_plus_plus"}, rollout={"samples_per_prompt": 1})) == []


def test_a_lone_sample_that_keeps_its_reward_can_be_asked_for() -> None:
    asked = {"name": "grpo", "lone_sample_keeps_reward": True}
    assert check(config(advantage=asked, rollout={"samples_per_prompt": 1})) == []


@pytest.mark.parametrize("name", POLICY_LOSSES.taking("mini_batch_tokens"))
def test_a_choice_in_the_mini_batch_does_not_depend_on_its_pieces(name: str) -> None:
    """The gradient of a mini-batch in one piece is the sum of those of its rows, whose tokens were chosen before over all of it
    (``with_choice``, by the policy's log-probs at that moment)."""
    policy = -torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
    advantages = torch.tensor([[1.0], [-1.0], [2.0], [0.5]]).expand(4, 3)
    sequences = batch().sequences
    train = train_batch(sequences, advantages * sequences.response_mask, old=policy + 0.1)
    bounds = {"covariance_low": -9.0, "covariance_high": 9.0} if name == "clip_cov" else {}
    section = LossConfig(name=name, covariance_share=0.5, **bounds)
    plan = LossPlan(name=name, parameters=section.settings, aggregation="token_mean", temperature=1.0)

    def gradient(part: TrainBatch, rows: list[int]) -> torch.Tensor:
        leaf = policy[rows].clone().requires_grad_()
        loss, _ = policy_objective(leaf, torch.zeros(len(rows), 3), part, plan, train.counts())
        return torch.autograd.grad(loss, leaf)[0]

    whole = gradient(train, [0, 1, 2, 3])
    engine = SimpleNamespace(logprobs=lambda sequences, temperature: policy)
    assert with_choice(train, engine, plan) is train  # in one piece the loss chooses for itself
    before = with_choice(train, engine, replace(plan, chooses_before=True))
    assert before.chosen is not None and 0 < int(before.chosen.sum()) == int(0.5 * int(train.loss_mask.sum()))
    pieces = torch.cat([gradient(before.rows([row]), [row]) for row in range(4)])
    torch.testing.assert_close(pieces, whole)
    with pytest.raises(RequestError, match="chooses tokens among those of the whole mini-batch"):
        gradient(train.rows([0]), [0])


def test_dro_without_its_weight_is_refused() -> None:
    (problem,) = check(config(loss={"name": "dro"}))
    assert problem.what == "dro needs loss.dro_beta"
    assert check(config(loss={"name": "dro", "dro_beta": 0.05})) == []


def test_numbers_that_the_choice_does_not_read_are_pointed_out() -> None:
    said = warnings_of(
        config(advantage={"name": "rloo", "normalize_by_std": False}, loss={"name": "gpg", "clip_ratio_high": 0.28})
    )
    assert said == [
        "advantage.normalize_by_std has no effect: rloo does not use it (gigpo, grpo, grpo_passk would)",
        "loss.clip_ratio_high has no effect: gpg does not use it "
        "(cispo, clip_cov, dppo_kl, dppo_tv, geo_mean, gspo, ppo_clip, rollout_is would)",
    ]
    assert warnings_of(config(loss={"name": "cispo", "clip_ratio_high": 0.28})) == []


def test_a_critic_that_nobody_asks_is_pointed_out() -> None:
    critic = {"path": "c", "warmup_steps": 3, "optimizer": {"lr": 1e-3}, "schedule": {"min_lr_ratio": 0.1}}
    assert warnings_of(config(critic=critic)) == [
        "critic.path, critic.optimizer.lr, critic.schedule.min_lr_ratio, critic.warmup_steps have no effect: grpo needs no "
        "critic (gae would)"
    ]
    assert warnings_of(config(critic={"warmup_steps": 1}, advantage={"name": "rloo"})) == [
        "critic.warmup_steps has no effect: rloo needs no critic (gae would)"
    ]
    assert warnings_of(config(critic=critic, advantage={"name": "gae"})) == [
        "critic.schedule.min_lr_ratio has no effect: the schedule is constant "
        "(cosine, linear, warmup_stable_decay, inverse_square_root would read it)"
    ]


def test_an_aggregation_that_is_not_the_losss_own_is_pointed_out() -> None:
    (said,) = warnings_of(config(loss={"name": "sapo"}))
    assert "loss.aggregation=sequence_mean_token_mean" in said
    assert warnings_of(config(loss={"name": "sapo", "aggregation": "sequence_mean_token_mean"})) == []


def test_an_estimator_of_a_kl_that_is_not_in_the_loss_is_pointed_out() -> None:
    assert warnings_of(config(loss={"kl_estimator": "k1"})) == ["loss.kl_estimator has no effect: loss.kl_coef is 0"]


def test_objective_by_hand() -> None:
    # One update per step, so r = 1: loss -A; token_mean over 6 tokens of valid rows.
    # grpo without std: group 0: +-0.5, group 1 has one valid member: 0. -(3 x 0.5 - 2 x 0.5) / 6 = -0.083333
    # entropy 2 everywhere, weight 0.1: -0.2. KL k1: policy -1, ref -1.5: 0.5, weight 0.2: +0.1. Sum -0.183333
    estimator = AdvantagePlan(name="grpo", parameters={"normalize_by_std": False})
    train = advantages_of(batch(), estimator, ref=torch.full((4, 3), -1.5))
    plan = LossPlan(
        name="ppo_clip",
        parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
        aggregation="token_mean",
        temperature=1.0,
        entropy_coef=0.1,
        kl_coef=0.2,
        kl_estimator="k1",
    )
    policy = torch.full((4, 3), -1.0, requires_grad=True)
    loss, sums = policy_objective(policy, torch.full((4, 3), 2.0), train, plan, train.counts())
    assert loss.item() == pytest.approx(-0.183333, abs=1e-6)
    assert sums["policy/ratio_mean"] == 6 and sums["policy/entropy"] == 12 and sums["reference/kl"] == 3
    # gradient per token: -A / 6 + 0.2 / 6; row 0: (-0.5 + 0.2) / 6 = -0.05; the invalid row has none
    (gradient,) = torch.autograd.grad(loss, policy)
    assert gradient[0].tolist() == pytest.approx([-0.05] * 3)
    assert gradient[3].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("aggregation", "entropy_aggregation", "bonus"),
    [
        # 9 tokens of 3 valid rows with entropy 2 each, weight 0.1
        ("token_mean", "token_mean", 0.2),  # 0.1 x 18 / 9
        ("token_sum", "token_mean", 0.2),  # whatever the policy loss does
        ("sequence_mean_token_sum_norm", "token_mean", 0.2),
        ("token_sum", "token_sum", 1.8),  # 0.1 x 18
        ("token_mean", "sequence_mean_token_sum", 0.6),  # 0.1 x 18 / 3
        ("sequence_mean_token_sum_norm", "sequence_mean_token_sum_norm", 0.06),  # the same / 10
    ],
)
def test_the_entropy_has_an_aggregation_of_its_own(aggregation: str, entropy_aggregation: str, bonus: float) -> None:
    train = advantages_of(batch(), AdvantagePlan(name="grpo"), old=torch.full((4, 3), -1.0))
    train = replace(train, advantages=torch.zeros(4, 3), loss_mask=torch.tensor([[True] * 3] * 3 + [[False] * 3]))
    plan = LossPlan(
        name="ppo_clip",
        aggregation=aggregation,
        entropy_aggregation=entropy_aggregation,
        norm_tokens=10,
        temperature=1.0,
        entropy_coef=0.1,
    )
    policy = torch.full((4, 3), -1.0)
    loss, _ = policy_objective(policy, torch.full((4, 3), 2.0), train, plan, train.counts())
    assert loss.item() == pytest.approx(-bonus, abs=1e-6)


@pytest.mark.parametrize(("kl_aggregation", "kl"), [(None, 1.5), ("token_mean", 0.5), ("sequence_mean_token_sum", 1.5)])
def test_the_kl_is_aggregated_as_the_loss_unless_it_has_one_of_its_own(kl_aggregation: str | None, kl: float) -> None:
    # k1 = -1 - -1.5 = 0.5 on 3 tokens of 3 rows: 1.5 a row, 0.5 a token; the policy loss is 0
    train = advantages_of(batch(), AdvantagePlan(name="grpo"), old=torch.full((4, 3), -1.0))
    loss_mask = torch.tensor([[True] * 3] * 3 + [[False] * 3])
    logprobs = replace(train.logprobs, ref=torch.full((4, 3), -1.5))
    train = replace(train, advantages=torch.zeros(4, 3), loss_mask=loss_mask, logprobs=logprobs)
    plan = LossPlan(
        name="ppo_clip",
        aggregation="sequence_mean_token_sum",
        temperature=1.0,
        kl_coef=1.0,
        kl_estimator="k1",
        kl_aggregation=kl_aggregation,
    )
    loss, _ = policy_objective(torch.full((4, 3), -1.0), torch.zeros(4, 3), train, plan, train.counts())
    assert loss.item() == pytest.approx(kl)
    said = warnings_of(config(loss={"kl_aggregation": "token_mean"}))
    assert said == ["loss.kl_aggregation has no effect: loss.kl_coef is 0"]


@pytest.mark.parametrize(
    ("dialect", "words", "expected"),
    [
        ("native", ["loss.aggregation=token_sum"], "token_mean"),
        ("skyrl", ["trainer.algorithm.loss_reduction=sequence_mean"], "token_mean"),
        ("verl", ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"], "sequence_mean_token_sum"),
        ("roll", ["loss_agg_mode=seq-mean-token-mean"], "sequence_mean_token_mean"),
    ],
)
def test_each_dialect_aggregates_the_entropy_as_its_peer_does(dialect: str, words: list[str], expected: str) -> None:
    assert read_config(None, words, dialect).config.loss.entropy_aggregation == expected


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_every_loss_goes_from_a_configuration_to_a_gradient(name: str) -> None:
    needed = {key: each.example() for key, each in POLICY_LOSSES.settings(name).items() if each.required}
    section = LossConfig.model_validate({"name": name, "covariance_kl_coef": 0.1, **needed})  # a weak pull
    plan = LossPlan(
        name=name,
        parameters=section.settings,
        aggregation=section.aggregation,
        temperature=1.0,
    )
    scored = batch()
    scored = replace(scored, sequences=replace(scored.sequences, rollout_logprobs=torch.full((4, 3), -1.05)))
    train = advantages_of(scored, AdvantagePlan(name="grpo"), old=torch.full((4, 3), -1.1))
    policy = torch.full((4, 3), -1.0, requires_grad=True)
    loss, sums = policy_objective(policy, torch.zeros(4, 3), train, plan, train.counts())
    (gradient,) = torch.autograd.grad(loss, policy)
    # group 0: the better response is made likelier, the worse one less likely; group 1 has nothing to compare with
    assert gradient[0].max() < 0
    compares = not {"advantages", "scores"}.isdisjoint(POLICY_LOSSES.inputs(name))  # else all are imitated
    assert (gradient[1][[0, 2]].min() > 0) == compares
    assert (gradient[~train.loss_mask] == 0).all()
    assert {"policy/ratio_mean", "policy/kl_old", "policy/entropy"} <= set(sums)


def test_a_loss_that_chooses_in_the_mini_batch_runs_when_it_is_whole_and_refuses_a_part() -> None:
    train = advantages_of(batch(), AdvantagePlan(name="grpo"))
    numbers = {"covariance_share": 0.5, "covariance_kl_coef": 1.0}
    plan = LossPlan(name="kl_cov", parameters=numbers, aggregation="token_mean", temperature=1.0)
    logprobs = torch.full((4, 3), -1.0, requires_grad=True)
    loss, _ = policy_objective(logprobs, torch.zeros(4, 3), train, plan, train.counts())
    assert loss.isfinite()
    part = train.rows([0])
    with pytest.raises(RequestError, match="holds 3 of 6"):
        policy_objective(logprobs[:1], torch.zeros(1, 3), part, plan, train.counts())


def test_every_choice_explains_itself() -> None:
    for section, registry in SECTIONS.items():
        for name in registry.names():
            about = registry.describe(name)
            assert about.summary and about.source, name
            for setting in about.settings.values():
                assert setting.meaning and setting.type is not Any, f"{section}.{setting.name} of {name}"
            assert set(about.inputs) <= set(registry.all_inputs())


def test_what_the_document_says_of_a_choice_is_so() -> None:
    document = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    lines = [line for line in document.splitlines() if line.startswith("| `")]
    evidence = {line.split("|")[1].strip(): line for line in lines if "hand" in line and "property" in line}
    described = {name for name in evidence if not name.startswith("`reward.")}
    for section, registry in SECTIONS.items():
        documented = [name for name in registry.names() if f"`{name}`" in described]
        assert len(documented) >= {"advantage": 17, "loss": 15, "method": 5, "distillation.divergence": 7}[section]
        rows = [row for name in documented for row in settings_rows(section, name)]
        cells = [(line, *(cell.strip() for cell in line.split(" | "))) for line in lines]
        of_settings = [
            line for line, name, key, *_ in cells if key.startswith(f"`{section}.") and name[3:-1] in documented
        ]
        assert of_settings == rows
    for name in get_args(Aggregation):
        assert any(line.startswith(f"| `{name}`") for line in lines), name

"""The engine megatron: megatron-core splits layers' matrices, layers and sequences (arXiv:1909.08053, 2104.04473)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from posttrain.config import TrainingConfig
from posttrain.config.base import Section
from posttrain.errors import Problem
from posttrain.plan.engine import EnginePlan, Learner, Learners, Passes, PlacedModel
from posttrain.plan.engines.megatron import checks, estimates
from posttrain.plan.engines.megatron.experts import EXPERTS_OVER, ONE_EXPERT_OVER
from posttrain.plan.engines.megatron.options import MegatronOptions, megatron_settings
from posttrain.plan.memory import RoleMemory
from posttrain.plan.placement import GroupSizes
from posttrain.plan.traffic import Traffic
from posttrain.registry import ENGINE_PLANS


@ENGINE_PLANS.register("megatron")
class MegatronPlan(EnginePlan):
    """Tensor, pipeline, context and expert parallel."""

    options: ClassVar[type[Section] | None] = MegatronOptions
    library: ClassVar[str | None] = "megatron"
    peer_names: ClassVar[tuple[str, ...]] = ("megatron",)
    shares_out: ClassVar[bool] = True
    replays_experts: ClassVar[bool] = True
    balances_experts: ClassVar[bool] = True
    splits_layers: ClassVar[bool] = True
    splits_sequences: ClassVar[bool] = True
    takes_any_model: ClassVar[bool] = False
    drops_out_adapters: ClassVar[bool] = False  # ranks would not drop out the same numbers
    has_full_logits: ClassVar[bool] = False
    scores_own_distributions: ClassVar[bool] = False
    learns_scores: ClassVar[bool] = False
    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "sgd")

    def sizes(self, section: Learner) -> GroupSizes:
        experts, one_expert = megatron_settings(section.engine_options).settings.experts.split(section.tensor_parallel)
        return GroupSizes(
            tensor=section.tensor_parallel,
            pipeline=section.pipeline_parallel,
            context=section.sequence_parallel,
            expert=experts,
            expert_tensor=one_expert,
        )

    def rests(self, section: Learner) -> tuple[str, ...]:
        leaves = megatron_settings(section.engine_options).settings.optimizer_offload or section.optimizer.offload
        return ("optimizer",) if leaves else ()

    def group_problems(self, sizes: GroupSizes, ranks: int, *, role: str, section: str) -> list[Problem]:
        """Experts are split within the devices that have the same layers."""
        stage = ranks // sizes.pipeline
        experts, one_expert = sizes.expert, sizes.expert_tensor
        if stage % (experts * one_expert) == 0:
            return []
        shared = f"{experts} that share them x {one_expert} that share each = {experts * one_expert}"
        what = f"the {role} has its experts on {stage} devices, which do not split into groups of {shared}"
        fits = [size for size in range(min(experts, stage), 0, -1) if stage % (size * one_expert) == 0]
        name = f"{section}.engine_options.{EXPERTS_OVER if fits else ONE_EXPERT_OVER}"
        return [Problem(what, fix=f"use {name}={fits[0] if fits else 1}", field=name)]

    def option_warnings(self, options: Mapping[str, Any], devices: int, role: str, compute_dtype: str) -> Iterator[str]:
        if role != "reference":  # which reads none: checks.warnings reports them
            yield from megatron_settings(options, role=role).warnings

    def problems(self, config: TrainingConfig, learners: Learners) -> Iterator[Problem]:
        return checks.problems(config, learners)

    def warnings(self, config: TrainingConfig, learners: Learners) -> Iterator[str]:
        return checks.warnings(config, learners)

    def unsupported(self, config: TrainingConfig, learners: Learners) -> Iterator[Problem]:
        return checks.unsupported(config, learners)

    def trained_memory(self, model: PlacedModel, *, trained: int, activations: int) -> RoleMemory:
        return estimates.trained_memory(model, trained=trained, activations=activations)

    def frozen_memory(self, model: PlacedModel) -> RoleMemory:
        weights = estimates.part(model.shape.parameters, model.place, model.shape)
        return RoleMemory(role=model.role, weights=weights * model.width)

    def update_traffic(self, model: PlacedModel, passes: Passes) -> list[Traffic]:
        return estimates.update_traffic(model, passes)

    def scoring_traffic(self, model: PlacedModel, purpose: str, passes: Passes) -> list[Traffic]:
        return estimates.split_traffic(model, purpose, passes)

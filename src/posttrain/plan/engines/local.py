"""The engine local: a whole model on one device, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from posttrain.config import TrainingConfig
from posttrain.errors import Problem
from posttrain.plan.engine import EnginePlan, Learners, engine_that
from posttrain.registry import ENGINE_PLANS


@ENGINE_PLANS.register("local")
class LocalPlan(EnginePlan):
    """One device."""

    peer_names: ClassVar[tuple[str, ...]] = ("local",)
    reads_options: ClassVar[bool] = False
    keeps_whole: ClassVar[bool] = True
    reads_images: ClassVar[bool] = True
    moves_reference: ClassVar[bool] = True
    replays_experts: ClassVar[bool] = True
    balances_experts: ClassVar[bool] = True
    scores_responses: ClassVar[bool] = True
    quantizes: ClassVar[bool] = True
    scales_losses: ClassVar[bool] = True
    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "sgd", "muon")

    def problems(self, config: TrainingConfig, learners: Learners) -> Iterator[Problem]:
        for role, section in learners:
            devices = config.placement.devices if section.devices is None else len(section.devices)
            if devices > 1:
                what = f"the {role} has {devices} devices, and {role}.engine={self.name} trains on one"
                other = engine_that(lambda plan: plan.shares_out)
                yield Problem(what, fix=f"use {role}.engine={other}, or {role}.devices=[0]", field=f"{role}.engine")

    def warnings(self, config: TrainingConfig, learners: Learners) -> Iterator[str]:
        for role, section in learners:
            if section.engine_options:
                names = ", ".join(section.engine_options)
                yield f"{role}.engine_options has no effect: the {self.name} engine reads none ({names})"

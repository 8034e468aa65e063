"""The interface through which a plan asks a training engine: how it splits a model, what that takes, what it can do.

A training engine is a folder in ``backends/train``, the code that trains, and a module of the same name in ``plan/engines``,
which registers a subclass of ``EnginePlan``. Nothing else in the package knows an engine by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.config import RunConfig, TrainingConfig, TuneConfig
from posttrain.config.base import Section
from posttrain.config.critic import CriticConfig
from posttrain.config.policy import ONE_DEVICE, LearnerConfig, OptimizerConfig
from posttrain.config.process_reward import PROCESS_REFERENCE, PROCESS_REWARD
from posttrain.config.roles import learner_of, teachers_of
from posttrain.errors import Problem
from posttrain.plan.memory import ADAM, AVERAGES, BYTES, RoleMemory
from posttrain.plan.model_shape import ModelShape
from posttrain.plan.placement import GroupSizes, RolePlacement
from posttrain.plan.traffic import Traffic
from posttrain.registry import ENGINE_PLANS

Learner = LearnerConfig | CriticConfig
Learners = Sequence[tuple[str, Learner]]  # trained roles, the policy first


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """A model on its devices: what estimates of memory and traffic are made from."""

    config: TrainingConfig
    place: RolePlacement
    shape: ModelShape

    @property
    def role(self) -> str:
        return self.place.role

    @property
    def ranks(self) -> int:
        return len(self.place.ranks)

    @property
    def width(self) -> int:
        """Bytes of a weight that is computed with."""
        return BYTES[self.config.model.compute_dtype]

    @property
    def master_width(self) -> int:
        """Bytes of a weight that is trained."""
        return BYTES[self.config.model.master_dtype]

    @property
    def averages(self) -> int:
        """Values that the optimizer keeps per trained weight."""
        return averages_of(learner_of(self.config, self.role).optimizer)

    @property
    def options(self) -> Mapping[str, Any]:
        return engine_options(self.config, self.role)


def averages_of(optimizer: OptimizerConfig) -> int:
    """Return how many values an optimizer keeps per trained weight."""
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 1 if optimizer.name == "muon" else AVERAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The passes that a device makes over a model in a step."""

    forward: int  # micro-batches
    directions: int = 1  # forward; backward; forward again, where activations are recomputed
    tokens: int  # of all copies' sequences, on each copy
    updates: int = 0


class EnginePlan:
    """A training engine, as a plan sees it. The defaults are those of an engine that a plan knows nothing about."""

    name: str
    options: ClassVar[type[Section] | None] = None  # None: options are handed to the engine unread
    reads_options: ClassVar[bool] = True
    library: ClassVar[str | None] = None  # an optional one that it needs, by its import name
    peer_names: ClassVar[tuple[str, ...]] = ()  # strategies of other dialects that mean this engine

    shares_out: ClassVar[bool] = False  # a model over several processes
    shards_any: ClassVar[bool] = False  # any model over any number of devices; one engine does
    keeps_whole: ClassVar[bool] = (
        False  # the model is whole in one process, so that a sampler there can read its weights
    )
    splits_layers: ClassVar[bool] = False  # their matrices, or the stack of them
    splits_sequences: ClassVar[bool] = False
    reads_images: ClassVar[bool] = False
    takes_any_model: ClassVar[bool] = True
    drops_out_adapters: ClassVar[bool] = True
    has_full_logits: ClassVar[bool] = True  # in one process, for losses over the whole vocabulary
    # Tokens drawn from a distribution of their own (another temperature, a grammar) are scored under it.
    scores_own_distributions: ClassVar[bool] = True
    saves_parts: ClassVar[bool] = True  # every process can write its own part of a checkpoint
    optimizers: ClassVar[tuple[str, ...]] = ("adamw",)
    scales_losses: ClassVar[bool] = False  # trains in float16
    replays_experts: ClassVar[bool] = False  # can send tokens to the experts that they had in another pass
    balances_experts: ClassVar[bool] = False  # has a loss that balances experts
    moves_reference: ClassVar[bool] = False  # the policy's weights can be mixed into the reference
    quantizes: ClassVar[bool] = False  # trains an adapter on 4-bit weights
    scores_responses: ClassVar[bool] = False  # computes the reward model
    learns_scores: ClassVar[bool] = True  # trains reward models: a head of one number, saved as a sequence classifier

    def sizes(self, section: Learner) -> GroupSizes:
        """Return the sizes of a role's groups, but data and shard, which depend on its devices."""
        return GroupSizes(
            tensor=section.tensor_parallel, pipeline=section.pipeline_parallel, sequence=section.sequence_parallel
        )

    def shard(self, options: Mapping[str, Any], ranks: int) -> int:
        """Return over how many ranks one copy of the weights is sharded."""
        return 1

    def shardings(self, devices_per_node: int) -> tuple[Mapping[str, Any], ...]:
        """Return the options worth trying for where one copy of the weights lies, on nodes of so many devices."""
        return ({},)

    def rests(self, section: Learner) -> tuple[str, ...]:
        """Return what leaves the device while other roles work there: weights, optimizer."""
        return ("optimizer",) if section.optimizer.offload else ()

    def offloaded(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a frozen model that rests in CPU memory (reference.offload)."""
        return options

    # Checks

    def group_problems(self, sizes: GroupSizes, ranks: int, *, role: str, section: str) -> list[Problem]:
        """Return what is wrong with a role's groups on so many ranks. Args: section of the configuration with its sizes."""
        return []

    def option_problems(self, options: Mapping[str, Any], ranks: int, role: str) -> list[Problem]:
        """Return what is wrong with a role's options, on so many devices."""
        return []

    def option_warnings(self, options: Mapping[str, Any], devices: int, role: str, compute_dtype: str) -> Iterator[str]:
        """Yield which of a role's options have no effect."""
        yield from ()

    def problems(self, config: TrainingConfig, learners: Learners) -> Iterator[Problem]:
        """Yield what this engine cannot do of what a run asks. Args: learners that it trains."""
        yield from ()

    def warnings(self, config: TrainingConfig, learners: Learners) -> Iterator[str]:
        """Yield which settings of the run have no effect with this engine. Args: learners that it trains."""
        yield from ()

    def unsupported(self, config: TrainingConfig, learners: Learners) -> Iterator[Problem]:
        """Yield what can be planned and not run. Args: learners that it trains."""
        yield from ()

    # Estimates

    def trained_memory(self, model: PlacedModel, *, trained: int, activations: int) -> RoleMemory:
        """Estimate the bytes on a device. Args: trained weights; bytes of activations."""
        # Otherwise weights are their own masters
        masters = model.master_width if model.width < model.master_width else 0
        states = (ADAM - AVERAGES) * model.master_width + masters + model.averages * model.master_width
        weights = even_part(model.shape.parameters, model.place) * model.width
        lora = learner_of(model.config, model.role).lora
        if lora is not None and lora.quantize is not None:
            weights = quantized_bytes(model.shape, model.width, scales_quantized=lora.quantize_scales)
            # One layer at a time is unpacked
            activations += model.shape.layer_parameters * model.width
        return RoleMemory(
            role=model.role,
            weights=weights,
            optimizer=even_part(trained, model.place) * states // model.place.sizes.shard,
            activations=activations,
        )

    def frozen_memory(self, model: PlacedModel) -> RoleMemory:
        """Estimate the bytes on a device of a model that is never trained."""
        return RoleMemory(role=model.role, weights=even_part(model.shape.parameters, model.place) * model.width)

    def update_traffic(self, model: PlacedModel, passes: Passes) -> list[Traffic]:
        """Estimate what a device receives for the updates of a step."""
        return []

    def scoring_traffic(self, model: PlacedModel, purpose: str, passes: Passes) -> list[Traffic]:
        """Estimate what a device receives for passes without gradient. Args: purpose, in words."""
        return []


def quantized_bytes(shape: ModelShape, width: int, *, scales_quantized: bool) -> int:
    """Estimate the bytes of a model whose layers are in 4 bits, with a scale per 64 weights: in float32, or in 8 bits with a
    float32 scale of 256 of them each. Embeddings and output layer keep ``width``."""
    per_scale = 1 + 4 / 256 if scales_quantized else 4
    return int(shape.layer_parameters * shape.layers * (0.5 + per_scale / 64)) + shape.outer_parameters * width


def even_part(parameters: int, place: RolePlacement) -> int:
    """Return a device's part of weights that tensor and pipeline parallel ranks share evenly."""
    return parameters // (place.sizes.tensor * place.sizes.pipeline)


def engine_plan(name: str) -> EnginePlan:
    """Return what is known about the engine of a name; of an engine from outside the package, the defaults."""
    found: EnginePlan = ENGINE_PLANS.get(name)() if name in ENGINE_PLANS.names() else EnginePlan()
    found.name = name
    return found


def engine_plans() -> tuple[EnginePlan, ...]:
    """Return all known engines, those that need nothing installed first."""
    found = [engine_plan(name) for name in ENGINE_PLANS.names()]
    return tuple(sorted(found, key=lambda plan: plan.library is not None))


def engine_that(can: Callable[[EnginePlan], bool]) -> str:
    """Return the name of an engine to recommend."""
    return next(plan.name for plan in engine_plans() if can(plan))


def engine_called(strategy: str, *, devices: int) -> str:
    """Return the engine for a peer's strategy: the one of its name, or on one device the one that splits nothing."""
    if devices == 1:
        return ONE_DEVICE
    if strategy in engine_plan(strategy).peer_names:  # most are called by our own name; then no other plan is loaded
        return strategy
    by_peer_name = {peer: plan.name for plan in engine_plans() for peer in plan.peer_names}
    return by_peer_name.get(strategy, strategy)


def is_split_as_policy(config: TrainingConfig, role: str) -> bool:
    """Tell whether a teacher is split over devices as the policy is: not on so few of its own that no copy of the policy fits on
    them."""
    devices, plan = teachers_of(config)[role].devices, engine_plan(config.policy.engine)
    if not devices:
        return True
    sizes = plan.sizes(config.policy)
    fits = len(devices) % sizes.per_copy == 0
    return fits and not plan.group_problems(sizes, len(devices), role=role, section="policy")


def teacher_engine(config: TrainingConfig, role: str) -> str:
    """Return the engine that computes a teacher: the policy's, or, where it is split otherwise, one that takes any number of
    devices."""
    if is_split_as_policy(config, role):
        return config.policy.engine
    if len(teachers_of(config)[role].devices or ()) == 1:
        return ONE_DEVICE
    return engine_that(lambda plan: plan.shards_any)


def engine_options(config: TrainingConfig, role: str) -> Mapping[str, Any]:
    """Return the options that a role's engine gets, in the engine's words."""
    teacher = teachers_of(config).get(role)
    if teacher is not None:
        options = teacher.engine_options
        return engine_plan(teacher_engine(config, role)).offloaded(options) if teacher.offload else options
    if role == "reward model" and isinstance(config, RunConfig) and config.reward.model is not None:
        model = config.reward.model
        return engine_plan(model.engine).offloaded(model.engine_options) if model.offload else model.engine_options
    if role == PROCESS_REFERENCE:
        return learner_of(config, PROCESS_REWARD).engine_options
    if role != "reference" or not isinstance(config, RunConfig | TuneConfig):
        return learner_of(config, role).engine_options
    given = config.reference.engine_options
    return engine_plan(config.policy.engine).offloaded(given) if config.reference.offload else given

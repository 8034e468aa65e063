"""Roles of megatron-core's ranks: ranks of one copy share matrices, layers and sequences; copies share the data.

Neighbours share a tensor-parallel group, then a sequence, then a stage's copies, then the pipeline, as placement.plan says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad
from transformers import PreTrainedModel

from posttrain.algos.balancing import balanced_parts
from posttrain.backends.torch_training.sharding import Row, Sharding
from posttrain.backends.train.megatron.without_cuda import on_this_machine
from posttrain.config import TrainingConfig
from posttrain.config.roles import learner_of
from posttrain.data.packing import PackedSequences
from posttrain.errors import ConfigError
from posttrain.models.packed_attention import shared_layout
from posttrain.models.sequence_parallel import SplitRow, collect, gathered
from posttrain.plan.engines.megatron.options import MegatronSettings, megatron_settings
from posttrain.records.partial_tensors import in_parts


class PolicyWeights(Protocol):
    """The policy's weights in Megatron's form (megatron.parts.ModelParts)."""

    pieces: dict[str, Parameter]

    def whole(
        self, parts: Mapping[str, Tensor], dtype: torch.dtype, *, frozen: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole tensors."""
        ...


class MegatronSharding(Sharding):
    """Initialises megatron-core's groups, which a process has only once: every model in it is sharded in the same way.

    Args: device of this process; compute_dtype of the layers; tensor, pipeline, context: ranks that share matrices, layers, a
        sequence.
    torch.distributed must be initialised.
    """

    starts_on_cpu = True
    splits_when_out_of_memory = False

    def __init__(
        self,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.float32,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        settings: MegatronSettings | None = None,
        timeout_s: float = 1800.0,
    ):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device, self.compute_dtype = device, compute_dtype
        self.settings = settings or MegatronSettings()
        self.tensor, self.pipeline, self.sequence = tensor, pipeline, context
        if not parallel_state.is_initialized():
            with on_this_machine():
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=tensor,
                    pipeline_model_parallel_size=pipeline,
                    context_parallel_size=context,
                    expert_model_parallel_size=self.settings.experts.parallel,
                    expert_tensor_parallel_size=self.settings.experts.tensor,
                    create_gloo_process_groups=False,
                    distributed_timeout_minutes=max(1, int(timedelta(seconds=timeout_s).total_seconds() // 60)),
                )
            if device.type == "cuda":  # its layers read the state of random numbers, but draw none
                model_parallel_cuda_manual_seed(0)
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.context_group = parallel_state.get_context_parallel_group()
        self.copies_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # Groups of ranks that together hold all experts of a layer, and of ranks with the same shard of them.
        self.experts_group = parallel_state.get_expert_tensor_and_model_parallel_group()
        self.expert_copies_group = parallel_state.get_expert_data_parallel_group()
        self.copies = parallel_state.get_data_parallel_world_size()
        self.first_stage = parallel_state.is_pipeline_first_stage()
        self.last_stage = parallel_state.is_pipeline_last_stage()
        self.policy: PolicyWeights | None = None  # set by the policy's engine

    @classmethod
    def of_run(cls, config: TrainingConfig, role: str, device: torch.device, compute_dtype: torch.dtype) -> Self:
        """Split a run's policy or critic over the processes that have met. Raises: ConfigError for options that cannot be."""
        section = learner_of(config, role)
        settings, problems, _ = megatron_settings(section.engine_options, role=role)
        if problems:
            raise ConfigError(problems)
        return cls(
            device,
            compute_dtype=compute_dtype,
            tensor=section.tensor_parallel,
            pipeline=section.pipeline_parallel,
            context=section.sequence_parallel,
            settings=settings,
            timeout_s=config.placement.call_timeout_s,
        )

    @property
    def sequence_parallel(self) -> bool:
        """Return True when tensor-parallel ranks split the tokens outside of the layers' matrices (arXiv:2205.05198)."""
        return self.settings.sequence_parallel and self.tensor > 1

    def weights(self, model: PreTrainedModel, *, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights; its Hugging Face model is only a shell by now."""
        assert self.policy is not None
        for name, tensor in self.policy.whole(self.policy.pieces, self.compute_dtype, frozen=frozen):
            yield name, tensor.cpu()

    def everything(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        return self.weights(model, frozen=True)

    def beside(self, options: Mapping[str, Any], role: str) -> MegatronSharding:
        return self

    def row(self, packed: PackedSequences, counted: Tensor | None = None) -> Row:
        """Return the tokens of this rank's context-parallel slice, padded at the end; padding is ignored.

        Args: counted [N] bool, the tokens at which losses of routers look.
        """
        share = self.tensor if self.sequence_parallel else 1
        filling = -len(packed.token_ids) % (share * self.sequence)
        filling += self._more_tokens(len(packed.token_ids) + filling)
        token_ids, position_ids = (pad(values, (0, filling)) for values in (packed.token_ids, packed.position_ids))
        counted = None if counted is None else pad(counted, (0, filling))
        # Padding has no experts
        experts = None if packed.experts is None else pad(packed.experts, (0, 0, 0, 0, 0, filling), value=-1)
        layout: Any = shared_layout([*packed.groups, *([(filling, ())] if filling else [])], packed.token_ids.device)
        if self.sequence == 1:
            return Row(
                token_ids=token_ids,
                position_ids=position_ids,
                layout=layout,
                predicting=packed.predicting,
                targets=packed.targets,
                experts=self._of_my_routers(experts),
                counted=self._of_my_routers(counted),
            )
        length = len(token_ids) // self.sequence
        first = self.context_group.rank() * length
        here = slice(first, first + length)
        places = ((packed.predicting >= first) & (packed.predicting < first + length)).nonzero()[:, 0]
        # Every rank must use every weight so that gradients can be reduced: without scored tokens, one score with weight 0.
        scored = places if len(places) else places.new_zeros(1)
        return Row(
            token_ids=token_ids[here],
            position_ids=position_ids[here],
            layout=SplitRow(layout, len(token_ids), self.context_group),
            predicting=packed.predicting[scored] - first if len(places) else scored,
            targets=packed.targets[scored],
            places=places,
            experts=self._of_my_routers(None if experts is None else experts[here]),
            counted=self._of_my_routers(None if counted is None else counted[here]),
        )

    def _of_my_routers(self, values: Tensor | None) -> Tensor | None:
        """Return the part of a slice's values, [n, ...], of the tokens that this rank's routers see."""
        if values is None or not self.sequence_parallel:
            return values
        return values.chunk(self.tensor)[self.tensor_group.rank()]

    def of_all_tokens(self, values: Tensor) -> Tensor:
        """Gather values of the tokens that each rank's routers see, [n, ...], to those of the row, on the CPU."""
        groups = [self.tensor_group] * self.sequence_parallel + [self.context_group] * (self.sequence > 1)
        for group in groups:
            values = gathered(values, group)
        return values.cpu()

    def added(self, values: Tensor, *, of_routers: bool = False) -> Tensor:
        """Add values over all ranks, on the CPU: of ranks with the same values, those of the first.

        Args: of_routers: values of the tokens that each rank's routers see, which differ over the ranks that share a sequence
            and over tensor-parallel ranks that share out its tokens; else all of these have the same.
        """
        out = values.to(self.device)
        alike = [] if of_routers else [self.context_group]
        alike += [] if of_routers and self.sequence_parallel else [self.tensor_group]
        if any(group.rank() != 0 for group in alike):
            out.zero_()
        dist.all_reduce(out)
        return out.cpu()

    def _more_tokens(self, count: int) -> int:
        """Return the padding that makes a row as long as the longest one gathered together with it."""
        if self.settings.experts.dispatcher != "allgather":
            return 0
        longest = torch.tensor(count, device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.experts_group)
        return int(longest) - count

    def collected(self, values: Tensor, row: Row, packed: PackedSequences) -> Tensor:
        if row.places is None:
            return values
        return collect(values[: len(row.places)], row.places, len(packed.targets), self.context_group)

    def deal(self, parts: list[list[int]], loads: Sequence[int]) -> list[list[int]]:
        """Balance by Karmarkar-Karp: equally many micro-batches for every copy, of nearly equal total tokens. With virtual stages
        their number is a multiple of the stages."""
        together = self.pipeline if self.settings.interleaved else 1
        missing = -len(parts) % (self.copies * together)
        filled, weights = parts + [[]] * missing, [*loads, *[0] * missing]
        mine = balanced_parts(weights, self.copies, equal_size=True)[parallel_state.get_data_parallel_rank()]
        return [filled[part] for part in mine]

    def joined(self, values: Tensor, rows: Sequence[int], count: int) -> Tensor:
        """Join values, which the last stage knows; one rank of each copy broadcasts them to all."""

        def whole() -> Tensor:
            out = Sharding.joined(self, values, rows, count).to(self.device)
            if not self._speaks:
                out.zero_()
            dist.all_reduce(out)
            return out.cpu()

        own = slice(None if self._speaks else 0)
        return in_parts(values[own], rows[own], count, whole)

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        everyone: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        dist.all_gather_object(everyone, dict(sums) if self._speaks else {})
        names = {name for each in everyone for name in each}
        return {name: sum(each.get(name, 0.0) for each in everyone) for name in sorted(names)}

    @property
    def _speaks(self) -> bool:
        return self.last_stage and self.tensor_group.rank() == 0 and self.context_group.rank() == 0

    def wait(self) -> None:
        dist.barrier()

"""Construction of the model that a run trains to reward tokens, with its frozen reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.torch_training.start import choose_kernels, how, rates, shares_prompts, stored_weights
from posttrain.config import RunConfig
from posttrain.config.config_apart import overrides_of
from posttrain.config.process_reward import PROCESS_REFERENCE
from posttrain.interfaces.roles import ProcessRewardModel
from posttrain.interfaces.train_engine import TrainEngine
from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
from posttrain.models.start_layers import fuse_on_cpu
from posttrain.models.vocabularies import check_same_tokens
from posttrain.plan.batch import process_sequences_per_update
from posttrain.plan.engine import engine_options
from posttrain.records.batch_plans import BatchPlan
from posttrain.records.notices import Notices
from posttrain.registry import TRAIN_ENGINES


def start_process_reward(
    config: RunConfig,
    batches: BatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    notices: Notices,
    sharding: Sharding | None = None,
) -> ProcessRewardModel | None:
    """Build the process reward model and its frozen reference, when the reward has one.

    Args: sharding, when several processes make this call, shards both over them.
    Raises: ModelError for weights with another vocabulary than the policy's.
    """
    process = config.reward.process
    if process is None:
        return None
    assert batches.schedule_steps is not None, "the number of steps is planned from the data"
    path = process.path or config.model.path
    start = partial(_load_beside, config, path, "reward.process.path", tokenizer)
    frozen = partial(
        _load_beside, config, process.reference_path or path, "reward.process.reference_path", tokenizer, device=device
    )
    compute = DTYPES[config.model.compute_dtype]
    if sharding is None:
        model = start(dtype=compute, device=device)
    else:
        first = torch.device("cpu") if sharding.starts_on_cpu else device
        model = start(dtype=DTYPES[config.model.master_dtype], device=first)
    choose_kernels(model, config.model)
    reference = frozen(dtype=compute).requires_grad_(False)
    fuse_on_cpu(reference, config.model)  # as the model, so that equal weights give equal log-probs
    updates = -(-batches.sequences_per_step // process_sequences_per_update(config, batches))
    engine = TRAIN_ENGINES.get(config.policy.engine)
    size = process.sequences_per_micro_batch
    trained: TrainEngine = engine(
        model,
        tokenizer,
        optimizer=process.optimizer,
        **rates(process, batches.schedule_steps * updates, updates),
        sequences_per_micro_batch=size,
        sequences_per_scoring_batch=size,
        gradient_checkpointing=process.gradient_checkpointing,
        **how(config, notices, sharding, None if sharding else stored_weights(config.model, path, start)),
    )
    beside = sharding.beside(engine_options(config, PROCESS_REFERENCE), PROCESS_REFERENCE) if sharding else None
    scorer: LogprobScorer = engine.scorer(
        reference, size, shares_prompts(config), None, padded=config.model.padded, sharding=beside
    )
    if beside is not None:
        beside.wrap(reference)  # after its head has been detected
    return ProcessRewardModel(engine=trained, reference=scorer)


def _load_beside(
    config: RunConfig,
    path: str,
    field: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> PreTrainedModel:
    """Load a causal language model that reads the policy's token ids."""
    own = path != config.model.path
    if own:
        apart: dict[str, Any] = {"path": path, "tokenizer_path": None, "config_overrides": {}, "config_path": None}
        found = load_tokenizer(config.model.model_copy(update=apart | {"chat_template_file": None}), field=field)
        check_same_tokens(tokenizer, found, field)
    return load_causal_lm(
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        config_overrides=None if own else overrides_of(config.model),
        field=field if own else "model.path",
    )

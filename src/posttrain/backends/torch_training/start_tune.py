"""Construction of the models of a tuning run as engines from its configuration, for every runtime."""

from __future__ import annotations

from functools import partial

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.torch_training.sharding import Sharding
from posttrain.backends.torch_training.start import (
    how,
    load_score_model,
    rates,
    start_sft_policy,
    stored_weights,
)
from posttrain.config import TuneConfig
from posttrain.interfaces.train_engine import ScoreEngine, TrainEngine
from posttrain.models.value_head import is_derived, write_pad_token
from posttrain.records.batch_plans import SftBatchPlan
from posttrain.records.notices import Notices
from posttrain.registry import VALUE_ENGINES


def start_tuned(
    config: TuneConfig,
    batches: SftBatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    notices: Notices,
    sharding: Sharding | None = None,
) -> TrainEngine | ScoreEngine:
    """Build the engine of the model that is tuned, which ``load_policy`` has loaded.

    The tokenizer's padding token is written into a score model's configuration: transformers looks for it to find the last
    token of a row.

    Args: sharding, when several processes make this call, shards it over them.
    """
    if not config.method.scored:
        return start_sft_policy(config, batches, tokenizer, model, notices, sharding)
    learner = config.policy
    assert batches.schedule_updates is not None
    whole = sharding is None and not learner.lora
    load = partial(load_score_model, config.model)
    write_pad_token(model, tokenizer)
    name = type(model).__name__
    if is_derived(model):
        notices.add(
            f"transformers has no {name}: runs here read this reward model as reward.model.path, and "
            "AutoModelForSequenceClassification does not load it"
        )
    elif not name.endswith("ForSequenceClassification"):
        notices.add(
            f"the head of {config.model.path} has a bias, which transformers' sequence classifiers drop: this reward model is "
            f"written as {name}, for AutoModelForTokenClassification; its score is the number at the last token"
        )
    engine: ScoreEngine = VALUE_ENGINES.get(learner.engine)(
        model,
        tokenizer,
        optimizer=learner.optimizer,
        **rates(learner, batches.schedule_updates, batches.updates_per_step),
        sequences_per_micro_batch=batches.sequences_per_micro_batch_per_device,
        max_tokens_per_micro_batch=batches.max_tokens_per_micro_batch,
        gradient_checkpointing=config.model.gradient_checkpointing,
        activation_offload=config.model.activation_offload,
        **how(config, notices, sharding, stored_weights(config.model, config.model.path, load) if whole else None),
    )
    return engine

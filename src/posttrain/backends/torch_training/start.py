"""Construction of a run's models as engines from its configuration, for every runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.reward_model.local import LocalRewardModel
from posttrain.backends.torch_training.moving_reference import MovingReference
from posttrain.backends.torch_training.rates import Rates
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.config import RunConfig, SftConfig, TrainingConfig, TuneConfig
from posttrain.config.config_apart import overrides_of
from posttrain.config.critic import CriticConfig
from posttrain.config.model import ModelConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.process_reward import ProcessRewardConfig
from posttrain.config.roles import compares_vocabularies, uses_reference
from posttrain.errors import ConfigError, Problem
from posttrain.interfaces.reward import RewardModel
from posttrain.interfaces.train_engine import TrainEngine, ValueEngine
from posttrain.libraries.cores import threads_of_a_process
from posttrain.models.cpu_products import choose_float32_products
from posttrain.models.frozen import freeze
from posttrain.models.liger import use_liger
from posttrain.models.loading import DTYPES, load_causal_lm, load_model_config
from posttrain.models.lora import adapter_off, add_adapter
from posttrain.models.reward_model import load_reward_model, load_reward_tokenizer
from posttrain.models.routing import routers_of
from posttrain.models.start_layers import fuse_on_cpu
from posttrain.models.value_head import head_name, load_value_model, value_head
from posttrain.models.vision import freeze_vision
from posttrain.plan.engine import engine_options
from posttrain.records.batch_plans import BatchPlan, SftBatchPlan
from posttrain.records.notices import Notices
from posttrain.registry import TRAIN_ENGINES, VALUE_ENGINES


def load_policy(
    config: TrainingConfig, device: torch.device | None = None, *, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, torch.device]:
    """Load the trained model, with its adapter if it gets one, on its device (None: by the configuration): a causal language
    model, or for a tuning method that learns scores one with a head of one number.

    Args: dtype of the weights; None is the compute dtype, but a sharded model needs that of its masters.
    """
    device = prepare_device(config) if device is None else device
    if device.type == "cpu" and config.model.fast_float32:
        choose_float32_products()
    torch.manual_seed(config.run.seed)
    scored = isinstance(config, TuneConfig) and config.method.scored
    load = load_score_model if scored else _load_model
    quantized = config.policy.lora is not None and config.policy.lora.quantize is not None
    # Whole weights of a model that is rounded to 4 bits need not fit into the device.
    whole_at = torch.device("cpu") if quantized else device
    model = load(config.model, dtype=dtype or DTYPES[config.model.compute_dtype], device=whole_at)
    if config.model.freeze_vision:
        freeze_vision(model)
    if config.model.freeze:
        freeze(model, config.model.freeze)
    choose_kernels(model, config.model)
    if config.policy.lora:
        add_adapter(model, config.policy.lora, seed=config.run.seed, head=head_name(model) if scored else None)
    model.to(device)  # type: ignore[arg-type]  # transformers hides the method's type behind a wrapper
    return model, device


def prepare_device(config: TrainingConfig) -> torch.device:
    """Return the device of a run in one process; on a CPU, take the number of threads that the configuration gives."""
    device = pick_device(config.placement.device)
    if device.type == "cpu":
        torch.set_num_threads(threads_of_a_process(config.placement.cpu_threads))
        if config.model.fast_float32:
            choose_float32_products()
    return device


def load_score_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    """Load a model as transformers' sequence classification class with one label. A causal language model gets a new head of
    zeros, so that every first score is 0; a classifier keeps its own."""
    return load_value_model(
        config.path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
        config_overrides=overrides_of(config),
        field="model.path",
        of_sequences=True,
    )


def _load_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    return load_causal_lm(
        config.path,
        dtype=dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
        config_overrides=overrides_of(config),
    )


def choose_kernels(model: PreTrainedModel, config: ModelConfig) -> None:
    """Replace the layers of a trained model by fused ones, as configured."""
    if config.liger:
        use_liger(model)
    else:
        fuse_on_cpu(model, config)


def stored_weights(
    config: ModelConfig, path: str, load: Callable[..., PreTrainedModel]
) -> Callable[[], Mapping[str, Tensor]] | None:
    """Return a function that reads the starting values of the masters: the weights in ``path`` at their stored precision, on the
    CPU, since the model's are rounded to the compute dtype. None where they are stored at that precision only.

    Args: load(dtype=..., device=...) reads the model.
    """
    compute = DTYPES[config.compute_dtype]
    if load_model_config(path, config.trust_remote_code).dtype == compute or compute == torch.float32:
        return None
    return lambda: load(dtype=torch.float32, device="cpu").state_dict()


def start_policy(
    config: RunConfig,
    batches: BatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    notices: Notices,
    sharding: Sharding | None = None,
    *,
    with_reference: bool = True,
    teachers: Mapping[str, LogprobScorer] | None = None,
) -> tuple[TrainEngine, LogprobScorer | None]:
    """Build the policy and, when the run needs it, the frozen reference (unless that has processes of its own).

    Args: sharding, when several processes make this call, shards the policy and the reference over them; teachers that are
        computed beside the policy, by name.
    """
    engine = TRAIN_ENGINES.get(config.policy.engine)
    assert batches.schedule_updates is not None
    reference = None
    if with_reference and uses_reference(config):
        reference = start_reference(config, model.device, model, sharding)
    policy: TrainEngine = engine(
        model,
        tokenizer,
        optimizer=config.policy.optimizer,
        **rates(config.policy, batches.schedule_updates, batches.updates_per_step),
        sequences_per_micro_batch=batches.sequences_per_micro_batch_per_device,
        sequences_per_scoring_batch=config.reference.sequences_per_micro_batch_per_device,
        max_tokens_per_micro_batch=batches.max_tokens_per_micro_batch,
        max_tokens_per_scoring_batch=config.reference.max_tokens_per_micro_batch,
        reference=reference if compares_vocabularies(config) else None,
        **_moving(config, reference),
        **_routers(config, model),
        **({"teachers": teachers} if teachers else {}),
        gradient_checkpointing=config.model.gradient_checkpointing,
        activation_offload=config.model.activation_offload,
        **how(config, notices, sharding, policy_stored(config, sharding)),
    )
    return policy, reference


def _routers(config: RunConfig, model: PreTrainedModel) -> dict[str, Any]:
    """Return the argument of engines that replay experts, or balance them. Before the model is sharded: its routers
    are tried out."""
    asked = {
        "rollout.routing_replay": config.rollout.routing_replay,
        "policy.routing_replay": config.policy.routing_replay,
        "loss.router_balance_coef": config.loss.router_balance_coef,
    }
    field = next((name for name, value in asked.items() if value), None)
    return {"routers": routers_of(model, field)} if field else {}


def _moving(config: RunConfig, reference: LogprobScorer | None) -> dict[str, Any]:
    """Return the argument of engines whose policy the reference follows."""
    if config.reference.update_every is None or reference is None:
        return {}
    return {"moving_reference": MovingReference(reference.model, reference.sharding)}


def start_sft_policy(
    config: SftConfig,
    batches: SftBatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    notices: Notices,
    sharding: Sharding | None = None,
    *,
    teachers: Mapping[str, LogprobScorer] | None = None,
) -> TrainEngine:
    """Build the policy of supervised fine-tuning, which is validated in micro-batches of the training size.

    Args: sharding, when several processes make this call, shards it over them; teachers as in ``start_policy``.
    """
    learner = config.policy
    assert batches.schedule_updates is not None
    policy: TrainEngine = TRAIN_ENGINES.get(learner.engine)(
        model,
        tokenizer,
        optimizer=learner.optimizer,
        **rates(learner, batches.schedule_updates, batches.updates_per_step),
        sequences_per_micro_batch=batches.sequences_per_micro_batch_per_device,
        max_tokens_per_micro_batch=batches.max_tokens_per_micro_batch,
        sequences_per_scoring_batch=learner.sequences_per_micro_batch_per_device,
        max_tokens_per_scoring_batch=batches.max_tokens_per_micro_batch,
        **({"teachers": teachers} if teachers else {}),
        gradient_checkpointing=config.model.gradient_checkpointing,
        activation_offload=config.model.activation_offload,
        **how(config, notices, sharding, policy_stored(config, sharding)),
    )
    return policy


def start_reference(
    config: RunConfig | TuneConfig,
    device: torch.device,
    policy: PreTrainedModel | None,
    sharding: Sharding | None = None,
) -> LogprobScorer:
    """Build the frozen reference: a model of its own, or the policy's without its adapter. Without a policy in this process
    (None) it is a model of its own.

    With several processes it is sharded as well, except where the loss compares whole vocabularies: it then runs within the
    policy's forward pass, so every process has all of it.
    """
    start = config.reference.path or config.model.path
    shares = policy is not None and config.policy.lora is not None and start == config.model.path
    full_kl = isinstance(config, RunConfig) and compares_vocabularies(config)
    if sharding is not None and not shares:
        sharding = sharding.beside(engine_options(config, "reference"), "reference")
    own = policy
    if own is None or not shares:
        own = load_causal_lm(
            start,
            dtype=DTYPES[config.model.compute_dtype],
            device=device,
            trust_remote_code=config.model.trust_remote_code,
            config_overrides=overrides_of(config.model) if start == config.model.path else None,
        ).requires_grad_(False)
        fuse_on_cpu(own, config.model)  # as the policy, so that equal weights give equal log-probs
    reference: LogprobScorer = TRAIN_ENGINES.get(config.policy.engine).scorer(
        own,
        config.reference.sequences_per_micro_batch_per_device,
        shares_prompts(config),
        config.reference.max_tokens_per_micro_batch,
        padded=config.model.padded,
        weights=partial(adapter_off, own) if shares else nullcontext,
        rests_on_cpu=config.reference.offload and not shares and not full_kl and sharding is None,
        sharding=None if full_kl else sharding,
    )
    if sharding is not None and not shares and not full_kl:
        sharding.wrap(own)  # after its head has been detected
    return reference


def rates(
    learner: LearnerConfig | CriticConfig | ProcessRewardConfig, total_updates: int, updates_per_step: int
) -> dict[str, Any]:
    """Return the arguments of an engine that are about its rates."""
    found = Rates(learner.optimizer, learner.schedule, total_updates, updates_per_step)
    return {
        "learning_rate_factor": found.factor,
        "weight_decay": found.weight_decay,
        "updates_per_step": found.updates_per_move,
        "rates": found,
    }


def shares_prompts(config: TrainingConfig) -> bool:
    """Tell whether rows of one group share the computation of their prompt: samples of a prompt, the sides of a pair."""
    return config.policy.share_prompts if isinstance(config, RunConfig) else isinstance(config, TuneConfig)


def how(
    config: TrainingConfig,
    notices: Notices,
    sharding: Sharding | None = None,
    stored: Callable[[], Mapping[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Return the compute settings common to all trained models."""
    shared: dict[str, Any] = {
        "share_prompts": shares_prompts(config),
        "padded": config.model.padded,
        "compile_layers": config.model.compile,
        "master_dtype": DTYPES[config.model.master_dtype],
        "loss_scaling": config.model.compute_dtype == "float16",
        "seed": config.run.seed,
        "notices": notices,
    }
    given = {"sharding": sharding, "stored_weights": stored}
    return shared | {name: value for name, value in given.items() if value is not None}


def policy_stored(config: TrainingConfig, sharding: Sharding | None) -> Callable[[], Mapping[str, Tensor]] | None:
    """Return ``stored_weights``; None for a sharded model, loaded in its masters' precision, and for a new adapter."""
    if sharding is not None or config.policy.lora:
        return None
    return stored_weights(config.model, config.model.path, partial(_load_model, config.model))


def start_critic(
    config: RunConfig,
    batches: BatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    notices: Notices,
    sharding: Sharding | None = None,
) -> ValueEngine:
    """Build the critic, from its own weights or from the policy's starting weights with a new value head."""
    plan, critic = batches.critic, config.critic
    assert plan is not None and batches.schedule_steps is not None
    path = critic.path or config.model.path
    load = partial(
        load_value_model,
        path,
        trust_remote_code=config.model.trust_remote_code,
        config_overrides={**({} if critic.path else overrides_of(config.model)), **critic.config_overrides},
        field="critic.path" if critic.path else "model.path",
    )
    model = load(
        dtype=DTYPES[config.model.compute_dtype if sharding is None else config.model.master_dtype],
        device="cpu" if sharding and sharding.starts_on_cpu else device,
    )
    whole = sharding is None and not critic.lora
    stored = stored_weights(config.model, path, load) if whole else None
    if critic.freeze_vision:
        freeze_vision(model, "critic.freeze_vision")
    if critic.freeze:
        freeze(model, critic.freeze, "critic.freeze")
        value_head(model).requires_grad_(True)
    choose_kernels(model, config.model)
    if critic.lora:
        add_adapter(model, critic.lora, seed=config.run.seed, head=head_name(model), field="critic.lora")
    engine: ValueEngine = VALUE_ENGINES.get(critic.engine)(
        model,
        tokenizer,
        optimizer=critic.optimizer,
        **rates(critic, batches.schedule_steps * plan.updates_per_step, plan.updates_per_step),
        sequences_per_micro_batch=plan.sequences_per_micro_batch_per_device,
        max_tokens_per_micro_batch=critic.max_tokens_per_micro_batch,
        gradient_checkpointing=critic.gradient_checkpointing,
        activation_offload=critic.activation_offload,
        **how(config, notices, sharding, stored),
    )
    return engine


def start_reward_model(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, sharding: Sharding | None = None
) -> RewardModel | None:
    """Build the reward model, when the reward has one. Shards are float32, and gathered in the compute precision."""
    model = config.reward.model
    if model is None:
        return None
    loaded = load_reward_model(
        model,
        dtype=DTYPES[config.model.compute_dtype] if sharding is None else torch.float32,
        device="cpu" if sharding and sharding.starts_on_cpu else device,
    )
    if sharding is not None:
        sharding.wrap(loaded)
    return LocalRewardModel(
        loaded,
        load_reward_tokenizer(model, tokenizer),
        sequences_per_micro_batch=model.sequences_per_micro_batch_per_device,
        max_tokens=model.max_tokens,
        truncation=model.truncation,
        device=device,
        rests_on_cpu=model.offload and sharding is None,
        sharding=sharding,
    )


def pick_device(wanted: str) -> torch.device:
    """Return the device of a run.

    Raises: ConfigError when cuda is requested and torch sees none.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError(
            Problem("torch sees no CUDA device on this machine", fix="use auto or cpu", field="placement.device")
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")

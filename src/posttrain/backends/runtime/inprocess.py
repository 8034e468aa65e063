"""One device: every role lives in this process, and sampler and trainer share one set of weights."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.backends.serving.launch import LaunchedServer
from posttrain.backends.serving.start import make_sampler, start_judges, start_weight_sync
from posttrain.backends.serving.thread_crew import crew_of_servers
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.start import (
    load_policy,
    pick_device,
    start_critic,
    start_policy,
    start_reference,
    start_reward_model,
    start_sft_policy,
)
from posttrain.backends.torch_training.start_process_reward import start_process_reward
from posttrain.backends.torch_training.start_teachers import asked_before, served_teachers, start_teachers
from posttrain.backends.torch_training.start_tune import start_tuned
from posttrain.config import RunConfig, SftConfig, TrainingConfig, TuneConfig
from posttrain.config.config_apart import overrides_of
from posttrain.config.generate import GenerateConfig
from posttrain.config.model import ModelConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.roles import needs_ref_logprobs, shares_weights, uses_reference
from posttrain.config.serve import ServeConfig
from posttrain.interfaces.roles import Learner, Roles, Tuned
from posttrain.interfaces.rollout_engine import NodeSpan, RolloutEngine
from posttrain.libraries.cores import threads_of_a_process
from posttrain.models.cpu_products import choose_float32_products
from posttrain.models.loading import DTYPES, load_causal_lm
from posttrain.models.work import work_of
from posttrain.records.batch_plans import BatchPlan, SftBatchPlan
from posttrain.records.notices import Notices
from posttrain.registry import RUNTIMES


@RUNTIMES.register("inprocess")
class InProcess:
    """See interfaces.roles.Runtime."""

    def start(self, config: RunConfig, batches: BatchPlan, tokenizer: PreTrainedTokenizerBase) -> Roles:
        model, device = load_policy(config)
        notices = Notices()
        teachers = start_teachers(config, tokenizer, device)
        policy, reference = start_policy(config, batches, tokenizer, model, notices, teachers=_beside(config, teachers))
        rollout = make_sampler(
            config.rollout,
            config.model,
            lambda: model,
            tokenizer,
            device=device,
            seed=config.run.seed,
            max_prompt_tokens=config.context_tokens,
            lora=config.policy.lora,
            image_options=config.data.image_options,
        )
        critic = start_critic(config, batches, tokenizer, device, notices) if batches.critic else None
        sync = start_weight_sync(
            config.rollout, model, tokenizer, device=device, lora=config.policy.lora, tell=notices.add
        )
        judge = start_judge_here(config, device)
        apart = config.asynchronous.mode == "separate" and not shares_weights(config.rollout.engine)
        return Roles(
            policy=policy,
            rollout=rollout,
            weight_sync=sync,
            crew=crew_of_servers(config.rollout.engine, rollout, sync) if apart else None,
            reference=reference if needs_ref_logprobs(config) else None,
            notes=tuple(role.note for role in (policy, critic, reference, rollout) if role is not None and role.note),
            teachers=asked_before(config, teachers, served_teachers(config, tokenizer)),
            critic=critic,
            process_reward=start_process_reward(config, batches, tokenizer, device, notices),
            reward_servers=(judge.address,) if judge else (),
            close=judge.close if judge else lambda: None,
            reward_model=start_reward_model(config, tokenizer, device),
            judges=start_judges(config, device),
            device=str(device),
            notices=notices,
            work=work_of(model, shares_prompts=config.policy.share_prompts),
        )

    def start_tune(self, config: TuneConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase) -> Tuned:
        model, device = load_policy(config)
        notices = Notices()
        engine = start_tuned(config, batches, tokenizer, model, notices)
        reference = start_reference(config, device, model) if uses_reference(config) else None
        notes = tuple(role.note for role in (engine, reference) if role is not None and role.note)
        return Tuned(engine=engine, reference=reference, device=str(device), notices=notices, notes=notes)

    def start_sft(self, config: SftConfig, batches: SftBatchPlan, tokenizer: PreTrainedTokenizerBase) -> Learner:
        model, device = load_policy(config)
        notices = Notices()
        teachers = start_teachers(config, tokenizer, device)
        policy = start_sft_policy(config, batches, tokenizer, model, notices, teachers=_beside(config, teachers))
        notes = (policy.note,) if policy.note else ()
        asked = asked_before(config, teachers, served_teachers(config, tokenizer))
        return Learner(policy=policy, teachers=asked, device=str(device), notices=notices, notes=notes)


def start_judge_here(config: RunConfig, device: torch.device) -> LaunchedServer | None:
    """Start the server of a model that reward functions ask; None without one."""
    if config.reward.served is None:
        return None
    from posttrain.backends.serving.reward_server import start_reward_server

    return start_reward_server(config, config.reward.served, cuda=device.type == "cuda", host="127.0.0.1")


def _beside(config: TrainingConfig, teachers: dict[str, LogprobScorer]) -> dict[str, LogprobScorer]:
    """Return the teachers that are computed inside the policy's forward pass."""
    return teachers if config.distillation.beside_the_student else {}


def prepare_sampling_device(placement: PlacementConfig, model: ModelConfig) -> torch.device:
    """Return the device of a server or a generation; on a CPU, take the number of threads that the configuration gives."""
    device = pick_device(placement.device)
    if device.type == "cpu":
        torch.set_num_threads(threads_of_a_process(placement.cpu_threads))
        if model.fast_float32:
            choose_float32_products()
    return device


def start_sampler(
    config: GenerateConfig | ServeConfig | RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    span: NodeSpan | None = None,
) -> tuple[RolloutEngine, torch.device]:
    """A sampler with a model of its own, for a run that trains nothing. Args: ``span``, of a server over several machines."""
    device = prepare_sampling_device(config.placement, config.model)

    def load() -> PreTrainedModel:
        return load_causal_lm(
            config.model.path,
            dtype=DTYPES[config.model.compute_dtype],
            device=device,
            trust_remote_code=config.model.trust_remote_code,
            config_overrides=overrides_of(config.model),
        ).requires_grad_(False)

    engine = make_sampler(
        config.rollout,
        config.model,
        load,
        tokenizer,
        device=device,
        seed=0,  # of the server's own random numbers; every request has its seed
        max_prompt_tokens=config.context_tokens if isinstance(config, RunConfig) else config.data.max_prompt_tokens,
        span=span,
    )
    return engine, device

"""The roles of a run, as its configuration alone decides them: which are trained, where they run, what they need."""

from __future__ import annotations

from typing import Literal

from posttrain.config import RunConfig, TrainingConfig, TuneConfig
from posttrain.config.critic import CriticConfig
from posttrain.config.distillation import ROLE, TeacherConfig
from posttrain.config.judge import shows_reference
from posttrain.config.lora import LoraConfig
from posttrain.config.placement import PlacementConfig
from posttrain.config.policy import LearnerConfig
from posttrain.config.process_reward import PROCESS_REWARD, ProcessRewardConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.registry import ROLLOUT_ENGINES

# Inputs of advantage estimators that are numbers of single tokens
TOKEN_INPUTS = frozenset(
    {"values", "old_logprobs", "ref_logprobs", "token_rewards", "token_scores", "process_rewards", "sum_pi_squared"}
)

VLLM_LARGEST_RANK = 512  # of adapters


def draws_no_prompts(config: RunConfig) -> bool:
    """Return True for a run that only validates, and names no training data."""
    generated = config.environment.train_episodes is not None
    return config.validation.only and not config.data.train_files and not generated


def needs_values(config: RunConfig) -> bool:
    """Tell whether the advantage estimator reads values, so that the run has a critic; False for an unknown name. Of values that
    it can do without, a critic is there where critic.path names one."""
    about = config.advantage.about
    reads = "values" in about.inputs and ("values" not in about.optional or config.critic.path is not None)
    return reads and not config.distillation.alone


def needs_old_logprobs(config: RunConfig) -> bool:
    """Tell whether a run reads the trainer's log-probs of a step from before its first update, however many updates follow."""
    correction = config.loss.rollout_correction
    estimator = "old_logprobs" in config.advantage.about.inputs and not config.distillation.alone
    redraws = config.resampling.redraws  # records are of rows that the update may not see
    weighs = correction.weights != "none" and correction.proximal == "recompute"
    corrects = weighs or bool(correction.reject)
    return estimator or redraws or penalizes_with_old_logprobs(config) or config.reward.kl.coef > 0 or corrects


def penalizes_with_old_logprobs(config: RunConfig) -> bool:
    """Tell whether a divergence of sampled tokens is taken from advantages by the trainer's own log-probs."""
    section = config.distillation
    as_advantage = section.used and section.enters == "advantage" and section.of_sampled_tokens
    return as_advantage and not config.loss.rollout_correction.use_rollout_logprobs


def replaces_old_logprobs(config: RunConfig) -> bool:
    """Tell whether the ratio of the loss does without the trainer's log-probs from before the first update."""
    correction = config.loss.rollout_correction
    return correction.use_rollout_logprobs or correction.proximal == "loglinear"


def several_updates(config: RunConfig) -> bool:
    """Tell whether a step makes more than one update of the policy."""
    mini_batch = config.policy.sequences_per_mini_batch
    sequences = config.data.prompts_per_step * config.rollout.samples_per_prompt
    return config.policy.epochs_per_step > 1 or (mini_batch is not None and mini_batch != sequences)


def scores_tokens_before(config: RunConfig) -> bool:
    """Tell whether the policy scores a step before its first update, however many updates follow."""
    return needs_old_logprobs(config) or config.loss.high_entropy_share is not None


def driver_reads_tokens(config: RunConfig) -> bool:
    """Tell whether the driver's own stages handle every token: turns, estimators that compare tokens, corrections, the choice of
    tokens, teachers' answers. Otherwise tokens stay with the workers, and the driver knows where they are."""
    turns = config.environment.used or config.asynchronous.mode in ("colocate", "separate")
    correction, about = config.loss.rollout_correction, config.advantage.about
    corrects = correction.weights != "none" or bool(correction.reject)
    estimates = not TOKEN_INPUTS.isdisjoint(about.inputs) and not about.facts.by_rows
    redraws = config.resampling.redraws
    chooses = config.loss.high_entropy_share is not None
    return turns or corrects or estimates or redraws or chooses or config.distillation.used


def chooses_before(config: RunConfig) -> bool:
    """Tell whether the policy scores every mini-batch before its update, so that a loss can choose among all of its tokens: where
    it is learned from in several pieces."""
    policy, about = config.policy, config.loss.about
    if not about.facts.chooses_tokens:
        return False
    mini_batch = policy.sequences_per_mini_batch or config.data.prompts_per_step * config.rollout.samples_per_prompt
    if policy.max_tokens_per_micro_batch is not None:
        most_tokens = mini_batch * (config.data.max_prompt_tokens + config.rollout.max_response_tokens)
        in_one_piece = policy.max_tokens_per_micro_batch >= most_tokens
    else:
        in_one_piece = policy.sequences_per_micro_batch_per_device >= mini_batch
    return not in_one_piece or config.placement.devices > 1 or config.environment.used


def uses_reference(config: TrainingConfig) -> bool:
    """Tell whether a reference scores samples or rows: for a KL in the loss or the reward, for an advantage, or for a
    tuning method."""
    if not isinstance(config, RunConfig):
        return isinstance(config, TuneConfig) and config.runs_reference and not releases_reference(config)
    return config.loss.kl_coef > 0 or config.reward.kl.coef > 0 or compares_with_reference(config)


def compares_with_reference(config: RunConfig) -> bool:
    """Tell whether the advantage estimator reads the reference's log-probs."""
    return "ref_logprobs" in config.advantage.about.inputs and not config.distillation.alone


def releases_reference(config: TuneConfig) -> bool:
    """Tell whether the reference scores all rows and is released before the policy is loaded: in a run without workers."""
    return config.scores_before and runtime_of(config.placement) != "ray"


def compares_vocabularies(config: RunConfig) -> bool:
    """Tell whether a KL over the whole vocabulary is part of the loss or of the reward: the policy's engine computes it, beside
    the reference."""
    loss, reward = config.loss, config.reward.kl
    return (loss.kl_coef > 0 and loss.kl_estimator == "full") or (reward.coef > 0 and reward.estimator == "full")


def needs_ref_logprobs(config: RunConfig) -> bool:
    """Tell whether a KL, or an advantage, is estimated from the reference's log-probs of sampled tokens."""
    loss, reward = config.loss, config.reward.kl
    estimated = (loss.kl_coef > 0 and loss.kl_estimator != "full") or (reward.coef > 0 and reward.estimator != "full")
    return estimated or compares_with_reference(config)


def measures_nothing(config: RunConfig) -> bool:
    """Tell whether no response gets a reward: teachers alone are learned from, and nothing else is configured."""
    reward = config.reward
    scored = bool(reward.terms) or reward.model is not None or bool(reward.judges) or config.environment.used
    return config.distillation.alone and not scored


def reads_references(config: RunConfig) -> bool:
    """Tell whether a run depends on the reference answers of its data: an environment reads them, or rewards are learned from and
    come of a term, a trained reward, a function that asks a served model, or a judge whose question shows them. Where teachers
    alone are learned from, rewards are measured as far as the data allows."""
    reward = config.reward
    scored = bool(reward.terms) or reward.process is not None or reward.served is not None
    scored = scored or any(shows_reference(judge) for judge in reward.judges.values())
    return config.environment.used or (scored and not config.distillation.alone)


def teachers_of(config: TrainingConfig) -> dict[str, TeacherConfig]:
    """Return the teachers that the run loads, by their roles; those in servers are no roles."""
    named = config.distillation.teachers.items()
    return {f"{ROLE}{name}": teacher for name, teacher in named if not teacher.endpoints}


def trained_roles(config: TrainingConfig) -> list[tuple[str, LearnerConfig | CriticConfig]]:
    """Return the roles that are trained with their sections, the policy first."""
    found: list[tuple[str, LearnerConfig | CriticConfig]] = [("policy", config.policy)]
    if isinstance(config, RunConfig) and needs_values(config):
        found.append(("critic", config.critic))
    return found


def learner_of(config: TrainingConfig, role: str) -> LearnerConfig | CriticConfig:
    """Return the section of a trained role; the policy's for reference and teachers, which are computed like the policy."""
    if not isinstance(config, RunConfig):
        return config.policy
    if role == PROCESS_REWARD and config.reward.process is not None:
        return _process_learner(config.policy, config.reward.process)
    return config.critic if role == "critic" else config.policy


def _process_learner(policy: LearnerConfig, process: ProcessRewardConfig) -> LearnerConfig:
    """The process reward model as a learner: split like the policy, by the same engine, with all of its weights trained."""
    own = {
        "sequences_per_micro_batch_per_device": process.sequences_per_micro_batch,
        "max_tokens_per_micro_batch": None,
        "lora": None,
        "optimizer": process.optimizer,
        "schedule": process.schedule,
        "engine_options": policy.engine_options | process.engine_options,
    }
    return policy.model_copy(update=own)


def starts_from(config: TrainingConfig, role: str) -> str:
    """Return the folder or hub id of a trained role's starting weights; a critic without one starts from the policy's."""
    section = learner_of(config, role)
    return (section.path if isinstance(section, CriticConfig) else None) or config.model.path


def reference_is_policy(config: RunConfig | TuneConfig) -> bool:
    """Tell whether the reference is the policy's model without its adapter."""
    return config.policy.lora is not None and config.reference.path in (None, config.model.path)


def shares_weights(engine: str) -> bool:
    """Tell whether a rollout engine reads the trainer's own weights; False: it has a copy of its own, and is sent new ones."""
    return ROLLOUT_ENGINES.facts(engine).shares_weights


def holds_a_copy(engine: str) -> bool:
    """Tell whether a rollout engine has a copy of the weights of its own; False for an unknown name."""
    return engine in ROLLOUT_ENGINES.names() and not shares_weights(engine)


def samples_beside_training(config: RunConfig) -> bool:
    """Tell whether sampling does not disturb training at the same time: the sampler has weights of its own, and is a server, or
    in the trainer's process, or on devices that no trained model shares."""
    place, rollout = config.placement, config.rollout
    if runtime_of(place) == "inprocess" or (rollout.endpoints and holds_a_copy(rollout.engine)):
        return holds_a_copy(rollout.engine)
    every = range(place.devices)
    trained = {device for _, section in trained_roles(config) for device in section.devices or every}
    return trained.isdisjoint(every if rollout.devices is None else rollout.devices)


def runtime_of(place: PlacementConfig) -> Literal["inprocess", "ray"]:
    """Return the runtime, with auto resolved: one process for one device, Ray for more."""
    if place.runtime != "auto":
        return place.runtime
    return "inprocess" if place.devices == 1 else "ray"


def sends_adapter(rollout: RolloutConfig, lora: LoraConfig | None) -> bool:
    """Tell whether the sampler receives the policy's adapter alone, instead of all weights with the adapter merged."""
    if lora is None or rollout.engine != "vllm" or lora.rank > VLLM_LARGEST_RANK or lora.quantize is not None:
        return False
    return rollout.weight_sync == "adapter" or (rollout.weight_sync == "auto" and not rollout.endpoints)

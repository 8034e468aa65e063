"""Construction of a run's teachers, in this process or as clients of servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch
from transformers import PreTrainedTokenizerBase

from posttrain.backends.teachers.served import ServedTeacher
from posttrain.backends.torch_training.scoring import LogprobScorer
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.config import RunConfig, TrainingConfig
from posttrain.config.distillation import ROLE
from posttrain.config.roles import teachers_of
from posttrain.errors import MissingDependency
from posttrain.interfaces.train_engine import TeacherEngine
from posttrain.models.loading import DTYPES, expanded, load_causal_lm, load_model_config, load_tokenizer
from posttrain.models.start_layers import fuse_on_cpu
from posttrain.models.vocabularies import check_same_tokens
from posttrain.plan.engine import engine_options, teacher_engine
from posttrain.registry import TRAIN_ENGINES, missing_library


def start_teacher(
    config: TrainingConfig,
    role: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    sharding: Sharding | None = None,
) -> LogprobScorer:
    """Load a teacher as a frozen scorer.

    With several processes it is sharded like the reference, except where whole vocabularies are compared: it is then computed
    within the policy's forward pass, so every process has all of it.

    Args: sharding, the policy's, or the teacher's own where it is split otherwise.
    Raises: ModelError for a folder without a model, or with another vocabulary than the policy's.
    """
    teacher = teachers_of(config)[role]
    field = f"distillation.teachers.{role.removeprefix(ROLE)}.path"
    assert teacher.path is not None, "checked with the configuration"
    model_config = config.model.model_copy(
        update={
            "path": teacher.path,
            "tokenizer_path": None,
            "config_overrides": {},
            "config_path": None,
            "chat_template_file": None,
        }
    )
    check_same_tokens(tokenizer, load_tokenizer(model_config, field=field), field)
    beside = config.distillation.beside_the_student
    if sharding is not None:
        sharding = sharding.beside(engine_options(config, role), role)
    model = load_causal_lm(
        expanded(teacher.path),
        dtype=DTYPES[config.model.compute_dtype],
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        field=field,
    ).requires_grad_(False)
    fuse_on_cpu(model, config.model)
    scorer: LogprobScorer = TRAIN_ENGINES.get(teacher_engine(config, role)).scorer(
        model,
        teacher.sequences_per_micro_batch_per_device,
        isinstance(config, RunConfig) and config.policy.share_prompts,
        teacher.max_tokens_per_micro_batch,
        padded=config.model.padded,
        rests_on_cpu=teacher.offload and not beside and sharding is None,
        sharding=None if beside else sharding,
    )
    scorer.vocabulary = _vocabulary(config)
    if sharding is not None and not beside:
        sharding.wrap(model)  # after its head has been detected
    return scorer


def start_teachers(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> dict[str, LogprobScorer]:
    """Load all teachers of a run in one process, by name."""
    return {role.removeprefix(ROLE): start_teacher(config, role, tokenizer, device) for role in teachers_of(config)}


def served_teachers(config: TrainingConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, TeacherEngine]:
    """Connect to the teachers that are in servers, by name. Raises: RequestError for servers that cannot be used."""
    served = {name: each for name, each in config.distillation.teachers.items() if each.endpoints}
    kinds = {name: _queued_teacher() if teacher.queued else ServedTeacher for name, teacher in served.items()}
    return {name: kinds[name](name, teacher, tokenizer, _vocabulary(config)) for name, teacher in served.items()}


def _queued_teacher() -> Callable[..., TeacherEngine]:
    """The client of verl's recipe gkd. Raises: MissingDependency without pyzmq."""
    try:
        module = import_module("posttrain.backends.teachers.queued")
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        raise MissingDependency(missing_library("zmq", "a teacher at a tcp:// address")) from error
    kind: Callable[..., TeacherEngine] = module.QueuedTeacher
    return kind


def asked_before(
    config: TrainingConfig, loaded: Mapping[str, TeacherEngine], served: Mapping[str, TeacherEngine]
) -> dict[str, TeacherEngine]:
    """Return the teachers that give their answers before an update: all, except where they are computed beside the student."""
    return {} if config.distillation.beside_the_student else {**loaded, **served}


def _vocabulary(config: TrainingConfig) -> int:
    """The number of token ids that the student knows; a teacher may know others besides."""
    policy = load_model_config(config.model.path, config.model.trust_remote_code)
    return int(policy.get_text_config().vocab_size)

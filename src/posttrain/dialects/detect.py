"""Which dialect a configuration is written in, seen by its own shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posttrain.dialects.compose import read_yaml
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.overrides import parse_overrides
from posttrain.errors import ConfigError, Problem, did_you_mean

NAMES = ("native", "verl", "verl@0.2", "skyrl", "skyrl@2025-06", "skyrl@2025-08", "roll")

# Keys that only one dialect has, dotted where the first name alone is shared.
MARKS: dict[str, tuple[str, ...]] = {
    "native": ("model.path", "policy", "rollout", "run", "advantage", "loss", "validation", "data.prompts_per_step"),
    "verl": (
        "actor_rollout_ref",
        "algorithm",
        "reward_model",
        "custom_reward_function",
        "model.partial_pretrain",
        "data.train_batch_size",
        "data.response_key",
        "data.output_path",
        "evaluation",
        "数据",
        "自定义奖励函数",
        "优化器配置",
        "trainer.total_epochs",
        "trainer.n_gpus_per_node",
    ),
    "skyrl": (
        "generator",
        "environment",
        "trainer.policy",
        "trainer.placement",
        "trainer.algorithm",
        "data.train_data",
    ),
    "roll": (
        "actor_train",
        "actor_infer",
        "rollout_batch_size",
        "rewards",
        "exp_name",
        "pretrain",
        "custom_envs",
        "train_env_manager",
    ),
}
# verl's other files: what they are, and the keys that only they have.
OTHER_ENTRIES = {
    "sft": ("verl's sft_trainer.yaml (supervised fine-tuning)", ("model.partial_pretrain", "optim", "优化器配置")),
    "evaluate": (
        "verl's evaluation.yaml (scoring responses in a file)",
        ("data.response_key", "evaluation", "数据", "自定义奖励函数"),
    ),
    "generate": ("verl's generation.yaml (writing responses to a file)", ("data.output_path", "data.n_samples")),
}
PEER_FILES = {"ppo_trainer": "verl", "ppo_megatron_trainer": "verl", "sft_trainer": "verl", "ppo_base_config": "skyrl"}


def read_config(path: str | None, overrides: Sequence[str], dialect: str | None, *, here: bool = False) -> LoadedConfig:
    """The configuration in the dialect it is written in, or in the one that is named.

    Raises: ConfigError for a dialect that does not exist or cannot be told, and for what cannot be read at all.
    """
    if dialect is not None and dialect not in NAMES:
        raise ConfigError(
            Problem(f"there is no dialect {dialect!r} (known: {', '.join(NAMES)})", fix=did_you_mean(dialect, NAMES))
        )
    name, _, version = (dialect or detect(path, overrides)).partition("@")
    if name == "native":
        from posttrain.dialects import native

        return native.read(path, overrides, here=here)
    from posttrain.dialects.reading import read_dialect, refuse_entry

    for entry, (title, marks) in OTHER_ENTRIES.items() if name == "verl" else ():
        keys = _keys(path, overrides)
        if _present(marks, keys) and not _present(MARKS["verl"][:3], keys):
            refuse_entry(load_dialect(name), path, overrides, version, entry, title)
    return read_dialect(load_dialect(name), path, overrides, version=version, here=here)


def load_dialect(name: str):  # type: ignore[no-untyped-def]
    """The dialect of a peer, with its tables."""
    from importlib import import_module

    return import_module(f"posttrain.dialects.{name}").DIALECT


def detect(path: str | None, overrides: Sequence[str]) -> str:
    """The dialect that the keys of the file, or of the overrides where there is no file, belong to.

    Raises: ConfigError when they could be of several, or of none.
    """
    keys = _keys(path, overrides)
    if path is not None:
        values, _ = read_yaml(path)
        listed = values.get("defaults") or []
        for name in listed if isinstance(listed, list) else []:
            if isinstance(name, str) and name.partition("@")[0].rpartition("/")[2] in PEER_FILES:
                return PEER_FILES[name.partition("@")[0].rpartition("/")[2]]
    marks = {dialect: sorted(_present(MARKS[dialect], keys)) for dialect in MARKS}
    most = max(len(found) for found in marks.values())
    best = [dialect for dialect, found in marks.items() if len(found) == most]
    if most == 0 and path is None:
        return "native"
    if most == 0 or len(best) > 1:
        what = "the keys do not show whose configuration this is"
        if most:
            what += f": {' and '.join(f'{marks[name][0]} ({name})' for name in best)}"
        raise ConfigError(
            Problem(what, fix=f"say it with --dialect {'|'.join(NAMES)}", where=path or "the command line")
        )
    return best[0]


def _keys(path: str | None, overrides: Sequence[str]) -> set[str]:
    """Every dotted key of the file, or of the overrides where there is no file."""
    if path is None:
        return {assignment.key for assignment in parse_overrides(overrides)}
    return set(read_yaml(path)[1])


def _present(marks: Iterable[str], keys: Iterable[str]) -> set[str]:
    return {mark for mark in marks if any(key == mark or key.startswith(f"{mark}.") for key in keys)}

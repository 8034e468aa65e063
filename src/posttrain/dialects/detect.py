"""Which dialect a configuration is written in, seen by its own shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posttrain.dialects.compose import read_yaml
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.overrides import parse_overrides
from posttrain.errors import ConfigError, Problem, did_you_mean

NAMES = ("native", "verl", "verl@0.2", "skyrl", "roll")

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
    from posttrain.dialects.reading import read_dialect

    return read_dialect(load_dialect(name), path, overrides, version=version, here=here)


def load_dialect(name: str):  # type: ignore[no-untyped-def]
    """The dialect of a peer, with its tables."""
    from importlib import import_module

    return import_module(f"posttrain.dialects.{name}").DIALECT


def detect(path: str | None, overrides: Sequence[str]) -> str:
    """The dialect that the keys of the file, or of the overrides where there is no file, belong to.

    Raises: ConfigError when they could be of several, or of none.
    """
    if path is None:
        keys = {assignment.key for assignment in parse_overrides(overrides)}
    else:
        values, places = read_yaml(path)
        keys = set(places)
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


def _present(marks: Iterable[str], keys: Iterable[str]) -> set[str]:
    return {mark for mark in marks if any(key == mark or key.startswith(f"{mark}.") for key in keys)}

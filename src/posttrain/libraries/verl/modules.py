"""The modules of verl that classes written for it import: stand-ins of ours, where verl itself cannot be imported.

A dataset, a sampler, a reward manager or a callback of a user's begins with ``from verl... import ...``. In the child process
that loads it, ``provide`` makes these names importable. An installed verl comes first; where importing it fails (a checkout in
the current folder without its dependencies), its own files still serve the modules that are not in this table.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.abc import Loader
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.user_files import run_file
from posttrain.verl_scoring import own_scores

_OURS = "posttrain.libraries.verl"
_DATA = "posttrain.data.verl"
_REWARDS = "posttrain.rewards.verl"
_PROTOCOL = {"DataProto": f"{_OURS}.protocol:DataProto", "DataProtoItem": f"{_OURS}.protocol:DataProtoItem"}
_DATASET = {"RLHFDataset": f"{_DATA}.dataset:RLHFDataset", "collate_fn": f"{_DATA}.dataset:collate_fn"}
_SCORES = {
    "default_compute_score": f"{_REWARDS}.scores:default_compute_score",
    "_default_compute_score": f"{_REWARDS}.scores:default_compute_score",
}
_REGISTRY = {
    name: f"{_REWARDS}.managers:{name}" for name in ("register", "get_reward_manager_cls", "AbstractRewardManager")
}
_MANAGERS = {
    **_REGISTRY,
    "NaiveRewardManager": f"{_REWARDS}.managers:NaiveRewardManager",
    "BatchRewardManager": f"{_REWARDS}.managers:BatchRewardManager",
}
_LOOP = {
    "register": f"{_REWARDS}.managers:register",
    "get_reward_manager_cls": f"{_REWARDS}.managers:get_reward_manager_cls",
    "RewardManagerBase": f"{_REWARDS}.managers:RewardManagerBase",
}
_ALGORITHMS = {
    name: f"posttrain.algos.verl.core_algos:{name}"
    for name in (
        *("register_adv_est", "register_policy_loss", "AdvantageEstimator", "agg_loss", "kl_penalty"),
        "compute_grpo_outcome_advantage",
    )
}
_SECTIONS = "omegaconf:DictConfig"  # verl's dataclasses of its sections, as annotations name them
_TOOLS = f"{_OURS}.tools"
_SCHEMAS = {
    name: f"{_TOOLS}:{name}"
    for name in (
        *("OpenAIFunctionPropertySchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionSchema"),
        *("OpenAIFunctionToolSchema", "ToolResponse"),
    )
}
_LOOPS = f"{_OURS}.agent_loops"
_AGENTS = {
    name: f"{_LOOPS}:{name}"
    for name in (
        *("AgentLoopBase", "AgentLoopOutput", "AgentLoopMetrics", "AsyncLLMServerManager", "DictConfigWrap"),
        *("ToolListWrap", "register", "AgentLoopManager", "AgentLoopWorker", "AgentLoopWorkerBase", "TokenOutput"),
    )
}
_SAMPLERS = {
    "AbstractSampler": f"{_OURS}.samplers:AbstractSampler",
    "AbstractCurriculumSampler": f"{_OURS}.samplers:AbstractCurriculumSampler",
}

CHECKOUT = "checkout"  # where a name is: in the checkout's own file

# Module -> name -> where it is.
PROVIDED: Mapping[str, Mapping[str, str]] = {
    "verl": _PROTOCOL,
    "verl.protocol": _PROTOCOL,
    "verl.utils": {
        "as_torch_index": f"{_OURS}.tensors:as_torch_index",
        "group_mean_std": f"{_OURS}.tensors:group_mean_std",
    },
    "verl.utils.dataset": _DATASET,
    "verl.utils.dataset.rl_dataset": _DATASET,
    "verl.utils.torch_functional": {
        name: f"{_OURS}.tensors:{name}"
        for name in (
            *("postprocess_data", "tokenize_and_postprocess_data", "pad_sequence_to_length"),
            *("masked_mean", "masked_sum", "masked_var", "masked_whiten"),
        )
    },
    "verl.utils.model": {"compute_position_id_with_mask": f"{_OURS}.tensors:compute_position_id_with_mask"},
    "verl.utils.fs": {"copy_to_local": f"{_OURS}.tensors:copy_to_local"},
    "verl.utils.reward_score": _SCORES,
    "verl.utils.chat_template": {"initialize_system_prompt": f"{_LOOPS}:initialize_system_prompt"},
    "verl.utils.profiler": {"simple_timer": f"{_LOOPS}:simple_timer", "marked_timer": f"{_LOOPS}:simple_timer"},
    "verl.utils.rollout_trace": {
        "rollout_trace_op": f"{_TOOLS}:rollout_trace_op",
        "rollout_trace_attr": f"{_LOOPS}:rollout_trace_attr",
    },
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": f"{_TOOLS}:BaseInteraction"},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": f"{_TOOLS}:BaseTool", **_SCHEMAS},
    "verl.tools.function_tool": {
        name: f"{_TOOLS}:{name}" for name in ("function_tool", "FunctionTool", "FUNCTION_TOOL_REGISTRY")
    },
    "verl.tools.schemas": _SCHEMAS,
    "verl.trainer": {},
    "verl.trainer.config": {"AlgoConfig": _SECTIONS},
    "verl.trainer.ppo": {},
    "verl.trainer.ppo.core_algos": _ALGORITHMS,
    "verl.trainer.ppo.checkpoint_callback": {"CheckpointCallback": f"{_OURS}.callbacks:CheckpointCallback"},
    "verl.experimental": {},
    "verl.experimental.agent_loop": _AGENTS,
    "verl.experimental.agent_loop.agent_loop": _AGENTS,
    "verl.experimental.agent_loop.utils": {"resolve_config_path": f"{_LOOPS}:resolve_config_path"},
    "verl.experimental.dataset": {},
    "verl.experimental.dataset.sampler": _SAMPLERS,
    "verl.experimental.reward_loop": {},
    "verl.experimental.reward_loop.reward_manager": _LOOP,
    "verl.experimental.reward_loop.reward_manager.base": _LOOP,
    "verl.experimental.reward_loop.reward_manager.registry": _LOOP,
    "verl.workers": {},
    "verl.workers.config": {"ActorConfig": _SECTIONS},
    "verl.workers.rollout": {},
    "verl.workers.rollout.replica": {"TokenOutput": f"{_LOOPS}:TokenOutput"},
    "verl.workers.reward_manager": _MANAGERS,
    "verl.workers.reward_manager.abstract": _MANAGERS,
    "verl.workers.reward_manager.registry": _MANAGERS,
    "verl.workers.reward_manager.naive": _MANAGERS,
    "verl.workers.reward_manager.batch": _MANAGERS,
}


_TEXTS = "posttrain.rewards.verl.texts"
_BOXES = {name: f"{_TEXTS}:{name}" for name in ("last_boxed_only_string", "remove_boxed")}
# Modules that a checkout's own file takes the place of, where there is one.
FALLBACKS: Mapping[str, Mapping[str, str]] = {
    "verl.utils.ray_utils": {"get_event_loop": f"{_TEXTS}:get_event_loop"},
    "verl.utils.reward_score.math": _BOXES,
    "verl.utils.reward_score.math_reward": _BOXES,
    "verl.utils.reward_score.math_dapo": _BOXES | {"normalize_final_answer": f"{_TEXTS}:normalize_final_answer"},
}


def provide(folder: Path | None = None) -> bool:
    """Make verl's modules importable in this process. Returns: True where they are the stand-ins.

    For a process that runs the user's code; it changes ``sys.modules``. ``folder`` is the package verl of a checkout, whose other
    modules then can be imported; by default the one on Python's path.
    """
    standing_in = getattr(sys.modules.get("verl"), "stands_in", False)
    if not standing_in and _is_importable():
        return False
    folder = folder or _checkout()
    if not standing_in:
        missing = {name: names for name, names in FALLBACKS.items() if not _has(folder, name)}
        provided = {**PROVIDED, **missing}
        for name, names in provided.items():
            sys.modules[name] = _StandIn(name, names)
        for name in provided:
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, sys.modules[name])
    if folder is not None:
        for name in PROVIDED:  # packages, so that a checkout's own files are found below them
            sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        for name, names in _own_scores_of(folder).items():
            sys.modules[name].__dict__["_names"] = names
        if not any(isinstance(each, _Packages) for each in sys.meta_path):
            sys.meta_path.insert(0, _Packages())
    return True


def _own_scores_of(folder: Path) -> dict[str, dict[str, str]]:
    """The function by data source of a checkout whose scorers are not verl's: its own file has it, under either name."""
    start = folder / "utils" / "reward_score" / "__init__.py"
    if not own_scores(start, start.parents[3]):
        return {}
    defined = {name for name in _SCORES if f"def {name}(" in start.read_text("utf-8", errors="replace")}
    return {f"verl.utils.{start.parent.name}": {name: f"{CHECKOUT}:{name}" for name in _SCORES if name in defined}}


def _has(folder: Path | None, module: str) -> bool:
    """Return True where a checkout's package verl has a file of this module."""
    return folder is not None and folder.joinpath(*module.split(".")[1:]).with_suffix(".py").is_file()


class _Packages:
    """Finds the packages of a checkout. One whose own file cannot be imported, because it needs more than is installed, is empty:
    the modules in it can be imported by their names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a package below verl; None for other modules."""
        spec = PathFinder.find_spec(name, path) if name.startswith("verl.") and path is not None else None
        if spec is None or not spec.submodule_search_locations or spec.loader is None:
            return None
        spec.loader = _Forgiving(spec.loader)
        return spec


class _Forgiving(Loader):
    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            self._loader.exec_module(module)


def _is_importable() -> bool:
    try:
        importlib.import_module("verl.protocol")
    except Exception:  # noqa: BLE001 - a checkout without its dependencies, or of another Python, fails in any way
        for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
            del sys.modules[name]
        return False
    return True


def _checkout() -> Path | None:
    """Return the folder of a verl that is there and cannot be imported; None without one."""
    spec = PathFinder.find_spec("verl")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _from_checkout(stand_in: ModuleType, name: str) -> Any:
    """Return a name that the stand-in lacks from the checkout's own file of that module; None without one."""
    if name.startswith("__"):
        return None
    for place in stand_in.__path__:
        for file in (Path(f"{place}.py"), Path(place) / "__init__.py"):
            if file.is_file():
                alias = f"{stand_in.__name__}.__checkout__"
                try:
                    module = sys.modules.get(alias) or run_file(alias, file)
                except Exception:  # noqa: BLE001 - its dependencies may be missing
                    return None
                return getattr(module, name, None)
    return None


def _own_file(stand_in: ModuleType) -> ModuleType:
    """Run the checkout's own file of a package. Raises: whatever it raises."""
    alias = f"{stand_in.__name__}.__checkout__"
    return sys.modules.get(alias) or run_file(alias, Path(stand_in.__path__[0]) / "__init__.py")


class _StandIn(ModuleType):
    """A module whose names are imported at their first use."""

    stands_in = True

    def __init__(self, name: str, names: Mapping[str, str]):
        super().__init__(name, "A stand-in of posttrain for the module of verl.")
        self._names = names
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        where = self.__dict__["_names"].get(name)
        if where is not None and where.startswith(f"{CHECKOUT}:"):
            return getattr(_own_file(self), name)
        if where is None and (found := _from_checkout(self, name)) is not None:
            return found
        if where is None:
            known = ", ".join(self.__dict__["_names"]) or "nothing by itself"
            raise AttributeError(
                f"verl is not installed, and posttrain's {self.__name__} has no {name} (it has: {known})"
            )
        module, _, attribute = where.partition(":")
        return getattr(importlib.import_module(module), attribute)

"""The other side of the environment ``roll_manager``: run by a Python that has ROLL, and nothing of this package.

Reads an episode from each line of standard input (JSON: folder, manager, tag, values, model, seed, training, base_url, api_key)
and answers with a line on standard output: {"reward", "metrics", "stop", "left_out"} or {"failure"}. All other output goes to
standard error. A manager is made once for a tag, in training and in validation, with ROLL's configuration of the values; its
``run_rollout_loop`` then plays an episode at a time. In the place of ROLL's scheduler, queue and policy it finds those of this
file.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import inspect
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_managers: dict[str, Any] = {}
_now = SimpleNamespace(client=None, ids=[], rollouts=[], manager=None)  # the episode under way


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # managers print
    for line in sys.stdin:
        try:
            answer = play(json.loads(line))
        except BaseException as error:  # noqa: BLE001 - someone's manager, which may also call sys.exit
            traceback.print_exc()
            answer = {"failure": f"{type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(answer, default=str) + "\n")


def other_bridge() -> Any:
    """Load the bridge of SkyRL's programs, whose client, threads and comparison of tokens serve here, too."""
    file = Path(__file__).resolve().parents[1] / "skyrl_program" / "bridge.py"
    spec = importlib.util.spec_from_file_location("skyrl_bridge", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shared = other_bridge()


def play(episode: dict[str, Any]) -> dict[str, Any]:
    """Play an episode with the manager of its tag."""
    manager = manager_of(episode)
    _now.client = shared.Client(episode, shared.loaded_tokenizer(episode["model"]), episode["model"])
    _now.manager, _now.ids, _now.rollouts = manager, [0], []
    data = importlib.import_module("roll.distributed.scheduler.protocol").DataProto(meta_info={"seed": episode["seed"]})
    manager.run_rollout_loop(data)
    answer = answer_of([row_values(each) for each in _now.rollouts if each is not None], episode["tag"])
    if "failure" in answer:
        return answer
    rows = answer.pop("rows")
    output = {"prompt_token_ids": rows[0], "response_ids": rows[1], "loss_masks": rows[2]}
    return {**answer, "left_out": shared.left_out(_now.client.sampled, output)}


def manager_of(episode: dict[str, Any]) -> Any:
    """Return the manager of a tag, which is made once in training and once in validation."""
    key = json.dumps([episode["tag"], episode["training"], episode["values"]], sort_keys=True, default=str)
    if key not in _managers:
        _managers[key] = made_manager(episode)
    return _managers[key]


def made_manager(episode: dict[str, Any]) -> Any:
    """Make a manager, with the arguments of ROLL's worker that it takes."""
    folder = str(Path(episode["folder"]).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    os.chdir(folder)  # where ROLL is launched: managers and environments read files from there
    shared.run_here()
    config = config_of(episode["values"])
    worker = config.train_env_manager if episode["training"] else config.val_env_manager
    found = [each for of_rank in worker.env_configs.values() for each in of_rank.values()]
    env_config = next((each for each in found if each["tag"] == episode["tag"]), None)
    if env_config is None:
        raise ValueError(f"no environment of the manager has the tag {episode['tag']}")
    env_config = copy.deepcopy(env_config)
    env_config["group_seed"] = 0  # an episode's own seed is all
    if env_config.get("max_env_step_concurrent"):
        env_config["max_env_step_concurrent"] = 0  # its limiter is an actor, and one episode is played at a time
    play_by_turns()
    tokenizer = copy.deepcopy(shared.loaded_tokenizer(episode["model"]))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    given = {
        "worker_config": worker,
        "pipeline_config": config,
        "env_config": env_config,
        "tokenizer": tokenizer,
        "processor": None,
        "generate_scheduler": SimpleNamespace(
            generate_one_request=shared.Remote(lambda data: turn(data, data.meta_info["generation_config"])),
            report_response=shared.Remote(lambda *_, **__: None),
        ),
        "output_queue": SimpleNamespace(put=shared.Remote(put), get_episode_id=shared.Remote(next_episode)),
        "thread_lock": threading.Lock(),
        "mode": "train" if episode["training"] else "val",
        "extra_data_provider": None,
    }
    made = class_of(episode["manager"])
    takes = inspect.signature(made.__init__).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        given = {name: value for name, value in given.items() if name in takes}
    manager = made(**given)
    if hasattr(manager, "update_step"):
        manager.update_step(0)
    return manager


def class_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def config_of(values: dict[str, Any]) -> Any:
    """Return ROLL's configuration of the values. The sampler's engine is one that ROLL knows: it is not started."""
    values = copy.deepcopy(values)
    sampler = values.setdefault("actor_infer", {})
    sampler["strategy_args"] = {"strategy_name": "vllm"}
    made = importlib.import_module("roll.pipeline.agentic.agentic_config").AgenticConfig
    return importlib.import_module("dacite").from_dict(made, values)


def play_by_turns() -> None:
    """Put ``turn`` in the place of ROLL's proxy of the policy; before there were proxies, the scheduler is in that place."""
    try:
        proxies = importlib.import_module("roll.pipeline.agentic.llm_proxy")
    except ModuleNotFoundError:
        return
    registry = importlib.import_module("roll.pipeline.agentic.llm_proxy.base_llm_proxy").LLM_PROXY_REGISTRY

    class PolicyTurns(proxies.BaseLLMProxy):  # type: ignore[name-defined]
        def generate(self, messages: Any, lm_input: Any, generation_config: Any) -> Any:
            return turn(lm_input, generation_config)

    registry["policy"] = PolicyTurns


def turn(asked: Any, generation_config: Any) -> Any:
    """Ask the run for a response. Args: asked, ROLL's DataProto of one prompt; generation_config, of which the number of tokens
    and the stop texts count. Returns: a DataProto with the response, as ROLL's proxy gives it."""
    if "lora_name" in asked.meta_info:
        raise ValueError("the manager asks for other weights (lora_name), and the policy alone answers here")
    batch = asked.batch
    if any("multi_modal" in name for name in asked.non_tensor_batch.keys()):  # noqa: SIM118 - no mapping since 2026-08
        raise ValueError("the manager's prompt has pictures, and texts alone are sampled for managers")
    prompt = batch["input_ids"][0][batch["attention_mask"][0].bool()].tolist()
    sampling = {"max_tokens": generation_config.get("max_new_tokens"), "stop": generation_config.get("stop_strings")}
    output = asyncio.run(_now.client.generate({"prompt_token_ids": [prompt], "sampling_params": sampling}))
    return response_of(asked, prompt, output["response_ids"][0], output["response_logprobs"][0])


def response_of(asked: Any, prompt: list[int], response: list[int], logprobs: list[float]) -> Any:
    import torch

    def row(values: list[Any], kind: Any) -> Any:
        return torch.tensor([values], dtype=kind)

    before, after = len(prompt), len(response)
    tensors = {
        "prompts": row(prompt, torch.long),
        "responses": row(response, torch.long),
        "input_ids": row(prompt + response, torch.long),
        "attention_mask": row([1] * (before + after), torch.long),
        "position_ids": row(list(range(before + after)), torch.long),
        "prompt_mask": row([True] * before + [False] * after, torch.bool),
        "response_mask": row([False] * before + [True] * after, torch.bool),
        "infer_logprobs": row([0.0] * (before - 1) + list(logprobs), torch.float32),
    }
    made = type(asked)()
    made.batch = importlib.import_module("tensordict").TensorDict(tensors, batch_size=1)
    made.non_tensor_batch = dict(asked.non_tensor_batch.items())
    made.meta_info = {
        name: each for name, each in asked.meta_info.items() if name not in ("generation_config", "src_rank")
    }
    return made


def put(*given: Any, **named: Any) -> None:
    """Take a rollout from the manager, and let its loop end."""
    rollouts = [each for each in (*given, *named.values()) if hasattr(each, "non_tensor_batch")]
    _now.rollouts += rollouts
    _now.manager.running = False


def next_episode(*_: Any, **__: Any) -> int | None:
    """Return the number of the next episode: 0, once."""
    if _now.ids:
        number: int = _now.ids.pop()
        return number
    _now.manager.running = False
    return None


def row_values(rollout: Any) -> dict[str, Any]:
    """Return the plain values of a rollout: tokens, masks and scores of its rows, the scores of the episode and its metrics."""
    batch = rollout.batch
    rows = []
    for row in range(batch.batch_size[0]):
        read = batch["attention_mask"][row].bool()
        ids, mask = batch["input_ids"][row][read].tolist(), batch["response_mask"][row][read].tolist()
        rows.append(
            (ids, [bool(each) for each in mask], float(batch["scores"][row].sum()) if "scores" in batch else None)
        )
    scores = rollout.non_tensor_batch.get("episode_scores")
    return {
        "rows": rows,
        "scores": None if scores is None else [float(each) for each in scores],
        "metrics": rollout.meta_info.get("metrics") or {},
    }


def answer_of(rollouts: list[dict[str, Any]], tag: str) -> dict[str, Any]:
    """Return the reward of an episode: the score of its one row, which ROLL trains on, or of several rows that of the episode;
    with its metrics, and under ``rows`` the prompts, responses and masks that it trains."""
    rows = [row for each in rollouts for row in each["rows"]]
    if not rows:
        return {"failure": "the manager put no rollout into its queue"}
    if not any(any(mask) for _, mask, _ in rows):
        return {"failure": "the manager masks the whole trajectory"}
    episode = rollouts[-1]["scores"]
    if len(rows) == 1 and rows[0][2] is not None:
        reward = rows[0][2]
    elif episode:
        reward = episode[-1]
    else:
        return {"failure": f"the manager returned {len(rows)} rows without episode_scores"}
    metrics = {}
    for name, value in rollouts[-1]["metrics"].items():
        number = number_of(value)
        if number is not None:
            metrics[str(name).removeprefix(f"env/{tag}/").removeprefix("env/")] = number
    starts = [mask.index(True) if any(mask) else len(ids) for ids, mask, _ in rows]
    cut = [(ids[:at], ids[at:], mask[at:]) for (ids, mask, _), at in zip(rows, starts, strict=True)]
    prompts, responses, masks = ([each[place] for each in cut] for place in range(3))
    return {"reward": reward, "metrics": metrics, "stop": "ended", "rows": (prompts, responses, masks)}


def number_of(value: Any) -> float | None:
    """Return a metric as a number, the mean of a list; None where it is none."""
    values = value.tolist() if hasattr(value, "tolist") else value
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    if not values or not all(isinstance(each, (int, float)) for each in values):
        return None
    mean = sum(map(float, values)) / len(values)
    return mean if mean == mean and abs(mean) != float("inf") else None


if __name__ == "__main__":
    sys.path = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]
    main()

"""The numbers of launches on verl beside a second reckoning of them.

    python benchmarks/launch_arithmetic.py CHECKOUT run.sh examples/*.sh

Every launch is planned with --skip-files and --drop-unknown, and its plan is compared with formulas written from verl's own code
(fsdp_workers.py, ray_trainer.py, core_algos.py), which read the composed keys and none of this package's rules. A line for every
difference; the last line counts.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from posttrain.cli.request import check_request, load_request
from posttrain.errors import RequestError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def expected(get: Callable[..., Any], version: str) -> dict[str, Any]:
    """Reckon the numbers of a launch. Args: ``get(key, otherwise)`` reads a composed key; version of verl, as in ``verl@0.2``."""
    before_03 = version in ("verl@0.1", "verl@0.2")
    prompts, n = get("data.train_batch_size"), get(f"{ROLLOUT}.n", 1)
    # Copies of a prompt that a fork makes itself, verl-agent's environments and Search-R1's agents; verl's own n is 1 there
    episodes, agents = get("env.rollout.n", None), get(f"{ROLLOUT}.n_agent", None)
    if episodes is not None or agents:
        n = 1
    copies = n * (agents or 1) * (episodes or 1)
    devices = get("trainer.nnodes", 1) * get("trainer.n_gpus_per_node", 8)
    split = get(f"{ACTOR}.ulysses_sequence_parallel_size", 1) or 1
    if get(f"{ACTOR}.strategy") == "megatron":
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        split = math.prod(get(f"{ACTOR}.megatron.{name}", 1) or 1 for name in names)
    ranks = max(1, devices // split)
    mini = get(f"{ACTOR}.ppo_mini_batch_size") * n  # verl repeats the prompts n times; a fork's own copies are rows
    per_rank, rows = mini // ranks, prompts * copies // ranks
    found: dict[str, Any] = {
        "prompts": prompts,
        "samples": copies,
        "updates": math.ceil(rows / max(1, min(per_rank, rows))) * get(f"{ACTOR}.ppo_epochs", 1),
        "lr": get(f"{ACTOR}.optim.lr"),
        "entropy": get(f"{ACTOR}.entropy_coeff", 0.001 if before_03 else 0),
        "grad_clip": get(f"{ACTOR}.grad_clip", 1.0),
        "prompt_tokens": get("data.max_prompt_length"),
        "response_tokens": get("data.max_response_length"),
        "temperature": get(f"{ROLLOUT}.temperature", 1.0),
        "epochs": get("trainer.total_epochs"),
        "steps": get("trainer.total_training_steps", None),
        "in_loss": get(f"{ACTOR}.kl_loss_coef", 0.001) if get(f"{ACTOR}.use_kl_loss", False) else 0,
        "estimator": get("algorithm.adv_estimator"),
    }
    if get(f"{ACTOR}.use_dynamic_bsz", False):
        found["tokens"] = get(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)  # per device, as a plan counts them
    elif per_rank > rows:  # a mini-batch above the step: cut evenly here, into a short last part by verl
        pass
    elif (micro := get(f"{ACTOR}.ppo_micro_batch_size_per_gpu", None)) is not None:
        found["micro"] = micro
    elif (micro := get(f"{ACTOR}.ppo_micro_batch_size", None)) is not None:
        found["micro"] = micro * (n if version == "verl@0.1" else 1) // ranks
    in_reward = not get(f"{ACTOR}.use_kl_loss", False) if before_03 else get("algorithm.use_kl_in_reward", False)
    found["in_reward"] = get("algorithm.kl_ctrl.kl_coef", 0.001) if in_reward else 0
    clip = get(f"{ACTOR}.clip_ratio", 0.2)
    found["clip"] = tuple(
        clip if (own := get(f"{ACTOR}.clip_ratio_{end}", None)) is None else own for end in ("low", "high")
    )
    if found["estimator"] == "gae":
        found["gae"] = (get("algorithm.gamma", 1.0), get("algorithm.lam", 1.0))
        found["critic_lr"] = get("critic.optim.lr", 1e-5)
    steps = get(f"{ACTOR}.optim.lr_warmup_steps", -1)
    found["warmup"] = steps if steps is not None and steps >= 0 else get(f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.0)
    return found


def planned(request: Any) -> dict[str, Any]:
    """The same numbers of a plan."""
    config, batches = request.loaded.config, request.batches
    schedule, reward = config.policy.schedule, config.reward
    found = {
        "prompts": batches.prompts_per_step,
        "samples": batches.samples_per_prompt,
        "updates": batches.updates_per_step,
        "lr": config.policy.optimizer.lr,
        "entropy": config.loss.entropy_coef,
        "grad_clip": config.policy.optimizer.max_grad_norm,
        "prompt_tokens": config.data.max_prompt_tokens,
        "response_tokens": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "epochs": config.run.total_epochs,
        "steps": config.run.total_steps,
        "in_loss": config.loss.kl_coef,
        "estimator": config.advantage.name,
        "tokens": batches.max_tokens_per_micro_batch,
        "micro": batches.sequences_per_micro_batch_per_device,
        "in_reward": reward.kl.coef,
        "warmup": schedule.warmup_ratio,
    }
    if hasattr(config.loss, "clip_ratio_low"):  # of verl's losses; a fork's own has settings of its own
        found["clip"] = (config.loss.clip_ratio_low, config.loss.clip_ratio_high)
    if schedule.warmup_updates is not None:  # verl's schedules move once a step
        found["warmup"] = schedule.warmup_updates / (batches.updates_per_step if schedule.moves_every == "step" else 1)
    if found["estimator"] == "gae":
        found["gae"] = (config.advantage.gamma, config.advantage.gae_lambda)
        found["critic_lr"] = config.critic.optimizer.lr
    if batches.counts_turns:  # a step has as many rows as its episodes take turns
        for name in ("updates", "micro", "prompt_tokens"):
            del found[name]
    if config.environment.name:  # an episode has several responses
        found.pop("response_tokens", None)
    return found


def differences(arguments: list[str]) -> Iterator[str]:
    """Yield the numbers that differ, each with both values. Raises: RequestError."""
    with contextlib.redirect_stdout(io.StringIO()):
        loaded = load_request(arguments, None, drop_unknown=True, skip_files=True)
        if loaded.entry != "train" or not loaded.dialect.startswith("verl"):
            return
        request = check_request(loaded, look_at_files=False)
    words = loaded.words
    assert words is not None

    def get(key: str, *otherwise: Any) -> Any:
        value = words.value(key)
        return (
            (otherwise[0] if otherwise else None) if not isinstance(value, str | int | float | bool | None) else value
        )

    mine, theirs = planned(request), expected(get, loaded.dialect)
    for name, value in theirs.items():
        if name in mine and mine[name] != value:
            yield f"{name}: {mine[name]}, expected {value}"


def main() -> None:
    folder, scripts = Path(sys.argv[1]).resolve(), sys.argv[2:]
    os.chdir(folder)
    counts = {"right": 0, "wrong": 0, "refused": 0}
    for script in scripts:
        try:
            found = list(differences([script]))
        except RequestError as error:
            counts["refused"] += 1
            print(f"{script}: refused: {str(error.problems[0])[:160]}")
            continue
        counts["wrong" if found else "right"] += 1
        for text in found:
            print(f"{script}: {text}")
    print(", ".join(f"{count} {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main()

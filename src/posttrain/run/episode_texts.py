"""Scored episodes as texts, a line of JSON each, so that finished ones survive a kill and can be read by other programs.

A text holds everything that is measured or shown: texts, token ids, turns, rewards, metrics and stop reasons. Log-probs are
left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.records.trajectories import Invalid, Outcome, Reward, StopReason, Trajectory, Turn
from posttrain.run.samples import as_json

TURN_VALUES = ("start", "end", "text", "observation", "reward", "state_key")


def episode_text(trajectory: Trajectory, outcome: Outcome) -> str:
    """Write an episode, or a response without an environment, with its outcome."""
    return json.dumps(
        {
            "sample_id": trajectory.sample_id,
            "response": trajectory.text,
            "reward": outcome.value if isinstance(outcome, Reward) else None,
            "reward_terms": dict(outcome.terms) if isinstance(outcome, Reward) else {},
            "reward_texts": dict(outcome.texts) if isinstance(outcome, Reward) else {},
            "invalid": {"reason": outcome.reason, "detail": outcome.detail} if isinstance(outcome, Invalid) else None,
            "stop_reason": str(trajectory.stop_reason),
            "failure": {"reason": trajectory.failure_reason, "detail": trajectory.failure},
            "environment": {
                "reward": trajectory.env_reward,
                "stop": trajectory.env_stop,
                "metrics": {name: as_json(value) for name, value in trajectory.env_metrics},
                "close_failure": trajectory.close_failure,
            },
            "samples": [_sample(sample) for sample in trajectory.samples],
        },
        ensure_ascii=True,  # half a character in someone's text has no other form
        allow_nan=False,
    )


def read_episode(text: str) -> tuple[Trajectory, Outcome]:
    """Read what ``episode_text`` wrote; log-probs are 0."""
    saved = json.loads(text)
    *earlier, last = saved["samples"]
    stop = StopReason(saved["stop_reason"])
    environment = saved["environment"]
    trajectory = Trajectory(
        **_read_sample(last),
        sample_id=saved["sample_id"],
        text=saved["response"],
        stop_reason=stop,
        policy_version=0,
        failure=saved["failure"]["detail"],
        failure_reason=saved["failure"]["reason"],
        earlier=tuple(
            Trajectory(
                **_read_sample(each),
                sample_id=f"{saved['sample_id']}#{number}",
                text="",
                stop_reason=stop,
                policy_version=0,
            )
            for number, each in enumerate(earlier)
        ),
        env_reward=environment["reward"],
        env_stop=environment["stop"],
        env_metrics=tuple(environment["metrics"].items()),
        close_failure=environment["close_failure"],
    )
    if saved["invalid"] is not None:
        return trajectory, Invalid(**saved["invalid"])
    terms, texts = tuple(saved["reward_terms"].items()), tuple(saved["reward_texts"].items())
    return trajectory, Reward(saved["reward"], terms, texts)


def _sample(sample: Trajectory) -> dict[str, Any]:
    return {
        "prompt": sample.prompt_text,
        "prompt_token_ids": None if sample.prompt_token_ids is None else list(sample.prompt_token_ids),
        "token_ids": list(sample.token_ids),
        "sampled": _spans(sample.sampled_mask),
        "turns": [{name: getattr(turn, name) for name in TURN_VALUES} | _stop(turn) for turn in sample.turns],
    }


def _stop(turn: Turn) -> dict[str, str]:
    return {"stop_reason": str(turn.stop_reason)}


def _read_sample(saved: Mapping[str, Any]) -> dict[str, Any]:
    ids = tuple(saved["token_ids"])
    mask = [False] * len(ids)
    for start, end in saved["sampled"]:
        mask[start:end] = [True] * (end - start)
    prompt = saved["prompt_token_ids"]
    return {
        "token_ids": ids,
        "logprobs": (0.0,) * len(ids),
        "response_mask": tuple(mask),
        "prompt_token_ids": None if prompt is None else tuple(prompt),
        "prompt_text": saved["prompt"],
        "turns": tuple(
            Turn(**{**turn, "stop_reason": StopReason(turn["stop_reason"])}, policy_version=0)
            for turn in saved["turns"]
        ),
    }


def _spans(mask: Sequence[bool]) -> list[list[int]]:
    """Stretches of sampled tokens, [start, end)."""
    spans: list[list[int]] = []
    for index, sampled in enumerate(mask):
        if not sampled:
            continue
        if spans and spans[-1][1] == index:
            spans[-1][1] = index + 1
        else:
            spans.append([index, index + 1])
    return spans

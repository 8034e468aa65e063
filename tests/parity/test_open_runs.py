"""Runs that are open: the official client plays, and the run trains exactly the tokens that it was given."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrain.build.train import train_run
from posttrain.config import RunConfig
from posttrain.records.batches import ScoredBatch
from posttrain.steps import rl_step

pytestmark = pytest.mark.slow
Played = tuple[tuple[int, ...], float]  # sampled tokens of a training sample, and the reward of its conversation


class Player:
    """A program that plays two groups of two conversations a step, each by another part of the API."""

    def __init__(self, port: int):
        from openai import OpenAI

        self._base = f"http://127.0.0.1:{port}"
        self._client = OpenAI(base_url=f"{self._base}/v1", api_key="secret", max_retries=20, timeout=120)
        self.played: list[Played] = []

    def reward(self, conversation: str, reward: float, *samples: list[int]) -> None:
        body = {"conversation": conversation, "reward": reward}
        self._client.post(f"{self._base}/rewards", cast_to=object, body=body)
        self.played += [(tuple(each), reward) for each in samples]

    def play(self, steps: int) -> None:
        for step in range(steps):
            with ThreadPoolExecutor(4) as pool:
                if step % 2 == 0:
                    parts = [pool.submit(self.choices), *(pool.submit(self.streamed, n) for n in range(2))]
                else:
                    parts = [pool.submit(part, n) for part in (self.completion, self.response) for n in range(2)]
                for each in parts:
                    each.result()

    def choices(self) -> None:
        """A group in one request, whose answers end at a stop text."""
        said = self._client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "A"}],
            n=2,
            logprobs=True,
            top_logprobs=2,
            stop=["e"],
            seed=4,
        )
        for place, choice in enumerate(said.choices):
            assert "e" not in (choice.message.content or "")
            assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
            self.reward(choice.conversation, float(place), [token.token_id for token in choice.logprobs.content])  # type: ignore[attr-defined]

    def streamed(self, number: int) -> None:
        """Two turns, the first one streamed, of one training sample."""
        asked: list[Any] = [{"role": "user", "content": "B"}]
        tokens, text, conversation = [], "", ""
        options = {"include_usage": True}
        for event in self._client.chat.completions.create(  # type: ignore[call-overload]
            model="policy", messages=asked, logprobs=True, stream=True, stream_options=options
        ):
            conversation = event.conversation
            for choice in event.choices:
                text += choice.delta.content or ""
                tokens += [token.token_id for token in choice.logprobs.content] if choice.logprobs else []
        asked += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        schema = {"name": "answer", "schema": {"enum": [1, 2]}}
        second = self._client.chat.completions.create(
            model="policy",
            messages=asked,
            logprobs=True,
            temperature=0.5 + number,
            response_format={"type": "json_schema", "json_schema": schema},
            extra_headers={"X-Conversation-Id": conversation},
        )
        assert second.choices[0].message.content.strip() in ("1", "2")
        more = [token.token_id for token in second.choices[0].logprobs.content]  # type: ignore[attr-defined, union-attr]
        self.reward(conversation, 0.5 + number, [*tokens, *more])

    def completion(self, number: int) -> None:
        """Two turns in token ids, of one training sample."""
        headers = {"X-Group-Id": "token ids"}
        first = self._client.completions.create(
            model="policy", prompt=[5, 6], logprobs=1, max_tokens=3, extra_headers=headers
        )
        ids = first.choices[0].logprobs.token_ids  # type: ignore[union-attr]
        second = self._client.completions.create(
            model="policy", prompt=[5, 6, *ids, 7], logprobs=1, extra_headers={"X-Conversation-Id": first.conversation}
        )
        self.reward(first.conversation, 2.0 + number, [*ids, *second.choices[0].logprobs.token_ids])  # type: ignore[union-attr]

    def response(self, number: int) -> None:
        headers = {"X-Group-Id": "responses"}
        said = self._client.responses.create(
            model="policy", input="C", include=["message.output_text.logprobs"], extra_headers=headers
        )
        parts = [part for item in said.output for part in item.content]  # type: ignore[union-attr]
        self.reward(said.conversation, 4.0 + number, [token.token_id for part in parts for token in part.logprobs])


@pytest.mark.parametrize("mode", ["off", "colocate"])
def test_the_official_client_trains_the_tokens_that_it_was_given(
    mode: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "token").write_text("secret")
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
            "run": {"folder": str(tmp_path / "run"), "total_steps": 2},
            "data": {"train_files": [], "prompts_per_step": 2},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 32},
            "policy": {"sequences_per_mini_batch": 4},
            "placement": {"cpu_threads": 1},
            "asynchronous": {"mode": mode},
            "environment": {
                "name": "open",
                "settings": {"port": port, "token_file": str(tmp_path / "token")},
                "train_episodes": 20,
            },
        }
    )
    trained: list[Played] = []
    assemble = rl_step.assemble

    def noted(*given: Any, **more: Any) -> ScoredBatch:
        batch = assemble(*given, **more)
        for row, reward in enumerate(batch.rewards.tolist()):
            trained.append((sampled(batch, row), reward))
        return batch

    monkeypatch.setattr(rl_step, "assemble", noted)
    player = Player(port)
    with ThreadPoolExecutor(1) as beside:
        playing = beside.submit(player.play, 2)
        train_run(config)
        playing.result(30)
    assert len(trained) == 8 and sorted(trained) == sorted(player.played)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["gap/max"] < 1e-4 and line["reward/invalid_share"] == 0 for line in lines)


JUDGE = """
class Judge:
    def __init__(self, spec):
        self.row = spec.row

    def score(self, conversation):
        [turn] = conversation.turns
        assert conversation.messages[-1]["content"] == turn.action
        return {"reward": len(turn.action) / 100, "metrics": {"letters": len(turn.action)}}
"""


def test_environments_score_what_the_official_client_plays(tiny_llama: Path, tmp_path: Path) -> None:
    """Half of the conversations by a class of the user's, half by an environment of ours, which sets their tasks, and which
    the run itself plays when it validates."""
    openai = pytest.importorskip("openai")
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
            "run": {"folder": str(tmp_path / "run"), "total_steps": 2},
            "data": {"train_files": [], "prompts_per_step": 2},
            "rollout": {"samples_per_prompt": 2, "max_response_tokens": 8},
            "policy": {"sequences_per_mini_batch": 4},
            "placement": {"cpu_threads": 1},
            "environment": {
                "name": "open",
                "settings": {"port": port, "token_file": str(tmp_path / "token")},
                "named": {
                    "judge": {"name": f"{tmp_path}/judge.py:Judge", "validation_weight": 0.0},
                    "guesses": {"name": "guess_number", "settings": {"format_penalty": -0.5}, "max_turns": 2},
                },
                "workers": 4,
                "train_episodes": 20,
                "validation_episodes": 3,
            },
            "validation": {"every_steps": 2},
        }
    )
    base = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="secret", max_retries=20, timeout=120)

    def play() -> tuple[str, str]:
        begun = client.post(f"{base}/conversations", cast_to=object, body={})
        asked = begun["messages"] or [{"role": "user", "content": "Q"}]
        headers = {"X-Conversation-Id": begun["conversation"]}
        said = client.chat.completions.create(model="policy", messages=asked, extra_headers=headers)
        client.post(f"{base}/rewards", cast_to=object, body={"conversation": begun["conversation"]})
        return str(begun["sample"]), said.choices[0].message.content or ""

    with ThreadPoolExecutor(5) as beside:
        playing = [beside.submit(play) for _ in range(8)]
        train_run(config)
        played = dict(each.result(30) for each in playing)
    lines = [
        json.loads(line)
        for step in (1, 2)
        for line in (tmp_path / f"run/samples/step_{step}.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 8 == len(played)
    judged = [line for line in lines if line["data_source"] == "judge"]
    for line in judged:
        assert line["reward_terms"]["environment"] == pytest.approx(len(played[line["sample_id"]]) / 100)
    guessed = [line for line in lines if line["data_source"] == "guesses"]
    assert judged and guessed and len(judged) + len(guessed) == 8  # groups are shuffled
    for line in guessed:  # one turn of five: a hit, a miss, or no number
        no_number = re.search(r"\d", played[line["sample_id"]]) is None
        assert line["reward_terms"]["environment"] in ((-0.5,) if no_number else (0.0, 1.0))
    _, *metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all("environment/letters" in line and line["reward/invalid_share"] == 0 for line in metrics)
    for step in (0, 2):
        held_out = [
            json.loads(line) for line in (tmp_path / f"run/validation/step_{step}.jsonl").read_text().splitlines()
        ]
        assert [line["data_source"] for line in held_out] == ["guesses"] * 3
        assert all(line["prompt"] and len(line["turns"]) in (1, 2) for line in held_out)


def sampled(batch: ScoredBatch, row: int) -> tuple[int, ...]:
    """Return the tokens of a row that the policy sampled."""
    mask = batch.sequences.response_mask[row]
    return tuple(batch.sequences.tokens[row, -len(mask) :][mask].tolist())

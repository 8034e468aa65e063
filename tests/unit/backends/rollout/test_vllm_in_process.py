"""vLLM in this process, with a stand-in for its library that counts on from the prompt's last token, one token a step."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from posttrain.errors import ModelError, RunStopped
from posttrain.interfaces.rollout_engine import Request, SamplerPlan, Served
from posttrain.models.tiny import tiny_tokenizer
from posttrain.records.images import PromptImages
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, TrajectoryGroup

END = 122  # z
IMAGE = 35  # #


class Scheduler:
    """What vLLM calls LLMEngine. At most two requests are under way at a time."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[list[int], Any, list[int]]] = {}
        self.aborted: list[str] = []
        self.adapters: list[int] = []
        self.adapters_asked_for: list[str | None] = []
        self.tokens_of_an_image = 3

    def add_lora(self, adapter: Any) -> bool:
        self.adapters.append(adapter.lora_int_id)
        return "broken" not in adapter.lora_path

    def remove_lora(self, number: int) -> None:
        self.adapters.remove(number)

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any) -> None:
        self.adapters_asked_for.append(lora_request and lora_request.lora_name)
        shown = [image.size for image in prompt.get("multi_modal_data", {}).get("image", ())]
        assert len(shown) == prompt["prompt_token_ids"].count(IMAGE)
        read = [
            token
            for each in prompt["prompt_token_ids"]
            for token in [each] * (self.tokens_of_an_image if each == IMAGE else 1)
        ]
        self.requests[name] = (read, params, [])

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.requests[name]

    def step(self) -> list[Any]:
        outputs = []
        for name, (prompt, params, drawn) in list(self.requests.items())[:2]:
            drawn.append(prompt[-1] + len(drawn) + 1)
            ended = (
                "stop" if drawn[-1] in params.stop_token_ids else "length" if len(drawn) == params.max_tokens else None
            )
            if prompt[0] == ord("!"):
                ended = "abort"
            if ended:
                del self.requests[name]
            logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in drawn]
            answer = SimpleNamespace(token_ids=tuple(drawn), finish_reason=ended, logprobs=logprobs)
            if ended:
                read = np.array([*prompt, *drawn][:-1])
                answer.routed_experts = np.stack([read * 0, read % 4], axis=1)[:, :, None]
            of_prompt = None
            if params.prompt_logprobs is not None:
                of_prompt = [None, *({token: SimpleNamespace(logprob=-token / 10)} for token in prompt[1:])]
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    finished=bool(ended),
                    outputs=[answer],
                    prompt_token_ids=prompt,
                    prompt_logprobs=of_prompt,
                )
            )
        return outputs


class Library:
    """What vLLM calls LLM."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.llm_engine = Scheduler()
        self.calls: list[str] = []

    def collective_rpc(self, method: str, args: tuple[str, ...]) -> list[dict[str, Any]]:
        self.calls.append(method)
        return [{"version": 3, "content_hash": args[1]}]

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.calls.append("wake")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    stand_in: Any = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = Library, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    requests: Any = ModuleType("vllm.lora.request")
    requests.LoRARequest = lambda name, number, path: SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=path
    )
    monkeypatch.setitem(sys.modules, "vllm.lora.request", requests)
    from posttrain.backends.rollout.vllm.in_process import VllmInProcessEngine

    options = {"free_cache_engine": True}
    layers = (False, True) if "experts" in request.node.name else ()
    plan = SamplerPlan(
        model_path="m",
        tokenizer_path="m",
        end_tokens=frozenset({END}),
        cuda=True,
        options=options,
        expert_layers=layers,
    )
    return VllmInProcessEngine(tiny_tokenizer(), plan)


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id=text, token_ids=tuple(text.encode()), text=text, data_source="t")


def test_groups_are_whole_and_handed_on_as_they_end(engine: Any) -> None:
    handed: list[TrajectoryGroup] = []
    counted: list[int] = []
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=5)
    groups = engine.generate([prompt("a"), prompt("x")], sampling, counted.append, handed.append)
    assert [t.text for group in groups for t in group.trajectories] == ["bcdef", "bcdef", "yz", "yz"]
    assert [t.sample_id for t in groups[1].trajectories] == ["x/0", "x/1"]
    assert [t.stop_reason for group in groups for t in group.trajectories] == [StopReason.LENGTH] * 2 + [
        StopReason.EOS
    ] * 2
    assert groups[0].trajectories[0].logprobs == (-0.5,) * 5
    assert handed == groups and sum(counted) == 14
    assert engine.llm.calls == ["sleep 1"]


def with_images(text: str, *sizes: tuple[int, int]) -> Prompt:
    """A prompt whose tokens # are those of images, red ones of these sizes."""
    files = []
    for size in sizes:
        buffer = io.BytesIO()
        Image.new("RGB", size, "red").save(buffer, "PNG")
        files.append(buffer.getvalue())
    shown = PromptImages(files=tuple(files), features={}, content_hash=text)
    return replace(prompt(text), images=shown)


@pytest.mark.parametrize("first", [None, 30.0])
def test_images_are_sent_with_one_token_each(
    engine: Any, tmp_path: Path, first: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor of vLLM makes three tokens of each; the answer is checked against what the trainer reads."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "image_token_id": IMAGE}))
    monkeypatch.setattr(engine, "_model", (str(tmp_path), False))
    sampling = SamplingParams(max_response_tokens=3, first_token_temperature=first)
    groups = engine.generate([with_images("a###b###c", (4, 2), (8, 8)), prompt("k")], sampling)
    assert [group.trajectories[0].text for group in groups] == ["def", "lmn"]
    for text, expected in (
        ("a####b###c", "vLLM reads a prompt with images as 9 tokens, and the trainer as 10"),
        ("a###c", "2 images and 1 places"),
    ):
        with pytest.raises(RunStopped, match=expected):
            engine.generate([with_images(text, (4, 2), (8, 8))], SamplingParams(max_response_tokens=1))


def test_images_of_a_family_that_writes_them_otherwise_are_refused(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smolvlm"}))
    monkeypatch.setattr(engine, "_model", (str(tmp_path), False))
    with pytest.raises(ModelError, match="this one is smolvlm"):
        engine.generate([with_images("a###", (4, 2))], SamplingParams(max_response_tokens=1))


def test_a_first_token_of_its_own_is_a_request_of_its_own(engine: Any) -> None:
    """The scheduler counts on from the prompt: b c d e f follow a, however they are requested; z ends what follows y."""
    asked: list[tuple[float, int, int]] = []
    params = engine.params

    def noting(sampling: SamplingParams, seed: int) -> Any:
        asked.append((sampling.temperature, sampling.top_k, sampling.max_response_tokens))
        return params(sampling, seed)

    engine.params = noting
    sampling = SamplingParams(max_response_tokens=5, first_token_temperature=30.0, first_token_top_k=16)
    groups = engine.generate([prompt("a"), prompt("y")], sampling)
    assert [(one.text, one.stop_reason) for group in groups for one in group.trajectories] == [
        ("bcdef", StopReason.LENGTH),
        ("z", StopReason.EOS),
    ]
    assert asked == [(30.0, 16, 1), (30.0, 16, 1), (1.0, 0, 4)]
    assert groups[0].trajectories[0].logprobs == (-0.5,) * 5
    with engine.open_stream(sampling) as stream:
        stream.submit([Request("gone", tuple(b"a"), 9)])
        stream.cancel(["gone"])
        assert stream.wait(0.1) == []


@pytest.mark.parametrize("first", [None, 30.0])
def test_experts_are_those_of_prompt_and_response(engine: Any, first: float | None) -> None:
    """b c d follow a; a is 97, 1 of 4. The last token is read by no pass."""
    assert engine.llm.arguments["enable_return_routed_experts"] is True
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    sampling = SamplingParams(max_response_tokens=3, first_token_temperature=first)
    [[response]] = [group.trajectories for group in engine.generate([prompt("a")], sampling)]
    assert response.text == "bcd" and response.experts.tolist() == [[[1]], [[2]], [[3]]]


def test_a_stream_takes_requests_while_others_are_sampled(engine: Any, tmp_path: Path) -> None:
    with engine.open_stream(SamplingParams(max_response_tokens=9)) as stream:
        stream.submit([Request("long", tuple(b"a"), 4), Request("gone", tuple(b"a"), 9)])
        assert stream.wait(0.0) == []
        stream.cancel(["gone", "unknown"])
        stream.submit([Request("short", tuple(b"k"), 2)])
        assert [(one.sample_id, one.text) for one in stream.wait(9.0)] == [("short", "lm")]
        assert [(one.sample_id, one.text) for one in stream.wait(9.0)] == [("long", "bcde")]
        assert stream.wait(9.0) == []
        stream.submit([Request("left", tuple(b"a"), 9)])
        with pytest.raises(RuntimeError, match="close the stream first"):
            engine.load_folder(tmp_path, Served(1, "hash"))
        with pytest.raises(RuntimeError, match="close the stream first"):
            engine.weights_changed(1)
    assert engine.llm.llm_engine.aborted == ["2", "4"]
    with pytest.raises(RuntimeError, match="the stream is closed"):
        stream.submit([])


def test_it_wakes_for_weights_and_for_sampling(engine: Any, tmp_path: Path) -> None:
    sampling = SamplingParams(max_response_tokens=1)
    for _ in range(2):
        engine.generate([prompt("a")], sampling)
    assert engine.load_folder(tmp_path, Served(3, "hash")) == [("vLLM", Served(3, "hash"))]
    assert engine.llm.calls == ["sleep 1", "wake", "sleep 1", "wake", "posttrain_load", "reset"]


def test_a_response_that_vllm_gave_up_stops_the_step(engine: Any) -> None:
    with pytest.raises(RunStopped, match="vLLM ended !/0 after 1 tokens: abort"):
        engine.generate([prompt("!")], SamplingParams(max_response_tokens=3))


def test_requests_name_the_adapter_that_was_loaded_last(engine: Any, tmp_path: Path) -> None:
    sampling = SamplingParams(max_response_tokens=1)
    engine.generate([prompt("a")], sampling)
    for version in (1, 2):
        engine.load_adapter(tmp_path, Served(version, "hash"))
        engine.generate([prompt("a")], sampling)
    assert engine.llm.llm_engine.adapters_asked_for == [None, "policy-1", "policy-2"]
    assert engine.llm.llm_engine.adapters == [2]
    with pytest.raises(RunStopped, match="vLLM could not load the adapter of version 3"):
        engine.load_adapter(tmp_path / "broken", Served(3, "hash"))


def test_prompt_logprobs_are_those_of_the_prompts_own_tokens(engine: Any) -> None:
    for asked, expected in ((True, (-9.8, -9.9)), (False, ())):
        [group] = engine.generate([prompt("abc")], SamplingParams(max_response_tokens=1, prompt_logprobs=asked))
        assert group.trajectories[0].prompt_logprobs == expected

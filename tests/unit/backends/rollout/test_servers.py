"""Servers that are slow, fail, cut connections, forget log-probs or serve other weights."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from posttrain.backends.rollout.http import start_http
from posttrain.backends.rollout.sglang import server_arguments, start_sglang
from posttrain.backends.rollout.vllm import start_vllm
from posttrain.backends.rollout.vllm.experts import decoded
from posttrain.backends.rollout.vllm.options import engine_arguments
from posttrain.backends.rollout.vllm.server import server_words
from posttrain.backends.serving.folder_sync import FolderSync
from posttrain.backends.serving.launch import LaunchedServer, arguments, free_port
from posttrain.backends.serving.protocol import UnusableAnswer
from posttrain.backends.weight_sync.disk import disk_sync
from posttrain.errors import ConfigError, MissingDependency, RunStopped
from posttrain.interfaces.rollout_engine import NodeSpan, Request, SamplerPlan
from posttrain.models.hugging_face_weights import hugging_face_weights
from posttrain.models.loading import load_causal_lm
from posttrain.processes import proc
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, TrajectoryGroup

SAMPLING = SamplingParams(samples_per_prompt=2, max_response_tokens=4, seed=1)
PROMPTS = [Prompt(prompt_id=f"p{n}", token_ids=(50 + n, 60), text="", data_source="t") for n in range(4)]


class Policy:
    version = 0


def plan(folder: Path, *urls: str, **more: Any) -> SamplerPlan:
    settings = {"timeout_s": 30.0, "retries": 2, "max_concurrent_sequences": 3} | more
    return SamplerPlan(
        model_path=str(folder), tokenizer_path=str(folder), end_tokens=frozenset({256}), endpoints=urls, **settings
    )


@pytest.fixture
def connect(served_model: Path) -> Callable[..., Any]:
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    starts = {"http": start_http, "vllm": start_vllm, "sglang": start_sglang}

    def start(engine: str, *urls: str, **more: Any) -> Any:
        return starts[engine](plan(served_model, *urls, **more), tokenizer)

    return start


def failures(groups: list[TrajectoryGroup]) -> list[str]:
    return [t.failure for group in groups for t in group.trajectories if t.stop_reason is StopReason.FAILED]


def about(prompt: Prompt, body: Any) -> bool:
    return body is not None and (body.get("prompt") or body.get("input_ids")) == list(prompt.token_ids)


# -------------------------------------------------------------------------------------------------------- what passes


@pytest.mark.parametrize("engine", ["http", "vllm", "sglang"])
def test_a_server_that_fails_now_and_then_changes_nothing(engine: str, connect: Any, stand_in: Any, said: Any) -> None:
    server = stand_in()
    right = connect(engine, server.url).generate(PROMPTS, SAMPLING)
    tries: Counter[str] = Counter()

    def misbehave(path: str, body: Any) -> Any:
        """The first try of every request fails, the second is cut off."""
        if path not in ("/v1/completions", "/generate"):
            return said()
        request = json.dumps(body)
        tries[request] += 1
        return {1: said(status=500, body={"error": "CUDA"}), 2: said(cut=True)}.get(tries[request], said())

    server.misbehave = misbehave
    assert connect(engine, server.url, retries=2).generate(PROMPTS, SAMPLING) == right
    assert list(tries.values()) == [3] * 8


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["http", "vllm", "sglang"])
def test_one_stuck_request_becomes_a_failure_and_holds_nobody_up(
    engine: str, connect: Any, stand_in: Any, said: Any
) -> None:
    server = stand_in()
    server.misbehave = lambda path, body: said(after_s=30.0) if about(PROMPTS[1], body) else said()
    handed: list[TrajectoryGroup] = []
    started = time.monotonic()
    groups = connect(engine, server.url, timeout_s=1.0).generate(PROMPTS, SAMPLING, on_group=handed.append)
    assert time.monotonic() - started < 25
    assert failures(groups) == ["no response within rollout.timeout_s = 1 s"] * 2
    assert [t.token_ids for t in groups[1].trajectories] == [(), ()]
    assert all(len(t.token_ids) == len(t.logprobs) > 0 for n in (0, 2, 3) for t in groups[n].trajectories)
    assert len(handed) == 4 and handed[-1] is groups[1]


def test_a_request_that_always_fails_becomes_a_failure(connect: Any, stand_in: Any, said: Any) -> None:
    server = stand_in()
    broken = said(status=503, body={"error": "out of memory"})
    server.misbehave = lambda path, body: broken if about(PROMPTS[0], body) else said()
    found = failures(connect("vllm", server.url).generate(PROMPTS, SAMPLING))
    assert len(found) == 2 and all("503" in text and "out of memory" in text for text in found)
    tries = [body for body in server.generations() if about(PROMPTS[0], body)]
    assert len(tries) == 2 * 3  # two samples, each once and twice again


def test_an_aborted_response_is_a_failure(connect: Any, stand_in: Any, said: Any) -> None:
    def abort(answer: Any) -> Any:
        answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "killed"}
        return answer

    server = stand_in()
    server.misbehave = lambda path, body: said(change=abort) if about(PROMPTS[2], body) else said()
    found = failures(connect("sglang", server.url).generate(PROMPTS, SAMPLING))
    assert len(found) == 2 and "abort" in found[0]


# ---------------------------------------------------------------------------------------------------- several servers


def test_a_groups_requests_go_to_one_server_and_all_servers_work(connect: Any, stand_in: Any) -> None:
    servers = [stand_in(), stand_in()]
    connect("vllm", *(server.url for server in servers)).generate(PROMPTS, SAMPLING)
    for number, server in enumerate(servers):
        prompts = [tuple(body["prompt"]) for body in server.generations()]
        assert sorted(prompts) == sorted(p.token_ids for p in PROMPTS[number::2] for _ in range(2))


def test_another_server_takes_over_and_samples_the_same(connect: Any, stand_in: Any) -> None:
    servers = [stand_in(), stand_in()]
    engine = connect("http", *(server.url for server in servers))
    right = engine.generate(PROMPTS, SAMPLING)
    servers[0].stop()
    assert engine.generate(PROMPTS, SAMPLING) == right


def test_a_server_that_dies_in_the_middle_is_left(connect: Any, stand_in: Any, said: Any) -> None:
    servers = [stand_in(), stand_in()]
    right = connect("vllm", servers[1].url).generate(PROMPTS, SAMPLING)
    servers[0].misbehave = lambda path, body: said(cut=True, body={}) if path == "/v1/completions" else said()
    # It says that it is well and cuts every answer: tries go round between the two.
    assert connect("vllm", *(s.url for s in servers)).generate(PROMPTS, SAMPLING) == right


def test_no_more_requests_at_a_time_than_allowed(connect: Any, stand_in: Any, said: Any) -> None:
    server = stand_in()
    server.misbehave = lambda path, body: said(after_s=0.03)
    connect("vllm", server.url, max_concurrent_sequences=3).generate(PROMPTS, SAMPLING)
    assert server.most_at_once == 3


# ------------------------------------------------------------------------------------------------- what stops the step


def test_no_server_at_all_stops_the_step(connect: Any) -> None:
    with pytest.raises(RunStopped, match=r"no sampler is left: no answer from http://127.0.0.1:1"):
        connect("vllm", "http://127.0.0.1:1").generate(PROMPTS, SAMPLING)


def test_when_nothing_comes_back_the_step_stops(connect: Any, stand_in: Any, said: Any) -> None:
    server = stand_in()
    server.misbehave = lambda path, body: said(status=500, body={}) if path == "/v1/completions" else said()
    with pytest.raises(RunStopped, match=r"not one of 8 responses came back from the sampler; the first: .*status 500"):
        connect("vllm", server.url, retries=0).generate(PROMPTS, SAMPLING)


def test_a_refused_request_stops_the_step_with_the_servers_words(connect: Any, stand_in: Any, said: Any) -> None:
    server = stand_in()
    refusal = said(status=400, body={"error": {"message": "maximum context length is 8"}})
    server.misbehave = lambda path, body: refusal if path == "/v1/completions" else said()
    with pytest.raises(RunStopped, match=r"rejected the request: .*maximum context length is 8"):
        connect("vllm", server.url).generate(PROMPTS, SAMPLING)
    requests = [json.dumps(body) for body in server.generations()]
    assert len(requests) == len(set(requests))  # none was asked again


def without(*path: str | int) -> Callable[[Any], Any]:
    def change(answer: Any) -> Any:
        place = answer
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = None
        return answer

    return change


@pytest.mark.parametrize(
    ("engine", "change", "words"),
    [
        ("vllm", without("choices", 0, "token_ids"), "no token ids, and text is not tokenised again"),
        ("vllm", without("choices", 0, "logprobs"), "no log-probs"),
        ("vllm", without("choices", 0, "logprobs", "token_logprobs", 0), "no log-probs"),
        ("http", without("choices", 0, "logprobs"), "no log-probs"),
        ("sglang", without("meta_info", "output_token_logprobs"), "no token ids"),
        ("sglang", without("meta_info", "output_token_logprobs", 0, 0), "no log-probs"),
        ("vllm", lambda answer: {"choices": []}, "no token ids"),
        ("vllm", lambda answer: [], "no token ids"),
    ],
)
def test_an_answer_without_ids_or_logprobs_stops_the_step(
    engine: str, change: Any, words: str, connect: Any, stand_in: Any, said: Any
) -> None:
    server = stand_in()
    generates = ("/v1/completions", "/generate")
    server.misbehave = lambda path, body: said(change=change) if path in generates else said()
    with pytest.raises(UnusableAnswer, match=words):
        connect(engine, server.url).generate(PROMPTS, SAMPLING)


def test_http_reads_ids_that_are_spelled_as_tokens_but_never_text(connect: Any, stand_in: Any, said: Any) -> None:
    server = stand_in()
    right = connect("http", server.url).generate(PROMPTS, SAMPLING)
    server.misbehave = lambda path, body: said(change=without("choices", 0, "token_ids")) if body else said()
    assert connect("http", server.url).generate(PROMPTS, SAMPLING) == right

    def spell(answer: Any) -> Any:
        answer["choices"][0] |= {"token_ids": None}
        answer["choices"][0]["logprobs"]["tokens"] = ["a" for _ in answer["choices"][0]["logprobs"]["tokens"]]
        return answer

    server.misbehave = lambda path, body: said(change=spell) if body else said()
    with pytest.raises(UnusableAnswer, match="text is not tokenised again"):
        connect("http", server.url).generate(PROMPTS, SAMPLING)


def test_more_tokens_than_asked_for_stop_the_step(connect: Any, stand_in: Any, said: Any) -> None:
    def longer(answer: Any) -> Any:
        answer["choices"][0] |= {"token_ids": [1] * 9}
        answer["choices"][0]["logprobs"]["token_logprobs"] = [-1.0] * 9
        return answer

    server = stand_in()
    server.misbehave = lambda path, body: said(change=longer) if body else said()
    with pytest.raises(UnusableAnswer, match="gave 9 tokens, and 4 is the limit"):
        connect("vllm", server.url).generate(PROMPTS, SAMPLING)


def test_http_refuses_logprobs_of_another_distribution(connect: Any, stand_in: Any) -> None:
    server = stand_in()
    hot = SamplingParams(max_response_tokens=4, temperature=0.5)
    with pytest.raises(UnusableAnswer, match="processed_logprobs"):
        connect("http", server.url).generate(PROMPTS, hot)
    connect("http", server.url, options={"logprobs": "processed"}).generate(PROMPTS[:1], hot)


def test_what_a_callback_raises_comes_out_as_it_is_and_ends_the_rest(connect: Any, stand_in: Any, said: Any) -> None:
    class Stop(Exception):
        pass

    def stop(tokens: int) -> None:
        raise Stop

    server = stand_in()
    server.misbehave = lambda path, body: said(after_s=0.1 if body else 0.0)
    with pytest.raises(Stop):
        connect("vllm", server.url, max_concurrent_sequences=2).generate(PROMPTS, SAMPLING, on_tokens=stop)
    assert len(server.generations()) < 8


# -------------------------------------------------------------------------------------------------------- the weights


@pytest.fixture
def trained(served_model: Path, tmp_path: Path) -> FolderSync:
    model = load_causal_lm(str(served_model), dtype=torch.float32)
    return disk_sync(lambda: hugging_face_weights(model), folder=tmp_path, shard_bytes=1 << 14)


@pytest.mark.parametrize("engine", ["http", "vllm", "sglang"])
def test_a_server_started_again_serves_other_weights_and_is_found_out(
    engine: str, connect: Any, stand_in: Any, trained: FolderSync
) -> None:
    server = stand_in()
    sampler = connect(engine, server.url, options=HTTP_UPDATES if engine == "http" else {})
    Policy.version = 5
    trained.publish(Policy(), sampler)
    sampler.generate(PROMPTS, SAMPLING)
    server.weight_version = '[0, "first"]' if engine == "http" else "default"  # as after a restart
    server.worker.__dict__.pop("_posttrain_served", None)
    with pytest.raises(RunStopped, match=r"(serves|comes from) .*(version 0|default).*(version )?5"):
        sampler.generate(PROMPTS, SAMPLING)


HTTP_UPDATES = {"update_path": "/update", "served_path": "/served"}


@pytest.mark.parametrize(
    ("engine", "path", "change", "words"),
    [
        ("http", "/update", lambda a: a | {"version": 4}, "serves weights of version 4 .* after weights of version 6"),
        ("http", "/update", lambda a: a | {"content_hash": "0" * 32}, "serves weights of version 6 .000000000000."),
        ("http", "/update", lambda a: None, "does not report the weights it serves"),
        ("vllm", "/collective_rpc", lambda a: {"results": [{"version": 6, "content_hash": "old"}]}, "serves .*old"),
        ("vllm", "/collective_rpc", lambda a: {"results": [{"error": "w did not arrive"}]}, "w did not arrive"),
        ("vllm", "/collective_rpc", lambda a: {"results": []}, "gave no answer"),
        ("sglang", "/update_weights_from_disk", lambda a: {"success": False, "message": "bad shape"}, "bad shape"),
        ("sglang", "/get_model_info", lambda a: a | {"weight_version": "6-abc"}, "serves weights of version 6 .abc."),
        ("sglang", "/get_model_info", lambda a: {}, "does not report the weights"),
        ("sglang", "/get_weights_by_name", lambda a: [[1e9]], "holds another .* than the one sent"),
        ("sglang", "/flush_cache", lambda a: b"", ""),
    ],
)
def test_a_sync_ends_with_what_the_server_says_that_it_serves(
    engine: str, path: str, change: Any, words: str, connect: Any, stand_in: Any, said: Any, trained: FolderSync
) -> None:
    server = stand_in()
    server.misbehave = lambda asked, body: said(change=change) if asked == path else said()
    sampler = connect(engine, server.url, options=HTTP_UPDATES if engine == "http" else {})
    Policy.version = 6
    if not words:
        trained.publish(Policy(), sampler)
        assert sampler.version == 6
        return
    with pytest.raises(RunStopped, match=words):
        trained.publish(Policy(), sampler)
    assert sampler.version == 0


def test_vllm_without_the_worker_extension_says_what_is_missing(
    connect: Any, stand_in: Any, said: Any, trained: FolderSync
) -> None:
    server = stand_in()
    server.misbehave = lambda path, body: said(status=404, body={}) if path == "/collective_rpc" else said()
    with pytest.raises(
        RunStopped, match=r"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls posttrain\.\S+WeightReceiver"
    ):
        trained.publish(Policy(), connect("vllm", server.url))


def test_cache_of_old_weights_is_emptied_and_memory_is_given_back(
    connect: Any, stand_in: Any, trained: FolderSync
) -> None:
    server = stand_in()
    sampler = connect("sglang", server.url, options={"free_cache_engine": True})
    trained.publish(Policy(), sampler)
    before = sampler.generate(PROMPTS, SAMPLING)
    assert sampler.generate(PROMPTS, SAMPLING) == before  # the same seeds, asleep in between
    steps = [p for p in server.paths() if p not in ("/generate", "/health", "/get_model_info", "/get_weights_by_name")]
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    assert steps == ["/update_weights_from_disk", "/flush_cache", release, resume, release]
    server = stand_in()
    sampler = connect("vllm", server.url, options={"free_cache_engine": True}, cuda=True)
    before = sampler.generate(PROMPTS, SAMPLING)
    trained.sent = None
    trained.publish(Policy(), sampler)
    again = sampler.generate(PROMPTS, SAMPLING)
    assert [t.token_ids for group in again for t in group.trajectories] == [
        t.token_ids for group in before for t in group.trajectories
    ]
    steps = [p for p in server.paths() if p not in ("/v1/completions", "/health")]
    sleep, wake = "/sleep?level=1", "/wake_up"
    assert steps == [sleep, wake, "/collective_rpc", "/reset_prefix_cache", "/collective_rpc", sleep]


# ------------------------------------------------------------------------------------------------------------- streams


def request(number: int, conversation: str = "", tokens: int = 4) -> Request:
    return Request(f"r{number}", PROMPTS[number].token_ids, tokens, conversation)


def test_requests_of_a_stream_are_answered_while_nobody_waits(connect: Any, stand_in: Any) -> None:
    server = stand_in()
    with connect("vllm", server.url).open_stream(SAMPLING) as stream:
        stream.submit([request(0), request(1)])
        end = time.monotonic() + 10
        while not (server.at_once == 0 and len(server.generations()) == 2) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)  # for the answers to come home
        assert sorted(one.sample_id for one in stream.wait(0.0)) == ["r0", "r1"]


def test_a_stuck_request_of_a_stream_holds_nobody_up_and_becomes_a_failure(
    connect: Any, stand_in: Any, said: Any
) -> None:
    server = stand_in()
    server.misbehave = lambda path, body: said(after_s=30.0) if about(PROMPTS[1], body) else said()
    with connect("vllm", server.url, timeout_s=1.5).open_stream(SAMPLING) as stream:
        stream.submit([request(0), request(1)])
        [first] = stream.wait(10.0)
        assert first.sample_id == "r0" and first.stop_reason is not StopReason.FAILED
        assert stream.wait(0.05) == []  # the time is over
        stream.submit([request(2)])
        assert [one.sample_id for one in stream.wait(10.0)] == ["r2"]
        [stuck] = stream.wait(10.0)
        assert (stuck.sample_id, stuck.stop_reason, stuck.token_ids) == ("r1", StopReason.FAILED, ())
        assert stuck.failure == "no response within rollout.timeout_s = 1.5 s"
        assert stream.wait(10.0) == []


def test_what_stops_a_step_comes_out_of_a_stream(connect: Any, stand_in: Any, said: Any) -> None:
    server = stand_in()
    server.misbehave = lambda path, body: said(status=400, body={"error": "too long"}) if body else said()
    stream = connect("vllm", server.url, options={"free_cache_engine": True}, cuda=True).open_stream(SAMPLING)
    with pytest.raises(RunStopped, match=r"rejected the request: .*400.*too long"), stream:
        stream.submit([request(0)])
        stream.wait(10.0)
    assert stream.closed and "/sleep?level=1" not in server.paths()
    with pytest.raises(RunStopped, match="no sampler is left"):
        connect("vllm", "http://127.0.0.1:1").open_stream(SAMPLING)
    with pytest.raises(UnusableAnswer, match="log-probs of the raw logits"):
        connect("http", server.url).open_stream(replace(SAMPLING, temperature=0.5))


def test_a_conversation_stays_with_its_server_and_streams_keep_the_bound(
    connect: Any, stand_in: Any, said: Any
) -> None:
    servers = [stand_in(), stand_in()]
    for server in servers:
        server.misbehave = lambda path, body: said(after_s=0.02)
    engine = connect("vllm", *(server.url for server in servers), max_concurrent_sequences=3)
    with engine.open_stream(SAMPLING) as stream:
        for turn in range(2):
            stream.submit([Request(f"{n}@{turn}", (50 + n, 60 + turn), 4, f"c{n}") for n in range(12)])
            ended: list[str] = []
            while more := stream.wait(10.0):
                ended += [one.sample_id for one in more]
            assert len(ended) == 12
    asked = [Counter(body["prompt"][0] for body in server.generations()) for server in servers]
    assert not asked[0].keys() & asked[1].keys()
    assert asked[0] and asked[1] and asked[0] + asked[1] == Counter(dict.fromkeys(range(50, 62), 2))
    assert sum(server.most_at_once for server in servers) <= 6 and max(s.most_at_once for s in servers) <= 3


@pytest.mark.parametrize("engine", ["vllm", "http"])
def test_a_stream_asks_again_what_is_served_after_new_weights(
    engine: str, connect: Any, stand_in: Any, trained: FolderSync
) -> None:
    server = stand_in()
    sampler = connect(engine, server.url, options=HTTP_UPDATES if engine == "http" else {})
    Policy.version = 5
    with sampler.open_stream(SAMPLING) as stream:
        trained.publish(Policy(), sampler)
        server.weight_version = '[0, "first"]'  # as after a restart
        server.worker.__dict__.pop("_posttrain_served", None)
        with pytest.raises(RunStopped, match=r"serves weights of version 0 .*version 5"):
            stream.submit([request(0)])


def test_a_stream_puts_its_server_to_sleep_when_it_is_closed(connect: Any, stand_in: Any) -> None:
    server = stand_in()
    sampler = connect("sglang", server.url, options={"free_cache_engine": True})
    for _ in range(2):
        with sampler.open_stream(SAMPLING) as stream:
            stream.submit([request(0)])
            assert len(stream.wait(10.0)) == 1
    steps = [path for path in server.paths() if path not in ("/generate", "/health")]
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    assert steps == [release, resume, release]


# ------------------------------------------------------------------------------------------------ settings and starting


def test_http_cannot_be_trained_with_without_an_address_for_weights(
    connect: Any, stand_in: Any, trained: FolderSync
) -> None:
    with pytest.raises(RunStopped, match=r"rollout\.engine_options\.update_path"):
        trained.publish(Policy(), connect("http", stand_in().url))


def test_http_refuses_options_that_mean_nothing(connect: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        connect("http", options={"dtype": "bfloat16"})
    assert "no option dtype" in str(caught.value) and "needs servers" in str(caught.value)


def test_key_goes_into_the_header_and_into_no_message(
    connect: Any, stand_in: Any, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLER_KEY", "s3cr3t")
    server = stand_in()
    server.misbehave = lambda path, body: said(status=400, body="your key s3cr3t is not known") if body else said()
    with pytest.raises(RunStopped) as caught:
        connect("vllm", server.url, options={"api_key_env": "SAMPLER_KEY"}).generate(PROMPTS, SAMPLING)
    assert "s3cr3t" not in str(caught.value) and "is not known" in str(caught.value)
    monkeypatch.delenv("SAMPLER_KEY")
    with pytest.raises(ConfigError, match="api_key_env"):
        connect("vllm", server.url, options={"api_key_env": "SAMPLER_KEY"})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_library_that_is_nowhere_is_named_with_the_ways_to_have_it(engine: str, connect: Any) -> None:
    with pytest.raises(
        MissingDependency, match=f"{engine} is not installed .*rollout.engine_options.python.*rollout.endpoints"
    ):
        connect(engine)


def test_arguments_of_vllm(tmp_path: Path) -> None:
    options = {
        "dtype": "float32",
        "load_format": "dummy_dtensor",
        "max_num_seqs": 64,
        "limit_images": 2,
        "swap_space": None,
        "free_cache_engine": True,
        "inference_engine_expert_parallel_size": 4,
        "enable_prefix_caching": False,
        "python": "/venv/bin/python",
        "some_new_argument": {"a": 1},
    }
    found = engine_arguments(plan(tmp_path, options=options, max_model_len=100, tensor_parallel=2, cuda=True))
    assert found == {
        "model": str(tmp_path),
        "tokenizer": str(tmp_path),
        "dtype": "float32",
        "seed": 0,
        "trust_remote_code": False,
        "max_model_len": 100,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "tensor_parallel_size": 2,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_sleep_mode": True,
        "load_format": "dummy",
        "limit_mm_per_prompt": {"image": 2},
        "enable_expert_parallel": True,
        "enable_prefix_caching": False,
        "some_new_argument": {"a": 1},
    }
    words = arguments({"seed": 3, "a_b": True, "c": False, "d": {"x": 1}, "e": None, "f": [1, 2]}, off="no-")
    assert words == ["--seed", "3", "--a-b", "--no-c", "--d", '{"x": 1}', "--f", "1", "2"]
    assert arguments({"c": False, "d": True}, off=None) == ["--d"]


@pytest.mark.parametrize(
    ("theirs", "ours"), [("dummy_megatron", "dummy"), ("hf", "auto"), ("safetensors", "safetensors")]
)
def test_load_formats(theirs: str, ours: str, tmp_path: Path) -> None:
    settings = plan(tmp_path, options={"load_format": theirs})
    assert engine_arguments(settings)["load_format"] == server_arguments(settings)["load_format"] == ours


def test_command_line_of_vllms_server(tmp_path: Path) -> None:
    """Its flags have a form with no-, but for --disable-log-stats."""
    words = server_words(plan(tmp_path, options={"disable_log_stats": False, "enforce_eager": False}), 8000)
    assert "--no-enforce-eager" in words and "--no-trust-remote-code" in words
    assert not [word for word in words if "log-stats" in word]
    assert words[-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert "--disable-log-stats" in server_words(plan(tmp_path, options={"disable_log_stats": True}), 8000)
    # Without a GPU a prompt is prefilled whole, in as many tokens as the longest sequence has.
    small = server_words(plan(tmp_path, max_model_len=300, max_prefill_tokens=64), 8000)
    assert "--no-enable-chunked-prefill" in small
    assert small[small.index("--max-num-batched-tokens") + 1] == "300"


def test_processes_of_a_server_on_two_machines(tmp_path: Path) -> None:
    def words(rank: int) -> list[str]:
        span = NodeSpan(nodes=2, rank=rank, address="10.0.0.1", port=77, host=f"10.0.0.{1 + rank}")
        return server_words(plan(tmp_path, tensor_parallel=16, span=span), 8000)

    meeting = "--distributed-executor-backend mp --nnodes 2 --node-rank {} --master-addr 10.0.0.1 --master-port 77"
    assert " ".join(words(0)).endswith(meeting.format(0))
    assert " ".join(words(1)).endswith(meeting.format(1) + " --headless")
    span = NodeSpan(nodes=2, rank=1, address="10.0.0.1", port=77, host="10.0.0.2")
    found = server_arguments(plan(tmp_path, tensor_parallel=16, span=span))
    assert (found["nnodes"], found["node_rank"], found["dist_init_addr"]) == (2, 1, "10.0.0.1:77")


def test_arguments_of_sglang(tmp_path: Path) -> None:
    options = {
        "attention_backend": "fa3",
        "gpu_memory_utilization": 0.6,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "free_cache_engine": True,
        "layered_summon": False,
    }
    found = server_arguments(plan(tmp_path, options=options, tensor_parallel=2))
    expected = {
        "attention_backend": "fa3",
        "mem_fraction_static": 0.6,
        "disable_cuda_graph": True,
        "chunked_prefill_size": -1,
        "disable_radix_cache": False,
        "enable_memory_saver": True,
        "tp_size": 2,
    }
    assert expected.items() <= found.items() and "layered_summon" not in found


def test_a_server_that_does_not_start_is_told_with_its_own_words() -> None:
    command = ["python3", "-c", "import sys; sys.exit('ValueError: not enough memory')"]
    server = LaunchedServer(command, port=free_port(), name="the server", environment={})
    with pytest.raises(RunStopped, match="the server did not start:\n  ValueError: not enough memory"):
        server.wait_until_ready("/health", 20)
    server.close()


def test_a_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    port = free_port()
    command = ["python3", "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    server = LaunchedServer(command, port=port, name="the server", environment={}, importable=tmp_path)
    server.wait_until_ready("/", 20)
    assert (Path(server.folder.name) / "code" / tmp_path.name).is_symlink()
    process = server.process
    server.close()
    assert process.poll() is not None
    with pytest.raises(RunStopped):
        server.wait_until_ready("/", 0.5)


def test_shared_memory_that_a_server_leaves_behind_goes(tmp_path: Path) -> None:
    """It is told to end, and ends without tidying up; a segment of somebody else's stays."""
    code = (
        "import os, signal, sys, time; from multiprocessing import resource_tracker, shared_memory\n"
        "mine = shared_memory.SharedMemory(create=True, size=4096)\n"
        "resource_tracker.unregister(mine._name, 'shared_memory')\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        f"open({str(tmp_path / 'name')!r}, 'w').write(mine.name + '.'); time.sleep(60)"
    )
    other = shared_memory.SharedMemory(create=True, size=4096)
    try:
        server = LaunchedServer([sys.executable, "-c", code], port=free_port(), name="it", environment={})
        end = time.monotonic() + 20
        while not (tmp_path / "name").exists() or not (name := (tmp_path / "name").read_text()).endswith("."):
            assert time.monotonic() < end
            time.sleep(0.02)
        segment = Path("/dev/shm") / name.rstrip(".")
        assert segment.exists()
        server.close()
        assert not segment.exists() and (Path("/dev/shm") / other.name).exists()
    finally:
        other.close()
        other.unlink()


def test_a_server_sees_the_hubs_token_and_no_other_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "JUDGE_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    code = "import os; print(*os.environ); raise SystemExit('that is all')"
    server = LaunchedServer([sys.executable, "-c", code], port=free_port(), name="it", environment={"OWN": "1"})
    try:
        server.process.wait(20)
        seen = set(server.log.read_text().split())
        assert seen & {"WANDB_API_KEY", "JUDGE_KEY", "HF_TOKEN", "OWN"} == {"HF_TOKEN", "OWN"}
    finally:
        server.close()


def test_processes_of_a_server_that_leave_its_session_end_with_it(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{left.pid}}.'); time.sleep(60)"
    )
    server = LaunchedServer([sys.executable, "-c", code], port=free_port(), name="it", environment={})
    end = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("."):
        assert time.monotonic() < end
        time.sleep(0.02)
    server.close()
    assert proc.state(int((tmp_path / "pid").read_text().rstrip("."))) == "gone"


def test_a_server_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    """And its folder goes."""
    port = free_port()
    code = (
        "import sys, time; from posttrain.backends.serving.launch import LaunchedServer\n"
        f"command = ['python3', '-m', 'http.server', '{port}', '--bind', '127.0.0.1']\n"
        f"server = LaunchedServer(command, port={port}, name='it', environment={{}})\n"
        "server.wait_until_ready('/', 20); print('ready', flush=True); time.sleep(60)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
    assert len(list(tmp_path.iterdir())) == 1
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0 and not list(tmp_path.iterdir()):
                return
        time.sleep(0.05)
    pytest.fail("the server, or its folder, is still there")


def experts_of(tokens: list[int]) -> np.ndarray:
    """[tokens, 3, 2]: a first layer without experts, as vLLM has zeros for it, and two whose experts the token decides."""
    ids = np.array(tokens)[:, None]
    chosen = np.concatenate([ids % 4, (ids + 1) % 4], axis=1)
    return np.stack([np.zeros_like(chosen), chosen, 3 - chosen], axis=1).astype(np.uint8)


@pytest.mark.parametrize("first", [None, 30.0])  # the first token is a request of its own
def test_experts_of_every_token_are_those_that_vllm_reports(connect: Any, stand_in: Any, first: float | None) -> None:
    server = stand_in()
    server.experts = experts_of
    engine = connect("vllm", server.url, expert_layers=(False, True, True))
    sampling = replace(SAMPLING, first_token_temperature=first)
    for group in engine.generate(PROMPTS[:2], sampling):
        for response in group.trajectories:
            tokens = [*group.prompt.token_ids, *response.token_ids]
            assert response.experts is not None and response.experts.dtype == np.int16
            assert response.experts.tolist() == experts_of(tokens[:-1])[:, 1:].tolist()
    assert connect("vllm", server.url).generate(PROMPTS[:1], SAMPLING)[0].trajectories[0].experts is None


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (None, "holds no experts of its tokens .*--enable-return-routed-experts"),
        # a cache that leaves out the prompt
        (lambda ids: experts_of(ids[1:]), r"experts of shape \(4, 3, 2\); \[5, 3, chosen\] is expected"),
        (lambda ids: experts_of(ids)[:, :2], r"experts of shape \(5, 2, 2\)"),
    ],
)
def test_experts_that_are_missing_stop_the_step(connect: Any, stand_in: Any, experts: Any, said: str) -> None:
    server = stand_in()
    server.experts = experts
    engine = connect("vllm", server.url, expert_layers=(False, True, True))
    with pytest.raises(UnusableAnswer, match=said):
        engine.generate(PROMPTS[:1], replace(SAMPLING, ignore_eos=True))


def test_experts_that_are_no_array_stop_the_step() -> None:
    for text in ("no base64", base64.b64encode(b"no array").decode(), 7):
        with pytest.raises(UnusableAnswer, match="the experts in the answer of vLLM cannot be read"):
            decoded(text)


def test_vllm_is_started_to_report_experts(tmp_path: Path, connect: Any) -> None:
    with pytest.raises(ConfigError, match="vLLM reports the experts of its tokens on GPUs alone"):
        connect("vllm", expert_layers=(True,))
    assert engine_arguments(plan(tmp_path, expert_layers=(True,)))["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in engine_arguments(plan(tmp_path))

"""The HTTP layer: keys, binary and JSON forms, polls, and what this server does not have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx2
import numpy as np
import pytest

from posttrain.backends.tinker import app as app_module
from posttrain.backends.tinker import messages
from posttrain.backends.tinker.app import AppPlan, TinkerApp
from posttrain.backends.tinker.messages import PROTOBUF, read_loss_request, sample_result
from posttrain.backends.tinker.requests import Sampled, SampleResult
from posttrain.backends.tinker.service import Service
from posttrain.backends.tinker.worker import Job
from posttrain.data.chat_api import Refused

KEY = "tml-secret"
TOKENS = [5, 6, 7, 8]


def ask(service: Service, work: Callable[[httpx2.AsyncClient], Awaitable[Any]], **headers: str) -> Any:
    async def whole() -> Any:
        plan = AppPlan(token=KEY, host_names=frozenset({"localhost"}))
        transport = httpx2.ASGITransport(app=TinkerApp(plan, service).app())
        given = {"X-API-Key": KEY, **headers}
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost/api/v1", headers=given) as client:
            return await work(client)

    return asyncio.run(whole())


def loss_request(model_id: str, seq_id: int, **changes: Any) -> Any:
    """A request of forward_backward in the client's binary form."""
    message = messages._classes()["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(TOKENS[:2], dtype="<i4").tobytes()
    datum.model_input.add().encoded_text.tokens = np.array(TOKENS[2:3], dtype="<i4").tobytes()
    for name, values, kind in (("target_tokens", TOKENS[1:], "<i8"), ("weights", [0, 1, 1], "<f4")):
        tensor = datum.loss_fn_inputs.add(key=name).value
        tensor.dense, tensor.dtype = np.array(values, dtype=kind).tobytes(), 1 if kind == "<f4" else 2
        tensor.shape.append(3)
    for name, value in changes.items():
        setattr(message, name, value)
    return message


async def poll(client: httpx2.AsyncClient, request_id: str, **headers: str) -> httpx2.Response:
    return await client.post("retrieve_future", json={"request_id": request_id}, headers=headers)


async def begin(client: httpx2.AsyncClient) -> tuple[str, str]:
    session = (await client.post("create_session", json={"tags": []})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2, "seed": 0}}
    made = await client.post("create_model", json=body)
    model_id: str = (await poll(client, made.json()["request_id"])).json()["model_id"]
    return session, model_id


def test_a_step_in_binary_and_in_json(service: Service) -> None:
    async def work(client: httpx2.AsyncClient) -> None:
        session, model_id = await begin(client)
        assert model_id == f"{session}:train:0"
        content = loss_request(model_id, 1).SerializeToString()
        sent = await client.post("forward_backward", content=content, headers={"Content-Type": PROTOBUF})
        assert sent.json() == {"request_id": f"{model_id}:1", "model_id": model_id}
        binary = await poll(client, f"{model_id}:1", Accept=PROTOBUF)
        assert binary.headers["content-type"] == PROTOBUF
        found = messages._classes()["ForwardBackwardOutput"]()
        found.ParseFromString(binary.content)
        (record,) = found.loss_fn_outputs
        (field,) = record.fields
        assert (record.num_datums, field.key) == (1, "logprobs")
        assert np.frombuffer(field.value.offsets, dtype="<i8").tolist() == [0, 12]
        logprobs = np.frombuffer(field.value.data, dtype="<f4")
        assert {each.key: each.value for each in found.metrics} == pytest.approx({"loss:sum": -logprobs[1:].sum()})

        tensors = {
            "target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [3]},
            "weights": {"data": [0, 1, 1], "dtype": "float32"},
        }
        datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:3]}]}, "loss_fn_inputs": tensors}
        body = {"model_id": model_id, "seq_id": 2, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
        assert (await client.post("forward", json=body)).status_code == 200
        same = (await poll(client, f"{model_id}:2")).json()
        assert same["loss_fn_outputs"][0]["logprobs"]["data"] == pytest.approx(logprobs.tolist(), abs=1e-6)

        info = (await client.post("get_info", json={"model_id": model_id})).json()
        assert (info["lora_rank"], info["model_data"]["model_name"]) == (2, "tiny")
        assert (await client.post(f"sessions/{session}/finish", json={})).status_code == 204
        assert (await client.post("session_heartbeat", json={"session_id": session})).status_code == 410
        gone = await client.post("get_info", json={"model_id": model_id})
        assert gone.status_code == 404
        assert "the client finished it" in gone.json()["detail"]

    ask(service, work)


def test_sampling_and_what_is_saved(service: Service) -> None:
    async def work(client: httpx2.AsyncClient) -> None:
        session, model_id = await begin(client)
        body = {"model_id": model_id, "seq_id": 1, "path": "final", "ttl_seconds": 3600, "user_metadata": {"a": "b"}}
        await client.post("save_weights_for_sampler", json=body)
        path = (await poll(client, f"{model_id}:1")).json()["path"]
        assert path == f"tinker://{model_id}/sampler_weights/final"
        info = (await client.post("weights_info", json={"tinker_path": path})).json()
        assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == ("tiny", 2, True)
        listed = (await client.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
        assert [(each["tinker_path"], each["user_metadata"]) for each in listed] == [(path, {"a": "b"})]
        assert (await client.get(f"training_runs/{model_id}")).json()["lora_rank"] == 2
        assert (await client.get("training_runs?limit=1&offset=0")).json()["cursor"]["limit"] == 1

        place = {"session_id": session, "sampling_session_seq_id": 3, "model_path": path}
        sampler = (await client.post("create_sampling_session", json=place)).json()["sampling_session_id"]
        assert (await client.get(f"samplers/{sampler}")).json()["model_path"] == path
        wanted = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "sampling_params": {"max_tokens": 3}}
        sent = await client.post("asample", json={**wanted, "prompt": {"chunks": [{"tokens": TOKENS}]}})
        assert len(set(sent.json()["sample_sequence_ids"])) == 2
        found = messages._classes()["SampleResponse"]()
        found.ParseFromString((await poll(client, sent.json()["request_id"], Accept=PROTOBUF)).content)
        assert [len(each.tokens) == len(each.logprobs) > 0 for each in found.sequences] == [True, True]

        assert (await client.delete(f"training_runs/{model_id}/checkpoints/sampler_weights/final")).status_code == 204
        assert (await client.post("weights_info", json={"tinker_path": path})).status_code == 404

    ask(service, work)


def test_a_poll_of_unfinished_work_asks_to_try_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "POLL_S", 0.01)
    go_on = threading.Event()

    def wait(given: Sequence[Any]) -> list[dict[str, str]]:
        go_on.wait(10)
        return [{"done": "yes"}]

    async def work(client: httpx2.AsyncClient) -> None:
        session = service.create_session()
        job = Job(run=wait)
        service.results.put(f"{session}:x", job.future)
        service.worker.submit(job)
        early = await poll(client, f"{session}:x")
        assert (early.status_code, early.json()["queue_state"]) == (408, "active")
        go_on.set()
        job.future.result(5)
        assert (await poll(client, f"{session}:x")).json() == {"done": "yes"}
        assert (await poll(client, f"{session}:y")).status_code == 404

    ask(service, work)


def test_who_may_ask(service: Service) -> None:
    async def capabilities(client: httpx2.AsyncClient) -> httpx2.Response:
        return await client.get("get_server_capabilities")

    assert ask(service, capabilities).json()["supported_models"][0]["model_name"] == "tiny"
    assert ask(service, capabilities, Authorization=f"Bearer {KEY}").status_code == 200
    assert ask(service, capabilities, **{"X-API-Key": "tml-other"}).status_code == 401
    assert ask(service, capabilities, Host="evil.example").status_code == 421

    async def health(client: httpx2.AsyncClient) -> httpx2.Response:
        return await client.get("healthz")

    assert ask(service, health, **{"X-API-Key": ""}).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("method", "path", "body", "told"),
    [
        ("POST", "create_custom_loss", {}, "this server has no POST /api/v1/create_custom_loss"),
        ("POST", "training_runs/a/checkpoints/weights/b/publish", {}, "this server has no POST"),
        ("POST", "save_weights_external", {}, "this server has no POST"),
        ("GET", "nothing", None, "this server has no GET /api/v1/nothing"),
        ("POST", "create_model", [], "the body is no JSON mapping"),
        ("POST", "create_model", {}, "session_id is missing, or no text"),
        ("POST", "weights_info", {"tinker_path": "tinker://../../etc"}, "is no path of a saved adapter"),
        ("POST", "weights_info", {"tinker_path": "tinker://../weights/x"}, "is no name"),
        ("POST", "load_weights", {"path": "x", "weights_access_token": "y"}, "this server has no accounts"),
    ],
)
def test_what_is_not_there_is_a_400_with_words(service: Service, method: str, path: str, body: Any, told: str) -> None:
    async def work(client: httpx2.AsyncClient) -> httpx2.Response:
        return await client.request(method, path, json=body)

    found = ask(service, work)
    assert found.status_code == 400
    assert told in found.json()["detail"]


def test_sampling_settings_that_are_not_there_are_refused(service: Service) -> None:
    async def work(client: httpx2.AsyncClient) -> list[httpx2.Response]:
        session = service.create_session()
        place = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await client.post("create_sampling_session", json=place)).json()["sampling_session_id"]
        base = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": TOKENS}]}}
        changes: list[dict[str, Any]] = [
            {"target_prompt_logprobs": {"data": [1]}},
            {"sampling_params": {"temperature": -1}},
            {"sampling_params": {"top_p": 1.5}},
            {"num_samples": 0},
            {"num_samples": 10**9},
            {"num_samples": 10**400},
            {"prompt": {"chunks": [{"type": "image", "data": ""}]}},
            {"prompt": {"chunks": []}},
            {"prompt": {"chunks": [{"tokens": [10**6]}]}},
            {"prompt_logprobs_last_n": 9, "prompt_logprobs": True},
        ]
        return [await client.post("asample", json={**base, **change}) for change in changes]

    answers = ask(service, work)
    assert [each.status_code for each in answers] == [400] * 10
    assert all(each.json()["detail"] for each in answers)


def test_binary_requests_that_are_damaged_are_refused() -> None:
    message = loss_request("m", 1)
    message.data[0].loss_fn_inputs[0].value.shape[0] = 5
    with pytest.raises(Refused, match=r"loss_fn_inputs.target_tokens has 3 numbers and the shape \[5\]"):
        read_loss_request(message.SerializeToString())
    message.data[0].loss_fn_inputs[0].value.shape[:] = [-1, -3]
    with pytest.raises(Refused, match=r"has 3 numbers and the shape \[-1, -3\]"):
        read_loss_request(message.SerializeToString())
    with pytest.raises(Refused, match="is not a ForwardBackwardRequest"):
        read_loss_request(b"\xff\xff\xff")
    message = loss_request("m", 1)
    message.data[0].model_input[0].encoded_text.tokens = b"123"
    with pytest.raises(Refused, match="no whole number of int32"):
        read_loss_request(message.SerializeToString())
    message = loss_request("m", 1)
    message.data[0].model_input.add().image = b"png"
    with pytest.raises(Refused, match="an image or audio"):
        read_loss_request(message.SerializeToString())


def test_settings_and_sparse_tensors_are_read() -> None:
    message = loss_request("m", 7, forward_only=True)
    message.loss_fn_config.add(key="beta", value=0.5)
    for key, value in (("beta", 0.25), ("kind", "x")):
        entry = message.loss_fn_config_v2.add(key=key).value
        setattr(entry, "number" if isinstance(value, float) else "text", value)
    tensor = message.data[0].loss_fn_inputs[1].value
    tensor.ClearField("dense")
    tensor.sparse_csr.values = np.array([2.0, 3.0], dtype="<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 1, 2], dtype="<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array([1, 0], dtype="<i8").tobytes()
    del tensor.shape[:]
    tensor.shape.extend([3, 2])
    found = read_loss_request(message.SerializeToString())
    assert (found.seq_id, found.forward_only, found.config) == (7, True, {"beta": 0.25, "kind": "x"})
    assert found.data[0].inputs["weights"].tolist() == [[0.0, 2.0], [0.0, 0.0], [3.0, 0.0]]
    tensor.sparse_csr.col_indices = np.array([1, 2], dtype="<i8").tobytes()
    with pytest.raises(Refused, match="no sparse tensor of the shape"):
        read_loss_request(message.SerializeToString())


def test_top_log_probs_are_written_as_the_client_reads_them() -> None:
    sampled = Sampled(tokens=(3,), logprobs=(-0.5,), stop_reason="length", top=[[(3, -0.5), (4, -1.0)]])
    result = SampleResult(sequences=(sampled,), prompt_logprobs=[None, -2.0], top_prompt=[None, [(1, -0.1), (2, -3.0)]])
    found = messages._classes()["SampleResponse"]()
    found.ParseFromString(sample_result(result))
    assert found.sequences[0].stop_reason == 1
    assert np.isnan(np.frombuffer(found.prompt_logprobs, dtype="<f4")).tolist() == [True, False]
    top = found.topk_prompt_logprobs
    assert (top.k, top.length) == (2, 2)
    assert np.frombuffer(top.token_ids, dtype="<i4").tolist() == [0, 0, 1, 2]
    assert np.frombuffer(top.logprobs, dtype="<f4").tolist() == pytest.approx([-99999.0, -99999.0, -0.1, -3.0])

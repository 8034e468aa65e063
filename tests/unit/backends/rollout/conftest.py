"""Stand-ins for servers: they sample for real, from a tiny model, in the words of the server they stand for; and misbehave on
request."""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

from posttrain.backends.rollout.hf import HuggingFaceEngine
from posttrain.backends.serving.vllm_worker import WeightReceiver
from posttrain.libraries import json_http
from posttrain.models.loading import load_causal_lm
from posttrain.models.packed_attention import packed_layout
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory


@dataclass
class Said:
    """An answer that is given instead of the right one, or a change to it."""

    status: int = 200
    body: Any = None  # None: the right one
    after_s: float = 0.0
    cut: bool = False  # the connection ends in the middle of the answer
    change: Callable[[Any], Any] = lambda body: body


@dataclass
class StandIn:
    """A server with a model of its own."""

    model: PreTrainedModel
    engine: HuggingFaceEngine
    asked: list[tuple[str, Any]] = field(default_factory=list)  # path and body of every request
    misbehave: Callable[[str, Any], Said] = lambda path, body: Said()
    most_at_once: int = 0
    url: str = ""
    # Of prompt and response but the last token, [tokens, layers, chosen], where vLLM reports them
    experts: Callable[[list[int]], np.ndarray] | None = None
    adapters: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # what each adds to the weights
    weight_version: str = "default"  # as SGLang calls it
    at_once: int = 0
    lock: Any = field(default_factory=threading.Lock)
    model_lock: Any = field(default_factory=threading.Lock)
    worker: Any = None
    server: Any = None

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def generations(self) -> list[Any]:
        return [body for path, body in self.asked if path in ("/v1/completions", "/generate")]

    def answer(self, path: str, body: Any) -> Any:
        path = path.partition("?")[0]
        match path:
            case "/health" | "/reset_prefix_cache" | "/sleep" | "/wake_up":
                return None
            case "/flush_cache":
                return b"Cache flushed.\n"
            case "/release_memory_occupation" | "/resume_memory_occupation":
                return None
            case "/v1/models":
                return {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
            case "/v1/completions":
                return self.complete(body)
            case "/v1/load_lora_adapter":
                self.load_adapter(body["lora_name"], Path(body["lora_path"]))
                return b"Success: LoRA adapter added successfully.\n"
            case "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
                return b"Success: LoRA adapter removed successfully.\n"
            case "/collective_rpc":
                return {"results": [getattr(self.worker, body["method"])(*body.get("args", []))]}
            case "/generate":
                return self.generate(body)
            case "/update_weights_from_disk":
                self.load(Path(body["model_path"]))
                self.weight_version = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            case "/get_model_info":
                return {"model_path": "tiny", "is_generation": True, "weight_version": self.weight_version}
            case "/get_weights_by_name":
                tensor = self.model.state_dict()[body["name"]]
                return tensor.float().numpy().tolist()[: body["truncate_size"]]
            case "/update":  # of rollout.engine=http
                self.load(Path(body["model_path"]))
                self.weight_version = json.dumps([body["version"], body["content_hash"]])
                return {"version": body["version"], "content_hash": body["content_hash"]}
            case "/served":
                version, content_hash = json.loads(self.weight_version)
                return {"version": version, "content_hash": content_hash}
        raise KeyError(path)

    def load(self, folder: Path) -> None:
        tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
        self.take(iter(tensors.items()))

    def load_adapter(self, name: str, folder: Path) -> None:
        """W + alpha / rank x B A, for the layers that the adapter names."""
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = {
            key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight": tensors[
                key.replace("lora_A", "lora_B")
            ]
            @ a
            * (config["lora_alpha"] / config["r"])
            for key, a in tensors.items()
            if "lora_A" in key
        }

    def take(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.model.state_dict()
        with self.model_lock, torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def sample(self, ids: list[int], sampling: SamplingParams, model: str | None = None) -> Trajectory:
        prompt = Prompt(prompt_id="asked", token_ids=tuple(ids), text="", data_source="t")
        with self.model_lock:
            self.add(self.adapters.get(model or "", {}), 1.0)
            try:
                [group] = self.engine.generate([prompt], sampling)
            finally:
                self.add(self.adapters.get(model or "", {}), -1.0)
        return group.trajectories[0]

    @torch.no_grad()
    def add(self, changes: dict[str, torch.Tensor], times: float) -> None:
        own = self.model.state_dict()
        for name, change in changes.items():
            own[name].add_(change, alpha=times)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """vLLM's completions."""
        found = self.sample(
            body["prompt"],
            SamplingParams(
                max_response_tokens=body["max_tokens"],
                temperature=body["temperature"],
                top_k=max(body.get("top_k", 0), 0),
                top_p=body["top_p"],
                min_p=body.get("min_p", 0.0),
                stop=tuple(body.get("stop", [])),
                stop_token_ids=tuple(body.get("stop_token_ids", [])),
                ignore_eos=body.get("ignore_eos", False),
                seed=body["seed"],
            ),
            body.get("model"),
        )
        logprobs = {
            "tokens": [f"token_id:{token}" for token in found.token_ids],
            "token_logprobs": list(found.logprobs),
        }
        choice = {
            "index": 0,
            "text": found.text,
            "logprobs": logprobs if body.get("logprobs") is not None else None,
            "finish_reason": "length" if found.stop_reason is StopReason.LENGTH else "stop",
            "stop_reason": None,
        }
        if body.get("prompt_logprobs") is not None:
            ids = torch.tensor([body["prompt"]])
            with self.model_lock, torch.no_grad():
                logits = self.model(ids, attention_layout=packed_layout([ids.shape[1]])).logits[0, :-1]
            own = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
            pairs = zip(body["prompt"][1:], own, strict=True)
            choice["prompt_logprobs"] = [
                None,
                *({str(token): {"logprob": value, "rank": 1}, "0": {"logprob": -9.0}} for token, value in pairs),
            ]
        if body.get("return_token_ids"):
            choice |= {"token_ids": list(found.token_ids), "prompt_token_ids": body["prompt"]}
        if self.experts is not None:
            file = io.BytesIO()
            np.save(file, self.experts([*body["prompt"], *found.token_ids][:-1]))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return {"id": "cmpl-1", "object": "text_completion", "model": body.get("model"), "choices": [choice]}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang's own endpoint."""
        asked = body["sampling_params"]
        found = self.sample(
            body["input_ids"],
            SamplingParams(
                max_response_tokens=asked["max_new_tokens"],
                temperature=asked["temperature"],
                top_k=max(asked["top_k"], 0),
                top_p=asked["top_p"],
                min_p=asked["min_p"],
                stop=tuple(asked["stop"]),
                stop_token_ids=tuple(asked["stop_token_ids"]),
                ignore_eos=asked["ignore_eos"],
                seed=asked["sampling_seed"],
            ),
        )
        reason = {"type": "length", "length": len(found.token_ids)}
        if found.stop_reason is not StopReason.LENGTH:
            reason = {"type": "stop", "matched": found.token_ids[-1]}
        pairs = zip(found.logprobs, found.token_ids, strict=True)
        meta = {
            "id": "1",
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(found.token_ids),
            "weight_version": self.weight_version,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        }
        return {"text": found.text, "output_ids": list(found.token_ids), "meta_info": meta}

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Runner:
    """What the worker extension asks of vLLM's model runner."""

    def __init__(self, stand_in: StandIn):
        self._stand_in = stand_in
        self.model = stand_in.model

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._stand_in.take(weights_iterator)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is what some tests are about."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stand_in: StandIn

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self._serve(json.loads(self.rfile.read(length)) if length else None)

    def _serve(self, body: Any) -> None:
        it = self.stand_in
        generates = self.path in ("/v1/completions", "/generate")
        with it.lock:
            it.asked.append((self.path, body))
            it.at_once += generates
            it.most_at_once = max(it.most_at_once, it.at_once)
        try:
            said = it.misbehave(self.path, body)
            time.sleep(said.after_s)
            right = it.answer(self.path, body) if said.status == 200 and said.body is None else said.body
            self._say(said, said.change(right))
        finally:
            with it.lock:
                it.at_once -= generates

    def _say(self, said: Said, body: Any) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            self.send_response(said.status)
            self.send_header("Content-Length", str(len(data) + said.cut * 100))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = self.close_connection or said.cut
        except OSError:  # the client has gone, which is what some tests are about
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


Start = Callable[[], StandIn]


@pytest.fixture
def stand_in(served_model: Path) -> Iterator[Start]:
    """Starts servers on loopback; each has the model's first weights."""
    started: list[StandIn] = []

    def start() -> StandIn:
        model = load_causal_lm(str(served_model), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(served_model)
        engine = HuggingFaceEngine(model, tokenizer, max_concurrent_sequences=64, max_prefill_tokens=1)
        it = StandIn(model, engine)
        it.worker = WeightReceiver()
        it.worker.model_runner, it.worker.device, it.worker.rank = _Runner(it), torch.device("cpu"), 0
        handler = type("Handler", (_Handler,), {"stand_in": it})
        it.server = _Server(("127.0.0.1", 0), handler)
        it.server.daemon_threads, it.server.block_on_close = True, False
        threading.Thread(target=it.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        it.url = f"http://127.0.0.1:{it.server.server_address[1]}"
        started.append(it)
        return it

    yield start
    for it in started:
        it.stop()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_http, "FIRST_WAIT_S", 0.02)


@pytest.fixture
def said() -> type[Said]:
    return Said

"""A client of a Tinker service in this process, without HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from posttrain.backends.tinker.requests import Datum, LossRequest, LossResult, SampleResult
from posttrain.backends.tinker.service import Service
from posttrain.config.serve import ServeConfig


def settings(model: Path, folder: Path, **tinker: object) -> ServeConfig:
    return ServeConfig.model_validate(
        {
            "model": {"path": str(model), "compute_dtype": "float32"},
            "endpoint": {"api": "tinker", "name": "tiny"},
            "tinker": {"folder": str(folder), **tinker},
            "rollout": {"max_response_tokens": 8},
            "placement": {"cpu_threads": 1},
        }
    )


def datum(tokens: list[int], **inputs: object) -> Datum:
    """The next-token datum of a text, with weights 1 unless other inputs are given."""
    given = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    arrays = {name: np.asarray(value) for name, value in {"target_tokens": tokens[1:], **given}.items()}
    return Datum(token_ids=tuple(tokens[:-1]), inputs=arrays)


class Client:
    """One training client in a session of its own."""

    def __init__(self, service: Service, *, load: str | None = None, optimizer: bool = True, **lora: Any):
        self.service = service
        self.session_id = service.create_session()
        self._number = 0
        self._samples = 0
        place = {"session_id": self.session_id, "model_seq_id": 0}
        if load is None:
            given = {"rank": 4, "seed": 1, **lora}
            request = service.create_model({**place, "base_model": "tiny", "lora_config": given})
        else:
            request = service.load_state({**place, "path": load, "optimizer": optimizer})
        self.model_id = self.result(request)["model_id"]

    def result(self, request_id: str) -> Any:
        future = self.service.results.get(request_id)
        assert future is not None
        return future.result(20)

    def number(self) -> int:
        self._number += 1
        return self._number

    def loss(self, data: list[Datum], loss_fn: str = "cross_entropy", **how: Any) -> LossResult:
        request = LossRequest(model_id=self.model_id, seq_id=self.number(), data=tuple(data), loss_fn=loss_fn, **how)
        result: LossResult = self.result(self.service.loss(request))
        return result

    def verb(self, name: str, **body: Any) -> Any:
        call = getattr(self.service, name)
        return self.result(call({"model_id": self.model_id, "seq_id": self.number(), **body}))

    def step(self, **params: float) -> dict[str, float]:
        found: dict[str, float] = self.verb("optim_step", adam_params={"learning_rate": 0.01, **params})["metrics"]
        return found

    def snapshot(self, **how: Any) -> str:
        self._samples += 1
        found: str = self.verb("save_for_sampler", sampling_session_seq_id=self._samples, **how)["sampling_session_id"]
        return found

    def sample(self, sampler: str, prompt: list[int], num_samples: int = 1, **how: Any) -> SampleResult:
        beside = {name: how.pop(name) for name in list(how) if "logprobs" in name}
        body = {"sampling_session_id": sampler, "num_samples": num_samples, "sampling_params": how, **beside}
        request, _ = self.service.sample({**body, "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}})
        result: SampleResult = self.result(request)
        return result

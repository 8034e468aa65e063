"""A sampler for tests that says what it is told to."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.interfaces.rollout_engine import Request
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory
from toy import ids


class Says:
    """A sampler that gives these responses, one token per character; a $ ends a response."""

    def __init__(self, *texts: str):
        self.texts, self.asked, self.waiting = list(texts), [], []  # type: ignore[var-annotated]

    def open_stream(self, sampling: SamplingParams, on_tokens: object = None) -> Says:
        return self

    def __enter__(self) -> Says:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def close(self) -> None: ...

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked += requests
        self.waiting += requests

    def cancel(self, sample_ids: Sequence[str]) -> None: ...

    def wait(self, timeout_s: float) -> list[Trajectory]:
        picked, self.waiting = self.waiting, []
        return [self._said(each, self.texts.pop(0)) for each in picked]

    def _said(self, request: Request, text: str) -> Trajectory:
        return Trajectory(
            sample_id=request.sample_id,
            token_ids=ids(text),
            logprobs=tuple(-0.5 - place for place in range(len(text))),
            text=text.removesuffix("$"),
            stop_reason=StopReason.EOS if text.endswith("$") else StopReason.LENGTH,
            policy_version=1,
        )

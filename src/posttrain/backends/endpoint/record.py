"""Recording of requests and responses, token by token, in a file for training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from posttrain.records.trajectories import SamplingParams, Trajectory

# The distribution that log-probs are of, and the end of the response.
_RECORDED = ("temperature", "top_k", "top_p", "min_p", "stop")


class Record:
    """A JSONL file to which a line is appended for every response. For one thread."""

    def __init__(self, path: Path):
        """Open the file. Raises: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(
        self,
        session: str,
        request: str,
        messages: Sequence[Mapping[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        response: Trajectory,
        *,
        continues: bool,
        created: float,
        sampling: SamplingParams,
    ) -> None:
        """Append a line. ``continues``: the prompt begins with the tokens of the session's previous request and its response."""
        line = {
            "session": session,
            "request": request,
            "created": created,
            "continues": continues,
            "messages": messages,
            "tools": list(tools),
            "prompt_token_ids": list(prompt_ids),
            "token_ids": list(response.token_ids),
            "logprobs": list(response.logprobs),
            "text": response.text,
            "stop_reason": str(response.stop_reason),
            "policy_version": response.policy_version,
            "sampling": {name: getattr(sampling, name) for name in _RECORDED},
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

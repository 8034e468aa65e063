"""What was asked and answered, token by token, in a file to learn from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from posttrain.records.trajectories import Trajectory


class Record:
    """A JSONL file with a line for every response, added to what is there. For one thread."""

    def __init__(self, path: Path):
        """Raises: OSError."""
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
    ) -> None:
        """``continues``: the prompt begins with the tokens of the session's request before it, and of its response."""
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
        }
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

"""Transcripts, "\\n\\nHuman: …\\n\\nAssistant: …": the form of Anthropic's hh-rlhf, whose texts are whole conversations."""

from __future__ import annotations

import re
from typing import Any

_SPEAKER = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """True for a text that Human begins and in which Assistant has a turn."""
    turns = transcript_turns(text)
    return len(turns) > 1 and turns[0]["role"] == "user"


def transcript_turns(text: str) -> list[dict[str, Any]]:
    """Parse a transcript into messages, without the blanks around them. Returns: [] where no speaker begins the text."""
    first, *parts = _SPEAKER.split("\n\n" + text.lstrip())
    if first.strip():
        return []
    return [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]

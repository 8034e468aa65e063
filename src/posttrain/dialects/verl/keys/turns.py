"""Keys of actor_rollout_ref.rollout.multi_turn: conversations of several turns."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, planned
from posttrain.dialects.verl.keys.words import MULTI_TURN, ROLLOUT


def _turns(name: str, type: Any, default: Any, meaning: str, since: str = "0.4") -> Key:
    return planned(f"{ROLLOUT}.multi_turn.{name}", type, default, MULTI_TURN, meaning, since=since)


ROWS: tuple[Key, ...] = (
    _turns("enable", bool, False, "several turns"),
    _turns("max_turns", int | None, None, "most turns (June 2025)"),
    _turns("max_assistant_turns", int | None, None, "most turns of the model"),
    _turns("max_user_turns", int | None, None, "most turns of the other side"),
    _turns("tool_config_path", str | None, None, "file with the tools"),
    _turns("interaction_config_path", str | None, None, "file with the other side"),
    _turns("max_parallel_calls", int, 1, "tool calls at once"),
    _turns("max_tool_response_length", int, 256, "longest answer of a tool, characters"),
    _turns("tool_response_truncate_side", Literal["left", "middle", "right"], "middle", "where longer ones are cut"),
    _turns("completion_callback", str | None, None, "what answers a completion"),
    _turns("use_inference_chat_template", bool, False, "train on the template as the server writes it"),
    _turns(
        "tokenization_sanity_check_mode",
        Literal["strict", "ignore_strippable", "disable"],
        "strict",
        "compare the tokens of all turns with those of the whole conversation",
    ),
    _turns("enable_tokenization_sanity_check", bool, True, "the same, in June 2025"),
    _turns("format", str, "hermes", "how tool calls are written"),
    _turns("**", Any, ABSENT, "further settings", "later"),
)

"""Keys of actor_rollout_ref.rollout.multi_turn and .agent: conversations of several turns."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped, planned, refused
from posttrain.dialects.verl.keys.words import MULTI_TURN, ROLLOUT

TURNS = f"{ROLLOUT}.multi_turn"
AGENT = f"{ROLLOUT}.agent"
_EXACT = "what was sampled is what is trained, and no turn is tokenized again: there is nothing to compare"

ROWS: tuple[Key, ...] = (
    mapped(
        f"{TURNS}.enable",
        bool,
        False,
        "environment.name environment.max_trajectory_tokens environment.max_sequence_tokens",
        "several turns: of the model and of tools, or of another side",
        by_rule=True,
        change="tools with a tool_config_path, interaction with an interaction_config_path; response_length is the limit of all "
        "turns and answers together, max_model_len that of the whole conversation",
        since="0.4",
        note="With mode=async and tools, a row's agent_name decides, as in verl, whatever stands here.",
    ),
    mapped(
        f"{TURNS}.max_turns",
        int | None,
        None,
        "environment.max_turns",
        "most turns of the model (June 2025)",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        f"{TURNS}.max_assistant_turns",
        int | None,
        None,
        "environment.max_turns",
        "most turns of the model; null: what fits",
        by_rule=True,
        since="0.4",
        note="verl's SGLang sampler reads null as a third of max_model_len.",
    ),
    mapped(
        f"{TURNS}.max_user_turns",
        int | None,
        None,
        "environment.max_turns",
        "most turns of the other side",
        by_rule=True,
        change="and one more of the model, which reads the last of them",
        since="0.4",
    ),
    mapped(
        f"{TURNS}.tool_config_path",
        str | None,
        None,
        "environment.settings.tools",
        "file with the tools",
        by_rule=True,
        change="each tool of the file, read when the configuration is: verl's Gsm8kTool is gsm8k, SandboxFusionTool is python in "
        "a box, tools of type mcp are mcp, every other class is called as verl calls it",
        since="0.4",
        note="A call that fails is answered with what was wrong; verl skips malformed calls, and its agent loop ends with an "
        "exception.",
    ),
    mapped(
        f"{TURNS}.interaction_config_path",
        str | None,
        None,
        "environment.settings.interactions",
        "file with the other side",
        by_rule=True,
        change="each interaction of the file: verl's Gsm8kInteraction is gsm8k, every other class is called as verl calls it",
        since="0.4",
    ),
    mapped(
        f"{TURNS}.max_parallel_calls",
        int,
        1,
        "environment.settings.max_calls_per_turn",
        "calls of a turn that are run",
        by_rule=True,
        since="0.4",
        note="They run one after the other. Further ones are told so; verl drops them in silence.",
    ),
    mapped(
        f"{TURNS}.max_tool_response_length",
        int,
        256,
        "environment.settings.max_result_characters",
        "longest answer of a tool, characters",
        by_rule=True,
        since="0.4",
    ),
    mapped(
        f"{TURNS}.tool_response_truncate_side",
        Literal["left", "middle", "right"],
        "middle",
        "environment.settings.cut",
        "where longer ones are cut",
        by_rule=True,
        change="left keeps the head (cut: end), right the tail (cut: start)",
        since="0.4",
        note="As in verl 0.4. Later versions have left and right the other way round.",
    ),
    refused(
        f"{TURNS}.completion_callback",
        str | None,
        None,
        "verl replaced such callbacks by agent loops within weeks; write an environment, or an agent (environment.name=agent)",
        "what answers a completion",
        since="0.4",
    ),
    mapped(
        f"{TURNS}.use_inference_chat_template",
        bool,
        False,
        "environment.changed_history",
        "go on with what the template makes of earlier turns",
        by_rule=True,
        change="false: append (the model goes on behind what it has read and said), true: split (where the template writes "
        "earlier turns in another way, a new sample begins with that)",
        since="0.4",
    ),
    ignored(
        f"{TURNS}.tokenization_sanity_check_mode",
        Literal["strict", "ignore_strippable", "disable"],
        "strict",
        _EXACT,
        "compare the tokens of all turns with those of the whole conversation",
        since="0.4",
    ),
    ignored(f"{TURNS}.enable_tokenization_sanity_check", bool, True, _EXACT, "the same, in June 2025", since="0.4"),
    refused(
        f"{TURNS}.format",
        str,
        "hermes",
        "tool calls are read in the form hermes, <tool_call>{...}</tool_call>",
        "how tool calls are written",
        since="0.4",
    ),
    planned(f"{TURNS}.**", Any, ABSENT, MULTI_TURN, "further settings", since="later"),
    ignored(
        f"{ROLLOUT}.mode",
        Literal["sync", "async"],
        "sync",
        "responses and turns are always sampled as they come, each conversation at its own pace",
        "sync or async",
        since="0.4",
        note="With async and a tool_config_path rows are played by their agent_name, as in verl.",
    ),
    ignored(
        f"{AGENT}.num_workers",
        int,
        8,
        "every environment has a process of its own; posttrain.environment.workers says how many live at once",
        "processes that run conversations",
        since="0.4",
    ),
    mapped(
        f"{AGENT}.custom_async_server.path",
        str | None,
        None,
        "rollout.engine rollout.engine_options.server",
        "file with a server class",
        by_rule=True,
        change="with mode=async: the engine http, which starts PATH:NAME in a process of its own (engine_options.server)",
        since="0.4",
        note="In the Chinese edition of July 2025 only. The class is called with one mapping, and has generate(prompt_ids, "
        "sampling_params, request_id) and load_weights(folder, version): verl's own base class holds verl's workers.",
    ),
    mapped(
        f"{AGENT}.custom_async_server.name",
        str | None,
        None,
        "rollout.engine_options.server",
        "name of that class",
        by_rule=True,
        since="0.4",
    ),
    refused(
        f"{AGENT}.agent_loop_config_path",
        str | None,
        ABSENT,
        "agent loops are coroutines over verl's own servers; write an environment, or an agent that talks to an "
        "OpenAI-compatible address (environment.name=agent)",
        "agents of your own",
        since="later",
    ),
    mapped(
        f"{AGENT}.default_agent_loop",
        Literal["single_turn_agent", "tool_agent"],
        ABSENT,
        "environment.name",
        "agent of rows that name none",
        by_rule=True,
        change="single_turn_agent: single_turn, tool_agent: tools",
        since="later",
    ),
)

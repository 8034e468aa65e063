"""Keys of generator about samples: lengths, sampling parameters, turns, what is left out."""

from __future__ import annotations

from typing import Any, Literal

from posttrain.dialects.ledger import ABSENT, Key, ignored, mapped

_A = "2025-08"


def _sampling(section: str, ours: str, *, length: Any, temperatures: tuple[float, float]) -> tuple[Key, ...]:
    """The parameters of training (rollout) or evaluation (validation)."""
    june, august = temperatures
    return (
        mapped(
            f"generator.{section}.max_generate_length",
            int,
            length,
            f"{ours}.max_response_tokens",
            "longest response, in tokens (of one turn)",
            by_rule=ours == "validation",
            change="null when it is the training's" if ours == "validation" else "",
        ),
        mapped(
            f"generator.{section}.temperature",
            float,
            june,
            f"{ours}.temperature",
            "divides the logits" + (", in sampling and in every log-prob" if ours == "rollout" else "; 0 is greedy"),
            earlier={_A: august} if june != august else {},
            note="SkyRL's reference model stays at temperature 1; here all log-probs of a run have one temperature."
            if ours == "rollout"
            else "",
        ),
        mapped(f"generator.{section}.top_p", float, 1.0, f"{ours}.top_p", "keep the most likely tokens up to this sum"),
        mapped(
            f"generator.{section}.min_p", float, 0.0, f"{ours}.min_p", "drop tokens below this share of the likeliest"
        ),
        mapped(
            f"generator.{section}.top_k",
            int,
            -1,
            f"{ours}.top_k",
            "keep the k most likely tokens; -1: all",
            to=lambda value: 0 if value == -1 else value,
            change="-1: 0",
        ),
        ignored(
            f"generator.{section}.logprobs",
            int | None,
            None,
            "the sampler's log-probs of its own tokens are always kept",
            "log-probs to return: null, or 0 for the sampled token's",
            since=_A,
        ),
        mapped(
            f"generator.{section}.stop",
            list[str] | str | None,
            None,
            f"{ours}.stop",
            "texts that end a response; they stay in it",
            to=lambda value: [value] if isinstance(value, str) else value or [],
            change="one text becomes a list of one; null: none",
            since=_A,
        ),
        mapped(
            f"generator.{section}.repetition_penalty",
            float,
            1.0,
            f"{ours}.engine_sampling.repetition_penalty",
            "above 1: repeated tokens become less likely",
            by_rule=True,
            since="later",
            change="1: left out",
        ),
        mapped(
            f"generator.{section}.stop_token_ids",
            list[int],
            ABSENT,
            f"{ours}.stop_token_ids",
            "token ids that end a response",
        ),
        mapped(
            f"generator.{section}.ignore_eos",
            bool,
            ABSENT,
            f"{ours}.ignore_eos",
            "go on after the model's end token",
        ),
        mapped(
            f"generator.{section}.**",
            Any,
            ABSENT,
            f"{ours}.engine_sampling",
            "further sampling parameters in the sampler's own words (added with +)",
            by_rule=True,
        ),
    )


ROWS: tuple[Key, ...] = (
    mapped(
        "generator.n_samples_per_prompt",
        int,
        5,
        "rollout.samples_per_prompt",
        "responses sampled for each training prompt",
    ),
    mapped(
        "generator.eval_n_samples_per_prompt",
        int,
        1,
        "validation.samples_per_prompt",
        "responses sampled for each validation prompt",
    ),
    *_sampling("sampling_params", "rollout", length=1024, temperatures=(1.0, 1.0)),
    *_sampling(
        "eval_sampling_params",
        "validation",
        length="${generator.sampling_params.max_generate_length}",
        temperatures=(1.0, 0.0),
    ),
    mapped(
        "generator.max_input_length",
        int,
        "${trainer.max_prompt_length}",
        "loss.norm_tokens environment.max_context_tokens",
        "longest context that a turn starts from, in tokens; equal to trainer.max_prompt_length with one turn",
        by_rule=True,
        change="seq_mean_token_sum_norm divides by this + sampling_params.max_generate_length",
    ),
    mapped(
        "generator.max_turns",
        int,
        1,
        "environment.max_turns",
        "turns of a conversation with the environment, which is told the number and ends the conversation itself",
        by_rule=True,
        change="above 1 (or with an environment that has several turns): conversations are played (environment.name "
        "skyrl_gym, environment.end_at_max_turns false); 1: they are scored, and nothing is played",
    ),
    ignored(
        "generator.batched",
        bool,
        True,
        "responses that are sampled together or one by one have the same distribution",
        "hand the sampler all prompts in one call; for one turn",
        earlier={_A: False},
    ),
    mapped(
        "generator.use_conversation_multi_turn",
        bool,
        False,
        "environment.conversation environment.changed_history",
        "observations become messages of their own; false: they stand as plain text in one message of the assistant",
        by_rule=True,
        earlier={_A: True},
        change="true: messages, with changed_history append (split with generator.chat_template); false: one_message",
        note="Tokens are kept as they were sampled, and observations are never trained on. In June 2025 SkyRL tokenised every "
        "turn anew; here, as since December, the reward of every turn counts, on its last token. SkyRL adds an end token that "
        "was not sampled behind the last turn of one message, and trains on it; here nothing is added.",
    ),
    mapped(
        "generator.append_eos_token_after_stop_str_in_multi_turn",
        bool,
        True,
        "environment.close_turns",
        "append the end token after a stop text",
        by_rule=True,
        since=_A,
        note="Outside the loss, as in SkyRL since December 2025. Here also behind a turn that was cut at the token limit.",
    ),
    mapped(
        "generator.step_wise_trajectories",
        bool,
        False,
        "environment.sample_per_turn",
        "train on every turn as a sample",
        by_rule=True,
        since="later",
    ),
    mapped(
        "generator.zero_reward_on_non_stop",
        bool,
        False,
        "reward.zero_unless_stopped",
        "the reward of a response that did not end by itself is 0",
        note="SkyRL's batched path leaves it unread; here it always holds.",
    ),
    mapped(
        "generator.apply_overlong_filtering",
        bool,
        False,
        "loss.mask_truncated",
        "leave responses that were cut at the length limit out of the loss",
        since=_A,
    ),
    ignored(
        "generator.chat_template.source",
        Literal["name", "file"],
        "name",
        "it says what chat_template.name_or_path is",
        "name: a template that SkyRL ships; file: a Jinja file",
        since="later",
    ),
    mapped(
        "generator.chat_template.name_or_path",
        str | None,
        None,
        "model.chat_template_file",
        "chat template instead of the tokenizer's; with source file, a Jinja file (names are planned)",
        by_rule=True,
        since="later",
    ),
    mapped(
        "generator.chat_template_kwargs",
        dict,
        {},
        "data.chat_template_options",
        "variables for the chat template, such as enable_thinking",
        by_rule=True,
        since="later",
    ),
    mapped(
        "generator.chat_template_kwargs.*",
        str | int | float | bool | None,
        ABSENT,
        "data.chat_template_options",
        "one variable for the chat template",
        by_rule=True,
        since="later",
    ),
)

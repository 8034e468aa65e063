"""Random conversations over the chat templates of ten model families: what is stored is what was sampled.

The templates say what those models' own templates say about a conversation of system, user and assistant messages. The
tokenizer is one of bytes, to which every family adds its special tokens.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from posttrain.data.turns import OneMessageTurns, TemplateTurns
from posttrain.interfaces.env import EnvStart, EnvStep, Message
from posttrain.interfaces.rollout_engine import Request
from posttrain.interfaces.worlds import EpisodeRules, TurnWriter
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import StopReason, Trajectory
from posttrain.steps.episode import Episode, EpisodeLost

CONVERSATIONS_EACH = 100
ROUND = "{% for m in messages %}"
PROMPTED = "{% endfor %}{% if add_generation_prompt %}"
ALTERNATES = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
# family -> template, special tokens (the first ends a turn), whether a system message is taken
FAMILIES: dict[str, tuple[str, list[str], bool]] = {
    "qwen2.5": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\n{% endif %}" + ROUND + "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n" + PROMPTED
        + "<|im_start|>assistant\n{% endif %}",
        ["<|im_end|>", "<|im_start|>", "<|endoftext|>"], True),
    "llama-3": (
        "{{ '<|begin_of_text|>' }}" + ROUND + "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
        "<|eot_id|>" + PROMPTED + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"], True),
    "chatml": (
        ROUND + "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n" + PROMPTED + "<|im_start|>assistant\n{% endif %}",
        ["<|im_end|>", "<|im_start|>"], True),
    "gemma": (
        "{{ '<bos>' }}" + ROUND + ALTERNATES + "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] | trim }}<end_of_turn>\n" + PROMPTED + "<start_of_turn>model\n{% endif %}",
        ["<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>"], False),
    "mistral": (
        "{{ '<s>' }}" + ROUND + ALTERNATES + "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}"
        " {{ m['content'] }}</s>{% endif %}{% endfor %}",
        ["</s>", "<s>"], False),
    "phi-3": (
        ROUND + "<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n"
        "{% else %}<|endoftext|>{% endif %}",
        ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"], True),
    "smollm2": (
        ROUND + "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
        "trained by Hugging Face<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n" + PROMPTED
        + "<|im_start|>assistant\n{% endif %}",
        ["<|im_end|>", "<|im_start|>"], True),
    "deepseek": (  # drops the thoughts of earlier turns
        "{{ '<bos>' }}" + ROUND + "{% if m['role'] == 'system' %}{{ m['content'] }}{% elif m['role'] == 'user' %}<|User|>"
        "{{ m['content'] }}{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}<eos>{% endif %}" + PROMPTED
        + "<|Assistant|>{% endif %}",
        ["<eos>", "<bos>", "<|User|>", "<|Assistant|>"], True),
    "zephyr": (
        ROUND + "<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n" + PROMPTED + "<|assistant|>\n{% endif %}",
        ["</s>"], True),
    "vicuna": (
        ROUND + "{% if m['role'] == 'system' %}{{ m['content'] }} {% elif m['role'] == 'user' %}USER: {{ m['content'] }} "
        "{% else %}ASSISTANT: {{ m['content'] }}</s>{% endif %}" + PROMPTED + "ASSISTANT:{% endif %}",
        ["</s>"], True),
}  # fmt: skip
WORDS = ["yes", " no", "42", "\n", "  ", "é", "日", "<b>", "{{x}}", "ok.", "</think>", "Observation:", "[INST]", "\t"]


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    template, special, _ = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[0],
        additional_special_tokens=special[1:],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def said(draw: random.Random) -> str:
    return "".join(draw.choice(WORDS) for _ in range(draw.randint(1, 6)))


class Conversation:
    """One episode played against a random policy and a random world, with a record of its own of what was sampled."""

    def __init__(self, family: str, writer: TurnWriter, rules: EpisodeRules, seed: int) -> None:
        self.draw = random.Random(seed)
        self.tokenizer = tokenizer_of(family)
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # of every turn: what it read, what it sampled
        prompt = Prompt(prompt_id="p", token_ids=(), text="", data_source="x")
        self.episode = Episode(prompt, "p/0", writer, rules)
        messages: list[Message] = [{"role": "user", "content": said(self.draw)}]
        if FAMILIES[family][2] and self.draw.random() < 0.5:
            messages.insert(0, {"role": "system", "content": said(self.draw)})
        request: Request | None = self.episode.begin(EnvStart(messages=messages))
        for turn in range(self.draw.randint(1, 4)):
            if request is None:
                break
            action = self.episode.sampled(self.response(request))
            last = turn == 3
            step = EnvStep(messages=[{"role": "user", "content": said(self.draw)}], reward=1.0, done=last)
            assert isinstance(action, str)
            request = self.episode.answered(step)
        self.trajectory = self.episode.trajectory({})

    def response(self, request: Request) -> Trajectory:
        """Random tokens, some of them no whole characters, with or without the end of a turn."""
        ids = self.tokenizer(said(self.draw), add_special_tokens=False)["input_ids"]
        if self.draw.random() < 0.2:
            ids = [self.draw.randrange(256) for _ in range(self.draw.randint(1, 5))]
        stop = self.draw.choice([StopReason.EOS, StopReason.EOS, StopReason.LENGTH, StopReason.STOP_TEXT])
        if stop is StopReason.EOS:
            ids = [*ids, self.tokenizer.eos_token_id]
        self.sampled.append((request.token_ids, tuple(ids)))
        return Trajectory(
            sample_id=request.sample_id,
            token_ids=tuple(ids),
            logprobs=tuple(-float(index + 1) for index in range(len(ids))),
            text="",
            stop_reason=stop,
            policy_version=0,
        )


def check_exact(played: Conversation, *, drops_ends: bool = False) -> None:
    """Every turn's tokens stand in the trajectory behind what they were sampled behind, and the mask is on them alone."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for sample in played.trajectory.samples:
        prompt = sample.prompt_token_ids or ()
        mask = [False] * len(sample.token_ids)
        for turn in sample.turns:
            own = sample.token_ids[turn.start : turn.end]
            found.append(((*prompt, *sample.token_ids[: turn.start]), own))
            mask[turn.start : turn.end] = [True] * len(own)
            assert sample.logprobs[turn.start : turn.end] == tuple(-float(index + 1) for index in range(len(own)))
        assert list(sample.sampled_mask) == mask
        assert all(value == 0.0 for value, own in zip(sample.logprobs, mask, strict=True) if not own)
        assert mask[-1]  # it ends with what the policy said last
    if drops_ends:  # turns that another one was asked for after lose their end token
        end = played.tokenizer.eos_token_id
        assert [read for read, _ in found] == [read for read, _ in played.sampled]
        for (_, kept), (_, sampled) in zip(found, played.sampled, strict=True):
            assert kept == sampled or (kept == sampled[:-1] and sampled[-1] == end)
    else:
        assert found == played.sampled


@pytest.mark.parametrize("family", FAMILIES)
def test_messages(family: str) -> None:
    rules = EpisodeRules(max_response_tokens=50, max_context_tokens=400)
    split = 0
    for seed in range(CONVERSATIONS_EACH):
        played = Conversation(family, TemplateTurns(tokenizer_of(family), {}), rules, seed)
        check_exact(played)
        split += len(played.trajectory.earlier)
        assert played.trajectory.env_reward == len(played.sampled)
    if family == "deepseek":
        assert split > 0  # some random answers hold a </think>
    else:
        assert split == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_reads_as_the_template_writes_it(family: str) -> None:
    """Without white space at the ends, and where turns end as the template ends them, the model reads what the template makes
    of the whole conversation, token by token."""
    tokenizer = tokenizer_of(family)
    writer = TemplateTurns(tokenizer, {})
    episode = Episode(
        Prompt(prompt_id="p", token_ids=(), text="", data_source="x"),
        "p/0",
        writer,
        EpisodeRules(max_response_tokens=50, max_context_tokens=1000),
    )
    request = episode.begin(EnvStart(messages=[{"role": "user", "content": "one"}]))
    space = " " if family in ("mistral", "vicuna") else ""  # these write one before what was said
    for answer in ("alpha", "beta"):
        ids = (*tokenizer(space + answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
        response = Trajectory(
            sample_id=request.sample_id, token_ids=ids, logprobs=(0.0,) * len(ids), text="", stop_reason=StopReason.EOS,
            policy_version=0,
        )  # fmt: skip
        episode.sampled(response)
        step = episode.answered(EnvStep(messages=[{"role": "user", "content": f"more after {answer}"}]))
        assert step is not None
        request = step
    whole = writer.begin(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "alpha"},
            {"role": "user", "content": "more after alpha"},
            {"role": "assistant", "content": "beta"},
            {"role": "user", "content": "more after beta"},
        ],
        (),
    )
    assert request.token_ids == whole


@pytest.mark.parametrize("family", ["llama-3", "vicuna"])
def test_one_message(family: str) -> None:
    rules = EpisodeRules(max_response_tokens=50, max_context_tokens=400)
    for seed in range(CONVERSATIONS_EACH):
        check_exact(Conversation(family, OneMessageTurns(tokenizer_of(family), {}), rules, seed), drops_ends=True)


def test_thoughts_that_a_template_drops_are_refused_on_request() -> None:
    rules = EpisodeRules(max_response_tokens=50, max_context_tokens=400, changed_history="refuse")
    refused = 0
    for seed in range(CONVERSATIONS_EACH):
        try:
            check_exact(Conversation("deepseek", TemplateTurns(tokenizer_of("deepseek"), {}), rules, seed))
        except EpisodeLost as lost:
            assert lost.args[0] == "history_changed"
            refused += 1
    assert 0 < refused < CONVERSATIONS_EACH

"""One suite for all samplers: native, hf, and the servers' clients against stand-ins that sample for real.

With POSTTRAIN_VLLM_PYTHON (a Python that has vLLM; `make vllm-env` makes one) the slow tests run a real vLLM server too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from posttrain.backends.environments.inline import InlineHost
from posttrain.backends.serving.start import make_sampler, start_weight_sync
from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.data.turns import TemplateTurns
from posttrain.errors import RunStopped
from posttrain.interfaces.env import EnvSpec, EnvStart, EnvStep
from posttrain.interfaces.rollout_engine import Request
from posttrain.interfaces.worlds import EpisodeRules, Worlds
from posttrain.models.loading import load_causal_lm
from posttrain.records.prompts import Prompt
from posttrain.records.trajectories import SamplingParams, StopReason, Trajectory, TrajectoryGroup
from posttrain.registry import ENVS
from posttrain.steps.play import play

PYTHON = os.environ.get("POSTTRAIN_VLLM_PYTHON", "")
CPU = torch.device("cpu")
TOLERANCE = 1e-3  # nats, float32: other kernels add up in another order


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id=f"p:{text}", token_ids=tuple(text.encode()), text=text, data_source="t")


PROMPTS = [prompt(text) for text in ("3+4=", "a", "What is the sum of 12 and 30?", "xy")]
MANY_STOPS = tuple(range(0, 256, 8))  # end responses of a random model after some 8 tokens


@dataclass
class Policy:
    version: int = 0


@dataclass
class Rig:
    """A sampler and the trainer's model that it is to follow."""

    name: str
    model: PreTrainedModel
    engine: Any
    sync: Any
    policy: Policy

    def publish(self, version: int) -> None:
        self.policy.version = version
        self.sync.publish(self.policy, self.engine)


SETTINGS: dict[str, dict[str, Any]] = {
    "native": {"engine": "native"},
    "hf": {"engine": "hf"},
    "http": {
        "engine": "http",
        "engine_options": {"update_path": "/update", "served_path": "/served", "logprobs": "processed"},
    },
    "vllm": {"engine": "vllm"},
    "vllm-collective": {"engine": "vllm", "weight_sync": "collective", "weight_bucket_mib": 1},
    "sglang": {"engine": "sglang"},
    "real-vllm": {
        "engine": "vllm",
        "engine_options": {"python": PYTHON, "enforce_eager": True, "load_format": "dummy", "startup_timeout_s": 550},
    },
}
REAL = pytest.param(
    "real-vllm",
    marks=[pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VLLM_PYTHON names no Python with vLLM")],
)


@pytest.fixture(scope="module")
def real_vllm() -> Iterator[dict[str, Any]]:
    """The one real server of this file: it takes a minute to start."""
    kept: dict[str, Any] = {}
    yield kept
    if kept:
        kept["engine"].close()


# Of the servers' clients one is tried in the quick part.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("http", "sglang")]
SAMPLERS = ["native", "hf", "vllm", *SLOW, REAL]
# vLLM's client with another weight sync: it samples as "vllm" does, so it is in the tests that send weights only.
with_every_sync = pytest.mark.parametrize("rig", [*SAMPLERS, "vllm-collective"], indirect=True)


@pytest.fixture(params=SAMPLERS)
def rig(request: pytest.FixtureRequest, served_model: Path, stand_in: Any, real_vllm: dict[str, Any]) -> Rig:
    name = request.param
    settings = dict(SETTINGS[name])
    if name not in ("native", "hf", "real-vllm"):
        settings["endpoints"] = [stand_in().url]
    rollout = RolloutConfig(max_concurrent_sequences=6, max_prefill_tokens=64, timeout_s=300, **settings)
    model = load_causal_lm(str(served_model), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(served_model)

    def make() -> Any:
        config = ModelConfig(path=str(served_model), compute_dtype="float32")
        return make_sampler(rollout, config, lambda: model, tokenizer, device=CPU, seed=0, max_prompt_tokens=64)

    engine = (real_vllm.get("engine") or real_vllm.setdefault("engine", make())) if name == "real-vllm" else make()
    rig = Rig(name, model, engine, start_weight_sync(rollout, model, tokenizer, device=CPU), Policy())
    rig.publish(0)
    return rig


def drawn(groups: list[TrajectoryGroup]) -> dict[str, tuple[int, ...]]:
    return {t.sample_id: t.token_ids for group in groups for t in group.trajectories}


def responses(groups: list[TrajectoryGroup]) -> list[tuple[Prompt, Trajectory]]:
    return [(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]


@cache
def _plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def with_weights_of(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """transformers' own model, unmodified, with the weights of another."""
    plain = _plain(folder)
    plain.load_state_dict(model.state_dict())
    return plain


def trainer_logits(model: PreTrainedModel, folder: Path, prompt: Prompt, response: Trajectory) -> torch.Tensor:
    """What the plain model with these weights says before each response token, [T, vocabulary]."""
    plain = with_weights_of(model, folder)
    with torch.no_grad():
        ids = torch.tensor([[*prompt.token_ids, *response.token_ids]])
        return plain(ids).logits[0, len(prompt.token_ids) - 1 : -1]


def logprobs_of(logits: torch.Tensor, response: Trajectory) -> torch.Tensor:
    return logits.log_softmax(-1)[torch.arange(len(response.token_ids)), torch.tensor(response.token_ids)]


def greedy_of_plain(model: PreTrainedModel, folder: Path, prompt: Prompt, tokens: int) -> list[int]:
    plain = with_weights_of(model, folder)
    ids = torch.tensor([prompt.token_ids])
    out = plain.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return out[0, ids.shape[1] :].tolist()


def test_greedy_is_what_transformers_generates_and_logprobs_are_the_trainers(rig: Rig, served_model: Path) -> None:
    groups = rig.engine.generate(PROMPTS, SamplingParams(max_response_tokens=24, temperature=0.0))
    for prompt, response in responses(groups):
        assert list(response.token_ids) == greedy_of_plain(rig.model, served_model, prompt, 24)
        expected = logprobs_of(trainer_logits(rig.model, served_model, prompt, response), response)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_under_the_temperature(rig: Rig, served_model: Path, temperature: float) -> None:
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=12, temperature=temperature, seed=3)
    for prompt, response in responses(rig.engine.generate(PROMPTS, sampling)):
        logits = trainer_logits(rig.model, served_model, prompt, response) / temperature
        expected = logprobs_of(logits, response)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=TOLERANCE)


def test_the_first_token_has_a_distribution_of_its_own(rig: Rig, served_model: Path) -> None:
    """FIRE: at temperature 2, the most that vLLM takes, the three likeliest first tokens are more alike, as their log-probs say;
    the others are drawn and scored at temperature 1. Limits and requests of a single token hold."""
    sampling = SamplingParams(
        samples_per_prompt=6, max_response_tokens=5, seed=3, first_token_temperature=2.0, first_token_top_k=3
    )
    firsts = set()
    for prompt, response in responses(rig.engine.generate(PROMPTS[:2], sampling)):
        logits = trainer_logits(rig.model, served_model, prompt, response)
        hot = logits[0] / 2.0
        kept = hot.masked_fill(hot < hot.topk(3).values[-1], -torch.inf)
        expected = torch.cat(
            [
                logprobs_of(kept[None], replace(response, token_ids=response.token_ids[:1])),
                logprobs_of(logits, response)[1:],
            ]
        )
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=TOLERANCE)
        assert response.token_ids[0] in logits[0].topk(3).indices
        firsts.add((prompt.prompt_id, response.token_ids[0]))
        assert len(response.token_ids) == 5 or response.stop_reason is StopReason.EOS
    assert len(firsts) > 2
    with rig.engine.open_stream(sampling) as stream:
        stream.submit([Request("one", PROMPTS[0].token_ids, 1), Request("two", PROMPTS[0].token_ids, 2)])
        ended = in_stream(stream)
    assert [len(ended[name].token_ids) for name in ("one", "two")] == [1, 2]


def test_cuts_forbid_tokens(rig: Rig, served_model: Path) -> None:
    """With top_k = 2 each token is one of the two likeliest; top_p and min_p act on their own below."""
    for cut, allowed in (({"top_k": 2}, 2), ({"top_p": 1e-6}, 1), ({"min_p": 1.0}, 1)):
        sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=10, seed=5, **cut)
        for prompt, response in responses(rig.engine.generate(PROMPTS[:2], sampling)):
            likeliest = trainer_logits(rig.model, served_model, prompt, response).topk(allowed).indices
            assert all(token in row for token, row in zip(response.token_ids, likeliest.tolist(), strict=True))


def test_logprobs_of_prompts_are_the_trainers_or_refused(rig: Rig, served_model: Path) -> None:
    """Whatever the temperature; of equal prompts (the last is one token longer than the first) and of a single token."""
    longer = Prompt(prompt_id="longer", token_ids=(*PROMPTS[0].token_ids, 7), text="", data_source="t")
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=3, temperature=0.6, prompt_logprobs=True)
    if rig.name in ("hf", "http", "sglang"):
        with pytest.raises(RunStopped, match="gives no log-probs of prompts: use native or vllm"):
            rig.engine.generate(PROMPTS, sampling)
        return
    groups = rig.engine.generate([*PROMPTS, longer], sampling)
    plain = with_weights_of(rig.model, served_model)
    for group in groups:
        ids = torch.tensor([group.prompt.token_ids])
        with torch.no_grad():
            expected = plain(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        for one in group.trajectories:
            assert one.prompt_logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)
    with rig.engine.open_stream(sampling) as stream:  # a conversation's past is computed again for it
        stream.submit([Request("1", PROMPTS[0].token_ids, 2, "c")])
        [first] = in_stream(stream).values()
        stream.submit([Request("2", (*PROMPTS[0].token_ids, *first.token_ids, 7), 2, "c")])
        [second] = in_stream(stream).values()
    assert len(second.prompt_logprobs) == len(PROMPTS[0].token_ids) + len(first.token_ids)
    assert second.prompt_logprobs[: len(first.prompt_logprobs)] == pytest.approx(first.prompt_logprobs, abs=TOLERANCE)
    plainly = rig.engine.generate(PROMPTS[:1], SamplingParams(max_response_tokens=2))
    assert plainly[0].trajectories[0].prompt_logprobs == ()


def test_groups_and_samples_keep_their_order_and_names_and_are_handed_on_once(rig: Rig) -> None:
    handed: list[TrajectoryGroup] = []
    ticks: list[int] = []
    sampling = SamplingParams(samples_per_prompt=3, max_response_tokens=12, stop_token_ids=MANY_STOPS)
    groups = rig.engine.generate(PROMPTS, sampling, ticks.append, handed.append)
    assert [group.prompt for group in groups] == PROMPTS
    for group in groups:
        assert [t.sample_id for t in group.trajectories] == [f"{group.prompt.prompt_id}/{n}" for n in range(3)]
        assert len({t.token_ids for t in group.trajectories}) > 1
        assert all(len(t.token_ids) == len(t.logprobs) for t in group.trajectories)
    assert sorted(group.prompt.prompt_id for group in handed) == sorted(p.prompt_id for p in PROMPTS)
    assert all(group in groups for group in handed)
    assert sum(ticks) == sum(len(t.token_ids) for _, t in responses(groups))


def test_seed_decides_alone(rig: Rig) -> None:
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=12, seed=11)
    together = drawn(rig.engine.generate(PROMPTS, sampling))
    assert drawn(rig.engine.generate(PROMPTS, sampling)) == together
    alone = drawn(rig.engine.generate([PROMPTS[2]], sampling))
    assert alone == {name: ids for name, ids in together.items() if name in alone}
    other = SamplingParams(samples_per_prompt=2, max_response_tokens=12, seed=12)
    assert drawn(rig.engine.generate(PROMPTS, other)) != together


def test_how_responses_end(rig: Rig, served_model: Path) -> None:
    greedy = {"temperature": 0.0, "max_response_tokens": 8}
    plain = greedy_of_plain(rig.model, served_model, PROMPTS[0], 8)

    def only(**options: Any) -> Trajectory:
        [group] = rig.engine.generate([PROMPTS[0]], SamplingParams(**(greedy | options)))
        return group.trajectories[0]

    cut = only(max_response_tokens=3)
    assert (list(cut.token_ids), cut.stop_reason) == (plain[:3], StopReason.LENGTH)
    stopped = only(stop_token_ids=(plain[2],))
    first = plain.index(plain[2])
    assert (list(stopped.token_ids), stopped.stop_reason) == (plain[: first + 1], StopReason.EOS)
    last_allowed = only(stop_token_ids=(plain[2],), max_response_tokens=first + 1)
    assert last_allowed.stop_reason is StopReason.EOS  # it has ended; nothing was cut off
    letter = next(token for token in plain if 32 < token < 127)
    by_text = only(stop=(chr(letter),))
    assert by_text.stop_reason is StopReason.STOP_TEXT
    assert list(by_text.token_ids) == plain[: plain.index(letter) + 1]  # the text stays
    assert by_text.text.endswith(chr(letter))


@with_every_sync
def test_end_token_ends_a_response_unless_it_is_ignored(rig: Rig, served_model: Path) -> None:
    """The likeliest first token of another prompt is made the model's end token: its output row is made large."""
    end = AutoTokenizer.from_pretrained(served_model).eos_token_id
    with torch.no_grad():  # the final norm's output times this row: as large as no other, in one direction
        plain = with_weights_of(rig.model, served_model)
        ids = torch.tensor([PROMPTS[0].token_ids])
        last = plain.model(ids).last_hidden_state[0, -1]
        rig.model.get_output_embeddings().weight[end] = last / last.norm() * 20
    rig.publish(1)
    sampling = {"temperature": 0.0, "max_response_tokens": 5}
    [group] = rig.engine.generate([PROMPTS[0]], SamplingParams(**sampling))
    assert group.trajectories[0].token_ids == (end,)
    assert group.trajectories[0].stop_reason is StopReason.EOS
    assert group.trajectories[0].text == ""
    [group] = rig.engine.generate([PROMPTS[0]], SamplingParams(ignore_eos=True, **sampling))
    assert len(group.trajectories[0].token_ids) == 5
    assert group.trajectories[0].stop_reason is StopReason.LENGTH


@with_every_sync
def test_new_weights_are_sampled_from_and_their_version_is_told(rig: Rig, served_model: Path) -> None:
    seen = set()
    for version in (3, 4):
        with torch.no_grad():
            for weight in rig.model.parameters():
                weight.add_(0.05 * torch.randn_like(weight))
        rig.publish(version)
        assert rig.engine.version == version
        [group] = rig.engine.generate([PROMPTS[2]], SamplingParams(max_response_tokens=12, temperature=0.0))
        [response] = group.trajectories
        assert response.policy_version == version
        assert list(response.token_ids) == greedy_of_plain(rig.model, served_model, PROMPTS[2], 12)
        with suppress(AttributeError):  # samplers that share the weights have no hash of what was sent
            seen.add(rig.sync.sent.content_hash)
    assert len(seen) == (0 if rig.name in ("native", "hf") else 2)


@with_every_sync
def test_nothing_is_sent_when_nothing_changed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    if rig.name in ("native", "hf"):
        pytest.skip("shares the weights")
    calls: list[str] = []
    for method in ("load_folder", "receive"):
        right: Callable[..., Any] = getattr(rig.engine, method)
        monkeypatch.setattr(rig.engine, method, lambda *a, _right=right: (calls.append("sent"), _right(*a))[1])
    rig.publish(0)
    assert calls == []
    rig.publish(9)
    assert calls == ["sent"]


# ------------------------------------------------------------------------------------------------------------- streams


def in_stream(stream: Any) -> dict[str, Trajectory]:
    """All that is under way, to the end."""
    ended: dict[str, Trajectory] = {}
    while more := stream.wait(60.0):
        assert not ended.keys() & {one.sample_id for one in more}
        ended |= {one.sample_id: one for one in more}
    return ended


def request(prompt: Prompt, number: int = 0, tokens: int = 12, conversation: str = "") -> Request:
    return Request(f"{prompt.prompt_id}/{number}", prompt.token_ids, tokens, conversation)


def test_a_stream_samples_what_generate_does_whenever_it_is_asked(rig: Rig) -> None:
    sampling = SamplingParams(samples_per_prompt=2, max_response_tokens=12, stop_token_ids=MANY_STOPS, seed=6)
    together = {t.sample_id: t for group in rig.engine.generate(PROMPTS, sampling) for t in group.trajectories}
    requests = [request(each, number) for number in (1, 0) for each in PROMPTS]
    counted: list[int] = []
    with rig.engine.open_stream(sampling, counted.append) as stream:
        assert stream.wait(1.0) == []  # nothing is under way
        stream.submit(requests[:3])
        ended = {one.sample_id: one for one in stream.wait(60.0)}
        assert ended
        stream.submit(requests[3:])
        ended |= in_stream(stream)
    assert sum(counted) == sum(len(one.token_ids) for one in ended.values())
    assert ended.keys() == together.keys()
    for name, one in together.items():
        assert (ended[name].token_ids, ended[name].text) == (one.token_ids, one.text)
        assert (ended[name].stop_reason, ended[name].policy_version) == (one.stop_reason, one.policy_version)
        assert ended[name].logprobs == pytest.approx(one.logprobs, abs=TOLERANCE)


def test_requests_of_a_stream_have_lengths_of_their_own(rig: Rig) -> None:
    sampling = SamplingParams(max_response_tokens=12, ignore_eos=True)
    with rig.engine.open_stream(sampling) as stream:
        stream.submit([request(each, tokens=tokens) for each, tokens in zip(PROMPTS, (1, 5, 20, 9), strict=True)])
        ended = in_stream(stream)
    assert [len(ended[f"{each.prompt_id}/0"].token_ids) for each in PROMPTS] == [1, 5, 20, 9]
    assert {one.stop_reason for one in ended.values()} == {StopReason.LENGTH}


def test_turns_of_a_conversation_are_sampled_like_requests_that_stand_alone(rig: Rig) -> None:
    sampling = SamplingParams(max_response_tokens=8, seed=3)
    found = []
    for named in (True, False):
        text = {each.prompt_id: each.token_ids for each in PROMPTS}
        with rig.engine.open_stream(sampling) as stream:
            for turn in range(3):
                stream.submit(
                    [Request(f"{name}/0@{turn}", ids, 6, name if named else "") for name, ids in text.items()]
                )
                for name, one in in_stream(stream).items():
                    text[name.partition("/")[0]] += (*one.token_ids, *b" and?")
        found.append(text)
    assert found[0] == found[1]


def test_a_cancelled_request_is_never_heard_of_again(rig: Rig) -> None:
    sampling = SamplingParams(max_response_tokens=12, ignore_eos=True, seed=1)
    with rig.engine.open_stream(sampling) as stream:
        stream.submit([request(each, tokens=30) for each in PROMPTS])
        stream.wait(0.0)
        stream.cancel({f"{PROMPTS[0].prompt_id}/0", "unknown"})
        stream.submit([request(PROMPTS[0], number=1)])
        ended = in_stream(stream)
        assert f"{PROMPTS[0].prompt_id}/0" not in ended or rig.name == "hf"  # which samples all of it in the first wait
        assert f"{PROMPTS[0].prompt_id}/1" in ended
        stream.submit([request(PROMPTS[0])])  # its name is free again
        assert len(in_stream(stream)) == 1


def test_what_a_stream_refuses(rig: Rig) -> None:
    sampling = SamplingParams(max_response_tokens=30, ignore_eos=True)
    stream = rig.engine.open_stream(sampling)
    stream.submit([request(PROMPTS[0], tokens=40)])
    with pytest.raises(ValueError, match="is already in progress"):
        stream.submit([request(PROMPTS[1]), request(PROMPTS[0])])
    for empty in (Request("a", (), 3), Request("b", (1,), 0)):
        with pytest.raises(ValueError, match="need at least one token each"):
            stream.submit([empty])
    with pytest.raises(RuntimeError, match="close it first"):
        rig.engine.open_stream(sampling)
    with pytest.raises(RuntimeError, match="close it first"):
        rig.engine.generate(PROMPTS, sampling)
    with pytest.raises(RuntimeError, match=r"while .* in progress: close the stream first"):
        rig.engine.weights_changed(9)
    stream.close()
    stream.close()
    with pytest.raises(RuntimeError, match="the stream is closed"):
        stream.submit([request(PROMPTS[0])])
    assert stream.wait(1.0) == []
    assert len(rig.engine.generate(PROMPTS, sampling)) == len(PROMPTS)


@with_every_sync
def test_a_stream_goes_on_with_new_weights_when_nothing_is_under_way(rig: Rig, served_model: Path) -> None:
    """Greedily, in a conversation: what was kept of the first turn is of the old weights."""
    sampling = SamplingParams(max_response_tokens=8, temperature=0.0)
    [first, *_] = PROMPTS
    with rig.engine.open_stream(sampling) as stream:
        stream.submit([request(first, 0, 8, "c")])
        [before] = stream.wait(60.0)
        with torch.no_grad():
            for weight in rig.model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))
        rig.publish(4)
        longer = Prompt(prompt_id="longer", token_ids=(*first.token_ids, *before.token_ids), text="", data_source="t")
        stream.submit([request(longer, 0, 8, "c")])
        [after] = stream.wait(60.0)
    assert (before.policy_version, after.policy_version) == (0, 4)
    assert list(after.token_ids) == greedy_of_plain(rig.model, served_model, longer, 8)
    expected = logprobs_of(trainer_logits(rig.model, served_model, longer, after), after)
    assert after.logprobs == pytest.approx(expected.tolist(), abs=TOLERANCE)


# -------------------------------------------------------------------------------------------------------- environments


class Talker:
    """Answers every turn with a word, and ends the episode with the third."""

    def __init__(self, spec: EnvSpec):
        self._messages, self._turns = spec.messages, 0

    def reset(self, seed: int) -> EnvStart:
        return EnvStart(messages=self._messages)

    def step(self, action: str) -> EnvStep:
        self._turns += 1
        return EnvStep(messages=[{"role": "user", "content": "and?"}], reward=1.0, done=self._turns == 3)

    def close(self) -> dict[str, float]:
        return {}


def test_all_turns_of_an_episode_are_the_trainers(
    rig: Rig, served_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy turns, three of them with what the environment says in between: each token that was sampled is the plain model's
    first choice behind all that stands before it, with the plain model's log-prob."""
    monkeypatch.setitem(ENVS._entries, "talker", Talker)
    tokenizer = AutoTokenizer.from_pretrained(served_model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '>' if m['role'] == 'assistant' }}{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    worlds = Worlds(
        InlineHost(),
        TemplateTurns(tokenizer, {}),
        EpisodeRules(max_response_tokens=6, max_context_tokens=60),
        lambda prompt: EnvSpec(name="talker", messages=({"role": "user", "content": prompt.text},)),
    )
    groups = play(rig.engine, PROMPTS, SamplingParams(max_response_tokens=6, temperature=0.0), worlds)
    for prompt, episode in responses(groups):
        assert len(episode.turns) == 3 and episode.env_reward == 3.0 and not episode.earlier
        before = tuple(f"{prompt.text}\n>".encode())
        assert episode.prompt_token_ids == before
        whole = replace(prompt, token_ids=before)
        logits = trainer_logits(rig.model, served_model, whole, episode)
        sampled = torch.tensor(episode.response_mask)
        assert sampled.sum() == sum(turn.end - turn.start for turn in episode.turns)
        assert torch.equal(logits.argmax(-1)[sampled], torch.tensor(episode.token_ids)[sampled])
        found = torch.tensor(episode.logprobs)[sampled]
        torch.testing.assert_close(found, logprobs_of(logits, episode)[sampled], rtol=0, atol=TOLERANCE)

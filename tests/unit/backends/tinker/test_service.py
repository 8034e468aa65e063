"""The verbs on a tiny model: training, sampling, saving, and what of one client's touches no other's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from posttrain.backends.tinker import clients as clients_module
from posttrain.backends.tinker import service as service_module
from posttrain.backends.tinker.requests import Datum
from posttrain.backends.tinker.service import Service
from posttrain.backends.tinker.training import ClientTraining
from posttrain.backends.tinker.worker import Failed
from posttrain.build.serve_tinker import start_service
from posttrain.data.chat_api import Refused
from tinker_client import Client, datum, settings

TEXT = list(range(20, 31))
OTHER = list(range(40, 46))


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> torch.nn.Module:
    """The base model as transformers has it."""
    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    return found


def plain_logprobs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


def test_a_new_adapter_gives_the_base_model_s_log_probs(service: Service, plain: torch.nn.Module) -> None:
    client = Client(service)
    # Two micro-batches of at most 12 tokens; targets as in the loop of tinker-cookbook: 0 where nothing is learned.
    shifted = Datum(
        token_ids=tuple(OTHER),
        inputs={"target_tokens": np.array([0, 0, *OTHER[3:], 9]), "weights": np.array([0.0, 0, 1, 1, 1, 2])},
    )
    result = client.loss([datum(TEXT), shifted], forward_only=True)
    wanted = plain_logprobs(plain, TEXT)[:-1].gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    assert result.logprobs[0] == pytest.approx(wanted.numpy(), abs=1e-5)
    of_shifted = plain_logprobs(plain, OTHER)
    second = torch.tensor([float(of_shifted[place, token]) for place, token in enumerate([0, 0, *OTHER[3:], 9])])
    assert result.logprobs[1] == pytest.approx(second.numpy(), abs=1e-5)
    total = -wanted.sum() - (second * torch.tensor([0.0, 0, 1, 1, 1, 2])).sum()
    assert result.metrics["loss:sum"] == pytest.approx(float(total), rel=1e-5)


def test_several_targets_per_position(service: Service, plain: torch.nn.Module) -> None:
    targets = np.array([[1, 2], [3, 4], [5, 6]])
    two = Datum(
        token_ids=(7, 8, 9), inputs={"target_tokens": targets, "weights": np.array([[1.0, 0], [0.5, 0.5], [0, 1]])}
    )
    result = Client(service).loss([two], forward_only=True)
    wanted = plain_logprobs(plain, [7, 8, 9]).gather(1, torch.tensor(targets))
    assert result.logprobs[0] == pytest.approx(wanted.numpy(), abs=1e-5)


def test_micro_batches_add_up_and_steps_are_those_of_adamw(service: Service) -> None:
    """Weights after two steps equal those of torch's AdamW on gradients of the whole batch in one pass."""
    client = Client(service, seed=5)
    training = service.sessions.model(client.model_id).training
    assert training is not None
    data = [datum(TEXT), datum(OTHER), datum(TEXT[3:9])]
    twin = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in training.adapter.weights.items()}
    optimizer = torch.optim.AdamW(twin.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(2):
        client.loss(data[:2])
        client.loss(data[2:])
        gradients = {
            name: weight.grad.clone() for name, weight in training.adapter.weights.items() if weight.grad is not None
        }
        norm = torch.stack([each.norm() for each in gradients.values()]).norm()
        for name, weight in twin.items():
            weight.grad = gradients[name] * min(1.0, 0.5 / float(norm))
        optimizer.step()
        metrics = client.step(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for name, weight in training.adapter.weights.items():
        assert weight.detach().numpy() == pytest.approx(twin[name].detach().numpy(), abs=1e-6)


def test_cutting_does_not_change_the_gradient(service: Service) -> None:
    whole, cut = Client(service, seed=2), Client(service, seed=2)
    scorers = service._scorers
    scorers.max_tokens, before = 1000, scorers.max_tokens
    try:
        whole.loss([datum(TEXT), datum(OTHER)])
    finally:
        scorers.max_tokens = before
    cut.loss([datum(TEXT)])
    cut.loss([datum(OTHER)])
    assert whole.step()["grad_norm"] == pytest.approx(cut.step()["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "trained"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_layers_of_an_adapter(service: Service, shape: dict[str, bool], trained: set[str]) -> None:
    client = Client(service, **shape)
    before = client.loss([datum(TEXT)]).metrics["loss:sum"]
    client.step()
    assert client.loss([datum(TEXT)], forward_only=True).metrics["loss:sum"] < before
    training = service.sessions.model(client.model_id).training
    assert training is not None
    assert {name.split(".")[-4] for name in training.adapter.weights} == trained
    # the sampler has the same weights, with and without an adapter on the output layer
    prompt = client.sample(client.snapshot(), TEXT, prompt_logprobs=True, max_tokens=1).prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert prompt[1:] == pytest.approx(client.loss([datum(TEXT)], forward_only=True).logprobs[0].tolist(), abs=1e-4)


def test_two_clients_train_apart(service: Service) -> None:
    """What one client trains alone is what it trains beside another, to the bit."""

    def train(client: Client, other: Client | None) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(client.loss([datum(TEXT)]).metrics["loss:sum"])
            if other is not None:
                other.loss([datum(OTHER)])
            client.step()
            if other is not None:
                other.step(learning_rate=0.5)
        return losses

    assert train(Client(service, seed=9), None) == train(Client(service, seed=9), Client(service, rank=2, seed=8))


def test_a_forward_pass_that_exceeds_the_memory_keeps_the_gradient(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, other = Client(service, seed=4), Client(service, seed=4)
    client.loss([datum(TEXT)])
    whole = ClientTraining._pass
    passes = iter([torch.OutOfMemoryError("out of memory")])

    def short_of_memory(*given: Any, **how: Any) -> Any:
        for error in passes:
            raise error
        return whole(*given, **how)

    scorers = service._scorers
    monkeypatch.setattr(scorers, "max_tokens", 1000)
    with monkeypatch.context() as patch:
        patch.setattr(ClientTraining, "_pass", short_of_memory)
        client.loss([datum(TEXT), datum(OTHER)], forward_only=True)
    other.loss([datum(TEXT)])
    assert client.step() == other.step()


def test_a_failed_pass_leaves_no_half_batch(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = Client(service, seed=3), Client(service, seed=3)
    client.loss([datum(OTHER)])
    huge = datum(TEXT, logprobs=[-1e30] * 10, advantages=[3e38] * 10)
    with pytest.raises(Failed, match="the loss of importance_sampling is not finite"):
        client.loss([datum(OTHER, logprobs=[0.0] * 5, advantages=[1.0] * 5), huge], "importance_sampling")
    with pytest.raises(
        Failed, match="no step was made, and the gradient was dropped: a forward_backward before it failed"
    ):
        client.step()
    with pytest.raises(Failed, match="there is no gradient for optim_step"):
        client.step()
    # it goes on as if nothing had happened
    for each in (client, other):
        each.loss([datum(OTHER)])
    assert client.step() == other.step()


def test_a_refused_request_does_not_stop_those_behind_it(service: Service) -> None:
    client = Client(service)
    with pytest.raises(Refused, match="no loss called 'x'"):
        client.loss([datum(TEXT)], "x")
    with pytest.raises(Failed, match="no loss called 'x'"):
        client.step()
    with pytest.raises(Refused, match="beta1 and beta2 are below 1"):
        client.step(beta1=1.0)
    assert client.loss([datum(TEXT)]).metrics["loss:sum"] > 0


def test_a_request_sent_again_runs_once(service: Service) -> None:
    client = Client(service)
    client.loss([datum(TEXT)])
    body = {"model_id": client.model_id, "seq_id": client.number(), "adam_params": {}}
    first, second = service.optim_step(body), service.optim_step(body)
    assert first == second
    client.result(first)
    training = service.sessions.model(client.model_id).training
    assert training is not None
    assert training.steps == 1


def test_samples_are_reproducible_and_their_log_probs_are_the_model_s(service: Service) -> None:
    client = Client(service, train_unembed=False)
    client.loss([datum(TEXT)])
    client.step()
    sampler = client.snapshot()
    first = client.sample(sampler, TEXT[:4], 3, seed=4, max_tokens=5, topk_sample_logprobs=2)
    again = client.sample(sampler, TEXT[:4], 3, seed=4, max_tokens=5, topk_sample_logprobs=2)
    assert first == again
    assert len({each.tokens for each in first.sequences}) > 1
    for each in first.sequences:
        whole = [*TEXT[:4], *each.tokens]
        scored = client.loss([datum(whole)], forward_only=True).logprobs[0][3:]
        assert list(each.logprobs) == pytest.approx(scored.tolist(), abs=1e-4)
        assert each.top is not None
        assert len(each.top) == len(each.tokens)
    greedy = client.sample(sampler, TEXT[:4], temperature=0, max_tokens=4, topk_sample_logprobs=1).sequences[0]
    assert greedy.top is not None
    assert [row[0][0] for row in greedy.top if row] == list(greedy.tokens)
    # a snapshot does not move with the training
    client.loss([datum(TEXT)])
    client.step(learning_rate=0.5)
    assert client.sample(sampler, TEXT[:4], 3, seed=4, max_tokens=5, topk_sample_logprobs=2) == first


def test_log_probs_of_a_prompt(service: Service, plain: torch.nn.Module) -> None:
    client = Client(service)
    body = {"session_id": client.session_id, "sampling_session_seq_id": 77, "base_model": "tiny"}
    base = service.create_sampling_session(body)
    found = client.sample(
        base, TEXT, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3, max_tokens=1
    )
    wanted = plain_logprobs(plain, TEXT)[:-1]
    assert found.prompt_logprobs is not None
    assert found.top_prompt is not None
    assert list(found.prompt_logprobs[:8]) == [None] * 8
    exact = wanted.gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    assert found.prompt_logprobs[8:] == pytest.approx(exact[7:].tolist(), abs=1e-4)
    assert len(found.top_prompt) == len(TEXT)
    assert found.top_prompt[7] is None
    top = wanted[-1].topk(2)
    assert found.top_prompt[-1] is not None
    assert [token for token, _ in found.top_prompt[-1]] == top.indices.tolist()
    assert [value for _, value in found.top_prompt[-1]] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_stops(service: Service) -> None:
    client = Client(service)
    sampler = client.snapshot()
    tokens = client.sample(sampler, TEXT[:4], seed=1, max_tokens=6, stop=[]).sequences[0].tokens
    stopped = client.sample(sampler, TEXT[:4], seed=1, max_tokens=6, stop=[tokens[2]]).sequences[0]
    assert stopped.tokens == tokens[: tokens.index(tokens[2]) + 1]
    assert stopped.stop_reason == "stop"
    with pytest.raises(Refused, match="neither a text nor a token id"):
        client.sample(sampler, TEXT, stop=[1.5])
    with pytest.raises(Refused, match="exceed the context"):
        client.sample(sampler, TEXT, max_tokens=10**6)


def test_saved_states_resume_to_the_bit_after_a_restart(service: Service, tiny_llama: Path) -> None:
    client = Client(service, seed=11)
    for _ in range(2):
        client.loss([datum(TEXT)])
        client.step()
    path = client.verb("save_state", path="two")["path"]
    with pytest.raises(Failed, match="there is a weights/two of this run already"):
        client.verb("save_state", path="two")
    client.verb("save_state", path="two", overwrite=True)
    sampler_path = client.verb("save_for_sampler", path="two")["path"]
    client.loss([datum(OTHER)])
    client.step()
    wanted = client.loss([datum(OTHER)], forward_only=True).metrics

    restarted = start_service(settings(tiny_llama, service.store.folder))
    restarted.worker.start()
    try:
        resumed = Client(restarted, load=path)
        resumed.loss([datum(OTHER)])
        resumed.step()
        assert resumed.loss([datum(OTHER)], forward_only=True).metrics == wanted
        assert restarted.info(resumed.model_id)["lora_rank"] == 4
        # weights alone: the averages begin at zero
        fresh = Client(restarted, load=path, optimizer=False)
        fresh.loss([datum(OTHER)])
        fresh.step()
        assert fresh.loss([datum(OTHER)], forward_only=True).metrics != wanted
        with pytest.raises(Failed, match="there is no state of an optimizer"):
            Client(restarted, load=sampler_path)
        with pytest.raises(Refused, match="there is no tinker://x:train:0/weights/two"):
            Client(restarted, load="tinker://x:train:0/weights/two")
        with pytest.raises(Refused, match="there is no session"):
            restarted.sessions.model(client.model_id)
    finally:
        restarted.worker.close()
    about = load_file(service.store.find(path).folder / "adapter_model.safetensors")
    assert any("lm_head" in name for name in about)


def test_only_the_newest_snapshots_are_kept(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (service_module, clients_module):
        monkeypatch.setattr(module, "SNAPSHOTS", 2)
    client = Client(service, train_mlp=False, train_unembed=False)
    samplers = [client.snapshot() for _ in range(3)]
    with pytest.raises(Refused, match="these weights were dropped, since 2 newer ones were saved"):
        client.sample(samplers[0], TEXT, max_tokens=1)
    assert client.sample(samplers[1], TEXT, max_tokens=1).sequences
    inflight = client.snapshot(kind="inflight")
    before = client.sample(inflight, TEXT, prompt_logprobs=True, max_tokens=1).prompt_logprobs
    client.loss([datum(TEXT)])
    client.step()
    client.snapshot(kind="inflight")
    assert client.sample(inflight, TEXT, prompt_logprobs=True, max_tokens=1).prompt_logprobs != before


def test_a_silent_session_ends_and_makes_room(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(service)
    session = service.sessions.of(client.session_id)
    trained = service.sessions.trained()
    session.seen -= 10_000
    service._tick()
    assert service.sessions.trained() == trained - 1
    with pytest.raises(Refused, match="it was silent for 600 s"):
        service.info(client.model_id)


def test_no_more_adapters_than_allowed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "plan", replace(service.plan, max_adapters=service.sessions.trained() + 1))
    client = Client(service)
    with pytest.raises(Refused, match=r"the most that tinker\.max_adapters allows"):
        Client(service)
    client.result(service.unload(client.model_id))
    assert Client(service).model_id


def test_what_cannot_be_trained(service: Service) -> None:
    for lora, told in (
        ({"rank": 0}, "rank=0 is no whole number of at least 1"),
        ({"rank": 1000}, "rank 1000 is above 256"),
        ({"train_mlp": False, "train_attn": False, "train_unembed": False}, "no layer of this model is left"),
    ):
        with pytest.raises(Refused, match=told):
            Client(service, **lora)
    session = service.create_session()
    for body, told in (
        ({"base_model": "gpt"}, "this server has the base model tiny, and not gpt"),
        ({"base_model": "tiny"}, "trains adapters, and not whole models"),
        ({"base_model": "tiny", "optimizer_config": {"type": "dimuon"}}, "no optimizer called dimuon"),
    ):
        with pytest.raises(Refused, match=told):
            service.create_model({"session_id": session, "model_seq_id": 0, **body})

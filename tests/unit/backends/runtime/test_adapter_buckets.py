"""A LoRA adapter alone, from a trainers' rank through flat buckets to a worker with a server; without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from posttrain.backends.runtime.ray.sending import Sender
from posttrain.backends.runtime.ray.taking import ServerTaker
from posttrain.backends.serving.vllm_worker import WeightReceiver
from posttrain.backends.torch_training.sharding import Sharding
from posttrain.config.lora import LoraConfig
from posttrain.errors import RunStopped
from posttrain.interfaces.rollout_engine import Served
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapter, write_own_adapter

CPU = torch.device("cpu")
LORA = LoraConfig(rank=2, alpha=4.0, target_modules=["q_proj", "down_proj"])


class Server:
    """What a sampler does with vLLM's server, with the real receiver of vLLM's worker; keeps what it was given."""

    def __init__(self) -> None:
        self.version = 0
        self.files: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.settings = ""

    def load_adapter(self, folder: Path, announced: Served) -> list[tuple[str, Served]]:
        report = WeightReceiver().posttrain_adapter(str(folder), announced.content_hash)
        if "error" in report:
            raise RunStopped(f"refuses the weights: {report['error']}")
        self.files = sorted(path.name for path in folder.iterdir())
        self.tensors = load_file(folder / "adapter_model.safetensors")
        self.settings = (folder / "adapter_config.json").read_text()
        return [("server", Served(report["version"], report["content_hash"]))]

    def weights_changed(self, version: int) -> None:
        self.version = version


@pytest.fixture
def model(tiny_llama: Path) -> PreTrainedModel:
    model = load_causal_lm(str(tiny_llama), dtype=torch.float32)
    add_adapter(model, LORA, seed=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    return model


def sender_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> Sender:
    return Sender(
        model,
        Sharding(),
        dtype,
        to_copies=False,
        adapter=True,
        device=CPU,
        rank=0,
        timeout_s=5.0,
        describe=lambda folder: None,
    )


def send(sender: Sender, taker: ServerTaker, change: Any = lambda data: data) -> tuple[Served, Served]:
    """Everything in buckets of 500 bytes, as the driver has it done: what was sent, and what is served."""
    for _ in range(sender.begin(500)):
        bucket = sender.next_bucket()
        assert bucket is not None
        assert taker.take_bucket((bucket[0], change(bucket[1]))) is None
    assert sender.next_bucket() is None
    return sender.finish(7), taker.finish(7, sender.settings())


def test_what_arrives_is_peft_s_folder(model: PreTrainedModel, tmp_path: Path) -> None:
    server = Server()
    sent, served = send(sender_of(model), ServerTaker(server, device=CPU, timeout_s=5.0))  # type: ignore[arg-type]
    assert sent == served and server.version == 7
    assert server.files == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    expected = write_own_adapter(model, tmp_path)
    assert server.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(server.tensors[name], tensor)
    assert server.settings == (tmp_path / "adapter_config.json").read_text()
    # A [rank, in] and B [out, rank] of every layer that has an adapter, in float32.
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "base_layer")]
    assert sent.nbytes == sum(4 * 2 * (each.in_features + each.out_features) for each in layers)
    assert sent.nbytes < sum(each.nbytes for each in model.parameters()) / 10


def test_it_travels_in_the_precision_to_compute_in(model: PreTrainedModel) -> None:
    server = Server()
    sent, _ = send(sender_of(model, torch.bfloat16), ServerTaker(server, device=CPU, timeout_s=5.0))  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in server.tensors.values()} == {torch.bfloat16}
    assert sent.nbytes == sum(tensor.nbytes for tensor in server.tensors.values())


def test_what_was_altered_on_the_way_is_named_and_not_served(model: PreTrainedModel) -> None:
    server = Server()
    seen: list[int] = []

    def change(data: Any) -> Any:
        seen.append(1)
        if len(seen) != 2:
            return data
        altered: Any = numpy.array(data)
        altered[5] ^= 1
        return altered

    with pytest.raises(RunStopped, match=r"refuses the weights: .*lora_[AB]\.weight was altered on the way"):
        send(sender_of(model), ServerTaker(server, device=CPU, timeout_s=5.0), change)  # type: ignore[arg-type]
    assert server.version == 0 and not server.tensors


def test_the_same_through_a_folder(model: PreTrainedModel, tmp_path: Path) -> None:
    sender, server = sender_of(model), Server()
    sent, _ = send(sender, ServerTaker(Server(), device=CPU, timeout_s=5.0))  # type: ignore[arg-type]
    written = sender.write(tmp_path / "adapter", 7, 500)
    assert written == sent and written.nbytes == sent.nbytes
    assert server.load_adapter(tmp_path / "adapter", written) == [("server", sent)]
    assert server.files == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]

"""Rotary positions that a run changes: by the keys that people write, with the frequencies that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen2VLConfig

from posttrain.errors import ModelError
from posttrain.models.loading import load_causal_lm, override_config, overrides_for_servers
from posttrain.models.tiny import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


def frequencies(folder: str, **overrides: Any) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2]."""
    model = load_causal_lm(folder, dtype=torch.float32, config_overrides=overrides)
    found: torch.Tensor = model.model.rotary_emb.inv_freq
    return found


def of_base(base: float, pairs: int) -> torch.Tensor:
    """Su et al., arXiv:2104.09864: base^(-2i / head_dim)."""
    return base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)


def test_the_base(folder: str) -> None:
    before = frequencies(folder)
    for value in (1e6, 1_000_000, "1e6"):
        torch.testing.assert_close(frequencies(folder, rope_theta=value), of_base(1e6, len(before)))
    torch.testing.assert_close(frequencies(folder), before)


@pytest.mark.parametrize("key", ["rope_type", "type"])  # type: as configurations had it before transformers 4.43
def test_scaling(folder: str, key: str) -> None:
    before = frequencies(folder)
    linear = frequencies(folder, rope_scaling={key: "linear", "factor": 4.0})
    torch.testing.assert_close(linear, before / 4)
    yarn = frequencies(folder, rope_scaling={key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
    torch.testing.assert_close(yarn[0], before[0])  # the quickest pair is not stretched, the slowest is
    torch.testing.assert_close(yarn[-1], before[-1] / 4)


def test_base_and_scaling_in_either_order(folder: str) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    expected = of_base(5e5, len(frequencies(folder))) / 2
    torch.testing.assert_close(frequencies(folder, rope_theta=5e5, rope_scaling=scaling), expected)
    torch.testing.assert_close(frequencies(folder, rope_scaling=scaling, rope_theta=5e5), expected)
    torch.testing.assert_close(frequencies(folder, rope_scaling=None), frequencies(folder))


def test_layers_of_full_attention_change_where_they_differ() -> None:
    config: Any = Gemma3TextConfig(num_hidden_layers=6)
    local = dict(config.rope_parameters["sliding_attention"])
    override_config(config, {"rope_theta": 2e6, "rope_scaling": {"type": "linear", "factor": 8.0}})
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "rope_theta": 2e6, "factor": 8.0}
    assert config.rope_parameters["sliding_attention"] == local
    override_config(config, {"rope_parameters": {"sliding_attention": {"rope_theta": 5000.0}}})
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 5000.0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"rope_theta": 0}, "rope_theta of the rotary positions is 0; it must be a number above 0"),
        ({"rope_theta": "big"}, "is 'big'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "must be a number at least 1"),
        ({"rope_scaling": {"type": "yarm", "factor": 2.0}}, r"rope_type is 'yarm' \(known: .*did you mean yarn"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_scaling": 4}, "not a mapping"),
    ],
)
def test_what_no_model_can_have(folder: str, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        frequencies(folder, **overrides)
    assert next(iter(caught.value.problems)).field.startswith("model.config_overrides")


SCALED = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}


def test_a_server_is_told_all_of_it_under_the_names_of_every_version(folder: str) -> None:
    assert overrides_for_servers(folder, {"rms_norm_eps": 0.5}, False) == {"rms_norm_eps": 0.5}
    told = overrides_for_servers(folder, {"rms_norm_eps": 0.5, **SCALED}, False)
    whole = {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    assert told == {"rms_norm_eps": 0.5, "rope_theta": 5e5, "rope_scaling": whole, "rope_parameters": whole}
    assert list(told)[-1] == "rope_parameters"  # transformers 5 takes the others for it, too
    plain = {"rope_theta": 5e5, "rope_type": "default"}
    told = overrides_for_servers(folder, {"rope_theta": 5e5}, False)
    assert told == {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": plain}


def test_a_server_is_told_of_the_language_model_of_two(tmp_path: Path) -> None:
    config = Qwen2VLConfig()
    config.save_pretrained(tmp_path)
    told = overrides_for_servers(str(tmp_path), {"rope_theta": 5e5, "text_config": {"rms_norm_eps": 0.5}}, False)
    assert told.keys() == {"text_config"} and told["text_config"]["rms_norm_eps"] == 0.5
    assert told["text_config"]["rope_parameters"]["rope_theta"] == 5e5

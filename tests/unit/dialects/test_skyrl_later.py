"""What SkyRL's keys of late 2025 and 2026 do: adapters, saves, servers, chat templates by name, samples per turn, verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.skyrl import DIALECT

T, P, G, E = "trainer", "trainer.placement", "generator", "generator.inference_engine"


def read(*overrides: str) -> LoadedConfig:
    """SkyRL's defaults with overrides."""
    return read_dialect(DIALECT, None, overrides)


def test_megatrons_keys_of_adapters_and_saves_are_no_options_of_the_engine() -> None:
    section = f"{T}.policy.megatron_config"
    loaded = read(
        f"{T}.strategy=megatron",
        f"{T}.policy.model.lora.rank=8",
        f"{section}.lora_config.merge_lora=false",
        f"{section}.hf_export_config.distributed_save=true",
        f"{section}.async_dist_ckpt_save=true",
    )
    assert loaded.problems == ()
    assert not {"lora_config", "hf_export_config", "async_dist_ckpt_save"} & loaded.config.policy.engine_options.keys()
    assert len([one for one in loaded.ignored if one.key.startswith(section)]) == 3


def test_layers_of_an_adapter_stood_in_trainer_until_december_2025() -> None:
    asked = read(f"{T}.policy.model.lora.rank=8", f"{T}.target_modules=[q_proj]", f"{T}.exclude_modules=[o_proj]")
    lora = asked.config.policy.lora
    assert (asked.problems, lora.target_modules, lora.exclude_modules) == ((), ["q_proj"], ["o_proj"])
    later = read(
        f"{T}.policy.model.lora.rank=8",
        f"{T}.target_modules=[q_proj]",
        f"{T}.policy.model.lora.target_modules=[k_proj]",
    )
    assert later.config.policy.lora.target_modules == ["k_proj"]


def test_a_router_is_passed_over_beside_the_servers_behind_it() -> None:
    for section in (G, E):
        servers = f"{section}.external_server_urls=['http://127.0.0.1:1','http://127.0.0.1:2']"
        asked = read(f"{P}.colocate_all=false", servers, f"{section}.external_proxy_url='http://a:8080'")
        assert (asked.problems, asked.config.rollout.endpoints) == ((), ["http://127.0.0.1:1", "http://127.0.0.1:2"])


MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "<think>\nt\n</think>\n\na"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "<think>u</think>b"},
]


@pytest.mark.parametrize(
    ("name", "system", "first"),
    [
        ("qwen3_with_thinking", "<|im_start|>system\nS<|im_end|>\n", "<think>\nt\n</think>\n\na"),
        ("qwen3_without_thinking", "<|im_start|>system\nS<|im_end|>\n", "a"),
        ("qwen2_5_with_generation_tag_simplified", "", "<think>\nt\n</think>\n\na"),
    ],
)
def test_chat_templates_that_skyrl_has_names_for(name: str, system: str, first: str) -> None:
    template = read(f"+{G}.chat_template.name_or_path={name}").config.model.chat_template
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    said = environment.from_string(template).render(messages=MESSAGES, add_generation_prompt=True)
    turns = [("user", "1"), ("assistant", first), ("user", "2"), ("assistant", "<think>u</think>b")]
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert said == f"{system}{told}<|im_start|>assistant\n"


def test_another_name_of_a_chat_template_gets_the_nearest() -> None:
    (problem,) = read(f"+{G}.chat_template.name_or_path=qwen3_without_thinkin").problems
    assert "SkyRL has no chat template 'qwen3_without_thinkin'" in problem.what
    assert "did you mean qwen3_without_thinking" in problem.fix


def test_an_environment_of_verifiers_ends_its_own_episodes() -> None:
    endpoint = f"{G}.enable_http_endpoint=true"
    asked = read("+posttrain.environment.name=verifiers", "environment.env_class=will/wordle@0.1.4", endpoint)
    environment = asked.config.environment
    assert (environment.name, environment.settings["env"], environment.max_turns) == ("verifiers", "wordle", None)


def test_a_program_with_a_generator_reads_its_overrides_itself(tmp_path: Path) -> None:
    file = tmp_path / "main_mine.py"
    file.write_text("bonus: float = 0.0")
    settings = "+posttrain.environment.settings"
    ours = ("+posttrain.environment.name=skyrl_program", f"{settings}.file='{file}'", f"{settings}.folder='{tmp_path}'")
    given = (f"{G}.max_turns=3", f"{G}.batched=false", f"++{G}.bonus=0.5", "environment.env_class=words")
    asked = read(*given, *ours)
    held = asked.config.environment.settings
    assert asked.problems == () and asked.config.environment.max_turns is None and held["env_class"] == "words"
    assert any(f"the generator of {file} plays the episodes" in text for text in asked.warnings)
    # As they were written, but for our own; bonus stands in the program, so it is no unknown key
    assert [each for each in held["arguments"] if each in given] == list(given)
    assert not any("posttrain" in each for each in held["arguments"])
    assert any(each.key == f"{G}.max_turns" for each in asked.ignored)
    # A key that the program does not have stays unknown
    (unknown,) = read(*given, *ours, f"++{G}.bonas=0.5").problems
    assert unknown.what.startswith(f"there is no key {G}.bonas")
    file.write_text("bonus: float = 0.0; train_child_trajectories: bool = False")
    assert read(*given, *ours, f"++{G}.train_child_trajectories=true").problems == ()


@pytest.mark.parametrize(
    ("written", "per_turn", "history"),
    [
        (("trainer.step_wise_training=true",), True, "append"),
        (("generator.step_wise_trajectories=true",), True, "append"),
        (("trainer.step_wise_training=true", "+generator.retokenize_chat_history=true"), True, "split"),
    ],
)
def test_a_sample_for_every_turn_under_both_names(written: tuple[str, ...], per_turn: bool, history: str) -> None:
    asked = read(f"{G}.max_turns=3", f"{G}.batched=false", f"{G}.use_conversation_multi_turn=true", *written)
    environment = asked.config.environment
    assert (environment.sample_per_turn, environment.changed_history) == (per_turn, history)
    assert environment.reward_of == "last_sample"


def test_a_whole_history_written_again_has_the_reward_of_its_last_turn(tmp_path: Path) -> None:
    given = (f"{G}.max_turns=3", f"{G}.batched=false", f"{G}.use_conversation_multi_turn=true")
    assert read(*given).config.environment.reward_of == "episode"
    own = read(*given, f"{G}.chat_template.source=file", f"{G}.chat_template.name_or_path={tmp_path}/t.jinja")
    assert own.config.environment.reward_of == "last_turn"


def test_nothing_else_is_reported_for_the_default_of_a_misspelt_key() -> None:
    """Without its value 4 engines would take 16 devices."""
    sizes = (f"{G}.backend=vllm", f"{G}.num_inference_engines=4")
    (problem,) = read(*sizes, f"{G}.inference_engine_tensor_parallel_zise=1").problems
    assert problem.fix == f"did you mean {G}.inference_engine_tensor_parallel_size?"
    # Under the later name, which the rules read by the earlier one, and with the slip in the section
    devices = f"{P}.policy_num_gpus_per_node=4"
    for slip in (f"{E}.tebsor_parallel_size", f"{E.replace('engine', 'engnie')}.tensor_parallel_size"):
        (problem,) = read(f"{E}.num_engines=4", devices, f"{slip}=1").problems
        assert problem.fix == f"did you mean {E}.tensor_parallel_size?"


@pytest.mark.parametrize("key", [f"{P}.policy_num_gpus_per_node", f"{P}.ref_num_gpus_per_node"])
def test_a_wrong_number_of_devices_is_not_compared(key: str) -> None:
    sizes = [f"{P}.{role}_num_gpus_per_node=1" for role in ("policy", "ref")]
    others = [each for each in sizes if not each.startswith(key)]
    (problem,) = read(*others, f"{G}.num_inference_engines=1", f"{key}=nan").problems
    assert problem.field == key


def test_experts_that_are_recorded_and_not_used_are_refused() -> None:
    """SkyRL asserts that Megatron replays them; without a word on it they are replayed here."""
    recorded = ("trainer.strategy=megatron", "generator.inference_engine.enable_return_routed_experts=true")
    replay = "trainer.policy.megatron_config.moe_enable_routing_replay"
    assert read(*recorded, f"{replay}=true").config.rollout.routing_replay
    [problem] = [each for each in read(*recorded, f"{replay}=false").problems if replay in str(each)]
    assert "does not use them: SkyRL stops there" in str(problem)

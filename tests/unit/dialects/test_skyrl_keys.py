"""SkyRL's keys: all of them have a row, with the defaults that SkyRL shipped; its page's blocks load; misspellings are seen."""

from __future__ import annotations

import random
import string
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.dialects.ledger import ABSENT, Ledger, leaves
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.skyrl import DIALECT

DOCUMENTS = Path(__file__).parent / "skyrl_documents"
LEDGER = DIALECT.ledger
JUNE, AUGUST = LEDGER.at("2025-06"), LEDGER.at("2025-08")
# The blocks that stand below trainer, in the order of the page; the others are sections of their own.
TRAINER = ("placement", "general", "evaluation", "checkpoint", "logging", "policy", "critic", "ref", "algorithm")


def documented(file: str = "keys.txt") -> Iterator[str]:
    """The keys of a file with sections and the names below them."""
    sections: tuple[str, ...] = ()
    for line in (DOCUMENTS / file).read_text().splitlines():
        if line.startswith("["):
            sections = tuple(line.strip("[]").split())
        elif not line.startswith("#"):
            yield from (f"{section}.{key}" for section in sections for key in line.split())


def block(name: str) -> str:
    return (DOCUMENTS / f"{name}.yaml").read_text()


def has_row(ledger: Ledger, key: str) -> bool:
    """A row of its own, or that of a section whose names the user chooses."""
    parts = key.split(".")
    return any(ledger.find(".".join(parts[:end])) for end in range(2, len(parts) + 1))


def known(key: str) -> bool:
    ledger = LEDGER.of("train")
    return has_row(ledger, key) or ledger.is_section(key)


def assembled() -> str:
    """The blocks of the page in one file: those of trainer below trainer, keys that it shows twice once."""
    seen: set[str] = set()
    lines: list[str] = []
    for name in TRAINER:
        for line in block(name).splitlines():
            key = line.partition(":")[0]
            if line.startswith(" ") or key not in seen:
                lines.append(line)
            seen.add(key)
    return "trainer:\n" + textwrap.indent("\n".join(lines), "  ") + "\n" + block("generator")


def read(tmp_path: Path, text: str, *overrides: str, version: str = "") -> LoadedConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return read_dialect(DIALECT, str(file), overrides, version=version)


def test_every_documented_key_has_a_row() -> None:
    keys = list(documented())
    assert [key for key in keys if not has_row(LEDGER, key)] == []
    assert len(keys) == len(set(keys)) > 300


def test_every_key_of_a_released_file_has_a_row() -> None:
    fine_tuning = "SFT:."
    released = list(documented("released_keys.txt"))
    assert len(released) > 590
    assert [key for key in released if not key.startswith("SFT:") and not known(key)] == []
    own = [key.removeprefix(fine_tuning).removeprefix("SFT:") for key in released if key.startswith("SFT:")]
    assert [key for key in own if not (LEDGER.of("sft").find(key) or has_row(LEDGER.of("sft"), key))] == []


def test_every_key_of_the_page_has_a_row_in_the_version_it_describes() -> None:
    below_trainer = [f"trainer.{key}" for name in TRAINER for key, _ in leaves(yaml.safe_load(block(name)))]
    sharding = [
        f"trainer.policy.{key}" for name in ("fsdp", "optimizer") for key, _ in leaves(yaml.safe_load(block(name)))
    ]
    keys = [*below_trainer, *sharding, *(key for key, _ in leaves(yaml.safe_load(block("generator"))))]
    assert len(keys) > 120
    assert [key for key in keys if JUNE.find(key) is None] == []


def test_every_key_that_the_page_explains_has_a_row() -> None:
    """Its lists name vllm_v1_disable_multiproc and dotted deepspeed keys that its blocks leave out."""
    for key in (
        "generator.vllm_v1_disable_multiproc",
        "deepspeed_config.train.zero_optimization.zero_hpz_partition_size",
    ):
        assert JUNE.find(key)


# (key, June 2025, August 2025); where page and code disagree, what the code shipped.
SHIPPED: list[tuple[str, Any, Any]] = [
    ("trainer.strategy", "fsdp2", "fsdp2"),
    ("trainer.placement.policy_num_gpus_per_node", 4, 4),
    ("trainer.placement.colocate_all", True, True),
    ("trainer.placement.colocate_critic_reward", False, False),
    ("trainer.train_batch_size", 1024, 1024),
    ("trainer.policy_mini_batch_size", 256, 256),
    ("trainer.critic_mini_batch_size", 256, 256),
    ("trainer.micro_train_batch_size_per_gpu", 1, 1),
    ("trainer.micro_forward_batch_size_per_gpu", 1, 1),
    ("trainer.update_epochs_per_batch", 1, 1),
    ("trainer.max_prompt_length", 512, 512),
    ("trainer.use_sample_packing", True, True),
    ("trainer.seed", 42, 42),
    ("trainer.bf16", True, True),
    ("trainer.flash_attn", True, True),
    ("trainer.eval_interval", 5, 5),
    ("trainer.eval_before_train", True, True),
    ("trainer.resume_mode", "latest", "latest"),
    ("trainer.max_ckpts_to_keep", -1, -1),
    ("trainer.ckpt_interval", 10, 10),
    ("trainer.hf_save_interval", -1, -1),
    ("trainer.logger", "wandb", "wandb"),
    ("trainer.policy.model.path", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    ("trainer.critic.model.path", None, None),
    ("trainer.policy.optimizer_config.lr", 1e-6, 1e-6),
    ("trainer.critic.optimizer_config.lr", 5e-6, 5e-6),
    ("trainer.policy.optimizer_config.weight_decay", 0.01, 0.01),
    ("trainer.policy.optimizer_config.max_grad_norm", 1.0, 1.0),
    ("trainer.policy.fsdp_config.cpu_offload", False, False),
    ("trainer.ref.fsdp_config.cpu_offload", True, True),
    ("trainer.policy.fsdp_config.fsdp_size", -1, -1),
    ("trainer.algorithm.advantage_estimator", "grpo", "grpo"),
    ("trainer.algorithm.use_kl_estimator_k3", True, False),
    ("trainer.algorithm.use_kl_loss", True, True),
    ("trainer.algorithm.kl_loss_coef", 0.001, 0.001),
    ("trainer.algorithm.value_clip", 0.2, 0.2),
    ("trainer.algorithm.eps_clip_low", 0.2, 0.2),
    ("trainer.algorithm.clip_ratio_c", 3.0, 3.0),
    ("trainer.algorithm.ppo_loss_type", "regular", "regular"),
    ("trainer.algorithm.normalize_reward", True, True),
    ("deepspeed_config.train.zero_optimization.stage", 3, 3),
    ("deepspeed_config.eval.zero_optimization.offload_param.device", "cpu", "cpu"),
    ("generator.backend", "vllm", "vllm"),
    ("generator.inference_engine_tensor_parallel_size", 4, 4),
    ("generator.n_samples_per_prompt", 5, 5),
    ("generator.batched", True, False),
    ("generator.max_num_seqs", 1024, 1024),
    ("generator.max_num_batched_tokens", 8192, 8192),
    ("generator.gpu_memory_utilization", 0.8, 0.8),
    ("generator.use_conversation_multi_turn", False, True),
    ("generator.sampling_params.max_generate_length", 1024, 1024),
    ("generator.sampling_params.temperature", 1.0, 1.0),
    ("generator.sampling_params.top_k", -1, -1),
    ("generator.eval_sampling_params.temperature", 1.0, 0.0),
    ("generator.zero_reward_on_non_stop", False, False),
    ("environment.env_class", "gsm8k", "gsm8k"),
]  # fmt: skip
# Since August 2025.
NEW_IN_AUGUST: list[tuple[str, Any]] = [
    ("trainer.algorithm.policy_loss_type", "regular"),
    ("trainer.algorithm.kl_estimator_type", "k3"),
    ("trainer.algorithm.kl_ctrl.type", "fixed"),
    ("trainer.algorithm.kl_ctrl.kl_target", 0.1),
    ("trainer.algorithm.kl_ctrl.horizon", 10000),
    ("trainer.algorithm.loss_reduction", "token_mean"),
    ("trainer.algorithm.grpo_norm_by_std", True),
    ("trainer.algorithm.use_tis", False),
    ("trainer.algorithm.tis_imp_ratio_cap", -1.0),
    ("trainer.algorithm.dynamic_sampling.type", None),
    ("trainer.algorithm.dynamic_sampling.max_sample_batches", 30),
    ("trainer.algorithm.dynamic_sampling.min_replace_ratio", 0.3),
    ("trainer.policy.optimizer_config.num_warmup_steps", 0),
    ("trainer.policy.optimizer_config.scheduler", "constant_with_warmup"),
    ("generator.apply_overlong_filtering", False),
    ("generator.append_eos_token_after_stop_str_in_multi_turn", True),
    ("generator.weight_transfer_threshold_cuda_ipc_GB", 1.0),
    ("generator.sampling_params.stop", None),
    ("generator.eval_sampling_params.logprobs", None),
    ("environment.skyrl_gym.max_env_workers", 32),
]  # fmt: skip


@pytest.mark.parametrize(("key", "june", "august"), SHIPPED)
def test_defaults_are_those_that_shipped(key: str, june: Any, august: Any) -> None:
    for ledger, value in ((JUNE, june), (LEDGER, june), (AUGUST, august)):
        default = ledger.by_name[key].default
        assert (default, type(default)) == (value, type(value))


@pytest.mark.parametrize(("key", "august"), NEW_IN_AUGUST)
def test_keys_of_august(key: str, august: Any) -> None:
    assert key not in JUNE.by_name
    assert LEDGER.by_name[key].default is not ABSENT  # so that plain skyrl takes it without a +
    assert AUGUST.by_name[key].default == august


def test_references_between_defaults() -> None:
    june = read_dialect(
        DIALECT, None, ["trainer.max_prompt_length=100", "generator.sampling_params.max_generate_length=50"]
    )
    assert june.problems == ()  # max_input_length follows the prompt
    assert june.config.validation.max_response_tokens is None  # the training's


def test_what_august_changed_reaches_the_configuration() -> None:
    june, august = (read_dialect(DIALECT, None, [], version=version).config for version in ("2025-06", "2025-08"))
    assert (june.loss.aggregation, august.loss.aggregation) == ("sequence_mean_token_mean", "token_mean")
    assert (june.validation.temperature, august.validation.temperature) == (1.0, 0.0)
    assert june.loss.kl_estimator == august.loss.kl_estimator == "k3"
    later = {"rollout": {"engine_options"}}  # which plain skyrl knows more of
    plain = read_dialect(DIALECT, None, []).config  # that of the page
    assert plain.model_dump(exclude=later) == june.model_dump(exclude=later)
    changed = {"validation": True, "loss": True} | later
    assert june.model_dump(exclude=changed) == august.model_dump(exclude=changed)


def test_the_blocks_of_the_page_load_as_they_stand(tmp_path: Path) -> None:
    loaded = read(tmp_path, assembled())
    assert loaded.problems == ()
    config = loaded.config
    assert config.data.prompts_per_step == 1024
    assert config.policy.sequences_per_mini_batch == 256 * 5
    assert config.rollout.samples_per_prompt == 5
    assert config.rollout.tensor_parallel == config.placement.devices == 4
    assert config.policy.optimizer.weight_decay == 0.01  # written 1e-2
    assert config.loss.kl_coef == 0.001
    assert config == read_dialect(DIALECT, None, []).config  # the page shows the defaults
    assert read(tmp_path, assembled(), version="2025-06").problems == ()


def test_the_data_block_of_the_page_is_wrong_and_the_message_says_where_the_keys_belong(tmp_path: Path) -> None:
    """It shows train_data and val_data beside data instead of below it."""
    loaded = read(tmp_path, block("data"))
    assert [str(problem) for problem in loaded.problems] == [
        f"there is no key {name} in skyrl 2025-06, at {tmp_path}/run.yaml:{line} {name}; did you mean data.{name}?"
        for line, name in ((2, "train_data"), (3, "val_data"))
    ]
    right = textwrap.indent(block("data").partition("\n")[2], "  ")
    assert read(tmp_path, f"data:\n{right}").problems == ()


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_the_shared_blocks_of_the_page_load_for_either_model(role: str, tmp_path: Path) -> None:
    text = "".join(textwrap.indent(block(name), "    ") for name in ("fsdp", "optimizer"))
    assert read(tmp_path, f"trainer:\n  {role}:\n{text}").problems == ()


@pytest.mark.parametrize(
    "listed",
    [
        # what a copy of SkyRL's own file begins with
        """
        - _self_
        - deepspeed_config@deepspeed_config.train: train
        - deepspeed_config@deepspeed_config.eval: eval
        - skyrl_gym_config@environment.skyrl_gym: default
        """,
        # a file that starts from it
        """
        - ppo_base_config
        - _self_
        """,
    ],
)
def test_defaults_lists_that_name_skyrl_s_own_files(listed: str, tmp_path: Path) -> None:
    text = f"defaults:\n{textwrap.dedent(listed)}\ntrainer:\n  strategy: deepspeed\n  train_batch_size: 512\n"
    for version, temperature in (("", 1.0), ("2025-08", 0.0)):
        loaded = read(tmp_path, text, version=version)
        assert loaded.problems == ()
        assert loaded.config.data.prompts_per_step == 512
        assert loaded.config.policy.engine_options["zero_optimization"]["stage"] == 3
        assert loaded.config.validation.temperature == temperature


def test_a_file_in_the_names_of_2026(tmp_path: Path) -> None:
    loaded = read(
        tmp_path,
        "trainer:\n  algorithm: {policy_loss_type: gspo}\n"
        "generator:\n  inference_engine: {num_engines: 2, tensor_parallel_size: 2, gpu_memory_utilization: 0.6}\n",
    )
    assert loaded.problems == ()
    assert (loaded.config.loss.name, loaded.config.rollout.tensor_parallel) == ("gspo", 2)
    assert loaded.config.rollout.engine_options["gpu_memory_utilization"] == 0.6


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("trainer.eval_before_train=True", "validation.before_training", True),
        ("trainer.eval_before_train=false", "validation.before_training", False),
        ("trainer.policy.optimizer_config.lr=1.0e-6", "policy.optimizer.lr", 1e-6),
        ("trainer.algorithm.clip_ratio_c=1e4", "loss.dual_clip", 10000.0),
        ("data.train_data=['p1.parquet','p2.parquet']", "data.train_files", ["p1.parquet", "p2.parquet"]),
        ("data.train_data=[a.parquet,b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_data=a.parquet", "data.train_files", ["a.parquet"]),
        ("data.val_data=", "data.validation_files", []),
        ("data.val_data=null", "data.validation_files", []),
        ('generator.sampling_params.stop=["</a>","</b>"]', "rollout.stop", ["</a>", "</b>"]),
        ("generator.max_input_length=${trainer.max_prompt_length}", "data.max_prompt_tokens", 512),
        ("data.train_data=['${oc.env:SKYRL_TEST}/a.parquet']", "data.train_files", ["/somewhere/a.parquet"]),
        ("generator.remote_inference_engine_urls=['127.0.0.1:8001']", "rollout.engine", "vllm"),
        ("+trainer.policy.deepspeed_config.zero_optimization.sub_group_size=9", "policy.engine", "fsdp"),
        ("trainer.policy.deepspeed_config=${deepspeed_config.train}", "policy.engine", "fsdp"),
    ],
)
def test_value_forms_of_real_scripts(written: str, key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_TEST", "/somewhere")
    loaded = read_dialect(DIALECT, None, [written, "trainer.algorithm.ppo_loss_type=dual_clip"])
    assert loaded.problems == ()
    node: Any = loaded.config
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value


def test_a_new_key_needs_a_plus_and_an_unknown_one_gets_the_nearest() -> None:
    loaded = read_dialect(DIALECT, None, ["trainer.train_batchsize=512", "generator.sampling_params.seed=3"])
    assert [str(problem) for problem in loaded.problems] == [
        "there is no key trainer.train_batchsize in skyrl 2025-06, at override trainer.train_batchsize=512; did you mean "
        "trainer.train_batch_size?",
        "generator.sampling_params.seed is not in the own file of skyrl 2025-06, at override generator.sampling_params.seed=3; "
        "a key that is not there yet needs a +: +generator.sampling_params.seed=3",
    ]
    assert read_dialect(DIALECT, None, ["+generator.sampling_params.seed=3"]).problems == ()


def test_misspellings() -> None:
    """One letter left out, added, replaced or swapped with the next: the key that was meant comes first."""
    pick = random.Random(7)
    names = sorted(row.name for row in LEDGER.rows if "*" not in row.name)
    right = tried = 0
    while tried < 500:
        name = pick.choice(names)
        place = pick.randrange(len(name) - 1)
        letter = pick.choice(string.ascii_lowercase + "_")
        wrong = {
            "left out": name[:place] + name[place + 1 :],
            "added": name[:place] + letter + name[place:],
            "replaced": name[:place] + letter + name[place + 1 :],
            "swapped": name[:place] + name[place + 1] + name[place] + name[place + 2 :],
        }[pick.choice(["left out", "added", "replaced", "swapped"])]
        if LEDGER.find(wrong) or LEDGER.is_section(wrong):
            continue
        tried += 1
        right += LEDGER.nearest(wrong) == [name]
    assert right >= 0.95 * tried, right

"""What verl refuses, and what cannot be: one message each, with the key, the place and a fix that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.served_model import ServedModelConfig
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.verl import DIALECT

A, M, R, F = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
# 8 prompts x 8 samples = 64 sequences, 2 updates of 4 x 8 = 32, micro-batches of 8; one device.
BASE = (
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=8",
    "algorithm.adv_estimator=grpo",
    f"{A}.ppo_mini_batch_size=4",
    f"{A}.ppo_micro_batch_size_per_gpu=8",
    f"{R}.name=native",
    f"{R}.n=8",
    f"{R}.log_prob_micro_batch_size_per_gpu=8",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=console",
)
PPO = ("algorithm.adv_estimator=gae",)
CRITIC = (*PPO, "critic.ppo_micro_batch_size_per_gpu=8")
KL = f"{A}.use_kl_loss=True"
VLLM = (f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1")
MEGATRON_WSD = (
    f"{A}.strategy=megatron",
    f"{A}.optim.lr_decay_style=WSD",
    f"{A}.optim.lr_wsd_decay_style=cosine",
)
CORRECTION = "algorithm.rollout_correction"
FILES = Path(__file__).parent / "verl_documents"


def read(*overrides: str, version: str = "") -> LoadedConfig:
    return read_dialect(DIALECT, None, [*BASE, *overrides], version=version)


# overrides; the key that the message is about; words of the message; the overrides of its fix ("" where it needs a choice)
REFUSED: list[tuple[tuple[str, ...], str, str, str]] = [
    # validating
    (
        ("trainer.val_only=True", "trainer.val_before_train=False"),
        "trainer.val_only",
        "with trainer.val_before_train=False verl trains, although trainer.val_only is true",
        "trainer.val_before_train=True",
    ),
    (
        ("trainer.val_only=True", "data.val_files=[]"),
        "trainer.val_only",
        "the run only validates, and there is no validation file",
        "",
    ),
    (("data.train_files=null",), "data.train_files", "there is no training file", ""),
    # scoring
    (
        ("reward_model.reward_manager=batch",),
        "reward_model.reward_manager",
        "calls a function with lists, and by_data_source scores one response at a time",
        "reward_model.reward_manager=naive",
    ),
    (
        ("+actor_rollout_ref.rollout.chat_scheduler=a.py",),
        f"{R}.chat_scheduler",
        "is refused: turns are run by tools",
        "",
    ),
    (
        ("+algorithm.rollout_is=True", "+algorithm.rollout_is_threshold=2.0", "+algorithm.rollout_is_veto_threshold=0"),
        "algorithm.rollout_is_veto_threshold",
        "a ratio is above 0",
        "algorithm.rollout_is_veto_threshold=1e-4",
    ),
    # batch sizes
    (
        (f"{A}.ppo_micro_batch_size=8",),
        f"{A}.ppo_micro_batch_size",
        "are both given",
        f"{A}.ppo_micro_batch_size=null",
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=null",),
        f"{A}.ppo_micro_batch_size_per_gpu",
        "is not given",
        f"{A}.ppo_micro_batch_size_per_gpu=8",
    ),
    (
        (f"{R}.log_prob_micro_batch_size=8",),
        f"{R}.log_prob_micro_batch_size",
        "are both given",
        f"{R}.log_prob_micro_batch_size=null",
    ),
    (
        (f"{R}.log_prob_micro_batch_size_per_gpu=null",),
        f"{R}.log_prob_micro_batch_size_per_gpu",
        "is not given",
        f"{R}.log_prob_micro_batch_size_per_gpu=8",
    ),
    ((KL,), f"{F}.log_prob_micro_batch_size_per_gpu", "is not given", f"{F}.log_prob_micro_batch_size_per_gpu=8"),
    (
        (KL, f"{F}.log_prob_micro_batch_size=8", f"{F}.log_prob_micro_batch_size_per_gpu=8"),
        f"{F}.log_prob_micro_batch_size",
        "are both given",
        f"{F}.log_prob_micro_batch_size=null",
    ),
    (
        (*CRITIC, "critic.ppo_micro_batch_size=8"),
        "critic.ppo_micro_batch_size",
        "are both given",
        "critic.ppo_micro_batch_size=null",
    ),
    (
        (*PPO, "critic.optim.lr=1e-5"),
        "critic.ppo_micro_batch_size_per_gpu",
        "is not given",
        "critic.ppo_micro_batch_size_per_gpu=8",
    ),
    (
        ("reward_model.enable=True",),
        "reward_model.micro_batch_size_per_gpu",
        "is not given",
        "reward_model.micro_batch_size_per_gpu=8",
    ),
    (
        ("reward_model.enable=True", "reward_model.micro_batch_size=8", "reward_model.micro_batch_size_per_gpu=8"),
        "reward_model.micro_batch_size",
        "are both given",
        "reward_model.micro_batch_size=null",
    ),
    (
        (f"{A}.ppo_mini_batch_size=16",),
        f"{A}.ppo_mini_batch_size",
        "a mini-batch of 16 prompts is more than an iteration has (data.train_batch_size=8)",
        f"{A}.ppo_mini_batch_size=8",
    ),
    (
        (*CRITIC, "critic.ppo_mini_batch_size=16"),
        "critic.ppo_mini_batch_size",
        "more than an iteration has",
        "critic.ppo_mini_batch_size=8",
    ),
    (
        (f"{A}.ppo_mini_batch_size=3",),
        f"{A}.ppo_mini_batch_size",
        "8 prompts do not split into mini-batches of 3 (8 / 3 = 2.667)",
        f"{A}.ppo_mini_batch_size=4",
    ),
    (
        ("data.train_batch_size=9", f"{A}.ppo_mini_batch_size=9", f"{R}.n=4", "trainer.n_gpus_per_node=8"),
        "data.train_batch_size",
        "9 prompts x 4 samples = 36 sequences do not split over 8 devices",
        "",
    ),
    (
        ("trainer.n_gpus_per_node=8", f"{R}.n=2", f"{A}.ppo_mini_batch_size=2", f"{A}.ppo_micro_batch_size_per_gpu=1"),
        f"{A}.ppo_mini_batch_size",
        "2 prompts x 2 samples = 4 sequences of a mini-batch do not split over 8 devices",
        f"{A}.ppo_mini_batch_size=4",
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=12",),
        f"{A}.ppo_mini_batch_size",
        "4 prompts x 8 samples = 32 sequences do not split over 1 device in micro-batches of 12",
        f"{A}.ppo_micro_batch_size_per_gpu=8",
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=64",),  # more than the mini-batch
        f"{A}.ppo_mini_batch_size",
        "in micro-batches of 64",
        f"{A}.ppo_micro_batch_size_per_gpu=32",
    ),
    (
        (f"{A}.use_dynamic_bsz=True", f"{A}.ppo_micro_batch_size_per_gpu=12"),  # verl's workers look at it even so
        f"{A}.ppo_mini_batch_size",
        "in micro-batches of 12",
        f"{A}.ppo_micro_batch_size_per_gpu=8",
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=null", f"{A}.ppo_micro_batch_size=2", "trainer.n_gpus_per_node=4"),
        f"{A}.ppo_micro_batch_size",
        "2 sequences on all devices together, and 4 devices share them (fewer than one each)",
        f"{A}.ppo_micro_batch_size=4",
    ),
    (
        (f"{A}.ppo_micro_batch_size_per_gpu=null", f"{A}.ppo_micro_batch_size=3"),
        f"{A}.ppo_micro_batch_size",
        "is 3, which does not divide the mini-batch of 4",
        f"{A}.ppo_micro_batch_size=2",
    ),
    (
        (
            f"{A}.use_dynamic_bsz=True",
            f"{A}.ppo_max_token_len_per_gpu=1000",
            f"{R}.log_prob_max_token_len_per_gpu=2000",
        ),
        f"{A}.ppo_max_token_len_per_gpu",
        "cannot hold a prompt and its response of 512 + 512 = 1024",
        f"{A}.ppo_max_token_len_per_gpu=1024",
    ),
    (
        (*CRITIC, "critic.use_dynamic_bsz=True", "critic.ppo_max_token_len_per_gpu=1000"),
        "critic.ppo_max_token_len_per_gpu",
        "cannot hold",
        "critic.ppo_max_token_len_per_gpu=1024",
    ),
    (
        (f"{R}.log_prob_use_dynamic_bsz=True", f"{R}.log_prob_max_token_len_per_gpu=1000"),
        f"{R}.log_prob_max_token_len_per_gpu",
        "cannot hold",
        f"{R}.log_prob_max_token_len_per_gpu=1024",
    ),
    # devices
    (
        (f"{A}.ulysses_sequence_parallel_size=3", f"{M}.use_remove_padding=True", "trainer.n_gpus_per_node=4"),
        f"{A}.ulysses_sequence_parallel_size",
        "4 devices do not split into groups of 3",
        f"{A}.ulysses_sequence_parallel_size=2",
    ),
    (
        (f"{A}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"),
        f"{A}.ulysses_sequence_parallel_size",
        "2 devices share a sequence, which needs packed sequences",
        f"{M}.use_remove_padding=True",
    ),
    (
        (*CRITIC, "critic.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"),
        "critic.ulysses_sequence_parallel_size",
        "needs packed sequences",
        "critic.model.use_remove_padding=True",
    ),
    (
        (f"{R}.name=vllm",),  # and tensor_model_parallel_size is 2 by default
        f"{R}.tensor_model_parallel_size",
        "1 device does not split into samplers of 2 devices each",
        f"{R}.tensor_model_parallel_size=1",
    ),
    (
        (*CRITIC, f"{A}.strategy=megatron", "critic.strategy=fsdp"),
        "critic.strategy",
        "must be trained by engines of one family, and they are megatron and fsdp",
        "critic.strategy=megatron",
    ),
    (
        ("actor_rollout_ref.hybrid_engine=False",),
        "actor_rollout_ref.hybrid_engine",
        "gives the sampler devices of its own, and no key says which",
        "",
    ),
    (
        (*CRITIC, f"{A}.loss_agg_mode=token_mean"),  # the critic's refers to it
        f"{A}.loss_agg_mode",
        "must be one of token-mean",
        "",
    ),
    (
        (f"{A}.strategy=megatron", f"{A}.shuffle=True"),
        f"{A}.shuffle",
        "shuffled mini-batches need a seed",
        f"{A}.data_loader_seed=1",
    ),
    # names
    ((f"{A}.strategy=fsdp3",), f"{A}.strategy", "must be one of fsdp, fsdp2, megatron", f"{A}.strategy=fsdp2"),
    (
        (f"{R}.name=vlm", f"{R}.tensor_model_parallel_size=1"),
        f"{R}.name",
        "must be one of vllm, sglang, hf, native",
        "",
    ),
    (
        ("algorithm.adv_estimator=GRPO",),
        "algorithm.adv_estimator",
        "must be one of gae, grpo",
        "",
    ),
    (
        (f"{A}.loss_agg_mode=token_mean",),
        f"{A}.loss_agg_mode",
        "must be one of token-mean",
        f"{A}.loss_agg_mode=token-mean",
    ),
    (
        (f"{A}.policy_loss.loss_mode=clip-cov",),
        f"{A}.policy_loss.loss_mode",
        "must be one of vanilla",
        "",
    ),
    ((f"{A}.optim.warmup_style=linear",), f"{A}.optim.warmup_style", "must be one of constant, cosine", ""),
    (
        (f"{A}.optim.lr_decay_style=inverse-square_root",),
        f"{A}.optim.lr_decay_style",
        "must be one of constant, linear",
        f"{A}.optim.lr_decay_style=inverse-square-root",
    ),
    (
        (KL, f"{A}.kl_loss_type=k4", f"{F}.log_prob_micro_batch_size_per_gpu=8"),
        f"{A}.kl_loss_type",
        "must be one of kl, k1",
        "",
    ),
    (("algorithm.kl_ctrl.type=adaptative",), "algorithm.kl_ctrl.type", "must be one of fixed, adaptive", ""),
    (("data.truncation=center",), "data.truncation", "must be one of error, left, right, middle", ""),
    (
        ("reward_model.reward_manager=Naive",),
        "reward_model.reward_manager",
        "must be one of naive, prime, dapo, batch",
        "",
    ),
    (("trainer.logger=[console,wandbb]",), "trainer.logger", "wandbb", ""),
    # values
    ((f"{A}.grad_clip=null",), f"{A}.grad_clip", "must be float, not null", ""),
    ((f"{A}.clip_ratio_c=1.0",), f"{A}.clip_ratio_c", "must be above 1", ""),
    (
        (f"{A}.optim.warmup_style=cosine", f"{A}.optim.min_lr_ratio=1.5"),
        f"{A}.optim.min_lr_ratio",
        "at most 1",
        "",
    ),
    (
        (
            "algorithm.use_kl_in_reward=True",
            f"{F}.log_prob_micro_batch_size_per_gpu=8",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.horizon=0",
        ),
        "algorithm.kl_ctrl.horizon",
        "at least 1",
        "",
    ),
    (
        ("algorithm.adv_estimator=grpo_passk", f"{R}.n=1", f"{A}.ppo_micro_batch_size_per_gpu=4"),
        f"{R}.n",
        "there is 1",
        f"{R}.n=8",
    ),
    (
        ("algorithm.adv_estimator=gdpo",),
        "algorithm.gdpo_reward_keys",
        "gdpo compares the numbers that gdpo_reward_keys names, and it names none",
        "+algorithm.gdpo_reward_keys=[score]",
    ),
    (
        (f"{R}.name=hf", f"{R}.do_sample=False"),
        f"{R}.do_sample",
        "greedy responses of a prompt are all the same",
        f"{R}.do_sample=True",
    ),
    (
        (f"{R}.temperature=0", f"{R}.val_kwargs.do_sample=True"),
        f"{R}.temperature",
        "temperature 0",
        f"{R}.temperature=1.0",
    ),
    (
        (f"+{A}.fsdp_config.mixed_precision.param_dtype=fp8",),
        f"{A}.fsdp_config.mixed_precision.param_dtype",
        "are in bf16, fp32 or fp16",
        f"{A}.fsdp_config.mixed_precision.param_dtype=bf16",
    ),
    (
        (*VLLM, f"{R}.max_num_batched_tokens=1000"),
        f"{R}.max_num_batched_tokens",
        "1000 tokens in one pass are fewer than the 1024 of the longest sequence",
        f"{R}.max_num_batched_tokens=1024",
    ),
    (
        (*VLLM, f"{R}.layered_summon=True", "actor_rollout_ref.model.lora_rank=8"),
        f"{R}.layered_summon",
        "load_format is dummy_dtensor",
        f"{R}.load_format=safetensors",
    ),
    (
        (*VLLM, f"+{R}.engine_kwargs.vllm.dtype=half"),
        f"{R}.engine_kwargs.vllm.dtype",
        f"that {R}.dtype gives it already",
        f"~{R}.engine_kwargs.vllm.dtype",
    ),
    (
        (f"{R}.agent.custom_async_server.path=my.py",),
        f"{R}.agent.custom_async_server.path",
        "without its name",
        f"{R}.agent.custom_async_server.name=Server",
    ),
    (
        (f"{R}.multi_turn.enable=True",),
        f"{R}.multi_turn.enable",
        "needs tools or another side",
        f"{R}.multi_turn.tool_config_path={FILES}/tools.yaml",
    ),
    (
        (f"{R}.multi_turn.enable=True", f"{R}.multi_turn.tool_config_path=/nowhere/tools.yaml"),
        f"{R}.multi_turn.tool_config_path",
        "/nowhere/tools.yaml cannot be read: No such file",
        "",
    ),
    (
        (f"{R}.multi_turn.enable=True", f"{R}.multi_turn.tool_config_path={FILES}/interactions.yaml"),
        f"{R}.multi_turn.tool_config_path",
        "has no list tools",
        "",
    ),
    ((f"{R}.multi_turn.format=llama3_json",), f"{R}.multi_turn.format", "in the form hermes", ""),
    (
        (f"{R}.multi_turn.completion_callback=my.Callback",),
        f"{R}.multi_turn.completion_callback",
        "write an environment",
        "",
    ),
    (
        ("+critic.enable=True",),
        "critic.enable",
        "critic.enable is true, and grpo reads no values of a critic",
        "~critic.enable",
    ),
    # resuming
    (("trainer.resume_mode=always",), "trainer.resume_mode", "must be auto, disable or resume_path", ""),
    (("trainer.resume_mode=resume_path",), "trainer.resume_from_path", "names no checkpoint: None", ""),
    (
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path=out/latest"),
        "trainer.resume_from_path",
        "'out/latest' is no folder global_step_N",
        "",
    ),
    (
        ("+trainer.remove_previous_ckpt_in_save=True", "trainer.max_actor_ckpt_to_keep=3"),
        "trainer.remove_previous_ckpt_in_save",
        "keeps 1 checkpoint, and trainer.max_actor_ckpt_to_keep is 3",
        "trainer.remove_previous_ckpt_in_save=False",
    ),
    # schedules and later features
    (
        (f"{A}.optim.warmup_style=cosine", f"+{A}.optim.lr_scheduler_type=constant"),
        f"{A}.optim.lr_scheduler_type",
        "its later name, is constant",
        f"{A}.optim.lr_scheduler_type=cosine",
    ),
    (MEGATRON_WSD, f"{A}.optim.lr_wsd_decay_steps", "needs the iterations of its decay", ""),
    (
        (*MEGATRON_WSD, f"{A}.optim.lr_wsd_decay_steps=10"),
        f"{A}.optim.lr_wsd_decay_steps",
        "only where trainer.total_training_steps is given",
        "trainer.total_training_steps=100",
    ),
    (
        (*MEGATRON_WSD, f"{A}.optim.lr_wsd_decay_steps=200", "trainer.total_training_steps=100"),
        f"{A}.optim.lr_wsd_decay_steps",
        "a decay of 200 iterations does not fit into 100 - 0 of warm-up",
        f"{A}.optim.lr_wsd_decay_steps=100",
    ),
    (
        (f"+{CORRECTION}.rollout_rs=token_k1",),
        f"{CORRECTION}.rollout_rs_threshold",
        "needs rollout_rs_threshold",
        f"+{CORRECTION}.rollout_rs_threshold=2.0",
    ),
    (
        (f"+{CORRECTION}.rollout_rs='token_k1,token_k2,token_k3'", f"+{CORRECTION}.rollout_rs_threshold='1.0,2.0'"),
        f"{CORRECTION}.rollout_rs_threshold",
        "3 rules have 2 bounds",
        f"{CORRECTION}.rollout_rs_threshold=2.0",
    ),
    (
        (f"+{CORRECTION}.rollout_rs=seq_max_k1", f"+{CORRECTION}.rollout_rs_threshold=2.0"),
        f"{CORRECTION}.rollout_rs",
        "there is no rule 'seq_max_k1'",
        f"{CORRECTION}.rollout_rs=seq_max_k2",
    ),
    (
        (f"+{CORRECTION}.rollout_is=token", f"+{CORRECTION}.rollout_is_threshold=two"),
        f"{CORRECTION}.rollout_is_threshold",
        "rollout_is_threshold is 'two'",
        f"{CORRECTION}.rollout_is_threshold=0.5_2.0",
    ),
    (
        (
            "reward_model.reward_manager=dapo",
            "+reward_model.overlong_buffer.enable=True",
            "+reward_model.overlong_buffer.len=64",
            "+reward_model.reward_kwargs.max_resp_len=100",
        ),
        "reward_model.reward_kwargs.max_resp_len",
        "is 100, and responses have up to 512 tokens",
        "reward_model.reward_kwargs.max_resp_len=512",
    ),
    (
        ("reward_model.reward_manager=dapo", "+reward_model.overlong_buffer.enable=True"),
        "reward_model.overlong_buffer.enable",
        "needs the length of its buffer",
        "+reward_model.overlong_buffer.len=64",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "words", "fix"), REFUSED, ids=lambda value: str(value)[:60])
def test_one_message_with_key_and_place_and_a_fix_that_works(
    overrides: tuple[str, ...], key: str, words: str, fix: str
) -> None:
    problems = read(*overrides).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    [problem] = problems
    assert words in problem.what
    assert problem.field == key
    place = next(
        (f"override {text}" for text in (*reversed(overrides), *BASE) if text.lstrip("+~").split("=")[0] == key), key
    )
    assert problem.where.startswith(place)
    if fix:
        name = fix.lstrip("+~").split("=")[0]
        suggested = "did you mean" in problem.fix or "remove" in problem.fix
        assert suggested or name in problem.fix or name.rpartition(".")[0] in problem.fix
        assert read(*overrides, fix).problems == ()


def test_a_larger_step_comes_with_mini_batches_that_fit() -> None:
    """9 x 4 = 36 sequences and 8 devices: 10 prompts make 40, and mini-batches of 10 prompts 5 sequences per device."""
    sizes = (f"{R}.n=4", "trainer.n_gpus_per_node=8", f"{A}.ppo_micro_batch_size_per_gpu=1")
    [problem] = read("data.train_batch_size=9", f"{A}.ppo_mini_batch_size=9", *sizes).problems
    assert problem.fix == (
        f"use data.train_batch_size=10 with {A}.ppo_mini_batch_size=10 or "
        f"data.train_batch_size=8 with {A}.ppo_mini_batch_size=8"
    )
    assert read("data.train_batch_size=10", f"{A}.ppo_mini_batch_size=10", *sizes).problems == ()


def test_files_are_named_with_their_lines(tmp_path: object) -> None:
    file = f"{tmp_path}/run.yaml"
    with open(file, "w") as out:
        out.write("data: {train_batch_size: 8}\nactor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 3\n")
    rest = [text for text in BASE if not text.startswith(("data.train_batch", f"{A}.ppo_mini"))]
    [problem] = read_dialect(DIALECT, file, rest).problems
    assert str(problem) == (
        f"8 prompts do not split into mini-batches of 3 (8 / 3 = 2.667), at {file}:4 {A}.ppo_mini_batch_size; "
        f"use {A}.ppo_mini_batch_size=4 or 2"
    )


def test_all_problems_come_together() -> None:
    overrides = (f"{A}.ppo_mini_batch_size=3", f"{R}.name=vllm", "algorithm.gamma=high", "data.truncation=none")
    assert {problem.field for problem in read(*overrides).problems} == {
        f"{A}.ppo_mini_batch_size",
        f"{R}.tensor_model_parallel_size",
        "algorithm.gamma",
        "data.truncation",
    }


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{A}.ppo_minibatch_size=4", f"did you mean {A}.ppo_mini_batch_size?"),
        ("reward_model.reward_kwargs.num_processes=4", "a key that is not there yet needs a +"),  # in no file of verl's
        ("trainer.total_training_step=3", "did you mean trainer.total_training_steps?"),
    ],
)
def test_struct_rules(override: str, words: str) -> None:
    [problem] = read(override).problems
    assert words in problem.fix
    assert problem.where == f"override {override}"


def test_0_2_refuses_what_it_does_not_have() -> None:
    old = ("data.val_batch_size=8", f"{F}.log_prob_micro_batch_size_per_gpu=8", f"{A}.use_kl_loss=True")
    [problem] = read(*old, "algorithm.adv_estimator=rloo", version="0.2").problems
    assert "verl 0.2 has no estimator rloo" in problem.what
    [problem] = read(*old, f"{A}.strategy=fsdp2", version="0.2").problems
    assert "verl 0.2 has no strategy fsdp2" in problem.what
    [problem] = read(*old, f"{A}.fsdp_config.fsdp_size=2", version="0.2").problems
    assert "verl 0.2 cannot shard over a part of the devices" in problem.what
    [problem] = read(*old, f"{A}.clip_ratio_c=3.0", version="0.2").problems
    assert f"there is no key {A}.clip_ratio_c in verl 0.2" in problem.what


@pytest.mark.parametrize("kl", [(), ("algorithm.kl_ctrl.kl_coef=0",), (f"{A}.use_kl_loss=True",)])
def test_0_2_always_has_a_reference_and_asks_for_its_sizes(kl: tuple[str, ...]) -> None:
    [problem] = read("data.val_batch_size=8", *kl, version="0.2").problems
    assert problem.field == f"{F}.log_prob_micro_batch_size_per_gpu"


# What is told and not refused: overrides, and words of a warning or of an ignored key's reason.
TOLD: list[tuple[tuple[str, ...], str]] = [
    (
        (f"{R}.agent.custom_async_server.path=my.py", f"{R}.agent.custom_async_server.name=Server"),
        f"read with {R}.mode=async only",
    ),
    ((f"{R}.mode=async",), "each conversation at its own pace"),
    ((f"{R}.agent.num_workers=4",), "posttrain.environment.workers says how many"),
    ((f"{R}.multi_turn.max_parallel_calls=2",), "multi_turn.enable is false"),
    ((f"{R}.multi_turn.tokenization_sanity_check_mode=disable",), "there is nothing to compare"),
    ((f"{A}.clip_ratio=0.3",), "verl 0.4 itself would keep its 0.2 there"),
    ((f"{A}.use_dynamic_bsz=True", f"{A}.ppo_mini_batch_size=16"), "is more than the 8 prompts of an iteration"),
    (
        (KL, "algorithm.use_kl_in_reward=True", f"{F}.log_prob_micro_batch_size_per_gpu=8"),
        "the KL to the reference counts twice",
    ),
    (
        (f"{A}.ppo_micro_batch_size=4", f"{A}.ppo_micro_batch_size_per_gpu=null"),
        "is deprecated: 4 sequences on 1 device",
    ),
    ((f"{A}.kl_loss_coef=0.1",), "use_kl_loss is false"),
    (("critic.optim.lr=1e-4",), "no critic: grpo needs no values"),
    (("trainer.critic_warmup=5",), "no critic: grpo needs no values"),
    ((f"{R}.val_kwargs.temperature=0.7",), "validation is greedy"),
    ((f"{R}.gpu_memory_utilization=0.7",), "the native engine has no such setting"),
    (("+trainer.remove_previous_ckpt_in_save=True",), "write trainer.max_actor_ckpt_to_keep=1"),
    (("reward_model.max_length=100",), "reward_model.enable is false"),
    ((f"{A}.policy_loss.clip_cov_lb=2.0",), "ppo_clip does not use it (clip_cov would)"),
    (("data.filter_overlong_prompts=True", "data.truncation=left"), "leaves out prompts that are too long"),
    ((*CRITIC, "algorithm.adv_estimator=rloo"), "no critic: rloo needs no values"),
    (("+algorithm.gdpo_reward_keys=[acc]",), "grpo does not use it (gdpo does)"),
    ((f"+{CORRECTION}.loss_type=reinforce",), "read with bypass_mode only"),
    ((f"{A}.profiler.all_ranks=True",), "no step is to be profiled"),
    (("+trainer.use_v1=True",), "verl's two loops make the same steps"),
    (("ray_init.timeline_json_file=/tmp/ray.json",), "timeline.jsonl in the run's folder"),
    ((f"+{R}.checkpoint_engine.backend=nccl",), "posttrain.rollout.weight_sync names another way"),
    (("+global_profiler.steps=[2]",), "global_profiler.tool is null, which profiles nothing"),
    (("+global_profiler.steps=[2]", "+global_profiler.tool=nsys"), "torch's own profiler records here"),
    (("trainer.profile_steps=[2]", "+trainer.worker_nsight_options.trace=cuda"), "torch's own profiler records"),
    (("trainer.profile_steps=[2]", f"{A}.profiler.discrete=True"), "every phase has a file of its own"),
    (
        (f"+{CORRECTION}.bypass_mode=True", f"+{CORRECTION}.rollout_is=token"),
        "the ratio itself starts from the sampler's log-probs",
    ),
]


@pytest.mark.parametrize(("overrides", "words"), TOLD, ids=lambda value: str(value)[:60])
def test_what_has_no_effect_or_another_one_is_told(overrides: tuple[str, ...], words: str) -> None:
    loaded = read(*overrides)
    assert loaded.problems == ()
    assert any(words in text for text in (*loaded.warnings, *(one.reason for one in loaded.ignored)))


def test_a_reference_that_is_not_there_is_told_key_by_key() -> None:
    written = {
        f"{F}.log_prob_micro_batch_size_per_gpu": "4",
        f"{F}.log_prob_use_dynamic_bsz": "True",
        f"{F}.log_prob_max_token_len_per_gpu": "999",
        f"{F}.fsdp_config.param_offload": "True",
        f"{F}.fsdp_config.reshard_after_forward": "False",
        f"{F}.fsdp_config.wrap_policy.disable": "True",
        f"{F}.megatron.tensor_model_parallel_size": "2",
        f"{F}.model.path": "other",
    }
    overrides = [f"+{name}={value}" for name, value in written.items()]
    told = read(*overrides).ignored
    assert sorted(one.key for one in told) == sorted(written)
    assert all(one.asks and one.reason == "there is no reference: no KL is configured" for one in told)
    assert {one.key: one.where for one in told}[f"{F}.model.path"] == f"override +{F}.model.path=other"
    assert not [one for one in read(*overrides, KL).ignored if one.reason.startswith("there is no reference")]


@pytest.mark.parametrize("kl", ["true", "false"])
def test_a_section_that_is_referred_to_asks_for_nothing_of_its_own(kl: str, tmp_path: Path) -> None:
    """The actor's has keys that the reference's has not: verl does not look at them there, and has all of them in its file."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {train_files: [t.parquet], val_files: [v.parquet], train_batch_size: 64}\n"
        "actor_rollout_ref:\n"
        "  actor:\n"
        f"    use_kl_loss: {kl}\n"
        "    ppo_mini_batch_size: 64\n"
        "    ppo_micro_batch_size_per_gpu: 8\n"
        "    fsdp_config: {param_offload: true, optimizer_offload: true}\n"
        "  ref:\n"
        f"    log_prob_micro_batch_size_per_gpu: {8 if kl == 'true' else 'null'}\n"
        f"    fsdp_config: ${{{A}.fsdp_config}}\n"
        "  rollout: {name: hf, log_prob_micro_batch_size_per_gpu: 8}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "trainer: {n_gpus_per_node: 2, logger: [console]}\n"
    )
    loaded = read_dialect(DIALECT, str(file), [])
    assert loaded.problems == ()
    assert [one.key for one in loaded.ignored if one.asks] == []
    assert {one.key for one in loaded.ignored if one.key.endswith("offload")} >= {f"{F}.fsdp_config.optimizer_offload"}
    assert not [one.key for one in loaded.ignored if "mixed_precision" in one.key]  # is not in the actor's, either
    assert loaded.config.policy.engine_options["optimizer_offload"] is True
    assert loaded.config.reference.engine_options.get("param_offload", False) is (kl == "true")


def test_what_follows_the_actor_without_a_reference_is_not_told(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    copied = f"    log_prob_use_dynamic_bsz: ${{{A}.use_dynamic_bsz}}\n    fsdp_config: {{param_offload: false}}\n"
    file.write_text(f"defaults: [ppo_trainer, _self_]\nactor_rollout_ref:\n  ref:\n{copied}")
    assert not [one.key for one in read().ignored if one.key.startswith(F)]
    [told] = [one for one in read_dialect(DIALECT, str(file), BASE).ignored if one.key.startswith(F)]
    assert (told.key, told.asks) == (f"{F}.fsdp_config.param_offload", False)  # its default


PLANNED = [
    "trainer.logger=[console,clearml]",
]


@pytest.mark.parametrize("override", PLANNED)
def test_what_is_planned_can_be_planned_and_is_said_to_be(override: str) -> None:
    loaded = read(override)
    assert loaded.problems == ()
    [problem] = loaded.unsupported
    assert "is planned" in problem.what
    assert problem.field == override.lstrip("+").split("=")[0]


# What the files of later versions say where nobody asked for anything.
LATER_DEFAULTS = (
    "+trainer.use_v1=True",
    "+trainer.v1={trainer_mode: sync, sync: {}, colocate_async: {num_warmup_batches: 1}}",
    "+trainer.v1.separate_async={num_warmup_batches: 1, parameter_sync_step: 4, hybrid_rollout: {enable_switch: False}}",
    "+trainer.v1.sampler={max_off_policy_threshold: 8, max_off_policy_strategy: drop, sync_refill_failed_groups: False}",
    "+trainer.v1.sampler.custom_sampler={path: null, name: null}",
    "+trainer.v1.sampler.sampler_kwargs={}",
    "+transfer_queue={enable: False, backend: {storage_backend: SimpleStorage}}",
    f"+{R}.checkpoint_engine={{backend: naive, update_weights_bucket_megabytes: 2048, engine_kwargs: {{}}}}",
    f"+{R}.trace={{backend: null, token2text: False, max_samples_per_step_per_worker: null}}",
    f"+{R}.prometheus={{enable: False, port: 9090, file: /tmp/p.yml, served_model_name: m}}",
    f"+{R}.skip_rollout=False",
    f"+{R}.skip_dump_dir=/tmp/rollout_dump",
    "+reward.reward_model={enable: False, enable_resource_pool: False, model_path: null, rollout: {name: vllm}}",
    "+reward_model.rollout={name: vllm, dtype: bfloat16}",
    f"+{R}.mtp={{enable: False, num_speculative_tokens: 1}}",
    *(f"+{R}.{text}" for text in ("data_parallel_size=1", "expert_parallel_size=1", "pipeline_model_parallel_size=1")),
    *(
        f"+{R}.{name}=null"
        for name in ("quantization", "quantization_config_file", "cudagraph_capture_sizes", "custom")
    ),
    *(f"+{R}.{text}" for text in ("logprobs_mode=processed_logprobs", "scheduling_policy=fcfs", "over_sample_rate=0")),
    *(f"+{R}.{name}=True" for name in ("enable_prefix_caching", "enable_sleep_mode", "skip_tokenizer_init")),
    f"+{R}.enable_rollout_routing_replay=False",
    f"+{R}.layer_name_map={{}}",
    f"+{R}.server={{timeout: 60.0, max_attempts: 3}}",
    f"+{A}.use_fused_kernels=False",
    f"+{M}.tokenizer_path=null",
    f"+{M}.hf_config_path=null",
    f"+{M}.mtp={{enable: False}}",
    "+trainer.use_legacy_worker_impl=auto",
    "+trainer.balance_keep_minibatch=False",
    "+trainer.checkpoint_callback_class=null",
    "+distillation={enabled: False, num_workers: 8}",
    "+skip.rollout={enable: False, dump_dir: /tmp/d, steps: [], action: cache}",
    "+ray_kwargs.timeline_json_file=null",
)


def test_what_later_files_say_by_default_asks_for_nothing() -> None:
    loaded = read(*LATER_DEFAULTS)
    assert loaded.problems == loaded.unsupported == ()


def test_a_head_that_scores_in_a_server_scores_here_and_a_sampled_judgement_is_planned() -> None:
    model = ("reward_model.enable=True", "+reward_model.rollout={name: vllm}")
    loaded = read(*model)
    assert loaded.problems == loaded.unsupported == ()
    assert loaded.config.reward.model.sequences_per_micro_batch_per_device == 8
    assert any(
        "reward_model.rollout: the reward model's head scores in the run's own processes" in w for w in loaded.warnings
    )
    assert read(*model, "+reward.custom_reward_function={path: null}").unsupported == ()
    asked = (*model, "custom_reward_function.path=my.py")
    here = read_dialect(DIALECT, None, [*BASE, *asked], here=True)
    [problem] = here.unsupported
    assert problem.what.startswith("a reward model that samples its judgement, which a function of yours reads, is not")
    assert "++custom_reward_function.reward_kwargs.reward_router_address=127.0.0.1:8000" in problem.fix
    pool = read_dialect(DIALECT, None, [*BASE, *asked, "+reward_model.enable_resource_pool=True"], here=True).ignored
    assert ("reward_model.enable_resource_pool", "the run does not serve the model") in [
        (each.key, each.reason) for each in pool
    ]


@pytest.mark.parametrize("later", [False, True])
def test_a_judge_that_the_user_s_function_asks_is_served_by_the_run(later: bool) -> None:
    """verl's generative reward models: on 2 x 4 devices of their own, 2 of which share a copy."""
    model, function = (
        ("reward.reward_model", "reward.custom_reward_function")
        if later
        else ("reward_model", "custom_reward_function")
    )
    plus = "+" * later
    rollout = (
        "{name: sglang, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.8, prompt_length: 100, n: 1, "
        "max_num_seqs: 9}"
    )
    asked = (
        f"{plus}{model}.enable=True", f"+{model}.model_path=a/judge" if later else f"{model}.model.path=a/judge",
        f"+{model}.rollout={rollout}", f"{plus}{function}.path=my.py", f"{plus}{function}.name=ask",
    )  # fmt: skip
    pool = (f"+{model}.enable_resource_pool=True", f"+{model}.n_gpus_per_node=4", f"+{model}.nnodes=2")
    loaded = read(*asked, *pool)
    assert loaded.problems == () and all(one.library for one in loaded.unsupported)
    reward = loaded.config.reward
    assert reward.served == ServedModelConfig(
        path="a/judge", engine="sglang", tensor_parallel=2, devices=[1, 2, 3, 4, 5, 6, 7, 8], max_tokens=100 + 2048,
        max_concurrent_sequences=9, engine_options={"gpu_memory_utilization": 0.8},
    )  # fmt: skip
    assert (reward.model, loaded.config.placement.devices, loaded.config.policy.devices) == (None, 9, [0])
    [term] = reward.terms
    assert (term.name, term.path, term.judge_tokenizer) == ("ask", "my.py", "a/judge")
    assert [one.key for one in loaded.ignored if one.key.startswith(model)] == [f"{model}.rollout.n"]
    [problem] = read(*asked).problems
    assert "1 device does not split into servers of 2 devices each" in problem.what
    assert problem.fix == f"use {model}.rollout.tensor_model_parallel_size=1"


@pytest.mark.parametrize("later", [False, True])
def test_a_judge_at_an_address_is_asked_by_the_user_s_function(later: bool) -> None:
    """verl serves the model and hands over the address; here the configuration gives it."""
    model, function = (
        ("reward.reward_model", "reward.custom_reward_function")
        if later
        else ("reward_model", "custom_reward_function")
    )
    where = f"+{model}.model_path=a/judge" if later else f"{model}.model.path=a/judge"
    plus = "+" * later
    keys = (
        f"{plus}{model}.enable=True", where, f"+{model}.enable_resource_pool=True", f"+{model}.n_gpus_per_node=8",
        f"+{model}.nnodes=1", f"+{model}.rollout={{name: vllm}}", f"{plus}{function}.path=my.py", f"{plus}{function}.name=ask",
        f"++{function}.reward_kwargs.reward_router_address=judge:8000",
    )  # fmt: skip
    loaded = read(*keys)
    assert loaded.problems == loaded.unsupported == ()
    [term] = loaded.config.reward.terms
    assert (term.name, term.path, term.judge_tokenizer) == ("ask", "my.py", "a/judge")
    assert term.options == {"reward_router_address": "judge:8000"} and loaded.config.reward.model is None
    assert any("the server at judge:8000 has the reward model" in one.reason for one in loaded.ignored)


def test_a_lower_clip_below_zero_clips_nothing() -> None:
    """CISPO's example of 0.7 says 10: 1 - 10 is below every ratio, and so is 1 - 1."""
    loaded = read(f"{A}.clip_ratio_low=10")
    assert loaded.config.loss.clip_ratio_low == 1.0
    assert any("nothing is clipped from below" in text for text in loaded.warnings)


def test_defaults_of_planned_keys_ask_for_nothing() -> None:
    rows = [row for row in DIALECT.ledger.of("train").rows if row.status == "planned" and "*" not in row.name]
    for row in rows:
        for value in row.asks_nothing:
            if value is None or isinstance(value, dict) or (isinstance(value, str) and "$" in value):
                continue
            text = str(value).replace("'", "").replace(" ", "")
            assert read(f"++{row.name}={text}").unsupported == (), (row.name, text)


def test_shuffled_mini_batches_are_drawn_by_every_engine() -> None:
    shuffled = (f"{A}.shuffle=True", f"{A}.data_loader_seed=1")
    for strategy in ("megatron", "fsdp"):
        loaded = read(f"{A}.strategy={strategy}", *shuffled)
        assert loaded.unsupported == ()
        assert (loaded.config.policy.shuffle, loaded.config.policy.shuffle_seed) == (True, 1)


def test_a_named_checkpoint_is_gone_on_from_in_both_versions() -> None:
    loaded = read("trainer.resume_mode=resume_path", "trainer.resume_from_path=out/global_step_5")
    assert (loaded.config.run.resume, loaded.config.run.resume_path) == ("auto", "out/global_step_5")
    old = ("data.val_batch_size=8", f"{F}.log_prob_micro_batch_size_per_gpu=8")
    loaded = read(*old, "trainer.resume_mode=out/global_step_5", version="0.2")
    assert (loaded.config.run.resume, loaded.config.run.resume_path) == ("auto", "out/global_step_5")


def test_contents_of_checkpoints() -> None:
    loaded = read(f"{A}.checkpoint.save_contents=[hf_model,extra,model,optimizer]").config.checkpoint
    assert (loaded.save_optimizer, loaded.load_optimizer, loaded.load_schedule) == (True, True, True)
    without = read(f"{A}.checkpoint.save_contents=[optimizer,extra]").problems
    assert [problem.field for problem in without] == [f"{A}.checkpoint.save_contents", f"{A}.checkpoint.load_contents"]
    assert "leaves the model out" in without[0].what
    [unknown] = read(f"{A}.checkpoint.load_contents=[model,hf]").problems
    assert unknown.what.endswith("does not know hf")
    ppo = ("algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=8")
    [told] = read(*ppo, "critic.checkpoint.save_contents=[model]").ignored
    assert told.key == "critic.checkpoint.save_contents" and "actor and critic together" in told.reason


def test_a_field_that_nobody_wrote_is_called_by_a_key_that_has_a_default() -> None:
    """placement.devices is of trainer.n_gpus_per_node, 8 unless written, and not of a sampler's own devices."""
    assert read().words.key("placement.devices") == "trainer.n_gpus_per_node"


def test_a_fix_that_verl_has_no_key_for_is_written_in_our_section():
    words = read().words
    assert words is not None
    text = words.text("use rollout.weights=int8 and data.shuffle=false")
    assert text == "use +posttrain.rollout.weights=int8 and data.shuffle=false"


def test_a_sentence_is_put_into_the_users_words_once():
    words = read().words
    assert words is not None
    text = words.text("raise run.total_epochs, or set run.total_steps=9 and run.name")
    assert "run.total_steps=9 (by trainer.total_training_steps)" in text and "trainer.experiment_name" in text
    assert words.text(text) == text


def test_what_is_planned_or_refused_in_a_section_that_is_off_is_a_note() -> None:
    overrides = ("reward_model.model.type=generative", "reward_model.enable=False")
    off = read_dialect(DIALECT, None, overrides)
    assert not [each for each in off.unsupported if each.field == "reward_model.model.type"]
    assert any(each.key == "reward_model.model" for each in off.ignored)
    on = read_dialect(DIALECT, None, ("reward_model.model.type=generative", "reward_model.enable=True"))
    assert [each.field for each in on.unsupported] == ["reward_model.model.type"]


def test_a_fork_of_an_old_verl_takes_a_mini_batch_above_its_step(tmp_path, monkeypatch) -> None:
    """Its trainer has no check, and the actor splits what there is; its keys may be those of a later version."""
    overrides = (f"{A}.ppo_mini_batch_size=16", "data.train_batch_size=8", "trainer.n_gpus_per_node=1")
    monkeypatch.chdir(tmp_path)
    said = [each.what for each in read_dialect(DIALECT, None, overrides, version="0.4").problems]
    assert any("more than an iteration has" in what for what in said)
    (tmp_path / "verl/version").mkdir(parents=True)
    (tmp_path / "verl/version/version").write_text("0.2.0.post2")
    said = [each.what for each in read_dialect(DIALECT, None, overrides, version="0.4").problems]
    assert not any("more than an iteration has" in what for what in said)


@pytest.mark.parametrize("key", ["trainer.nnodes", "trainer.n_gpus_per_node"])
@pytest.mark.parametrize("number", [0, -2])
def test_no_machine_and_no_device_is_one_error_about_that_key(key: str, number: int) -> None:
    """Both make the number of devices, so the other key would be blamed as well."""
    [problem] = read(f"{key}={number}").problems
    assert problem.field == key and f"not {number}" in problem.what


def test_a_tracker_of_ones_own_is_dropped_and_a_misspelt_one_is_not() -> None:
    board = "trainer.logger=[console,rl_board]"
    [problem] = read(board).problems
    assert problem.field == "trainer.logger" and "--drop-unknown" in problem.fix
    dropped = read_dialect(DIALECT, None, [*BASE, board], drop_unknown=True)
    assert dropped.problems == () and list(dropped.config.tracking.trackers) == ["console"]
    assert any("rl_board is a tracker of yours" in warning for warning in dropped.warnings)
    [problem] = read_dialect(DIALECT, None, [*BASE, "trainer.logger=[console,wandbb]"], drop_unknown=True).problems
    assert "did you mean wandb?" in problem.fix


def test_a_manager_of_ones_own_beside_a_reward_model_is_rejected() -> None:
    """verl's own managers return the model's score; one of the user's may do anything with it."""
    model = ("reward_model.enable=True", "reward_model.micro_batch_size_per_gpu=8")
    [problem] = read(*model, "reward_model.reward_manager=blank").problems
    assert problem.field == "reward_model.reward_manager" and "reward_model.enable=False" in problem.fix
    assert read(*model, "reward_model.reward_manager=dapo").problems == ()

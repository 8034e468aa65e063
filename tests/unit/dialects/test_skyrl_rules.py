"""What SkyRL's keys decide together: batch sizes, devices, aliases; and one clear message for everything that cannot be."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import regex

from posttrain.dialects.detect import read_config
from posttrain.dialects.loaded import LoadedConfig
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.skyrl import DIALECT
from posttrain.plan.batch import plan_batches
from posttrain.rewards.scorers.llm_judge import matched_verdict

T, P, AL, G, E = "trainer", "trainer.placement", "trainer.algorithm", "generator", "generator.inference_engine"
OPC = f"{AL}.off_policy_correction"
GAE = (f"{AL}.advantage_estimator=gae", f"{T}.critic.model.path=c")
NO_KL = (f"{AL}.use_kl_loss=false",)
APART = (f"{P}.colocate_all=false",)
ADAPTIVE = (*NO_KL, f"{AL}.use_kl_in_reward=true", f"{AL}.kl_ctrl.type=adaptive")
SGLANG = (f"{G}.backend=sglang", f"{G}.inference_engine_tensor_parallel_size=1", f"{G}.num_inference_engines=4")
TIS = (f"{AL}.use_tis=true", f"{AL}.tis_imp_ratio_cap=2.0")


@cache
def read(*overrides: str, version: str = "", here: bool = False) -> LoadedConfig:
    """SkyRL's defaults with overrides: 4 devices, 1024 prompts x 5 samples, mini-batches of 256, micro-batches of 1."""
    return read_dialect(DIALECT, None, overrides, version=version, here=here)


Bad = tuple[tuple[str, ...], str, str, str]

SIZES: list[Bad] = [
    # overrides, key, what is said (a part), the fix
    (
        (f"{T}.train_batch_size=128",),
        f"{T}.policy_mini_batch_size",
        "a mini-batch of 256 prompts is more than the 128 of a step (trainer.train_batch_size)",
        f"use {T}.policy_mini_batch_size=128, or {T}.train_batch_size=256",
    ),
    (
        (f"{T}.policy_mini_batch_size=0",),
        f"{T}.policy_mini_batch_size",
        "must be at least 1, not 0",
        f"use {T}.policy_mini_batch_size=1024",
    ),
    (
        (*GAE, f"{T}.critic_mini_batch_size=2048"),
        f"{T}.critic_mini_batch_size",
        "a mini-batch of 2048 prompts is more than the 1024 of a step",
        f"use {T}.critic_mini_batch_size=1024, or {T}.train_batch_size=2048",
    ),
    (
        (*GAE, f"{T}.critic_mini_batch_size=-1"),
        f"{T}.critic_mini_batch_size",
        "must be at least 1, not -1",
        f"use {T}.critic_mini_batch_size=1024",
    ),
    # SkyRL checks the critic's sizes wherever it has a path
    (
        (f"{T}.critic.model.path=c", f"{T}.critic_mini_batch_size=0"),
        f"{T}.critic_mini_batch_size",
        "must be at least 1, not 0",
        f"use {T}.critic_mini_batch_size=1024",
    ),
    (
        (f"{T}.micro_train_batch_size_per_gpu=0",),
        f"{T}.micro_train_batch_size_per_gpu",
        "must be at least 1, not 0",
        f"use {T}.micro_train_batch_size_per_gpu=1, or more",
    ),
    (
        (f"{T}.micro_forward_batch_size_per_gpu=0",),
        f"{T}.micro_forward_batch_size_per_gpu",
        "must be at least 1, not 0",
        f"use {T}.micro_forward_batch_size_per_gpu=1, or more",
    ),
    # 100 / 32; of the divisors of 100, x 5 samples is a multiple of 4 for 4, 20, 100
    (
        (f"{T}.train_batch_size=100", f"{T}.policy_mini_batch_size=32"),
        f"{T}.policy_mini_batch_size",
        "trainer.train_batch_size=100 prompts do not split into mini-batches of 32 (100 / 32 = 3.125)",
        f"use {T}.policy_mini_batch_size=100 or {T}.policy_mini_batch_size=20",
    ),
    # 1 prompt x 1 sample over 4 devices
    (
        (f"{T}.policy_mini_batch_size=1", f"{G}.n_samples_per_prompt=1"),
        f"{T}.policy_mini_batch_size",
        "1 prompts x 1 sample = 1 sequences do not split over 4 devices, which gives some of them nothing",
        f"use {T}.policy_mini_batch_size=4",
    ),
    # 6 prompts x 5 samples = 30 sequences; with 7 each, the 24 x 5 / 4 = 30 of a step would leave 2
    (
        (f"{T}.train_batch_size=24", f"{T}.policy_mini_batch_size=6"),
        f"{T}.policy_mini_batch_size",
        "6 prompts x 5 samples = 30 sequences do not split over 4 devices, which is 7.5 each",
        f"use {T}.policy_mini_batch_size=8",
    ),
    # no divisor of 10 prompts does: 5 samples take a multiple of 4 prompts
    (
        (f"{T}.train_batch_size=10", f"{T}.policy_mini_batch_size=5"),
        f"{T}.policy_mini_batch_size",
        "5 prompts x 5 samples = 25 sequences do not split over 4 devices",
        f"use {T}.policy_mini_batch_size=8 with {T}.train_batch_size=16",
    ),
    # 8 x 5 / 4 = 10 each; micro-batches of 4 would take 16 prompts (16 x 5 / 4 = 20)
    (
        (f"{T}.train_batch_size=16", f"{T}.policy_mini_batch_size=8", f"{T}.micro_train_batch_size_per_gpu=4"),
        f"{T}.micro_train_batch_size_per_gpu",
        "8 prompts x 5 samples = 40 sequences over 4 devices are 10 each, which micro-batches of 4 do not divide",
        f"use {T}.micro_train_batch_size_per_gpu=2, or {T}.policy_mini_batch_size=16",
    ),
    # larger than what a device gets
    (
        (f"{T}.train_batch_size=4", f"{T}.policy_mini_batch_size=4", f"{T}.micro_train_batch_size_per_gpu=8"),
        f"{T}.micro_train_batch_size_per_gpu",
        "4 prompts x 5 samples = 20 sequences over 4 devices are 5 each, which micro-batches of 8 do not divide",
        f"use {T}.micro_train_batch_size_per_gpu=5, or {T}.policy_mini_batch_size=32 with {T}.train_batch_size=32",
    ),
    (
        (*GAE, *NO_KL, f"{T}.train_batch_size=24", f"{T}.policy_mini_batch_size=24", f"{T}.critic_mini_batch_size=6"),
        f"{T}.critic_mini_batch_size",
        "6 prompts x 5 samples = 30 sequences do not split over 4 devices",
        f"use {T}.critic_mini_batch_size=8",
    ),
    # 1 prompt x 2 samples: enough for the policy's 2 copies, not for the reference's 4
    (
        (*APART, f"{P}.colocate_policy_ref=false", f"{P}.policy_num_gpus_per_node=2", f"{T}.train_batch_size=1",
         f"{T}.policy_mini_batch_size=1", f"{G}.n_samples_per_prompt=2"),
        f"{T}.train_batch_size",
        "a step of 2 sequences cannot be shared among 2 copies of the policy and 4 of the reference, which takes 4",
        f"use {T}.train_batch_size=2",
    ),
]  # fmt: skip
DEVICES: list[Bad] = [
    (
        (f"{G}.num_inference_engines=2",),
        f"{P}.colocate_all",
        "colocate_all puts policy and sampler on the same devices: the policy has 1 node x 4 = 4, the sampler 2 copies x 4 "
        "tensor = 8",
        f"use {G}.num_inference_engines=1, or {P}.policy_num_gpus_per_node=8, or {P}.colocate_all=false",
    ),
    (
        (f"{P}.ref_num_gpus_per_node=2",),
        f"{P}.ref_num_gpus_per_node",
        "colocate_all puts policy and reference on the same devices: the policy has 1 node x 4 = 4, the reference 1 node x 2 = 2",
        f"use {P}.ref_num_gpus_per_node=4 with {P}.ref_num_nodes=1",
    ),
    (
        (*GAE, f"{P}.critic_num_nodes=2"),
        f"{P}.critic_num_gpus_per_node",
        "policy has 1 node x 4 = 4, the critic 2 nodes x 4 = 8",
        f"use {P}.critic_num_gpus_per_node=4 with {P}.critic_num_nodes=1",
    ),
    (
        (*APART, f"{P}.ref_num_gpus_per_node=2", f"{P}.ref_num_nodes=2"),
        f"{P}.colocate_policy_ref",
        "colocate_policy_ref puts policy and reference on the same devices: the policy has 1 node x 4 = 4, the reference "
        "2 nodes x 2 = 4",
        f"use {P}.ref_num_gpus_per_node=4 with {P}.ref_num_nodes=1, or {P}.colocate_policy_ref=false",
    ),
    (
        (f"{P}.policy_num_nodes=0",),
        f"{P}.policy_num_nodes",
        "must be at least 1, not 0",
        f"use {P}.policy_num_nodes=1, or more",
    ),
    (
        (f"{T}.policy.sequence_parallel_size=3",),
        f"{T}.policy.sequence_parallel_size",
        "4 devices of the policy (1 node x 4 = 4) do not split into groups of 3",
        f"use {T}.policy.sequence_parallel_size=2",
    ),
    (
        (f"{T}.policy.sequence_parallel_size=2", f"{T}.use_sample_packing=false"),
        f"{T}.use_sample_packing",
        "2 devices share a sequence (trainer.policy.sequence_parallel_size), which needs packed sequences",
        f"use {T}.use_sample_packing=true, or {T}.policy.sequence_parallel_size=1",
    ),
]
CHECKS: list[Bad] = [
    (
        (f"{G}.max_input_length=1000",),
        f"{G}.max_input_length",
        "with one turn the longest input is the longest prompt, and generator.max_input_length is 1000, not 512",
        f"use {G}.max_input_length=512, or {T}.max_prompt_length=1000",
    ),
    (
        (f"{G}.max_turns=3", f"{G}.max_input_length=100"),
        f"{G}.max_input_length",
        "the longest input of a turn (generator.max_input_length=100) is shorter than the longest prompt of 512",
        f"use {G}.max_input_length=512, or more",
    ),
    (
        (*APART, f"{G}.run_engines_locally=false", f"{G}.num_inference_engines=2"),
        f"{G}.num_inference_engines",
        "there are 1 addresses (generator.remote_inference_engine_urls) for 2 samplers",
        f"use {G}.num_inference_engines=1",
    ),
    (
        (*APART, f"{G}.run_engines_locally=false", f"{G}.remote_inference_engine_urls=[]"),
        f"{G}.remote_inference_engine_urls",
        "generator.remote_inference_engine_urls names no server",
        f"use {G}.remote_inference_engine_urls=[HOST:PORT]",
    ),
    (
        (*APART, f"{G}.run_engines_locally=false", f"{G}.backend=native"),
        f"{G}.run_engines_locally",
        "native samples in the run's own processes, and not in servers",
        f"use {G}.backend=vllm or sglang, or remove it",
    ),
    (
        (*APART, f"{E}.external_server_urls=['http://127.0.0.1:8000']", f"{E}.backend=hf"),
        f"{E}.external_server_urls",
        "hf samples in the run's own processes, and not in servers",
        f"use {E}.backend=vllm or sglang, or remove it",
    ),
    (
        (f"{E}.external_server_urls=['http://127.0.0.1:8000']",),
        f"{P}.colocate_all",
        "servers of generator.inference_engine.external_server_urls cannot share the policy's devices",
        f"use {P}.colocate_all=false",
    ),
    (
        (f"{E}.external_proxy_url='http://127.0.0.1:8000'",),
        f"{E}.external_proxy_url",
        "external_proxy_url names a router alone, and weights go to the servers behind it",
        f"name them in {E}.external_server_urls",
    ),
    (
        (f"{G}.async_engine=false", f"{G}.batched=false"),
        f"{G}.async_engine",
        "generator.async_engine=false takes all prompts in one call, and generator.batched is false",
        f"use {G}.batched=true, or {G}.async_engine=true",
    ),
    (
        (f"{G}.backend=sglang",),
        f"{G}.inference_engine_tensor_parallel_size",
        "SkyRL runs sglang locally on one device per copy, not on 4",
        f"use {G}.inference_engine_tensor_parallel_size=1",
    ),
    (
        (f"{T}.sequence_parallel_backend=ring",),
        f"{T}.sequence_parallel_backend",
        "must be one of ulysses, not 'ring'",
        "",
    ),
    (
        (f"{AL}.advantage_estimator=gpro",),
        f"{AL}.advantage_estimator",
        "there is no advantage estimator 'gpro'",
        "did you mean grpo?",
    ),
    (
        (f"{AL}.advantage_estimator=gae",),
        f"{T}.critic.model.path",
        "gae needs a critic, and trainer.critic.model.path is null",
        f"use {T}.critic.model.path=Qwen/Qwen2.5-1.5B-Instruct",
    ),
    (
        (f"{AL}.use_kl_in_reward=true",),
        f"{AL}.use_kl_in_reward",
        "the KL goes into the loss (use_kl_loss) or into the reward, not both",
        f"use {AL}.use_kl_loss=false with {AL}.use_kl_in_reward=true, or {AL}.use_kl_in_reward=false",
    ),
    (
        (f"{T}.strategy=fsdp", f"{T}.policy.fsdp_config.cpu_offload=true"),
        f"{T}.policy.fsdp_config.cpu_offload",
        "FSDP1 cannot train with weights in CPU memory",
        f"use {T}.policy.fsdp_config.cpu_offload=false, or {T}.strategy=fsdp2",
    ),
    (
        (f"{T}.strategy=fsdp", f"{T}.critic.fsdp_config.cpu_offload=true"),
        f"{T}.critic.fsdp_config.cpu_offload",
        "FSDP1 cannot train with weights in CPU memory",
        f"use {T}.critic.fsdp_config.cpu_offload=false, or {T}.strategy=fsdp2",
    ),
    (
        (f"{T}.strategy=deepspeed", "deepspeed_config.train.zero_optimization.stage=2"),
        "deepspeed_config.train.zero_optimization.stage",
        "SkyRL runs DeepSpeed at ZeRO stage 3, not 2",
        "use deepspeed_config.train.zero_optimization.stage=3",
    ),
    (
        (f"{T}.strategy=zero",),
        f"{T}.strategy",
        "must be one of fsdp, fsdp2, deepspeed, megatron, not 'zero'",
        "",
    ),
    (
        (f"{T}.strategy=deepspeed", f"{T}.policy.optimizer_config.offload_after_step=false"),
        f"{T}.policy.optimizer_config.offload_after_step",
        "DeepSpeed offloads after every step",
        f"use {T}.policy.optimizer_config.offload_after_step=true",
    ),
    (
        (f"{T}.strategy=deepspeed", f"{T}.critic.optimizer_config.offload_after_step=false"),
        f"{T}.critic.optimizer_config.offload_after_step",
        "DeepSpeed offloads after every step",
        f"use {T}.critic.optimizer_config.offload_after_step=true",
    ),
    (
        (f"{T}.max_ckpts_to_keep=0",),
        f"{T}.max_ckpts_to_keep",
        "trainer.max_ckpts_to_keep=0 would keep no checkpoint",
        f"use {T}.max_ckpts_to_keep=-1 for all, or {T}.max_ckpts_to_keep=1",
    ),
    (
        (f"{AL}.ppo_loss_type=dual-clip",),
        f"{AL}.ppo_loss_type",
        "there is no policy loss 'dual-clip'",
        "did you mean dual_clip?",
    ),
    (
        (f"{AL}.loss_reduction=sequence_means",),
        f"{AL}.loss_reduction",
        "must be one of token_mean, sequence_mean, seq_mean_token_sum_norm, token_mean_legacy, prompt_mean, not "
        "'sequence_means'",
        "did you mean sequence_mean?",
    ),
    (
        (*SGLANG, f"{G}.use_conversation_multi_turn=false"),
        f"{G}.use_conversation_multi_turn",
        "SkyRL's sglang continues conversations by messages only",
        f"use {G}.use_conversation_multi_turn=true",
    ),
    (
        (*SGLANG, f"{G}.sampling_params.stop=[END]"),
        f"{G}.sampling_params.stop",
        "SkyRL's sglang has no stop texts",
        f"use {G}.backend=vllm, or {G}.sampling_params.stop=null",
    ),
    (
        (*SGLANG, f"+{G}.eval_sampling_params.min_new_tokens=4"),
        f"{G}.eval_sampling_params.min_new_tokens",
        "SkyRL's sglang has no generator.eval_sampling_params.min_new_tokens",
        f"use {G}.backend=vllm, or remove it",
    ),
    (
        (f"{AL}.use_tis=true",),
        f"{AL}.tis_imp_ratio_cap",
        "use_tis cuts weights at trainer.algorithm.tis_imp_ratio_cap, which must be above 0, not -1",
        f"use {AL}.tis_imp_ratio_cap=2.0",
    ),
    (
        (*TIS, *SGLANG),
        f"{AL}.use_tis",
        "use_tis needs the sampler's log-probs, which SkyRL does not get from sglang",
        f"use {G}.backend=vllm, or {AL}.use_tis=false",
    ),
    (
        (*TIS, f"{AL}.policy_loss_type=gspo"),
        f"{AL}.use_tis",
        "use_tis goes with the losses regular and dual_clip, not with gspo",
        f"use {AL}.use_tis=false",
    ),
    (
        (f"{G}.sampling_params.logprobs=5",),
        f"{G}.sampling_params.logprobs",
        "generator.sampling_params.logprobs must be null, 0 or 1 (the sampled token's alone), not 5",
        f"use {G}.sampling_params.logprobs=0",
    ),
    (
        (f"{G}.sampling_params.logprobs=0.5",),
        f"{G}.sampling_params.logprobs",
        "must be int | null, not 0.5",
        "",
    ),
    (
        (f"{G}.sampling_params.logprobs=0", f"{G}.batched=false"),
        f"{G}.sampling_params.logprobs",
        "generator.sampling_params.logprobs needs generator.batched=true in SkyRL",
        f"remove it (log-probs are kept here in any case), or use {G}.sampling_params.logprobs=null",
    ),
    (
        (*APART, f"{G}.sampling_params.logprobs=0", f"{G}.run_engines_locally=false"),
        f"{G}.sampling_params.logprobs",
        "generator.sampling_params.logprobs needs samplers that run locally",
        f"use {G}.sampling_params.logprobs=null",
    ),
    (
        (*ADAPTIVE, f"{AL}.kl_ctrl.horizon=0"),
        f"{AL}.kl_ctrl.horizon",
        "trainer.algorithm.kl_ctrl.horizon must be a whole number of sequences above 0, not 0",
        f"use {AL}.kl_ctrl.horizon=10000",
    ),
    (
        (f"{AL}.dynamic_sampling.type=drop",),
        f"{AL}.dynamic_sampling.type",
        "must be one of filter, replace | null, not 'drop'",
        "",
    ),
    *(
        (
            (f"{AL}.dynamic_sampling.type=replace", f"{AL}.dynamic_sampling.min_replace_ratio={share}"),
            f"{AL}.dynamic_sampling.min_replace_ratio",
            f"must be a share from 0 to below 1, not {share}: replace needs more good prompts than that",
            f"use {AL}.dynamic_sampling.min_replace_ratio=0.3, or another share below 1",
        )
        for share in (1, -0.5)
    ),
    (
        (f"{T}.resume_mode=newest",),
        f"{T}.resume_mode",
        "must be one of none, latest, from_path | null, not 'newest'",
        "",
    ),
    (
        (f"{T}.resume_mode=from_path",),
        f"{T}.resume_path",
        "resume_mode=from_path needs trainer.resume_path, which is null",
        f"use {T}.resume_path=FOLDER/global_step_10, or {T}.resume_mode=latest",
    ),
    (
        (f"{T}.resume_mode=from_path", f"{T}.resume_path=/ckpts/step_7"),
        f"{T}.resume_path",
        "/ckpts/step_7 is no checkpoint: the folder's name must be global_step_N",
        f"use {T}.resume_path=FOLDER/global_step_10, or {T}.resume_mode=latest",
    ),
    (
        ("data.train_data=[a.txt]",),
        "data.train_data",
        "a.txt is no data file: SkyRL reads .parquet, .json, .jsonl",
        "convert it to .parquet, or .jsonl with one row per line",
    ),
    (("data.train_data=",), "data.train_data", "data.train_data names no file", "use data.train_data=[FILE.parquet]"),
    (
        (f"{T}.reward.model.path=rm",),
        f"{T}.reward.model.path",
        "trainer.reward.model.path is refused: SkyRL never had a reward model behind this key; this program's own is "
        "+posttrain.reward.model={path: FOLDER}",
        "",
    ),
    ((f"{T}.logger=[wandb,wanbd]",), f"{T}.logger", "there is no tracker 'wanbd'", "did you mean wandb?"),
    (("environment.env_class=gsm8",), "environment.env_class", "there is no environment 'gsm8'", "did you mean gsm8k?"),
    (
        (f"{T}.policy.optimizer_config.scheduler=cosin",),
        f"{T}.policy.optimizer_config.scheduler",
        "there is no scheduler 'cosin'",
        "did you mean cosine?",
    ),
    (
        (f"{T}.policy.optimizer_config.adam_betas=[0.9]",),
        f"{T}.policy.optimizer_config.adam_betas",
        "trainer.policy.optimizer_config.adam_betas has 1 numbers, and AdamW takes two",
        "write [0.9, 0.999]",
    ),
    (
        (f"{T}.train_batch_size=many",),
        f"{T}.train_batch_size",
        "trainer.train_batch_size must be int, not 'many'",
        "",
    ),
    (
        (f"{OPC}.token_mask_is_threshold_high=2",),
        f"{OPC}.token_mask_is_threshold_low",
        "token_mask_is_threshold_low and _high go together, and one of them is null",
        f"give {OPC}.token_mask_is_threshold_low too, such as {OPC}.token_mask_is_threshold_low=0.0001",
    ),
]  # fmt: skip
ALIASES: list[Bad] = [
    (
        (f"{AL}.ppo_loss_type=regular", f"{AL}.policy_loss_type=dual_clip"),
        f"{AL}.policy_loss_type",
        "trainer.algorithm.policy_loss_type is the later name of trainer.algorithm.ppo_loss_type, and both are written",
        "keep one of them",
    ),
    (
        (f"{G}.num_inference_engines=1", f"{E}.num_engines=1"),
        f"{E}.num_engines",
        "generator.inference_engine.num_engines is the later name of generator.num_inference_engines, and both are written",
        "keep one of them",
    ),
    (
        (f"{T}.use_sample_packing=true", f"{T}.remove_microbatch_padding=true"),
        f"{T}.remove_microbatch_padding",
        "trainer.remove_microbatch_padding is the later name of trainer.use_sample_packing, and both are written",
        "keep one of them",
    ),
    (
        (f"{T}.num_warmup_steps=2", f"{T}.policy.optimizer_config.num_warmup_steps=2"),
        f"{T}.policy.optimizer_config.num_warmup_steps",
        "trainer.policy.optimizer_config.num_warmup_steps took the place of trainer.num_warmup_steps, and both are written",
        "keep one of them",
    ),
    (
        (f"{AL}.kl_estimator_type=k2", f"{AL}.use_abs_kl=true"),
        f"{AL}.use_abs_kl",
        "trainer.algorithm.kl_estimator_type took the place of trainer.algorithm.use_abs_kl, and both are written",
        f"remove {AL}.use_abs_kl",
    ),
    (
        (*TIS, f"{OPC}.tis_ratio_type=token"),
        f"{AL}.use_tis",
        "tis_ratio_type took the place of trainer.algorithm.use_tis, and both are given",
        f"use {AL}.use_tis=false",
    ),
]


@pytest.mark.parametrize("bad", [*SIZES, *DEVICES, *CHECKS, *ALIASES], ids=lambda bad: f"{bad[1]}-{bad[0][-1]}")
def test_what_cannot_be_gets_one_message_with_key_place_and_fix(bad: Bad) -> None:
    overrides, key, what, fix = bad
    problems = read(*overrides).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    problem = problems[0]
    assert what in problem.what
    assert problem.fix == fix
    assert problem.field == key
    written = [override for override in overrides if override.lstrip("+").split("=")[0] == key]
    assert problem.where == (
        f"override {written[0]}" if written else f"{key} (a default; the command line does not set it)"
    )


def test_all_problems_at_once_in_the_order_in_which_they_were_written() -> None:
    found = read(f"{AL}.use_kl_in_reward=true", f"{T}.max_ckpts_to_keep=0", f"{T}.policy_mini_batch_size=100").problems
    assert [problem.field for problem in found] == [
        f"{AL}.use_kl_in_reward",
        f"{T}.max_ckpts_to_keep",
        f"{T}.policy_mini_batch_size",
    ]


# prompts, mini-batch, samples, devices, sequence parallel, micro-batch -> sequences, updates, per update, accumulation
BATCHES = [
    # the defaults: 1024 x 5; 256 x 5 = 1280 per update, 320 per device, 320 micro-batches of 1
    ((1024, 256, 5, 4, 1, 1), (5120, 4, 1280, 320)),
    # 4 prompts in mini-batches of 2 are 2 updates, as the page says
    ((4, 2, 4, 4, 1, 1), (16, 2, 8, 2)),
    # 8 devices in pairs that share a sequence are 4 copies: 64 x 8 / 4 = 128 each, 16 micro-batches of 8
    ((128, 64, 8, 8, 2, 8), (1024, 2, 512, 16)),
    ((8, 8, 8, 1, 1, 64), (64, 1, 64, 1)),
]


@pytest.mark.parametrize(("sizes", "counts"), BATCHES)
def test_the_batch_flow(sizes: tuple[int, ...], counts: tuple[int, ...]) -> None:
    prompts, mini, samples, devices, shared, micro = sizes
    loaded = read(
        *NO_KL,
        f"{T}.train_batch_size={prompts}",
        f"{T}.policy_mini_batch_size={mini}",
        f"{G}.n_samples_per_prompt={samples}",
        f"{P}.policy_num_gpus_per_node={devices}",
        f"{G}.inference_engine_tensor_parallel_size={devices}",
        f"{T}.policy.sequence_parallel_size={shared}",
        f"{T}.micro_train_batch_size_per_gpu={micro}",
    )
    assert loaded.problems == ()
    plan, problems = plan_batches(loaded.config, None)
    assert plan and not problems
    found = (
        plan.sequences_per_step,
        plan.updates_per_step,
        plan.sequences_per_update,
        plan.gradient_accumulation_steps,
    )
    assert found == counts
    assert plan.prompts_per_step == prompts


def test_the_critic_has_mini_batches_of_its_own() -> None:
    """1024 / 64 = 16 updates of the critic beside 4 of the policy."""
    config = read(*GAE, f"{T}.critic_mini_batch_size=64").config
    plan, _ = plan_batches(config, None)
    assert plan and plan.critic
    assert (plan.updates_per_step, plan.critic.updates_per_step) == (4, 16)


def test_an_epoch_leaves_out_the_last_incomplete_step() -> None:
    """7473 // 1024 = 7 steps, 3 epochs: 21."""
    plan, _ = plan_batches(read(f"{T}.epochs=3").config, 7473)
    assert plan and plan.total_steps == 21


# overrides -> policy, reference, critic, sampler, all
GROUPS: list[tuple[tuple[str, ...], Any]] = [
    ((), (None, None, None, None, 4)),
    (APART, ([0, 1, 2, 3], [0, 1, 2, 3], None, [4, 5, 6, 7], 8)),
    ((*APART, *NO_KL), ([0, 1, 2, 3], None, None, [4, 5, 6, 7], 8)),
    (
        (
            *APART,
            *GAE,
            f"{P}.colocate_policy_ref=false",
            *(f"{P}.{role}_num_gpus_per_node=1" for role in ("ref", "critic")),
        ),
        ([0, 1, 2, 3], [4], [5], [6, 7, 8, 9], 10),
    ),
    # servers elsewhere take no devices of the run
    ((*APART, f"{G}.run_engines_locally=false"), (None, None, None, None, 4)),
    # 2 copies x 2 devices
    (
        (*APART, *NO_KL, f"{G}.num_inference_engines=2", f"{G}.inference_engine_tensor_parallel_size=2"),
        ([0, 1, 2, 3], None, None, [4, 5, 6, 7], 8),
    ),
    # our own sampler has a copy on each device: one, where nobody wrote how many
    ((*APART, f"{G}.backend=native"), ([0, 1, 2, 3], [0, 1, 2, 3], None, [4], 5)),
]


@pytest.mark.parametrize(("overrides", "expected"), GROUPS)
def test_which_model_stands_where(overrides: tuple[str, ...], expected: Any) -> None:
    loaded = read(*overrides)
    assert loaded.problems == ()
    config = loaded.config
    groups = (config.policy.devices, config.reference.devices, config.critic.devices, config.rollout.devices)
    assert (*groups, config.placement.devices) == expected


# what is written -> estimator in the loss, in the reward
ESTIMATORS: list[tuple[str, tuple[str, ...], str, str]] = [
    ("", (), "k3", "k3"),
    ("", (f"{AL}.use_kl_estimator_k3=false",), "k1", "k1"),
    ("", (f"{AL}.use_kl_estimator_k3=false", f"{AL}.use_abs_kl=true"), "k1", "abs"),
    ("", (f"{AL}.use_abs_kl=true",), "k3", "k3"),
    ("", (f"{AL}.kl_estimator_type=abs",), "abs", "abs"),
    ("2025-06", (f"{AL}.use_kl_estimator_k3=false",), "k1", "k1"),
    ("2025-08", (), "k3", "k3"),
    ("2025-08", (f"{AL}.use_abs_kl=true",), "abs", "abs"),
    ("2025-08", (f"{AL}.use_abs_kl=true", f"{AL}.use_kl_estimator_k3=true"), "abs", "abs"),
    ("2025-08", (f"{AL}.kl_estimator_type=k2",), "k2", "k2"),
]


@pytest.mark.parametrize(("version", "overrides", "in_loss", "in_reward"), ESTIMATORS)
def test_the_estimator_of_the_kl(version: str, overrides: tuple[str, ...], in_loss: str, in_reward: str) -> None:
    loss = read(*overrides, version=version)
    reward = read(*NO_KL, f"{AL}.use_kl_in_reward=true", *overrides, version=version)
    assert loss.problems == reward.problems == ()
    assert loss.config.loss.kl_estimator == in_loss
    assert reward.config.reward.kl.estimator == in_reward
    assert reward.config.loss.kl_coef == 0 and loss.config.reward.kl.coef == 0


def test_a_negative_weight_of_the_kl_in_the_reward_counts_as_0() -> None:
    assert read(*NO_KL, f"{AL}.use_kl_in_reward=true", f"{AL}.kl_loss_coef=-1").config.reward.kl.coef == 0


def test_later_names_say_the_same() -> None:
    early = read(
        *NO_KL, f"{G}.max_num_seqs=7", f"{G}.num_inference_engines=2", f"{G}.inference_engine_tensor_parallel_size=2"
    )
    late = read(*NO_KL, f"{E}.max_num_seqs=7", f"{E}.num_engines=2", f"{E}.tensor_parallel_size=2")
    assert early.problems == late.problems == ()
    assert early.config == late.config
    assert late.key("rollout.max_concurrent_sequences") == f"{E}.max_num_seqs"


@pytest.mark.parametrize(
    ("prompts", "share", "enough"),
    [(10, 0.3, 4), (8, 0.5, 5), (8, 0.0, 1), (10, 0.25, 3), (100, 0.29, 29), (100, 0.07, 8)],
)
def test_replace_goes_on_when_more_than_the_share_is_good(prompts: int, share: float, enough: int) -> None:
    """SkyRL: good > prompts x share, computed in floating point: 100 x 0.29 is 28.999999999999996, and 29 are more; 100 x 0.07
    is 7.000000000000001, and 7 are not."""
    assert enough > prompts * share >= enough - 1
    loaded = read(
        *NO_KL,
        f"{T}.train_batch_size={prompts}",
        f"{T}.policy_mini_batch_size={prompts}",
        f"{T}.critic_mini_batch_size={prompts}",
        *(f"{T}.placement.{role}_num_gpus_per_node=1" for role in ("policy", "critic", "ref")),
        f"{G}.inference_engine_tensor_parallel_size=1",
        f"{AL}.dynamic_sampling.type=replace",
        f"{AL}.dynamic_sampling.min_replace_ratio={share}",
    )
    assert loaded.problems == ()
    asked = loaded.config.group_filter.min_kept_share
    assert enough / prompts >= asked > (enough - 1) / prompts


def test_settings_that_nothing_reads_are_told() -> None:
    written = (
        f"{T}.critic.optimizer_config.lr=1e-5",
        f"{T}.critic_mini_batch_size=128",
        f"{AL}.value_clip=0.5",
        f"{T}.ref.sequence_parallel_size=1",
        f"{AL}.kl_loss_coef=0.1",
        f"{AL}.clip_ratio_c=4",
        f"{AL}.lambd=0.9",
        f"{AL}.dynamic_sampling.max_sample_batches=3",
        f"{AL}.kl_ctrl.horizon=5",
        f"{AL}.entropy_loss_coef=0.1",
        f"{AL}.max_seq_len=9",
        f"{AL}.tis_imp_ratio_cap=4",
        "deepspeed_config.train.zero_optimization.stage=2",
        f"{T}.export_path=/x",
        f"{T}.resume_path=/x/global_step_3",
        f"{G}.remote_inference_engine_urls=[h:1]",
    )
    loaded = read(*NO_KL, *written)
    assert loaded.problems == ()
    assert [one.key for one in loaded.ignored] == [override.split("=")[0] for override in written]
    assert all(
        one.reason and one.where == f"override {override}"
        for one, override in zip(loaded.ignored, written, strict=True)
    )


def test_engine_settings_are_told_on_one_device() -> None:
    one = tuple(f"{P}.{role}_num_gpus_per_node=1" for role in ("policy", "ref"))
    loaded = read(*one, f"{G}.backend=native", f"{G}.gpu_memory_utilization=0.5", f"{T}.policy.fsdp_config.fsdp_size=2",
                  f"{G}.num_inference_engines=3")  # fmt: skip
    assert loaded.problems == ()
    assert [one.key for one in loaded.ignored] == [
        f"{G}.gpu_memory_utilization",
        f"{T}.policy.fsdp_config.fsdp_size",
        f"{G}.num_inference_engines",
    ]
    assert loaded.config.rollout.engine_options == loaded.config.policy.engine_options == {}


def test_the_http_endpoint_opens_the_run_to_programs() -> None:
    loaded = read(f"{G}.enable_http_endpoint=true", f"{G}.http_endpoint_port=8123", "data.val_data=[]")
    assert loaded.problems == ()
    assert loaded.config.environment.name == "open"
    assert loaded.config.environment.settings == {"host": "127.0.0.1", "port": 8123}


PLANNED = [
    ("data.train_data=[openai/gsm8k:train]", "data.train_data", ()),
    (f"{T}.logger=vemlp_wandb", f"{T}.logger", ()),
]


@pytest.mark.parametrize(("override", "key", "around"), PLANNED)
def test_what_is_planned_can_be_planned_for(override: str, key: str, around: tuple[str, ...]) -> None:
    loaded = read(*around, override)
    assert loaded.problems == ()
    told = [problem for problem in loaded.unsupported if problem.field == key]
    assert len(told) == 1 and "planned" in told[0].what and told[0].fix
    assert told[0].where == f"override {override}"


def test_values_that_ask_for_nothing_are_no_plans() -> None:
    asked = read(f"{T}.hf_save_interval=0", f"{G}.max_turns=1", f"{T}.policy.model.lora.rank=0")
    assert {problem.field for problem in asked.unsupported} == {problem.field for problem in read().unsupported}


def test_scorers_by_environment() -> None:
    term = read("environment.env_class=gsm8k").config.reward.terms[0]
    assert (term.name, term.options) == ("gsm8k", {"which": "first"})
    assert read("environment.env_class=exact_match").config.reward.terms[0].name == "exact_match"
    judge = read("environment.env_class=llm_as_a_judge")
    assert judge.problems == ()
    options = judge.config.reward.terms[0].options
    assert (options["base_url"], options["model"]) == ("https://api.openai.com/v1", "gpt-4o-mini")
    assert options["api_key_env"] == "OPENAI_API_KEY"
    said = matched_verdict("so\n### Final Score: 1", pattern=regex.compile(options["extract"]))
    assert said == 1.0 and all(
        f"{{{name}}}" in options["prompt_template"] for name in ("prompt", "ground_truth", "response")
    )
    unread = read("environment.skyrl_gym.text2sql.db_path=/data", "+environment.skyrl_gym.gsm8k.method=flexible")
    assert [(one.key, one.reason) for one in unread.ignored] == [
        ("environment.skyrl_gym.text2sql", "environment.env_class is gsm8k")
    ]
    config = ("+environment.skyrl_gym.exact_match.extract=tag", "+environment.skyrl_gym.mine.level=5")
    ours = read("environment.env_class=exact_match", *config)
    assert ours.config.reward.terms[0].options == {"extract": "tag"}
    assert [one.key for one in ours.ignored] == ["environment.skyrl_gym.mine"]
    own = read("environment.env_class=mine", "+posttrain.reward.terms=[{path: mine.py, name: score}]")
    assert own.problems == ()
    assert own.config.reward.terms[0].path == "mine.py"
    assert [one.key for one in own.ignored] == ["environment.env_class"]


TURNS = (f"{G}.max_turns=3", f"{G}.max_input_length=2048", f"{G}.batched=false")


def test_several_turns_are_played_in_the_package() -> None:
    loaded = read(*TURNS, "environment.env_class=text2sql", "environment.skyrl_gym.text2sql.db_path=/data")
    assert loaded.problems == ()
    config = loaded.config
    assert config.reward.terms == [] and config.data.extra_columns == ["*"]
    assert config.environment.name == "skyrl_gym"
    assert config.environment.settings == {"env_class": "text2sql", "configs": {"text2sql": {"db_path": "/data"}}}
    assert (config.environment.max_turns, config.environment.end_at_max_turns) == (3, False)
    assert config.environment.max_context_tokens == 2048
    assert config.environment.conversation == "one_message"  # the default of June 2025


def test_one_turn_is_scored() -> None:
    loaded = read("environment.env_class=gsm8k", f"{G}.use_conversation_multi_turn=true")
    assert not loaded.config.environment.used
    assert [one.key for one in loaded.ignored] == [f"{G}.use_conversation_multi_turn"]


def test_an_environment_with_turns_of_its_own_is_played_whatever_max_turns_says() -> None:
    settings = read("environment.env_class=gsm8k_multi_turn").config.environment.settings
    assert settings == {"env_class": "gsm8k_multi_turn"}
    own = read("environment.env_class=my.worlds:Maze", "+environment.skyrl_gym.maze.size=3")
    assert own.problems == ()
    assert own.config.environment.settings == {"env_class": "my.worlds:Maze", "configs": {"maze": {"size": 3}}}


def test_batched_and_several_turns() -> None:
    loaded = read(*TURNS[:2])
    assert any("generator.batched=true, its default of June 2025, makes SkyRL step" in text for text in loaded.warnings)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("environment.env_class=lcb", "runs code that the model writes"),
        ("environment.env_class=serach", "skyrl-gym has no environment 'serach'"),
    ],
)
def test_environments_that_are_not_played(override: str, said: str) -> None:
    (problem,) = read(*TURNS, override).problems
    assert said in problem.what and problem.fix
    allowed = read(*TURNS, "environment.env_class=lcb", "+posttrain.environment.settings.allow_unboxed_code=true")
    assert allowed.problems == () and allowed.config.environment.settings["allow_unboxed_code"] is True


def test_a_registered_environment_that_is_misspelt_is_reported_once_with_its_name() -> None:
    loaded = read(*TURNS, "+posttrain.environment.settings.register.maze=my.worlds:Maze", "environment.env_class=mazee")
    (problem,) = loaded.problems
    assert (problem.field, problem.fix) == ("environment.env_class", "did you mean maze?")
    assert loaded.key("environment.settings.env_class") == "environment.env_class"


def test_here_runs_a_cluster_s_configuration_on_one_device() -> None:
    loaded = read(here=True)
    assert loaded.problems == loaded.unsupported == ()
    assert loaded.config.policy.sequences_per_mini_batch == 1280  # as on the cluster
    assert (loaded.config.placement.devices, loaded.config.rollout.engine) == (1, "native")
    elsewhere = read(*APART, f"{G}.run_engines_locally=false", here=True)
    assert elsewhere.problems == elsewhere.unsupported == ()
    assert elsewhere.config.rollout.endpoints == []


REMOTE = (*APART, f"{G}.run_engines_locally=false")


def test_servers_that_run_already_have_settings_of_their_own() -> None:
    """Two addresses are two samplers; what is about the start of a server has no effect and is told, where it was written."""
    urls = f"{G}.remote_inference_engine_urls=['127.0.0.1:8001','http://127.0.0.1:8002']"
    written = (f"{G}.gpu_memory_utilization=0.5", f"{G}.max_num_batched_tokens=100", f"{G}.weight_sync_backend=gloo")
    two = f"{G}.num_inference_engines=2"
    loaded = read(*REMOTE, urls, two, *written, f"{G}.inference_engine_tensor_parallel_size=2")
    assert loaded.problems == loaded.unsupported == ()
    assert loaded.config.rollout.endpoints == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
    assert (loaded.config.rollout.devices, loaded.config.placement.devices) == (None, 4)  # the policy's alone
    told = [text.partition(" has no effect")[0] for text in loaded.warnings if "run already" in text]
    assert told == [
        f"{G}.gpu_memory_utilization",
        f"{G}.max_num_batched_tokens",
        f"rollout.tensor_parallel (by {G}.inference_engine_tensor_parallel_size)",
    ]
    plain = read(*REMOTE, f"{G}.num_inference_engines=1")
    assert not [text for text in plain.warnings if "run already" in text]  # SkyRL's defaults are nobody's wish


def test_servers_on_other_machines_need_a_way_for_the_weights() -> None:
    (problem,) = read(*REMOTE, f"{G}.remote_inference_engine_urls=['10.0.0.7:8001']").problems
    assert "http://10.0.0.7:8001 is on another machine" in problem.what
    assert "rollout.weight_folder=/shared" in problem.fix and "rollout.weight_sync=collective" in problem.fix
    url = f"{G}.remote_inference_engine_urls=['10.0.0.7:8001']"
    assert read(*REMOTE, url, "+posttrain.rollout.weight_sync=collective").problems == ()


def test_later_names_of_servers_that_run_already() -> None:
    urls = "['http://127.0.0.1:8001','http://127.0.0.1:8002']"
    later = read(*APART, f"{E}.external_server_urls={urls}", f"{G}.remote_inference_engine_urls=[h:1]")
    assert later.problems == later.unsupported == ()
    assert [(one.key, one.reason) for one in later.ignored] == [
        (f"{G}.remote_inference_engine_urls", f"{E}.external_server_urls names the samplers")
    ]
    early = read(*REMOTE, f"{G}.remote_inference_engine_urls={urls}", f"{G}.num_inference_engines=2")
    assert later.config.rollout == early.config.rollout


def test_float32_is_told_where_skyrl_would_not_compute_in_it() -> None:
    assert read(f"{T}.bf16=false").warnings == (
        "trainer.bf16=false computes in float32 here; SkyRL's FSDP would still compute in bfloat16",
    )


def test_an_item_of_a_list_of_ours_cannot_be_named() -> None:
    problems = read("+posttrain.reward.terms.0.name=gsm8k").problems
    assert [problem.what for problem in problems] == ["terms must be a list, not a section"]


def test_the_versions_by_name() -> None:
    assert read_config(None, [], "skyrl@2025-08").config.loss.aggregation == "token_mean"
    assert read_config(None, [], "skyrl").config.loss.aggregation == "sequence_mean_token_mean"
    assert read_config(None, ["generator.batched=true"], None).dialect == "skyrl"


def test_the_mean_of_micro_batch_means_is_that_of_the_mini_batch_and_said() -> None:
    loaded = read(f"{AL}.loss_reduction=token_mean_legacy")
    assert loaded.problems == () and loaded.config.loss.aggregation == "token_mean"
    assert any("mean of micro-batch means" in text for text in loaded.warnings)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{T}.strategy=fsdp", f"{T}.policy.fsdp_config.cpu_offload=true"),
        (f"{G}.sampling_params.logprobs=0", f"{G}.batched=false"),
    ],
)
def test_what_the_files_of_2026_no_longer_refuse(overrides: tuple[str, ...]) -> None:
    assert read(*overrides).problems and read(*overrides, f"{E}.enforce_eager=true").problems == ()


def test_an_empty_name_of_a_run_is_skyrls_own() -> None:
    loaded = read(f"{T}.run_name=")
    assert loaded.problems == () and loaded.config.run.name == "test_run"
    assert any("trainer.run_name is empty" in text for text in loaded.warnings)


def test_objects_as_json_are_read() -> None:
    """SkyRL of 2026 reads its command line as YAML."""
    loaded = read(
        *APART, f"{G}.backend=vllm", f'{E}.engine_init_kwargs={{"swap_space": 5, "compilation": {{"level": 3}}}}'
    )
    assert loaded.problems == ()
    options = loaded.config.rollout.engine_options
    assert (options["swap_space"], options["compilation"]) == (5, {"level": 3})


def test_weights_beside_single_requests_are_those_of_later_versions() -> None:
    """SkyRL's asynchronous example of January 2026; that of August 2025 refuses the two together."""
    loaded = read(*TIS, f"{G}.batched=false")
    assert loaded.problems == () and loaded.config.loss.rollout_correction.weight_high == 2.0
    assert any("August and September 2025 refuses use_tis" in text for text in loaded.warnings)


@pytest.mark.parametrize("masked", [False, True])
def test_responses_of_a_fully_asynchronous_run_are_weighted(masked: bool) -> None:
    """SkyRL's own examples leave out what is far from the sampler, or nothing."""
    bounds = ("sequence_mask_metric=geometric", "geo_mask_low=0.99", "geo_mask_high=1.01")
    given = [f"{AL}.off_policy_correction.{each}" for each in bounds] if masked else []
    ahead = ("++trainer.fully_async.enabled=true", "++trainer.fully_async.max_staleness_steps=4")
    loaded = read(*APART, *ahead, f"{T}.policy_mini_batch_size=1024", f"{T}.train_batch_size=1024", *given)
    assert not [each for each in loaded.problems if "weights at the start of the step" in each.what]
    correction = loaded.config.loss.rollout_correction
    assert (correction.weights, correction.weight_high, bool(correction.reject)) == ("token", 2.0, masked)
    assert any("up to 4 steps older" in text for text in loaded.warnings)


def test_responses_sampled_a_step_ahead_are_weighted() -> None:
    """SkyRL's own example trains on them as they are."""
    ahead = "+posttrain.asynchronous.mode=one_step"
    loaded = read(ahead)
    assert loaded.problems == () and loaded.config.loss.rollout_correction.weights == "token"
    assert any("as trainer.algorithm.use_tis=true does" in text for text in loaded.warnings)
    assert read().config.loss.rollout_correction.weights == "none"


def test_traces_are_of_the_schedules_steps() -> None:
    profiler = f"{T}.policy.torch_profiler_config"
    loaded = read(
        f"{profiler}.enable=true", f"{profiler}.save_path=/p", f"{profiler}.skip_first=1", f"{profiler}.repeat=2"
    )
    assert loaded.problems == () and loaded.config.profiling.steps == [3, 5]
    assert loaded.config.profiling.phases == ["logprobs", "update"] and loaded.config.profiling.folder == "/p"


def test_merged_turns_need_turns_that_are_samples() -> None:
    turns = (f"{G}.max_turns=3", f"{G}.merge_stepwise_output=true")
    [problem] = read(*turns).problems
    assert problem.field == f"{G}.merge_stepwise_output" and "step_wise_trajectories=true" in problem.fix


def test_a_limit_of_episodes_counts_where_it_is_enabled() -> None:
    limit = (f"{G}.max_turns=3", f"{G}.rate_limit.max_concurrency=2", f"{G}.rate_limit.trajectories_per_second=5")
    assert read(*limit).config.environment.workers == 32
    assert read(*limit, f"{G}.rate_limit.enabled=true").config.environment.workers == 2


REGISTERED = """
from skyrl_gym.envs.registration import register

register(id="gsm8k", entry_point="skyrl_gym.envs.gsm8k.env:GSM8kEnv")
register(id="riddle", entry_point="skyrl_gym.envs.riddle.env:Riddle")
register(id="gone", entry_point="skyrl_gym.envs.gone.env:Gone")
"""


@pytest.mark.parametrize("beside", ["", "skyrl-train"])
def test_a_fork_registers_environments_in_its_skyrl_gym(tmp_path, monkeypatch, beside: str) -> None:
    package = tmp_path / "skyrl-gym/skyrl_gym/envs"
    (package / "riddle").mkdir(parents=True)
    (package / "riddle/env.py").write_text("class Riddle: ...\n")
    (package / "__init__.py").write_text(REGISTERED)
    (tmp_path / beside).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / beside)
    overrides = ("environment.env_class=riddle", "+environment.skyrl_gym.riddle.level=2")
    found = read_dialect(DIALECT, None, overrides)
    settings = found.config.environment.settings
    where = f"{'../' if beside else ''}skyrl-gym/skyrl_gym/envs/riddle/env.py:Riddle"
    assert (settings["env_class"], settings["register"]) == ("riddle", {"riddle": where})
    assert settings["configs"] == {"riddle": {"level": 2}}
    assert any("riddle is yours" in warning for warning in found.warnings)
    unknown = read_dialect(DIALECT, None, ("environment.env_class=gone",))
    assert any("no environment 'gone'" in problem.what for problem in unknown.problems)


LCB = (f"{P}.policy_num_gpus_per_node=8", f"{P}.ref_num_gpus_per_node=8", f"{G}.n_samples_per_prompt=5",
       f"{T}.train_batch_size=16", f"{T}.policy_mini_batch_size=4", f"{T}.micro_train_batch_size_per_gpu=2")  # fmt: skip


@pytest.mark.parametrize("here", [False, True])
def test_a_mini_batch_that_leaves_a_remainder_is_skyrls_of_2025(here: bool) -> None:
    """4 x 5 = 20 sequences over 8 devices: 20 // 8 = 2 each, so updates of 16; of a step's 16 x 5 = 80, 80 / 8 / 2 = 5 updates.
    The critic's 8 x 5 = 40 split: 5 each, which micro-batches of 1 divide."""
    engines = (f"{G}.num_inference_engines=2", f"{G}.inference_engine_tensor_parallel_size=4")
    read_here = read(*LCB, *engines, here=here)
    assert not read_here.problems
    plan, problems = plan_batches(read_here.config, None)
    assert not problems and plan is not None
    assert (plan.sequences_per_update, plan.updates_per_step) == (16, 5)
    assert any("5 updates of 16 sequences rather than 4 of 20" in each for each in read_here.warnings)
    assert not read_here.config.policy.uneven_shares


def test_a_mini_batch_that_leaves_a_remainder_is_padded_since_2026() -> None:
    """Rows without a token in the loss fill 20 sequences up to 24, so an update has 20 of them, over 8 devices 3 or 2 each."""
    read_2026 = read(*LCB, f"{E}.num_engines=2", f"{E}.tensor_parallel_size=4")
    assert not read_2026.problems and not any("updates of" in each for each in read_2026.warnings)
    plan, problems = plan_batches(read_2026.config, None)
    assert not problems and plan is not None
    assert (plan.sequences_per_update, plan.updates_per_step) == (20, 4)
    assert read_2026.config.policy.uneven_shares


def test_one_logprob_is_the_sampled_tokens() -> None:
    assert not read(f"{G}.sampling_params.logprobs=1").problems


@pytest.mark.parametrize("turns", [1, 3])
def test_an_environment_of_null_needs_a_program(turns: int) -> None:
    alone = read("environment.env_class=null", f"{G}.max_turns={turns}", f"{G}.batched=false")
    [problem] = [each for each in alone.problems if each.field == "environment.env_class"]
    assert "nothing says what scores the responses" in problem.what
    program = ("+posttrain.environment.name=skyrl_program", "+posttrain.environment.settings.file=a.py",
               "+posttrain.environment.settings.folder=.")  # fmt: skip
    played = read("environment.env_class=null", f"{G}.max_turns={turns}", f"{G}.batched=false", *program)
    assert not played.problems and played.config.environment.settings.get("env_class") is None


TRIAL = ("+posttrain.data.dataset_class_file=pkg://posttrain.data.full_length",
         "+posttrain.data.dataset_class_name=FullLengthPrompts", f"{T}.train_batch_size=512")  # fmt: skip


def test_a_trial_makes_its_rows_up_and_keeps_nothing() -> None:
    """One row per prompt of a step, of the longest prompt (512 tokens by default); its length is that of num_dummy_steps."""
    made = read(*TRIAL, f"{T}.num_dummy_steps=3", "data.train_data=[gone.parquet]", f"{T}.ckpt_interval=5")
    assert not made.problems
    config = made.config
    assert (config.data.train_files, config.data.dataset_class_options) == ([], {"rows": 512, "tokens": 512})
    assert (config.run.total_steps, config.rollout.ignore_eos, config.run.resume) == (3, True, "never")
    assert [term.name for term in config.reward.terms] == ["chance"]
    assert config.checkpoint.every_steps is None and not config.validation.before_training
    assert {"data.train_data", f"{T}.ckpt_interval"} <= {each.key for each in made.ignored}
    assert any("nothing is learned" in each for each in made.warnings)


PLAYED = (f"{G}.max_turns=2", f"{G}.batched=false", "environment.env_class=search")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((f"{T}.num_dummy_steps=0",), "num_dummy_steps must be at least 1, not 0"),
        ((), "num_dummy_steps must be at least 1, not None"),
        ((f"{T}.num_dummy_steps=3", *PLAYED), "a trial on made-up rows has one turn"),
    ],
)  # fmt: skip
def test_trials_that_cannot_be(given: tuple[str, ...], said: str) -> None:
    assert any(said in each.what for each in read(*TRIAL, *given).problems)


def test_steps_of_a_trial_are_ignored_in_another_run() -> None:
    plain = read(f"{T}.num_dummy_steps=3")
    assert not plain.problems and plain.config.run.total_steps is None
    assert f"{T}.num_dummy_steps" in {each.key for each in plain.ignored}

"""Files of verl 0.5 to 0.8 say things that those of 0.4 do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.detect import read_config
from posttrain.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
SIZES = (
    f"{A}.ppo_micro_batch_size_per_gpu=8",
    f"{R}.log_prob_micro_batch_size_per_gpu=8",
    "critic.ppo_micro_batch_size_per_gpu=8",
)


def read(tmp_path: Path, text: str, *overrides: str):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return read_config(str(file), [*SIZES, *overrides], "verl", here=True)


def test_what_is_open_below_a_section_that_is_off_is_no_error(tmp_path: Path) -> None:
    text = (
        "reward_model:\n  enable: False\n  rollout:\n    _target_: verl.workers.config.RolloutConfig\n    name: ???\n"
    )
    assert not read(tmp_path, text).problems


def test_what_a_file_of_verl_holds_gives_way_to_the_earlier_name(tmp_path: Path) -> None:
    """verl moves reward_model to reward: its reward_kwargs replace those that a recipe's file holds."""
    text = (
        "reward:\n  reward_manager: {name: dapo}\n  reward_kwargs:\n"
        "    overlong_buffer_cfg: {enable: False, len: 0, penalty_factor: 0.0}\n"
    )
    buffer = "+reward_model.reward_kwargs.overlong_buffer_cfg"
    loaded = read(tmp_path, text, f"{buffer}.enable=True", f"{buffer}.len=64", f"{buffer}.penalty_factor=0.5")
    assert not loaded.problems, loaded.problems
    assert loaded.config.reward.overlong_buffer_tokens == 64
    later = "+reward.reward_kwargs.overlong_buffer_cfg.len=32"
    problems = read(tmp_path, "{}", "reward_model.reward_manager=dapo", f"{buffer}.len=64", later).problems
    assert any("is the later name of" in problem.what for problem in problems)


def test_mindspeed_is_trained_by_megatron_and_named_in_messages(tmp_path: Path) -> None:
    section = f"+{A}.mindspeed"
    own = (f"{section}.strategy=mindspeed_llm", f"{section}.llm_kwargs.swiglu=true", f"{section}.grad_offload=True")
    split = (f"{section}.tensor_model_parallel_size=4", f"{section}.pipeline_model_parallel_size=2")
    file = tmp_path / "run.yaml"
    file.write_text("{}")
    eight = ("trainer.n_gpus_per_node=8", f"{R}.tensor_model_parallel_size=1", "data.train_batch_size=8", f"{R}.n=8")
    loaded = read_config(
        str(file), [*SIZES, *eight, f"{A}.ppo_mini_batch_size=8", "model_engine=mindspeed", *own, *split], "verl"
    )
    assert not loaded.problems, loaded.problems
    policy = loaded.config.policy
    assert (policy.engine, policy.tensor_parallel, policy.pipeline_parallel) == ("megatron", 4, 2)
    assert policy.engine_options == {"grad_offload": True}
    assert {f"{A}.mindspeed.strategy", f"{A}.mindspeed.llm_kwargs.swiglu"} <= {one.key for one in loaded.ignored}
    other = [
        *SIZES,
        *eight,
        f"{A}.ppo_mini_batch_size=8",
        "model_engine=mindspeed",
        f"{section}.tensor_model_parallel_size=3",
    ]
    problems = read_config(str(file), other, "verl").problems
    assert [problem.field for problem in problems] == [f"{A}.mindspeed.tensor_model_parallel_size"]


def test_a_plus_replaces_a_null(tmp_path: Path) -> None:
    """As in Hydra, which appends to what is there only where that is null."""
    text = "data: {seed: null}\n"
    assert not read(tmp_path, text, "+data.seed=3").problems
    [problem] = read(tmp_path, "data: {seed: 1}\n", "+data.seed=3").problems
    assert problem.what == "data.seed is there already"


def test_a_plus_twice_with_one_value_is_no_second_key(tmp_path: Path) -> None:
    twice = ["+actor_rollout_ref.model.override_config.max_position_embeddings=64"] * 2
    loaded = read(tmp_path, "{}", *twice)
    assert not loaded.problems and loaded.config.model.config_overrides == {"max_position_embeddings": 64}
    other = twice[0].replace("64", "32")
    [problem] = read(tmp_path, "{}", twice[0], other).problems
    assert "is there already" in problem.what


def test_a_key_below_a_reference_takes_its_place(tmp_path: Path) -> None:
    """As in OmegaConf: what stands behind the reference does not count any more."""
    section = f"{R}.engine_kwargs.vllm"
    text = (
        "actor_rollout_ref:\n  rollout:\n    name: vllm\n    mode: async\n    tensor_model_parallel_size: 1\n"
        "    engine_kwargs: {vllm: '${oc.select:own.arguments,{}}'}\nown: {arguments: {block_size: 16}}\n"
    )
    device = ("trainer.n_gpus_per_node=1", "posttrain.own_keys=[own.arguments.block_size]")
    file = tmp_path / "run.yaml"
    file.write_text(text)

    def options(*overrides: str) -> dict[str, object]:
        loaded = read_config(str(file), [*SIZES, *device, *overrides], "verl")
        assert not loaded.problems, loaded.problems
        return loaded.config.rollout.engine_options

    assert options()["block_size"] == 16
    found = options(f"++{section}.swap_space=4", f"+{section}.cpu_offload_gb=1")
    assert (found["swap_space"], found["cpu_offload_gb"]) == (4, 1) and "block_size" not in found
    [problem] = read(tmp_path, text, f"{section}.swap_space=4").problems
    assert f"++{section}.swap_space=4" in problem.fix


@pytest.mark.parametrize("shows", [f"{R}.mode=async", "ray_kwargs.ray_init.runtime_env.py_executable=python"])
def test_servers_prefill_in_pieces_and_take_arguments_twice(tmp_path: Path, shows: str) -> None:
    """Servers are the sampler of mode async, and of every verl from 0.7 on: there engine_kwargs replace what other keys say."""
    sampler = (f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1")
    few = (*SIZES, *sampler, f"{R}.max_num_batched_tokens=256", f"+{R}.engine_kwargs.vllm.max_model_len=300")
    loaded = read_config(None, [*few, shows], "verl")
    assert not loaded.problems
    options = loaded.config.rollout.engine_options
    assert (options["max_num_batched_tokens"], options["max_model_len"]) == (256, 300)
    old = [problem.what for problem in read_config(None, few, "verl").problems]
    assert len(old) == 2 and "gives it already" in old[0] + old[1]
    [problem] = read_config(None, [*few, shows, f"+{R}.engine_kwargs.vllm.tensor_parallel_size=2"], "verl").problems
    assert "tensor_model_parallel_size gives it already" in problem.what


def test_classes_of_verls_own_program_are_no_settings(tmp_path: Path) -> None:
    text = "actor_rollout_ref:\n  rollout:\n    multi_turn: {_target_: verl.x.MultiTurn}\n    n: 4\n"
    loaded = read(tmp_path, text)
    assert not loaded.problems and not loaded.unsupported


def test_keys_of_later_files_need_no_plus(tmp_path: Path) -> None:
    assert not read(tmp_path, "{}", "reward_model.use_reward_loop=True").problems
    [problem] = read(tmp_path, "{}", "reward_model.reward_kwargs.num_processes=4").problems
    assert "needs a +" in problem.fix


@pytest.mark.parametrize(
    ("more", "rules", "bounds"),
    [
        (("rollout_rs=token", "rollout_rs_threshold=4"), ["token_k1"], ["0.25_4.0"]),
        (("rollout_rs=sequence", "rollout_is_threshold=2"), ["sequence_sum_k1"], ["0.5_2.0"]),  # the weights' bound
        (  # of pi_old / pi_rollout, and k1 is the logarithm of its inverse: 1 / 4 and 1 / 0.5
            ("rollout_rs=geometric", "rollout_rs_threshold=4", "rollout_rs_threshold_lower=0.5"),
            ["sequence_mean_k1"],
            ["0.25_2.0"],
        ),
        (
            ("rollout_rs=token", "rollout_rs_threshold=2", "rollout_token_veto_threshold=0.25"),
            ["token_k1", "sequence_max_k1"],
            ["0.5_2.0", "1e-30_4.0"],
        ),
    ],
)
def test_rejections_as_0_6_writes_them(tmp_path: Path, more: tuple[str, ...], rules: list, bounds: list) -> None:
    loaded = read(tmp_path, "{}", *(f"{CORRECTION}.{one}" for one in more))
    assert not loaded.problems
    correction = loaded.config.loss.rollout_correction
    assert (correction.reject, correction.reject_bounds) == (rules, bounds)


FIRST = "algorithm: {rollout_is: %s, rollout_is_threshold: %s, rollout_is_level: sequence, rollout_is_mode: mask}\n"


@pytest.mark.parametrize(("on", "threshold"), [("false", "2.0"), ("true", "null")])
def test_the_correction_of_0_6_0_is_off_without_a_threshold_or_measured_only(
    tmp_path: Path, on: str, threshold: str
) -> None:
    read_as = read(tmp_path, FIRST % (on, threshold))
    assert not read_as.problems and read_as.config.loss.rollout_correction.weights == "none"


def test_the_correction_of_0_6_0_cuts_out_what_is_outside_its_two_thresholds(tmp_path: Path) -> None:
    """Without a lower one it is 1 / 4."""
    correction = read(tmp_path, FIRST % ("true", "4.0")).config.loss.rollout_correction
    assert (correction.weights, correction.weight_low, correction.weight_high) == ("sequence", 0.25, 4.0)
    assert not correction.reject


def test_an_empty_switch_is_off_as_in_verl_and_said(tmp_path: Path) -> None:
    loaded = read(tmp_path, "", f"{A}.use_kl_loss=")
    assert not loaded.problems and loaded.config.loss.kl_coef == 0
    assert any(f"{A}.use_kl_loss is empty, and is read as false" in text for text in loaded.warnings)


def test_names_of_samplers_that_are_no_more(tmp_path: Path) -> None:
    loaded = read_config(None, [*SIZES, f"{R}.name=sglang_async"], "verl")
    assert not loaded.problems and loaded.config.rollout.engine == "sglang"
    for here in (True, False):
        loaded = read_config(None, [*SIZES, f"{R}.name=trtllm", f"{R}.tensor_model_parallel_size=1"], "verl", here=here)
        assert not loaded.problems and loaded.config.rollout.engine == ("native" if here else "vllm")
    assert any("no sampler of TensorRT-LLM here; vLLM samples" in text for text in loaded.warnings)
    # Two of the four devices that split a layer
    split = (f"{R}.tensor_model_parallel_size=4", f"++{R}.expert_parallel_size=2")
    loaded = read(tmp_path, "", f"{R}.name=trtllm", *split)
    assert not loaded.problems and f"{R}.expert_parallel_size" in [each.key for each in loaded.ignored]


def test_bounds_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    rs = f"{CORRECTION}.rollout_rs"
    [problem] = read(tmp_path, "{}", f"{rs}=token", f"{rs}_threshold=2", f"{rs}_threshold_lower=3").problems
    assert problem.what == "no ratio is between 3 and 2"
    [problem] = read(tmp_path, "{}", f"{CORRECTION}.rollout_token_veto_threshold=0").problems
    assert problem.field == f"{CORRECTION}.rollout_token_veto_threshold"


def test_megatrons_words_for_the_optimizers_memory_change_nothing(tmp_path: Path) -> None:
    section = f"{A}.optim.override_optimizer_config"
    names = ("optimizer_cpu_offload=True", "use_precision_aware_optimizer=True", "fp8_recipe=blockwise")
    loaded = read(
        tmp_path, "{}", f"{A}.strategy=megatron", "critic.strategy=megatron", *(f"+{section}.{n}" for n in names)
    )
    assert not loaded.problems
    assert {f"{section}.{name.partition('=')[0]}" for name in names} <= {one.key for one in loaded.ignored}


def test_epochs_end_a_run_of_so_many_steps(tmp_path: Path) -> None:
    both = ("trainer.total_training_steps=40", "trainer.total_epochs=3")
    run = read(tmp_path, "{}", *both).config.run
    assert (run.total_steps, run.total_epochs, run.within_epochs) == (40, 3, True)
    run = read(tmp_path, "{}", "trainer.total_epochs=3").config.run
    assert (run.total_steps, run.total_epochs, run.within_epochs) == (None, 3, False)
    [problem] = read(tmp_path, "{}", "trainer.total_training_steps=40", "trainer.total_epochs=0").problems
    assert problem.field == "trainer.total_epochs"


def test_the_recipe_gkd_adds_no_two_divergences(tmp_path: Path) -> None:
    gkd = (
        "+rollout.nnodes=1",
        "+rollout.n_gpus_per_node=1",
        "actor_rollout_ref.hybrid_engine=False",
        "+actor_rollout_ref.teacher.server_port=15555",
    )
    [problem] = read(tmp_path, "{}", *gkd, f"+{A}.distill_loss.name=kl_rkl").problems
    assert problem.field == f"{A}.distill_loss.name" and "adds two divergences" in problem.what


class TestLaterFineTuning:
    """sft_trainer_engine.yaml."""

    def sft(self, *overrides: str, file: str = "sft_trainer_engine"):
        return read_config(file, ["data.train_files=a.parquet", *overrides], None, here=True)

    def test_the_file_is_known_by_its_name(self) -> None:
        loaded = self.sft("data.max_token_len_per_gpu=4096")
        config = loaded.config
        assert not loaded.problems and loaded.entry == "sft"
        assert (config.data.messages_column, config.policy.max_tokens_per_micro_batch) == ("messages", 4096)
        assert (config.policy.schedule.name, config.policy.schedule.warmup_ratio) == ("constant", 0.0)
        assert (config.policy.optimizer.lr, config.policy.optimizer.betas) == (1e-3, (0.9, 0.999))
        assert config.data.validation_files == []

    def test_the_earlier_trainer_reads_none_of_it(self) -> None:
        config = self.sft("optim.lr_scheduler_type=constant", file="sft_trainer").config
        assert config.policy.schedule.name == "cosine" and config.data.messages_column is None

    @pytest.mark.parametrize(
        ("engine", "lr", "schedule"),
        [("fsdp", 1e-3, "constant"), ("veomni", 1e-3, "cosine"), ("automodel", 1e-5, "cosine")],
    )
    def test_an_engine_s_files_are_chosen_by_their_names(self, engine: str, lr: float, schedule: str) -> None:
        """As scripts do, without a checkout of verl beside them: automodel's own learning rate is 1e-5."""
        loaded = self.sft(f"engine={engine}", f"optim={engine}", "model=hf_model", "optim.weight_decay=0.1")
        config = loaded.config
        assert not loaded.problems and config.policy.optimizer.weight_decay == 0.1
        assert (config.policy.optimizer.lr, config.policy.schedule.name) == (lr, schedule)

    def test_megatron_s_sizes_are_read_where_its_file_is_chosen(self) -> None:
        chosen = ["engine=megatron", "optim=megatron", "engine.tensor_model_parallel_size=2", "optim.min_lr=1e-4"]
        given = ["data.train_files=a.parquet", "optim.lr_decay_style=cosine", "trainer.n_gpus_per_node=2", *chosen]
        config = read_config("sft_trainer_engine", given, None).config
        assert (config.policy.tensor_parallel, config.policy.schedule.name) == (2, "cosine")
        assert config.policy.schedule.min_lr_ratio == pytest.approx(0.1)  # 1e-4 of 1e-3

    def test_a_file_that_verl_does_not_have_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"no option 'fsbp' of engine .*did you mean fsdp\?"):
            self.sft("engine=fsbp")

    def test_halved_precision_computes_with_full_trained_weights(self) -> None:
        loaded = self.sft("engine.dtype=fp16", "engine.model_dtype=fp16")
        assert (loaded.problems, loaded.config.model.compute_dtype) == ((), "float16")
        assert loaded.config.model.master_dtype == "float32"
        assert any(text.startswith("engine.model_dtype: the trained weights are float32") for text in loaded.warnings)

    def test_a_split_that_devices_do_not_have_is_refused(self) -> None:
        loaded = read_config(
            "sft_trainer_engine",
            ["data.train_files=a", "trainer.n_gpus_per_node=3", "engine.ulysses_sequence_parallel_size=2"],
            None,
        )
        assert "3 devices do not split into groups of 2" in loaded.problems[0].what


def test_tool_files_are_not_opened_with_skip_files() -> None:
    turns = f"{R}.multi_turn"
    keys = [*SIZES, f"{turns}.enable=True", f"{turns}.tool_config_path=/nowhere/tools.yaml"]
    [problem] = read_config(None, keys, "verl", here=True).problems
    assert "/nowhere/tools.yaml cannot be read" in problem.what
    loaded = read_config(None, keys, "verl", here=True, skip_files=True)
    assert not loaded.problems
    assert any("/nowhere/tools.yaml is not opened (--skip-files)" in text for text in loaded.warnings)


def test_a_second_draw_is_of_gae_alone() -> None:
    """As in verl, whose other estimators do not look at use_pf_ppo."""
    keys = ["algorithm.adv_estimator=grpo", "algorithm.use_pf_ppo=True", "algorithm.pf_ppo.weight_pow=3"]
    sizes = [
        f"actor_rollout_ref.{one}=8"
        for one in ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu", "rollout.n")
    ]
    loaded = read_config(None, [*keys, *sizes], "verl", here=True, skip_files=True)
    assert loaded.config.resampling.weights == "none"
    reasons = {one.key: one.reason for one in loaded.ignored}
    assert reasons["algorithm.use_pf_ppo"] == "verl draws again for gae alone, not for grpo"
    assert "algorithm.pf_ppo.weight_pow" in reasons


@pytest.mark.parametrize(("mode", "refused"), [("sync", 1), ("async", 0)])
def test_prefill_in_pieces_is_refused_where_verl_refuses_it(mode: str, refused: int) -> None:
    """Its servers, which mode async starts, leave the limit to vLLM; the sampler of mode sync stops."""
    section = "actor_rollout_ref"
    keys = [
        f"{section}.rollout.max_num_batched_tokens=100",
        f"{section}.rollout.mode={mode}",
        "trainer.n_gpus_per_node=1",
    ]
    sizes = [
        f"{section}.{one}_per_gpu=8" for one in ("actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size")
    ]
    group = [
        "algorithm.adv_estimator=grpo",
        f"{section}.rollout.n=8",
        f"{section}.rollout.tensor_model_parallel_size=1",
    ]
    loaded = read_config(None, [*keys, *sizes, *group, f"{section}.rollout.name=vllm"], "verl", skip_files=True)
    assert sum("tokens in one pass are fewer" in str(one) for one in loaded.problems) == refused


def test_settings_of_speed_alone_leave_a_plan_that_trains() -> None:
    """They are reported as ignored, each with its reason."""
    section = "actor_rollout_ref.rollout"
    asked = {f"{section}.over_sample_rate": "0.1", f"{section}.trace.backend": "mlflow"}
    asked["algorithm.filter_groups.max_inflight_gen_batches"] = "4"
    sizes = [
        f"actor_rollout_ref.{one}=8"
        for one in ("actor.ppo_micro_batch_size_per_gpu", "rollout.log_prob_micro_batch_size_per_gpu", "rollout.n")
    ]
    keys = [f"+{key}={value}" for key, value in asked.items()]
    loaded = read_config(None, ["algorithm.adv_estimator=grpo", *sizes, *keys], "verl", here=True, skip_files=True)
    assert not loaded.problems and not loaded.unsupported
    assert {one.key for one in loaded.ignored if one.asks} >= set(asked)


def test_here_keeps_the_tokens_that_devices_pooled_for_a_sequence() -> None:
    """Two devices share a sequence, each with 24,000 tokens: one device takes micro-batches of 48,000."""
    overrides = [
        "data.train_files=a.parquet", "data.max_prompt_length=2048", "data.max_response_length=32768",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.enable_chunked_prefill=False",
        "actor_rollout_ref.model.use_remove_padding=True",
    ]  # fmt: skip
    loaded = read_config(None, overrides, "verl", here=True)
    assert loaded.problems == ()
    assert loaded.config.policy.max_tokens_per_micro_batch == 48_000
    assert any("48000 instead of 24000" in change for change in loaded.changes)


SCORED = ("reward_model.enable=True", "reward_model.micro_batch_size_per_gpu=4")


def test_a_reward_model_is_sharded_where_there_are_devices_to_share_it() -> None:
    two = read_config(None, [*SIZES, *SCORED, "trainer.n_gpus_per_node=2"], "verl").config.reward.model
    assert two.engine == "fsdp" and two.engine_options["fsdp_size"] == -1
    one = read_config(None, [*SIZES, *SCORED, "trainer.n_gpus_per_node=1"], "verl").config.reward.model
    assert (one.engine, one.engine_options) == ("local", {})
    here = read_config(None, [*SIZES, *SCORED, "trainer.n_gpus_per_node=2"], "verl", here=True).config.reward.model
    assert (here.engine, here.engine_options) == ("local", {})


def test_arguments_of_the_manager_batch_reach_its_function() -> None:
    keys = (
        "reward_model.reward_manager=batch",
        "custom_reward_function.path=my.py",
        "+reward_model.reward_kwargs.scale=2",
    )
    loaded = read_config(None, [*SIZES, *keys], "verl", here=True)
    [term] = loaded.config.reward.terms
    assert not loaded.unsupported and term.batched and term.options == {"scale": 2}
    naive = read_config(None, [*SIZES, "+reward_model.reward_kwargs.scale=2"], "verl", here=True)
    [problem] = naive.problems
    assert problem.what == "verl's reward manager naive takes no argument scale"
    assert problem.fix.startswith("+custom_reward_function.reward_kwargs.scale")
    misspelt = read_config(None, [*SIZES, "+reward_model.reward_kwargs.max_resp_lens=8"], "verl", here=True)
    [problem] = misspelt.problems
    assert problem.fix.startswith("did you mean reward_model.reward_kwargs.max_resp_len? If it is a function's, +")


def test_adapters_in_megatrons_words(tmp_path: Path) -> None:
    lora = "actor_rollout_ref.model.lora"
    found = read(tmp_path, "", f"{lora}.rank=8").config.policy.lora
    assert (found.rank, found.alpha) == (8, 32.0)
    assert found.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert read(tmp_path, "", f"{lora}.rank=0").config.policy.lora is None
    [problem] = read(tmp_path, "", f"{lora}.rank=8", f"{lora}.target_modules=[linear_qvk]").problems
    assert "names 'linear_qvk', which is no kind of layer" in problem.what


def test_a_default_that_the_file_repeats_gives_way_to_the_other_name(tmp_path: Path) -> None:
    """verl's own files of 2026 hold router_replay.mode twice, and its scripts override one of them."""
    both = f"{A}.megatron.router_replay.mode", f"{A}.router_replay.mode"
    text = (
        "actor_rollout_ref: {actor: {router_replay: {mode: disabled}, megatron: {router_replay: {mode: disabled}}}}\n"
    )
    for key in both:
        loaded = read(tmp_path, text, f"{key}=R2", f"{A}.strategy=megatron", "critic.strategy=megatron")
        assert not [one for one in loaded.problems if "router_replay" in one.what]
        assert loaded.config.policy.routing_replay
    clash = read(tmp_path, text, f"{both[0]}=R2", f"{both[1]}=R3")
    assert any("is the later name of" in one.what for one in clash.problems)


def test_a_checkout_of_verl_whose_samplers_are_servers_prefills_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.7 verl refuses fewer tokens in one pass than the longest sequence has; its servers leave them to vLLM."""
    words = [*SIZES, f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1", f"{R}.max_num_batched_tokens=64"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verl/version").mkdir(parents=True)
    for version, problems in (("0.6.1", 1), ("0.7.0", 0)):
        (tmp_path / "verl/version/version").write_text(version)
        found = read_config(None, [*words, f"{R}.enable_chunked_prefill=True"], "verl").problems
        assert len(found) == problems and all("in one pass are fewer than" in each.what for each in found)


def test_a_sampler_that_would_round_its_weights_does_not(tmp_path: Path) -> None:
    loaded = read(tmp_path, "", f"+{R}.quantization=fp8")
    assert not loaded.problems
    (said,) = [each.reason for each in loaded.ignored if each.key == f"{R}.quantization"]
    assert "from the policy that learns" in said


@pytest.mark.parametrize(
    ("default", "name", "said"),
    [
        ("seeker", "agent_loop", ""),
        ("plain", "single_turn", ""),
        (None, "single_turn", ""),
        ("seker", "single_turn", "did you mean seeker"),
    ],
)
def test_agent_loops_of_a_file_play_the_rows_that_name_them(default: str | None, name: str, said: str) -> None:
    more = [] if default is None else [f"actor_rollout_ref.rollout.agent.default_agent_loop={default}"]
    file = Path(__file__).parent / "verl_documents/loops.yaml"
    loops = [f"{R}.mode=async", "data.max_response_length=77", f"{R}.agent.agent_loop_config_path={file}"]
    loaded = read_config(None, [*SIZES, *loops, *more], "verl", here=True)
    if said:
        [problem] = loaded.problems
        assert said in problem.fix
        return
    environment = loaded.config.environment
    assert (environment.name, environment.column) == (name, "agent_name")
    # Neither turns nor conversations beside the output are counted against its length
    assert (environment.max_turns, environment.max_trajectory_tokens) == (None, None)
    named = environment.named
    assert named["plain"].name == named["single_turn_agent"].name == "single_turn"
    settings = named["seeker"].settings
    assert (settings["class_name"], settings["arguments"]) == ("my_loops.Seeker", {"most_questions": 3})
    # verl's own configuration, with its defaults, and keys that refer to others
    rollout = settings["config"]["actor_rollout_ref"]["rollout"]
    assert (rollout["response_length"], rollout["temperature"]) == (77, 1.0)

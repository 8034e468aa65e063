"""Keys of the user's own: listed together, dropped on request, and never where they look like a misspelling or a count."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.dialects.detect import read_config
from posttrain.dialects.reading import read_dialect
from posttrain.dialects.roll import DIALECT as ROLL
from posttrain.dialects.verl import DIALECT as VERL
from posttrain.dialects.verl.ledger import LEDGER
from posttrain.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SIZES = (
    f"{A}.ppo_micro_batch_size_per_gpu=8",
    f"{R}.log_prob_micro_batch_size_per_gpu=8",
    "critic.ppo_micro_batch_size_per_gpu=8",
)


def read(*overrides: str, drop: bool = False, dialect: str = "verl"):
    return read_config(None, [*SIZES, *overrides], dialect, here=True, drop_unknown=drop)


def test_all_own_keys_are_listed_with_the_way_on() -> None:
    loaded = read("do_search=true", f"{A}.state_masking=true", "+retriever.url=http://localhost")
    assert [problem.what for problem in loaded.problems] == [
        f"there is no key {key} in verl 0.4 or later: it is yours, not verl's"
        for key in ("do_search", f"{A}.state_masking", "retriever.url")
    ]
    assert [problem.fix for problem in loaded.problems] == [
        "",
        "",
        f"without these 3 keys: --drop-unknown, or +posttrain.own_keys=[do_search,{A}.state_masking,retriever.url]",
    ]


def test_drop_unknown_goes_on_and_names_each_in_the_notes() -> None:
    loaded = read("do_search=true", "+retriever.url=x", drop=True)
    assert not loaded.problems and not loaded.unsupported
    reason = "it is yours, not verl's, and is dropped (--drop-unknown)"
    assert [(one.key, one.reason) for one in loaded.ignored if "yours" in one.reason] == [
        ("do_search", reason),
        ("retriever.url", reason),
    ]


def test_the_list_of_own_keys_drops_what_it_names_sections_too() -> None:
    loaded = read("do_search=true", "+retriever.url=x", "+posttrain.own_keys=[retriever]")
    assert [problem.field for problem in loaded.problems] == ["do_search"]
    assert not read("do_search=true", "+retriever.url=x", "+posttrain.own_keys=[retriever,do_search]").problems


def test_the_list_names_only_own_keys() -> None:
    [problem] = read(f"+posttrain.own_keys=[{A}.optim.lr]").problems
    assert problem.what == f"posttrain.own_keys names {A}.optim.lr, which is verl's and is read"
    [problem] = read("+posttrain.own_keys=do_search").problems
    assert problem.what == "posttrain.own_keys must be a list of keys"


@pytest.mark.parametrize(
    ("override", "confirms"),
    [
        ("+algorithm.format_coef=0.1", True),
        ("+data.buffer_size=64", True),
        (f"+{A}.second_lr=1e-5", True),
        ("+env.num_envs=4", True),
        ("+algorithm.format_coef=0", False),  # off
        ("+algorithm.format_coef=null", False),
        ("+algorithm.format_style=0.1", False),  # no word of a count, size or factor
        ("+env.num_workers=4", False),  # of processes that read rows
        ("+env.workers_batch_size=4", True),
        ("+env.use_batch=true", False),
        ("+env.size_name=large", False),
    ],
)
def test_a_dropped_word_about_a_number_is_confirmed_by_name(override: str, confirms: bool) -> None:
    loaded = read(override, drop=True)
    key = override.lstrip("+").partition("=")[0]
    assert not loaded.problems
    assert [problem.field for problem in loaded.unsupported] == [key] * confirms
    for problem in loaded.unsupported:
        assert problem.fix == f"confirm that by name: +posttrain.own_keys=[{key}]"
    assert not read(override, f"+posttrain.own_keys=[{key}]", drop=True).unsupported


def test_the_confirmation_names_the_number_beside() -> None:
    [problem] = read(f"+{R}.n_agent=5", drop=True).unsupported
    assert problem.what.startswith(f"{R}.n_agent=5, which stands beside {R}.n")


def test_a_group_of_one_is_refused_beside_a_dropped_count() -> None:
    grpo = ("algorithm.adv_estimator=grpo", f"+{R}.n_agent=5")
    for more in ((), (f"+posttrain.own_keys=[{R}.n_agent]",)):  # naming it does not make a baseline
        [problem] = read(*grpo, *more, drop=True).problems
        assert problem.what.startswith("a group of one has no baseline: grpo compares the responses to a prompt")
        assert problem.fix == f"say how many responses a prompt gets, such as {R}.n=5"
    assert not read(*grpo, f"{R}.n=5", drop=True).problems
    assert not read(f"+{R}.n_agent=5", drop=True).problems  # PPO has a critic


def test_what_looks_misspelt_is_not_dropped_unless_it_is_named() -> None:
    wrong = f"{A}.ppo_mini_bach_sise=4"
    [problem] = read(wrong, drop=True).problems
    assert problem.fix.startswith(f"did you mean {A}.ppo_mini_batch_size? If it is yours, name it:")
    assert not read(wrong, f"+posttrain.own_keys=[{A}.ppo_mini_bach_sise]").problems
    [problem] = read("actor_rollout_ref.model.ptah=mine", drop=True).problems  # of four letters, two are swapped
    assert problem.fix.startswith("did you mean actor_rollout_ref.model.path?")


@pytest.mark.parametrize(
    ("key", "dialect", "others"),
    [
        (f"{A}.clip_ratio_high", "verl@0.2", "it came with verl 0.4"),
        ("data.partial_pretrain", "verl", "it is yours"),
        ("optim.lr_scheduler", "verl", "it is one of posttrain sft"),
    ],
)
def test_a_key_of_another_version_or_entry_point_says_so(key: str, dialect: str, others: str) -> None:
    loaded = read_config(None, [*SIZES, "data.val_batch_size=8", f"{key}=1"], dialect)
    [problem] = [one for one in loaded.problems if one.field == key or key in one.what]
    assert others in problem.what and "did you mean" not in problem.fix


def test_a_suggestion_never_means_something_else() -> None:
    table = LEDGER.at("0.2").of("train")
    for key in (f"{A}.clip_ratio_high", f"{A}.clip_ratio_low", "retrieval.path", "data.max_start_length"):
        assert table.nearest(key) == []
    assert table.nearest(f"{A}.clip_ratoi") == [f"{A}.clip_ratio"]
    assert LEDGER.of("train").nearest("custom_reward_functions.path") == ["custom_reward_function.path"]


def test_helpers_that_other_keys_refer_to_are_no_unknown_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "samples: 4\nsizes: {mini: 64, other: 3}\n"
        "actor_rollout_ref:\n  rollout: {n: '${samples}'}\n  actor: {ppo_mini_batch_size: '${sizes.mini}'}\n"
    )
    loaded = read_config(str(file), SIZES, "verl", here=True)
    assert [problem.field for problem in loaded.problems] == ["sizes.other"]
    assert loaded.config.rollout.samples_per_prompt == 4


def test_free_sections_suggest_the_key_that_was_meant() -> None:
    [problem] = read_config(None, ["generator.sampling_params.tom_p=0.9"], "skyrl", here=True).problems
    assert problem.fix.startswith("did you mean generator.sampling_params.top_p?")


def test_a_native_file_has_no_keys_to_drop() -> None:
    with pytest.raises(ConfigError, match="every key of a native one is read"):
        read_config(None, ["model.path=m"], "native", drop_unknown=True)


class TestVersions:
    def test_a_plus_that_the_own_version_does_not_take_shows_an_earlier_one(self) -> None:
        loaded = read("+trainer.val_before_train=False", "data.val_batch_size=8")
        assert loaded.dialect == "verl@0.2"
        assert loaded.warnings[0] == (
            "read as verl 0.2: trainer.val_before_train does not fit verl 0.4; --dialect verl@0.4 reads it as that"
        )

    def test_where_keys_fit_several_the_checkout_says_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "verl/version").mkdir(parents=True)
        (tmp_path / "verl/version/version").write_text("0.2.0.post2\n")
        monkeypatch.chdir(tmp_path)
        both = read_config(None, ["data.val_batch_size=8", f"{A}.ppo_micro_batch_size_per_gpu=8"], "verl")
        assert both.dialect == "verl@0.2" and "verl/version/version says 0.2.0.post2" in both.warnings[0]
        later = read_config(None, [f"{A}.ppo_micro_batch_size_per_gpu=8", "trainer.val_before_train=False"], "verl")
        assert later.dialect == "verl"

    @pytest.mark.parametrize(("name", "field"), [("trust_remote_code", "trust_remote_code"), ("use_liger", "liger")])
    def test_what_its_code_reads_besides_its_file_needs_a_plus_there(self, name: str, field: str) -> None:
        """verl 0.2's workers read both with ``.get``, and its ppo_trainer.yaml holds neither."""
        asked = f"actor_rollout_ref.model.{name}=True"
        loaded = read_config(None, [*SIZES, f"+{asked}"], "verl@0.2")
        assert getattr(loaded.config.model, field) is True
        plain = read_config(None, [*SIZES, asked], "verl@0.2")
        assert name in plain.problems[0].what and "needs a +" in plain.problems[0].fix

    def test_keys_of_both_leave_the_usual_one(self) -> None:
        loaded = read("+trainer.val_before_train=False", f"{A}.clip_ratio_high=0.3")
        assert loaded.dialect == "verl"

    def test_a_file_of_the_first_version_is_told_by_its_values(self, tmp_path: Path) -> None:
        file = tmp_path / "run.yaml"
        for micro, version in ((64, "verl@0.1"), ("null", "verl@0.2")):
            file.write_text(
                "actor_rollout_ref:\n  actor:\n    fsdp_config: {grad_offload: False}\n"
                f"    ppo_micro_batch_size: {micro}\n"
            )
            assert read_config(str(file), [], None).dialect == version

    def test_keys_of_skyrl_of_august_take_its_defaults(self) -> None:
        loaded = read_config(None, ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=2"], "skyrl")
        assert loaded.dialect == "skyrl@2025-08"
        assert loaded.config.validation.temperature == 0

    @pytest.mark.parametrize("version", ["0.1", "0.2"])
    def test_checks_that_came_later_are_not_made(self, version: str) -> None:
        loaded = read_config(
            None,
            [
                *("data.train_batch_size=16", f"{R}.max_num_batched_tokens=256", "+trainer.val_only=False"),
                *(f"{A}.ppo_mini_batch_size=64", f"{A}.ppo_micro_batch_size=8", "critic.ppo_micro_batch_size=8"),
                *(f"{R}.log_prob_micro_batch_size=8", "actor_rollout_ref.ref.log_prob_micro_batch_size=8"),
            ],
            f"verl@{version}",
            here=True,
        )
        assert not loaded.problems and not [one for one in loaded.unsupported if "val_only" in one.field]
        assert loaded.config.policy.sequences_per_mini_batch == 16  # all prompts of an iteration


def test_zero_checkpoints_to_keep_are_all_of_them() -> None:
    assert read("trainer.max_actor_ckpt_to_keep=0").config.checkpoint.keep_last is None


def test_arguments_of_a_manager_of_ones_own_are_dropped_and_named() -> None:
    arguments = ("reward_model.reward_kwargs.mode=train", "reward_model.reward_kwargs.n_votes=4")
    loaded = read(*arguments, drop=True)
    assert not loaded.problems
    assert [one.key for one in loaded.ignored if "yours" in one.reason] == [one.partition("=")[0] for one in arguments]
    assert [one.field for one in loaded.unsupported] == ["reward_model.reward_kwargs.n_votes"]
    assert not read(*arguments, "+posttrain.own_keys=[reward_model.reward_kwargs.n_votes]", drop=True).unsupported
    assert len(read(*arguments).problems) == 2
    # what is read stays read
    buffer = "++reward_model.reward_kwargs.overlong_buffer_cfg"
    kept = (f"{buffer}.enable=true", f"{buffer}.len=64", "reward_model.reward_manager=dapo")
    assert read(*arguments, *kept, drop=True).config.reward.overlong_buffer_tokens == 64


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        (f"{R}.name=vllm_with_search", "a sampler of your own: use vllm; for its tools,"),
        (
            "reward_model.reward_manager=votes",
            "a manager of your own: name the file that holds it with +reward_manager.module.path=FILE",
        ),
    ],
)
def test_a_value_of_ones_own_code_is_refused_with_what_to_write(override: str, fix: str) -> None:
    [problem] = read(override, drop=True).problems
    assert problem.field == override.partition("=")[0] and problem.fix.startswith(fix)


def test_a_misspelt_choice_is_still_guessed() -> None:
    [problem] = read(f"{R}.name=vlm").problems
    assert problem.fix == "did you mean vllm?"


@pytest.mark.parametrize("dialect", ["verl", "verl@0.2", "verl@0.1"])
def test_an_empty_variable_of_a_script_is_named_and_nothing_else(dialect: str) -> None:
    """Sizes that need the number of devices are not compared with a number that nobody wrote."""
    empty = ["trainer.n_gpus_per_node", f"{R}.tensor_model_parallel_size", "trainer.experiment_name"]
    sizes = ["data.train_batch_size=12", f"{A}.ppo_mini_batch_size=6"]
    loaded = read_config(None, [*SIZES, *sizes, *(f"{key}=" for key in empty)], dialect)
    assert {(one.field, one.what, one.fix) for one in loaded.problems} == {
        (key, f"{key} is empty", "was a variable of the script not set?") for key in empty[:2]
    }
    assert any("trainer.experiment_name is empty, and the run is called gsm8k" in text for text in loaded.warnings)


def test_an_empty_text_where_it_means_nothing_is_no_error() -> None:
    assert not read("trainer.default_hdfs_dir=").problems


CHUNKED = ("data.max_response_length=16384", "data.max_prompt_length=2048", f"{A}.use_dynamic_bsz=True",
           f"{A}.ppo_max_token_len_per_gpu=20000", "algorithm.adv_estimator=grpo", f"{R}.n=8")  # fmt: skip


def test_a_forks_launch_needs_no_plus_before_known_keys_when_own_keys_are_dropped() -> None:
    key = "trainer.remove_previous_ckpt_in_save"  # in the file of verl 0.2, not in that of 0.4
    launch = ("do_search=true", f"{key}=True", "+trainer.esi_redundant_time=5", f"{A}.policy_loss.loss_mode=gpg")
    assert [problem.what.partition(" is not in ")[0] for problem in read(*launch).problems][1:] == [key]
    assert read(*launch, drop=True).problems == ()
    # A misspelling is one all the same.
    [problem] = read(*launch, f"{A}.ppo_epoch=2", drop=True).problems
    assert "did you mean" in problem.fix


def test_a_check_of_later_verl_is_a_warning_for_a_fork() -> None:
    said = "with enable_chunked_prefill, 8192 tokens in one pass are fewer than the 18432"
    assert [said in problem.what for problem in read(*CHUNKED).problems] == [True]
    fork = read(*CHUNKED, "do_search=true", drop=True)
    assert fork.problems == () and any(said in warning for warning in fork.warnings)
    written = read(*CHUNKED, "do_search=true", f"{R}.max_num_batched_tokens=8192", drop=True)
    assert written.problems == () and any(said in warning for warning in written.warnings)


def test_a_null_of_a_forks_own_file_goes_whatever_it_is_called() -> None:
    key = "actor_rollout_ref.model.custom_chat_template_path"
    assert read(f"+{key}=null", drop=True).problems == ()
    [problem] = read(f"+{key.removesuffix('_path')}s=mine", drop=True).problems
    assert "did you mean actor_rollout_ref.model.custom_chat_template?" in problem.fix


def test_a_number_is_a_name_too() -> None:
    assert read("trainer.experiment_name=1").config.run.name == "1"


@pytest.mark.parametrize("version", ["0.1", "0.2", "0.4"])
def test_numbers_of_a_forks_validation_count(version: str) -> None:
    """rllm, Skywork-OR1 and LUFFY repeat every validation prompt n_val times, and sample at val_temperature."""
    loaded = read(f"{R}.n_val=8", f"{R}.val_temperature=0.6", dialect=f"verl@{version}")
    assert not [problem for problem in loaded.problems if "val" in problem.field]
    assert (loaded.config.validation.samples_per_prompt, loaded.config.validation.temperature) == (8, 0.6)
    assert read(f"{R}.n_val=8", dialect=f"verl@{version}").config.validation.temperature == 0


def test_verls_own_numbers_of_validation_win_over_a_forks() -> None:
    own = (f"{R}.val_kwargs.n=4", f"{R}.val_kwargs.do_sample=True", f"{R}.val_kwargs.temperature=1.0")
    loaded = read(f"{R}.n_val=8", f"{R}.val_temperature=0.6", *own)
    assert (loaded.config.validation.samples_per_prompt, loaded.config.validation.temperature) == (4, 1.0)
    assert {one.key for one in loaded.ignored} >= {f"{R}.n_val", f"{R}.val_temperature"}


@pytest.mark.parametrize(("key", "value", "theirs"), [("n_agent", 5, f"{R}.n=5")])
def test_words_of_known_forks_name_verls_own_key(key: str, value: float, theirs: str) -> None:
    loaded = read(f"+{R}.{key}={value}", f"{R}.n=4", drop=True)
    [problem] = loaded.unsupported
    assert (
        problem.fix
        == f"verl's key for it is {theirs}; or confirm by name that it may go: +posttrain.own_keys=[{R}.{key}]"
    )


def test_arguments_of_a_manager_whose_file_is_named_are_its_options() -> None:
    launch = ("custom_reward_function.path=my.py", "reward_model.reward_manager=votes")
    arguments = ("+reward_model.reward_kwargs.mode=train", "+reward_model.reward_kwargs.n_votes=4")
    for drop in (False, True):
        loaded = read(*launch, *arguments, drop=drop)
        assert not loaded.problems and not loaded.unsupported
        [term] = loaded.config.reward.terms
        assert (term.name, term.kind, term.options) == ("votes", "manager", {"mode": "train", "n_votes": 4})
        assert not [one for one in loaded.ignored if "reward_kwargs" in one.key]


SLIPS = [
    ("verl", "+actor_rollout_ref.ref.megatron.tensor_model_parallelq_size=2", "tensor_model_parallel_size"),
    ("verl", "+actor_rollout_ref.actor.megatron.context_parillel_size=2", "context_parallel_size"),
    ("roll", "+teacher.data_args.temlpate=qwen3", "teacher.data_args.template"),
    ("roll", "+teacher.ddevice_mapping='[0]'", "teacher.device_mapping"),
    ("roll", "+checkpoint_config.outputu_dir=out", "checkpoint_config.output_dir"),
    ("roll", "+validation.generating_args.temperatuure=1", "validation.generating_args.temperature"),
    (
        "roll",
        "+actor_train.strategy_args.strategy_config.tensoromodel_parallel_size=2",
        "strategy_config.tensor_model_parallel_size",
    ),
]


@pytest.mark.parametrize(("peer", "written", "meant"), SLIPS)
def test_a_slip_below_a_section_that_takes_any_name_is_named(peer: str, written: str, meant: str) -> None:
    loaded = read_dialect({"verl": VERL, "roll": ROLL}[peer], None, [written])
    key = written.lstrip("+").partition("=")[0]
    told = [*loaded.warnings, *map(str, loaded.problems)]
    assert any(key in text and f"{meant}?" in text for text in told), told


def test_a_slip_in_a_section_that_refers_to_another_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(
        "actor_train: {strategy_args: {strrtegy_config: '${deepspeed_zero3}'}}\n"
        "deepspeed_zero3: {zero_optimization: {stage: 3, overlap_comm: true}}\n"
    )
    told = [text for text in read_dialect(ROLL, str(file), []).warnings if "strrtegy_config" in text]
    assert len(told) == 1 and "did you mean actor_train.strategy_args.strategy_config" in told[0], told


@pytest.mark.parametrize(
    ("dialect", "wrote", "meant"),
    [
        ("verl", "data.files_train=a.parquet", "data.train_files"),  # the same words in another order
        ("skyrl", "generator.engine_hnit_kwargs={swap_space: 4}", "generator.engine_init_kwargs.swap_space"),
        ("verl", "+reward_model.model.overrideConfig={rope_theta: 5}", "reward_model.model.override_config.rope_theta"),
    ],
)
def test_a_misspelt_section_is_found_also_where_the_user_names_what_is_in_it(
    dialect: str, wrote: str, meant: str
) -> None:
    [problem] = [one for one in read_config(None, [wrote], dialect).problems if wrote in one.where]
    assert problem.fix == f"did you mean {meant}?"


def test_a_key_without_its_first_section_is_that_of_the_first_section_of_the_table() -> None:
    [warning] = [one for one in read_config(None, ["training_args.adam_beta2=0.9"], "roll").warnings if "adam" in one]
    assert "(did you mean actor_train.training_args.adam_beta2?)" in warning


def test_a_key_that_another_entry_point_has_and_this_one_below_a_section() -> None:
    found = read_config(None, ["algorithm.adv_estimator=grpo", "data.train_batch_size=8", "rollout.name=hf"], "verl")
    [problem] = [one for one in found.problems if "rollout.name=hf" in one.where]
    assert problem.fix == "did you mean actor_rollout_ref.rollout.name?"


def test_a_key_of_a_fork_names_the_file_of_what_verls_key_holds() -> None:
    """Where no version has KEY_path, and our own section reads KEY from a file."""
    key = "actor_rollout_ref.model.custom_chat_template"
    loaded = read(f"+{key}_path=chat.jinja")
    assert not loaded.problems and loaded.config.model.chat_template_file == "chat.jinja"
    assert any(
        f"{key}_path is yours, and is read as posttrain.model.chat_template_file" in text for text in loaded.warnings
    )
    assert "is yours" in read("+trainer.experiment_name_path=x").problems[0].what


def test_a_misspelt_true_is_true_and_a_misspelt_false_is_refused() -> None:
    """In Python both are true, which a misspelt false does not mean."""
    loaded = read("trainer.val_before_train=ture")
    assert not loaded.problems and any("'ture', a misspelling, and is read as true" in text for text in loaded.warnings)
    assert "must be bool, not 'flase'" in read("trainer.val_before_train=flase").problems[0].what


def test_a_word_of_a_fork_that_says_what_verls_own_key_says_needs_no_name() -> None:
    """n_agent=1 beside n=1: without it the run is the same. n_agent=5 is another run."""
    dropped = read(f"+{R}.n_agent=1", drop=True)
    assert dropped.unsupported == () and any(one.key == f"{R}.n_agent" for one in dropped.ignored)
    assert read(f"+{R}.n_agent=5", f"{R}.n=5", drop=True).unsupported == ()
    assert len(read(f"+{R}.n_agent=5", f"{R}.n=4", drop=True).unsupported) == 1


def test_a_plus_before_a_key_that_only_the_peers_own_file_holds_is_no_error_for_a_fork() -> None:
    """verl 0.4's generation.yaml holds rollout.disable_log_stats, an earlier one does not."""
    given = ["data.path=a.parquet", "model.path=m", "+rollout.disable_log_stats=False"]
    [problem] = read_config("generation", given, "verl").problems
    assert problem.what == "rollout.disable_log_stats is there already"
    assert read_config("generation", given, "verl", drop_unknown=True).problems == ()

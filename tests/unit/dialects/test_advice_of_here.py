"""Advice on what cannot run yet: --here is named where it helps, and there alone."""

from __future__ import annotations

from posttrain.cli.request import load_request
from posttrain.dialects.entries import GENERATE

RUN = (
    "data.train_files=x",
    "actor_rollout_ref.model.external_lib=no_such_module",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.logger=console",
)


def unsupported(*, here: bool) -> dict[str, str]:
    found = load_request(list(RUN), "verl", here=here, skip_files=True).unsupported
    return {problem.what: problem.fix for problem in found}


def test_a_missing_module_stays_missing_with_here() -> None:
    missing = "there is no module no_such_module (asked for: no_such_module)"
    advice = "install the package, or put its folder on PYTHONPATH"
    assert unsupported(here=True) == {missing: advice}
    found = unsupported(here=False)
    assert found.pop(missing) == advice
    # The sampler vllm, where it is not installed, is what --here replaces
    assert set(found.values()) <= {"--here runs without it"}


def test_generation_writes_parquet_under_names_without_its_suffix() -> None:
    keys = ["data.path=x.parquet", "model.path=m", "data.n_samples=1"]
    for name, refused in (("out/Qwen2.5-7B", False), ("out/plain", False), ("out/a.jsonl", True)):
        loaded = load_request([*keys, f"data.output_path={name}"], "verl", GENERATE, here=True, skip_files=True)
        said = [str(problem) for problem in loaded.problems if "must end in .parquet" in str(problem)]
        assert bool(said) == refused, (name, said)


def test_a_split_over_a_cluster_of_unknown_size_is_not_checked_with_here() -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    keys = [key for key in RUN if "external_lib" not in key and "n_gpus_per_node" not in key]
    keys += ["actor_rollout_ref.model.path=m", "actor_rollout_ref.actor.strategy=megatron", "trainer.n_gpus_per_node=8"]
    keys += [f"{megatron}.tensor_model_parallel_size=4", f"{megatron}.pipeline_model_parallel_size=4"]

    def refusals(*more: str, here: bool) -> list[str]:
        found = load_request([*keys, *more], "verl", here=here, skip_files=True).problems
        return [problem.what for problem in found if "do not split" in problem.what]

    assert refusals(here=True) == refusals("trainer.nnodes=???", here=True) == []
    # A number that is written is checked, and so is verl's default where the cluster is taken as it is
    assert refusals("trainer.nnodes=1", here=True) == refusals(here=False)
    assert refusals(here=False) == ["8 devices do not split into groups of 4 x 4 x 1 that share a model"]


def test_the_word_none_names_no_model() -> None:
    keys = [key for key in RUN if "external_lib" not in key]
    for key in (
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.tokenizer_path",
    ):
        model = [] if key == "actor_rollout_ref.model.path" else ["actor_rollout_ref.model.path=m"]
        for word in ("None", "none", "'null'"):
            found = load_request([*keys, *model, f"{key}={word}"], "verl", here=True, skip_files=True).problems
            text = word.strip("'")
            assert any(
                f"the text '{text}' names nothing" in str(each) and f"override {key}=" in str(each) for each in found
            ), (key, word)

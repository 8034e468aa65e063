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

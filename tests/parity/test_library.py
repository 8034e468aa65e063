"""The package as a library makes the run that the command makes."""

from __future__ import annotations

import json
import runpy
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import posttrain
from posttrain.api.configs import as_overrides
from posttrain.cli.app import main
from posttrain.errors import RequestError, RunInterrupted

REWARD = "def score(solution_str): return float(len(solution_str) % 3)\n"


@pytest.fixture
def file(tmp_path: Path, tiny_llama: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums", "ground_truth": "0"} for n in range(6)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "run": {"seed": 1, "total_steps": 2},
        "model": {"path": str(tiny_llama), "compute_dtype": "float32"},
        "data": {"train_files": [str(tmp_path / "train.jsonl")], "prompts_per_step": 2},
        "rollout": {"samples_per_prompt": 3, "max_response_tokens": 6},
        "reward": {"workers": 1, "terms": [{"name": "score", "path": str(tmp_path / "reward.py")}]},
        "policy": {"optimizer": {"lr": 1e-3}},
        "tracking": {"trackers": []},
        "placement": {"device": "cpu", "cpu_threads": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections))
    return tmp_path / "run.yaml"


def steps(folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps, without those of the machine."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "speed/", "memory/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


@pytest.mark.slow
def test_a_run_in_a_thread_is_that_of_the_command(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[posttrain.Run] = []

    def train() -> None:
        runs.append(posttrain.train(file, {"run.folder": str(tmp_path / "library")}))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(120)
    [run] = runs
    monkeypatch.setattr("sys.argv", ["posttrain", "train", str(file), f"run.folder={tmp_path / 'command'}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    for ours, theirs in zip(steps(run.folder), steps(tmp_path / "command"), strict=True):
        assert {name: value for name, value in ours.items() if theirs.get(name) != value} == {}

    table = run.metrics
    assert table.column("step").to_pylist() == [1, 2]
    assert table.column("reward/mean").to_pylist() == list(run.metric("reward/mean").values())
    with pytest.raises(RequestError, match="did you mean reward/mean"):
        run.metric("reward/meen")
    assert len(run.samples(2)) == 6 and {"prompt", "response", "reward"} <= run.samples(2)[0].keys()
    with pytest.raises(RequestError, match="steps with samples: 1, 2"):
        run.samples(3)
    assert run.checkpoints == [2] and run.info["status"] == "done"
    model, tokenizer = run.model()
    ids = tokenizer("1+1=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
# Mini-batches, two passes and a KL in the loss; greedy validation and checkpoints between the steps.
MORE = {
    "policy.sequences_per_mini_batch": 3,
    "policy.epochs_per_step": 2,
    "loss.kl_coef": 0.01,
    "checkpoint.every_steps": 1,
    "run.total_steps": 3,
}


def test_thirty_lines_make_the_run_that_the_command_makes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every metric of every step to the byte, the order of the keys included; samples and weights."""
    command = posttrain.train(file, MORE | {"run.folder": str(tmp_path / "command")})
    own = tmp_path / "own"
    monkeypatch.setattr("sys.argv", ["own_loop.py", str(file), f"run.folder={own}", *as_overrides(MORE)])
    code = EXAMPLE.read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    ours, theirs = steps(own), steps(command.folder)
    assert len(ours) == 3 and json.dumps(ours) == json.dumps(theirs)
    assert posttrain.Run(own).info["status"] == "done"
    assert (own / "samples/step_3.jsonl").read_bytes() == (command.folder / "samples/step_3.jsonl").read_bytes()
    weights = "checkpoints/global_step_3/policy/model.safetensors"
    assert (own / weights).read_bytes() == (command.folder / weights).read_bytes()
    saved = Path(capsys.readouterr().out.split("saved ")[-1].strip())
    assert (saved / "model.safetensors").read_bytes() == (own / weights).read_bytes()


def test_a_loop_of_ones_own_is_stopped_and_resumed(file: Path, tmp_path: Path) -> None:
    overrides = {"run.folder": str(tmp_path / "run")}
    with (
        pytest.raises(RunInterrupted, match="stopped by SIGTERM after step 1"),
        posttrain.start(file, overrides) as session,
    ):
        for number in session.steps():
            groups = session.sampler.sample(session.prompts())
            lengths = [[float(len(each.text)) for each in group.trajectories] for group in groups]
            batch = session.batch(session.score(groups, lengths))
            assert batch.rewards.tolist() == [length for group in lengths for length in group]
            for mini_batch in session.trainer.mini_batches(batch, batch.rewards - batch.rewards.mean()):
                with pytest.raises(RequestError, match="no gradient for optim_step"):
                    session.trainer.optim_step()
                session.trainer.forward_backward(mini_batch)
                assert session.trainer.optim_step() is not None
            assert number == 1
            signal.raise_signal(signal.SIGTERM)
    assert posttrain.Run(tmp_path / "run").info["status"] == "interrupted"
    with posttrain.start(file, overrides) as session:
        with pytest.raises(RequestError, match="inside a step"):
            session.prompts()
        assert next(session.steps()) == 2
        [group] = session.sampler.sample(["Hello"], samples_per_prompt=2, max_response_tokens=3)
        assert [len(each.token_ids) <= 3 for each in group.trajectories] == [True, True]
        assert "Hello" in group.prompt.text
        with pytest.raises(RequestError, match=r"one list per group, of \[2\] numbers, not \[1\]"):
            session.score([group], [[1.0]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"advantage.name": "gae"}, "a critic is not for a loop of your own"),
        ({"group_filter.strategy": "refill", "group_filter.above_std": 0.0}, "samples until a step is full"),
        (
            {"asynchronous.mode": "one_step", "loss.rollout_correction.weights": "token"},
            "sampling ahead is not for a loop of your own",
        ),
        (
            {"loss.rollout_correction.weights": "token", "loss.rollout_correction.proximal": "loglinear"},
            "log-probs interpolated by version are not for a loop of your own",
        ),
    ],
)
def test_a_run_whose_steps_are_not_the_callers(file: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message), posttrain.start(file, overrides):
        pass


def one_step(session: Any) -> None:
    """A whole step by the verbs; rewards by the number of characters."""
    groups = session.sampler.sample(session.prompts())
    batch = session.batch(session.score(groups))
    for mini_batch in session.trainer.mini_batches(batch, batch.rewards - batch.rewards.mean()):
        session.trainer.forward_backward(mini_batch)
        session.trainer.optim_step()


@pytest.mark.slow
def test_a_loop_that_is_left_early_is_saved_and_resumed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left after a step, in a step without updates and between updates; then as a run that nobody left."""
    straight, left = ({"run.folder": str(tmp_path / name), "run.total_steps": 3} for name in ("straight", "left"))
    with posttrain.start(file, straight) as session:
        for _ in session.steps():
            one_step(session)
    with posttrain.start(file, left) as session:
        for _ in session.steps():
            one_step(session)
            break
    assert "stopped by its caller after step 1, saved as global_step_1" in capsys.readouterr().err
    run = posttrain.Run(tmp_path / "left")
    assert run.info["status"] == "interrupted" and run.checkpoints == [1]
    with posttrain.start(file, left) as session:
        assert next(session.steps()) == 2
        session.sampler.sample(session.prompts())
    assert "in step 2, which is made again" in capsys.readouterr().err
    with posttrain.start(file, left) as session:
        for _ in session.steps():
            batch = session.batch(session.score(session.sampler.sample(session.prompts())))
            session.trainer.forward_backward(next(session.trainer.mini_batches(batch, batch.rewards)))
            break
    said = capsys.readouterr().err
    assert "between the updates of step 2, which is made again" in said and "from global_step_1" in said
    with posttrain.start(file, left) as session:
        for _ in session.steps():
            one_step(session)
    assert steps(tmp_path / "left") == steps(tmp_path / "straight")
    assert run.info["status"] == "done"


@pytest.mark.slow
def test_a_session_without_steps_is_not_done(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither where steps() is never called, nor where its first number is never asked for; one whose steps are done stays."""
    run = {"run.folder": str(tmp_path / "run"), "run.total_steps": 1}
    for enter in (False, True):
        with posttrain.start(file, run) as session:
            if enter:
                session.steps()
        assert "stopped by its caller before step 1" in capsys.readouterr().err
        assert posttrain.Run(tmp_path / "run").info["status"] == "interrupted"
    with posttrain.start(file, run) as session:
        for _ in session.steps():
            one_step(session)
    with posttrain.start(file, run):
        pass
    assert posttrain.Run(tmp_path / "run").info["status"] == "done"


def test_a_verb_called_twice_counts_once(file: Path, tmp_path: Path) -> None:
    """Each of the verbs that read is repeated, as in a notebook whose cell is run again: the run is that of the command."""
    statistics = {"reward.kl.coef": 0.1, "reward.kl.target": 0.01, "reward.normalize_std": "running"}
    more = {"group_filter.strategy": "drop", "group_filter.above_std": 0.0, "run.total_steps": 2} | statistics
    folders = [tmp_path / "once", tmp_path / "twice"]
    for folder, times in zip(folders, (1, 2), strict=True):
        with posttrain.start(file, more | {"run.folder": str(folder)}) as session:
            for _ in session.steps():
                groups = session.sampler.sample(session.prompts())
                for _ in range(times):
                    scored = session.score(groups)
                    assert {id(each.group) for each in scored} <= {id(each) for each in groups}
                for _ in range(times):
                    batch = session.batch(scored)
                for mini_batch in session.trainer.mini_batches(batch, batch.rewards - batch.rewards.mean()):
                    session.trainer.forward_backward(mini_batch)
                    session.trainer.optim_step()
    assert steps(folders[0]) == steps(folders[1])


def test_groups_are_scored_part_by_part_and_sampled_again(file: Path, tmp_path: Path) -> None:
    all_pass = {"group_filter.strategy": "drop", "group_filter.above_std": None, "group_filter.above_mean": -1.0}
    with posttrain.start(file, all_pass | {"run.folder": str(tmp_path / "run"), "run.total_steps": 1}) as session:
        for _ in session.steps():
            prompts = session.prompts()
            first, other = session.sampler.sample(prompts), session.sampler.sample(prompts)
            assert [each.token_ids for each in first[0].trajectories] != [
                each.token_ids for each in other[0].trajectories
            ]
            parts = [session.score([group]) for group in (*first, *other)]
            assert [len(part) for part in parts] == [1, 1, 1, 1]
            [again] = session.score([first[0]], [[7.0, 8.0, 9.0]])
            batch = session.batch([again, parts[3][0]])
            assert batch.rewards[:3].tolist() == [7.0, 8.0, 9.0]
            for mini_batch in session.trainer.mini_batches(batch, torch.arange(6.0) - 2.5):
                session.trainer.forward_backward(mini_batch)
                session.trainer.optim_step()
    [step] = steps(tmp_path / "run")
    assert (step["rollout/groups_sampled"], step["rollout/groups_kept"]) == (4, 2)


def test_an_interrupt_leaves_no_half_gradient_and_no_half_update(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the handler of a notebook's kernel, which raises KeyboardInterrupt at any line."""
    with posttrain.start(file, {"run.folder": str(tmp_path / "run")}) as session:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        trainer, numbers = session.trainer, session.steps()
        policy = trainer._work.made.roles.policy
        next(numbers)
        batch = session.batch(session.score(session.sampler.sample(session.prompts())))
        [mini_batch] = trainer.mini_batches(batch, torch.arange(6.0) - 2.5)
        trainer.forward_backward(mini_batch)
        real = policy.forward_backward

        def interrupted(*arguments: Any) -> Any:
            real(*arguments)
            signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patched:
            patched.setattr(policy, "forward_backward", interrupted)
            with pytest.raises(KeyboardInterrupt) as raised:
                trainer.forward_backward(mini_batch)
        assert "gradients since the last optim_step are dropped" in raised.value.__notes__[0]
        with pytest.raises(RequestError, match="no gradient for optim_step"):
            trainer.optim_step()
        trainer.forward_backward(mini_batch)
        norms: list[float] = []
        step = policy.optimizer_step

        def signalled() -> Any:
            signal.raise_signal(signal.SIGINT)
            made = step()
            norms.append(made.grad_norm)
            return made

        with monkeypatch.context() as patched:
            patched.setattr(policy, "optimizer_step", signalled)
            with pytest.raises(KeyboardInterrupt):
                trainer.optim_step()
        assert policy.version == 1
        with monkeypatch.context() as patched:
            patched.setattr("posttrain.api.work.finish_step", lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                next(numbers)
        for call in (lambda: next(numbers), lambda: session.sampler.sample(["a"]), trainer.optim_step):
            with pytest.raises(RequestError, match="the change to the next step was left half done"):
                call()
        signal.signal(signal.SIGINT, before)
    # Twice the gradient would have twice the norm.
    with posttrain.start(file, {"run.folder": str(tmp_path / "alone")}) as session:
        next(session.steps())
        batch = session.batch(session.score(session.sampler.sample(session.prompts())))
        [mini_batch] = session.trainer.mini_batches(batch, torch.arange(6.0) - 2.5)
        session.trainer.forward_backward(mini_batch)
        made = session.trainer.optim_step()
        assert made is not None and norms == [made.grad_norm]


def test_wrong_calls_of_the_verbs_are_one_error_each(file: Path, tmp_path: Path) -> None:
    """None of them ends the step that it is made in."""

    def wrong(message: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        with pytest.raises(RequestError, match=message):
            call(*arguments, **options)

    with posttrain.start(file, {"run.folder": str(tmp_path / "own"), "run.total_steps": 1}) as session:
        sampler, trainer = session.sampler, session.trainer
        wrong("prompts is a list, not str", sampler.sample, "hello")
        wrong("prompts holds int", sampler.sample, [1])
        wrong("did you mean temperature", sampler.sample, ["a"], temprature=1)
        for name, value in {
            "temperature": -1.0,
            "first_token_temperature": 0.0,
            "top_p": 0,
            "samples_per_prompt": 0,
            "max_response_tokens": 10**9,
            "top_k": 1.5,
            "seed": "a",
            "stop": "a",
        }.items():
            wrong(f"{name} must be", sampler.sample, ["a"], **{name: value})
        assert len(sampler.sample(["a"], max_response_tokens=2, temperature=1, stop=("x",))[0].trajectories) > 0
        for _ in session.steps():
            wrong("made once", lambda: next(session.steps()))
            wrong("a batch of no groups", session.batch, [])
            groups = sampler.sample(session.prompts())
            wrong("one list per group", session.score, groups, [1.0] * 6)
            wrong("a number, not 'a'", session.score, groups, [["a"] * 3] * 2)
            wrong("holds TrajectoryGroup", session.batch, groups)
            batch = session.batch(session.score(groups))
            advantages = torch.arange(6.0) - 2.5
            wrong("must be Tensor, not list", trainer.mini_batches, batch, [1.0] * 6)
            wrong(r"shape \[6\].*not \[5\]", trainer.mini_batches, batch, torch.zeros(5))
            wrong("must be TrainBatch, not ShapedBatch", trainer.forward_backward, batch)
            for mini_batch in trainer.mini_batches(batch, advantages):
                wrong("must be LossPlan, not str", trainer.forward_backward, mini_batch, "ppo")
                trainer.forward_backward(mini_batch)
                trainer.optim_step()
    assert len(steps(session.folder)) == 1
    wrong("session is over", sampler.sample, ["a"])
    wrong("session is over", trainer.save, tmp_path / "late")

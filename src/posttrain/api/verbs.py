"""The four verbs of a session: sample, forward_backward, optim_step and save, in the manner of Tinker's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.api.arguments import check_advantages, with_changes
from posttrain.api.kinds import check_items, check_kind
from posttrain.api.work import OneStep, Work
from posttrain.data.templates import apply_template
from posttrain.errors import RequestError
from posttrain.records.batches import ShapedBatch, TrainBatch
from posttrain.records.plans import LossPlan
from posttrain.records.prompts import Prompt
from posttrain.records.statistics import ForwardBackwardStats, OptimizerStats
from posttrain.records.trajectories import SamplingParams, TrajectoryGroup
from posttrain.run.stopping import held_back
from posttrain.steps.rl_step import collect


class Sampler:
    """Samples from the policy's newest weights that a step has ended with."""

    def __init__(self, work: Work):
        self._work = work

    def sample(self, prompts: Sequence[Prompt | str], **changes: Any) -> list[TrajectoryGroup]:
        """Sample a group of responses per prompt, with their token ids, log-probs and stop reasons.

        Args: ``prompts`` of ``session.prompts()``, or texts, each a user's message; ``changes`` to the sampling of the
            configuration (samples_per_prompt, temperature, max_response_tokens, top_p, seed ...; fields of SamplingParams).
        Random numbers go by the seed and the place of a prompt. Each call in a step has others; texts get the same responses
        again until ``seed`` changes.

        Raises: RequestError for arguments of another type and values out of range; RunStopped when the sampler does not serve
            the trainer's weights.
        """
        work, roles = self._work, self._work.made.roles
        work.check_open()
        check_items(prompts, (Prompt, str), "prompts", "of session.prompts(), or texts")
        asked = [self._prompt(number, each) for number, each in enumerate(prompts)]
        if any(isinstance(each, str) for each in prompts):
            return collect(roles, asked, with_changes(work.made.plan.step.sampling, changes))
        step = work.step
        sampling: SamplingParams = with_changes(step.plan.sampling_of(step.sampled), changes)
        with step.clock.phase("rollout", total=roles.most_tokens(len(asked), sampling)):
            groups = collect(roles, asked, sampling, step.clock.advance, work.made.scorer.begin)
        step.sampled += 1
        return groups

    def _prompt(self, number: int, prompt: Prompt | str) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        messages = [{"role": "user", "content": prompt}]
        text, ids = apply_template(self._work.tokenizer, messages, {})
        return Prompt(
            prompt_id=f"text:{number}",
            token_ids=tuple(ids),
            text=text,
            data_source="text",
            messages=tuple(messages),
        )


class Trainer:
    """Trains the policy."""

    def __init__(self, work: Work):
        self._work = work

    def mini_batches(self, batch: ShapedBatch, advantages: Tensor) -> Iterator[TrainBatch]:
        """The mini-batches of the step, pass by pass, as the configuration cuts them; each is for one optimizer step.

        Args: ``advantages`` [B], one per response, or [B, T], one per token.

        Raises: RequestError for another batch or shape.
        """
        check_kind(batch, ShapedBatch, "the batch", "of session.batch(...)")
        check_advantages(batch, advantages)
        return self._work.mini_batches(batch, advantages)

    def forward_backward(self, mini_batch: TrainBatch, loss: LossPlan | None = None) -> ForwardBackwardStats:
        """Add the gradient of the configuration's policy loss, or of ``loss``, over a mini-batch. Sums divide by the counts of
        this mini-batch.

        Returns: the loss, sums by metric, and the log-probs [B, T] of the weights as they are.
        Raises: whatever makes it fail, also KeyboardInterrupt; all gradients since the last optimizer step are dropped then, and
            a note at the error reports it.
        """
        work, step = self._work, self._work.step
        check_kind(mini_batch, TrainBatch, "the mini-batch", "of trainer.mini_batches(...)")
        check_kind(loss or step.plan.update.loss, LossPlan, "the loss", "a function of your own goes into loss.path")
        work.begin_updates()
        with self._dropping_gradients(step):
            stats = work.made.roles.policy.forward_backward(
                mini_batch, loss or step.plan.update.loss, mini_batch.counts()
            )
        if step.first_logprobs is None:
            step.first_logprobs = stats.policy_logprobs
        step.waiting.append(stats)
        return stats

    def optim_step(self) -> OptimizerStats | None:
        """Make an optimizer step with the gradients added since the last one, by the configuration's optimizer and schedule.
        An interrupt comes after it, not in its middle.

        Returns: gradient norm and learning rate; None where a loss was not finite or no token was learned: the gradients are
            dropped, and the step counts as skipped.
        Raises: RequestError without a gradient.
        """
        step = self._work.step
        if not step.waiting:
            raise RequestError("there is no gradient for optim_step: call forward_backward first")
        passes, step.waiting = step.waiting, []
        with held_back(), self._work.whole("optim_step"):
            return self._work.begin_updates().step(*passes)

    @contextmanager
    def _dropping_gradients(self, step: OneStep) -> Iterator[None]:
        """A pass that fails half way leaves a part of its gradient, which must not be learned from."""
        try:
            yield
        except BaseException as error:
            with self._work.whole("forward_backward"):
                step.waiting.clear()
                self._work.made.roles.policy.zero_grad()
            error.add_note(
                "forward_backward was left half way: the gradients since the last optim_step are dropped; call it again for "
                "each of their mini-batches"
            )
            raise

    def save(self, folder: str | Path) -> Path:
        """Write the policy as a folder that transformers loads (of a policy with an adapter, the adapter).

        Checkpoints, from which the session resumes, are written between steps as checkpoint.every_steps says.

        Raises: RunStopped when it cannot be written.
        """
        from posttrain.run.exports import export_models

        self._work.check_open()
        if not isinstance(folder, str | Path):
            raise RequestError(f"a folder is a text or a Path, not {type(folder).__name__}")
        policy = self._work.made.roles.policy
        return export_models(Path(folder), policy.version, policy) / "policy"

"""The loop of a fork of verl that plays episodes, run as it is: its class gets the run's sampler in the place of verl's workers.

    the fork's class (a thread of this process) ──generate_sequences──▶ LoopEpisode ──a turn──▶ the run's sampler

The class is built and called by the expressions of the fork's own trainer (``posttrain.verl_episodes``), with a batch of one row.
Each call of ``generate_sequences`` is a turn of the episode: what the class adds behind the response is the observation. The
reward is computed by the object that the fork's program passes to its trainer.
"""

from __future__ import annotations

import ast
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from posttrain.data.templates import ids_of, render
from posttrain.envs.verl_loop.opened import TrainerParts, opened
from posttrain.envs.verl_loop.turns import Context
from posttrain.errors import RequestError
from posttrain.interfaces.env import AskingEnv, EnvAsk, EnvSpec, EnvStep, EnvWithdrawn, TurnOptions
from posttrain.libraries.verl.parts import Checkout, Values
from posttrain.models.lists import tokenizer_of
from posttrain.registry import ENVS
from posttrain.user_files import last_line
from posttrain.verl_episodes import EpisodeLoop, EpisodeReward

Emit = Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]


class LoopFailed(RequestError):
    """The fork's code raised, or returned something else than it should. The message names its line."""


class _Over(BaseException):
    """Ends the thread of an episode that is closed; the fork's code catches exceptions."""


@ENVS.register("verl_loop", asks=True, loads="posttrain.envs.verl_loop.opened:load")
def verl_loop(
    spec: EnvSpec,
    *,
    trainer: str,
    folder: str,
    model: Mapping[str, Any],
    program: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> AskingEnv:
    """An episode of a row that the class of a fork's own loop plays.

    Args: trainer, FILE:CLASS.METHOD, builds the class and calls it; folder, from which the fork's modules are imported; model,
        the settings of the tokenizer: path, tokenizer_path, chat_template, chat_template_file, trust_remote_code; program
        builds the trainer, with its reward function and other attributes (reward.terms score where it passes no reward
        function); config, the values that their expressions read.
    Raises: ConfigError.
    """
    return LoopEpisode(spec, *opened(trainer, folder, program), tokenizer_of(tuple(model.items())), config or {})


class LoopEpisode:
    """One episode, as an AskingEnv. The fork's loop runs in a thread and waits for each turn."""

    def __init__(
        self,
        spec: EnvSpec,
        checkout: Checkout,
        loop: EpisodeLoop,
        reward: EpisodeReward | None,
        tokenizer: Any,
        config: Mapping[str, Any],
    ):
        self._spec, self._loop, self._reward, self._tokenizer = spec, loop, reward, tokenizer
        self._checkout = checkout
        self._config = OmegaConf.create(dict(config))
        self._answers: queue.SimpleQueue[Sequence[int] | None] = queue.SimpleQueue()
        self._tokens: Sequence[int] = ()  # of the turn that is answered next
        self._context = Context(tokenizer)
        self._rows: Any = None  # the step's batch: the row, for all episodes of its prompt
        self._emit: Emit = lambda event: None
        self._over = threading.Event()
        self._turns = self._line = 0

    def begin(self, seed: int, emit: Emit) -> None:
        """Start the fork's loop."""
        self._emit = emit
        torch.manual_seed(seed)
        threading.Thread(target=self._play, daemon=True).start()

    def sampled(self, turn: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens = token_ids

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        """Let the loop continue with the policy's turn."""
        tokens, self._tokens = self._tokens, ()
        self._answers.put(tokens or ids_of(self._tokenizer, action))

    def close(self) -> Mapping[str, float]:
        """End the loop, which may wait for a turn. Returns: the number of turns."""
        self._over.set()
        self._answers.put(None)
        return {"num_actions": float(self._turns)}

    def _play(self) -> None:
        try:
            final = self._final_output()
            told = self._line == 1  # else the loop dropped the beginning of its context
            keeps = self._context.end(_row(final.batch["responses"], _mask_of(final.batch))) if told else None
            step = EnvStep(done=True, stop="ended", reward=self._rewarded(final), keeps=keeps)
        except _Over:
            return
        except Exception as error:  # noqa: BLE001 - the fork's own code
            self._say(self._failure(error))
        else:
            self._say(step)

    def _final_output(self) -> Any:
        """Build the class as the trainer does, and let it play. Returns: its batch of the whole episode."""
        loop, sampling = self._loop, self._spec.sampling
        step = sampling.step if sampling else 0
        trainer = TrainerParts(self._checkout, loop, self._tokenizer, self, self._config, step)
        copies = sampling.samples_per_prompt + sampling.extra_episodes if sampling else 1
        self._rows = self._batch(copies)
        values = Values(self._checkout, loop.site, {"self": trainer, loop.batch: self._batch(), loop.rows: self._rows})
        made = values.evaluated(loop.made)
        method = getattr(made, loop.method)

        def valued(each: ast.expr) -> Any:
            value = values.evaluated(each)
            return self._own_part(value, copies, each) if id(each) in loop.by_row else value

        given = [valued(each) for each in loop.call.args]
        named = {one.arg: valued(one.value) for one in loop.call.keywords if one.arg}
        found = method(*given, **named)
        final = found[0] if isinstance(found, tuple) and found else found
        batch = getattr(final, "batch", None)
        lacks = [name for name in ("prompts", "responses", "attention_mask") if batch is None or name not in batch]
        if lacks:
            what = f"{self._loop.title} returned a {type(final).__name__} without {', '.join(lacks)}"
            raise LoopFailed(what)
        if not self._turns:
            raise LoopFailed(f"{self._loop.title} ended without a turn of the model")
        return final

    def _own_part(self, value: Any, copies: int, written: ast.expr) -> Any:
        """The part of this episode in a value that is built from the step's batch: one element of a list, an array or a tensor
        with one for each episode of the prompt."""
        place = self._spec.number
        if isinstance(value, list | tuple | np.ndarray | Tensor) and len(value) == copies:
            return value[place : place + 1]
        what = (
            f"{ast.unparse(written)} (line {written.lineno} of {self._loop.site.file}) is built from the step's batch"
        )
        raise LoopFailed(f"{what}, and is no list or array of {copies} values, one for each response to the prompt")

    def _batch(self, copies: int = 1) -> Any:
        """Build the batch of the row, as verl's dataset does: its prompt's tokens, and its columns, as many times as said."""
        from verl import DataProto  # type: ignore[import-not-found]  # the stand-in, or an installed one

        ids = torch.tensor([ids_of(self._tokenizer, self._prompt())] * copies)
        mask = torch.ones_like(ids)
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
        return DataProto.from_dict(
            tensors,
            {name: _objects(value, copies) for name, value in self._columns().items()},
            {
                "eos_token_id": self._tokenizer.eos_token_id,
                "pad_token_id": self._tokenizer.pad_token_id,
                "recompute_log_prob": False,
            },
        )

    def _prompt(self) -> str:
        return render(self._tokenizer, self._spec.messages, {})

    def _columns(self) -> dict[str, Any]:
        row = dict(self._spec.row)
        truth = row.pop("ground_truth", None)
        extra = {name: value for name, value in row.items() if name != "data_source"}
        own = {"data_source": row.get("data_source"), "reward_model": {"style": "rule", "ground_truth": truth}}
        return {**extra, **own, "extra_info": extra, "index": extra.get("index", 0)}

    # What the class calls of verl's sampling workers
    world_size = 1

    def generate_sequences(self, batch: Any) -> Any:
        """Answer a call for responses with a turn of the run's sampler. Rows that repeat the first one, as a class adds them for
        several devices, get the same response.

        Args: batch, input_ids and attention_mask [rows, tokens], left-padded. Returns: such a batch with responses besides.
        """
        ids = batch.batch["input_ids"]
        rows = {tuple(_row(ids[place : place + 1], batch.batch["attention_mask"])) for place in range(len(ids))}
        if len(rows) != 1:
            raise LoopFailed(f"{self._loop.title} asks for responses to {len(rows)} prompts in an episode of one")
        response = torch.tensor([list(self._turn(list(rows.pop())))] * len(ids), dtype=torch.long)
        there = torch.ones_like(response)
        mask = torch.cat([batch.batch["attention_mask"].long(), there], dim=1)
        made = type(batch).from_dict(
            {
                "prompts": ids,
                "responses": response,
                "input_ids": torch.cat([ids.long(), response], dim=1),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
            }
        )
        made.meta_info.update(batch.meta_info)
        return made

    def _turn(self, ids: list[int]) -> Sequence[int]:
        """Ask for a turn behind a context. Returns: the response's tokens."""
        if self._over.is_set():
            raise _Over
        follows = self._context.follows(ids) if self._turns else None
        if follows is None:
            self._line += 1
            self._context = Context(self._tokenizer, first=len(ids))
        self._turns += 1
        whole = ids == ids_of(self._tokenizer, self._prompt()) and self._line == 1
        self._say(
            EnvAsk(
                turn=str(self._turns),
                line=self._line,
                # The row's own prompt is tokenised already
                messages=self._spec.messages if follows is None and whole else (),
                prompt=follows.added if follows is not None else None if whole else tuple(ids),
                keeps=follows.keeps if follows is not None else None,
                options=TurnOptions(tokens=True),
            )
        )
        tokens = self._answers.get()
        if tokens is None:
            raise _Over
        self._context.answered(ids, tokens)
        return tokens

    def _say(self, event: EnvAsk | EnvStep | Exception) -> None:
        if not self._over.is_set():
            self._emit(event)

    def _rewarded(self, final: Any) -> float | None:
        """Return the reward of the fork's own reward function; None leaves it to the run's reward terms."""
        if self._reward is None:
            return None
        given = {"config": self._config, "tokenizer": self._tokenizer}
        manager = Values(self._checkout, self._reward.site, given).evaluated(self._reward.value)
        place = self._spec.number
        objects = {name: value[place : place + 1] for name, value in self._rows.non_tensor_batch.items()}
        tensors = {name: final.batch[name] for name in final.batch.keys()}  # noqa: SIM118 - an installed verl's has no __iter__
        said = manager(type(final).from_dict(tensors, {**objects, **final.non_tensor_batch}, final.meta_info))
        rewards = said[0] if isinstance(said, tuple) and said else said
        rewards = rewards.get("reward_tensor") if isinstance(rewards, Mapping) else rewards
        if not isinstance(rewards, Tensor) or rewards.shape[:1] != (1,):
            what = (
                f"rewards of shape {tuple(rewards.shape)}"
                if isinstance(rewards, Tensor)
                else f"a {type(said).__name__}"
            )
            raise LoopFailed(
                f"{self._reward.name} of {self._reward.site.file} returned {what} for one response, not [1, T]"
            )
        return float(rewards.sum())

    def _failure(self, error: Exception) -> Exception:
        """An error of the fork's code with its file and line; one about an address names the key that holds it."""
        if isinstance(error, RequestError):
            return error
        frames = traceback.extract_tb(error.__traceback__)
        ours = str(Path(__file__).parent)
        theirs = [frame for frame in frames if not frame.filename.startswith((ours, "<"))]
        within = [frame for frame in theirs if Path(frame.filename).is_relative_to(self._checkout.folder)]
        place = f"{within[-1].filename}:{within[-1].lineno}: " if within else ""
        said = last_line(error)
        if isinstance(error, OSError) and error.filename is None and (key := self._address(error)):
            return LoopFailed(f"{place}no answer from {key}: start that server, or correct the key ({said[:300]})")
        return LoopFailed(f"{place}{said[:600]}")

    def _address(self, error: Exception) -> str:
        """The keys whose values are addresses, KEY=VALUE: the one that an error is about, where it says that; "" without any."""
        asked = str(getattr(getattr(error, "request", None), "url", "") or error)
        found = {}
        for key, value in _leaves(OmegaConf.to_container(self._config, resolve=True)):
            if isinstance(value, str) and (host := value.partition("://")[2].partition("/")[0]):
                found[f"{key}={value}"] = value in asked or host in asked
        return " or ".join([each for each, named in found.items() if named] or found)


def _mask_of(batch: Any) -> Tensor:
    """The mask of the responses in a batch of whole sequences."""
    mask: Tensor = batch["attention_mask"][:, -batch["responses"].shape[1] :]
    return mask


def _row(ids: Tensor, mask: Tensor) -> list[int]:
    """The tokens of the first row [1, tokens] that its mask marks."""
    return [int(token) for token in ids[0][mask[0].bool()].tolist()]


def _objects(value: Any, count: int) -> np.ndarray:
    """An array [count] of the same object, as verl keeps the columns of rows."""
    made = np.empty(count, dtype=object)
    for place in range(count):
        made[place] = value
    return made


def _leaves(tree: Any, above: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(above, tree)]
    return [leaf for name, each in tree.items() for leaf in _leaves(each, f"{above}.{name}" if above else str(name))]

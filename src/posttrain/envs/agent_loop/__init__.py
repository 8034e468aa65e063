"""An agent loop written for verl (``AgentLoopBase``), run as it is: its ``server_manager`` asks the run's sampler.

    the class's run (a coroutine in a thread of this process) ──generate──▶ LoopEpisode ──a turn──▶ the run's sampler

Requests are token ids. One that begins with an earlier conversation of the episode continues it, with the tokens as they were
sampled; another begins a conversation of its own. Of all of them those tokens are trained that the output holds where its mask
is 1.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from posttrain.data.templates import ids_of, render
from posttrain.data.turns import TemplateTurns
from posttrain.envs.agent_loop.conversations import Conversation, Follows, begun, learned
from posttrain.envs.agent_loop.opened import class_of
from posttrain.envs.verl_columns import columns_of
from posttrain.errors import RequestError
from posttrain.interfaces.env import AskingEnv, EnvAsk, EnvSpec, EnvStep, EnvWithdrawn, TurnOptions
from posttrain.interfaces.worlds import SampledTurn
from posttrain.libraries.verl.agent_loops import DictConfigWrap, TokenOutput, ToolListWrap, named_in
from posttrain.models.lists import tokenizer_of
from posttrain.registry import ENVS
from posttrain.user_files import last_line

Emit = Callable[[EnvAsk | EnvWithdrawn | EnvStep | Exception], None]
# Sampling parameters that a request may have of its own
OWN = ("temperature", "stop", "seed", "max_tokens", "max_new_tokens")


class LoopFailed(RequestError):
    """The loop raised, or returned something else than it should. The message names its line."""


@ENVS.register("agent_loop", asks=True, loads="posttrain.envs.agent_loop.opened:load")
def agent_loop(
    spec: EnvSpec,
    *,
    class_name: str,
    model: Mapping[str, Any],
    root: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AskingEnv:
    """An episode of a row that an agent loop plays.

    Args: class_name, package.module.Class or path/to/file.py:Class; root, a folder in which its package lies; model, the settings
        of the tokenizer: path, tokenizer_path, chat_template, chat_template_file, trust_remote_code; arguments of its constructor
        beside verl's own; config, verl's configuration, as far as the class reads it.
    Raises: ConfigError.
    """
    return LoopEpisode(
        spec, class_of(class_name, root), tokenizer_of(tuple(model.items())), arguments or {}, config or {}
    )


class LoopEpisode:
    """One episode, as an AskingEnv, and the server manager of its loop. The loop runs in a thread and waits for its turns."""

    def __init__(
        self, spec: EnvSpec, kind: Any, tokenizer: Any, arguments: Mapping[str, Any], config: Mapping[str, Any]
    ):
        self._spec, self._kind, self._tokenizer, self._arguments = spec, kind, tokenizer, arguments
        self._config = OmegaConf.create(dict(config))
        self._sampling = _params(spec)
        self._conversations: list[Conversation] = []
        self._tokens: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
        self._waiting: dict[str, asyncio.Future[TokenOutput]] = {}
        self._emit: Emit = lambda event: None
        self._events: asyncio.AbstractEventLoop | None = None
        self._over = False
        self._turns = 0  # requested of the sampler
        self._abandoned = 0  # of them
        self._lines = 0

    def begin(self, seed: int, emit: Emit) -> None:
        """Start the loop."""
        self._emit = emit
        threading.Thread(target=self._play, daemon=True).start()

    def sampled(self, turn: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens[turn] = token_ids, logprobs

    def answer(self, turn: str, action: str, *, cut: bool, prompt_tokens: int, response_tokens: int) -> None:
        """Let the loop continue with a turn."""
        tokens, logprobs = self._tokens.pop(turn, (ids_of(self._tokenizer, action), None))
        output = TokenOutput(tokens, logprobs, "length" if cut else "completed")
        self._in_loop(lambda: self._answered(turn, output))

    def _answered(self, turn: str, output: TokenOutput) -> None:
        waiting = self._waiting.get(turn)
        if waiting is not None and not waiting.done():  # else the loop waits for it no longer
            waiting.set_result(output)

    def close(self) -> Mapping[str, float]:
        """End the loop, which may wait for turns. Returns: the numbers of turns, and of those that it waited for no longer."""
        self._over = True
        self._in_loop(lambda: [each.cancel() for each in self._waiting.values()])
        return {"num_actions": float(self._turns - self._abandoned), "abandoned_turns": float(self._abandoned)}

    def _in_loop(self, call: Callable[[], object]) -> None:
        if self._events is not None and not self._events.is_closed():
            self._events.call_soon_threadsafe(call)

    def _play(self) -> None:
        try:
            step = self._end(asyncio.run(self._output()))
        except asyncio.CancelledError:
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own code
            self._say(error if isinstance(error, LoopFailed) else self._failure(error))
        else:
            self._say(step)

    async def _output(self) -> Any:
        """Make the class as verl does, and let it play."""
        from verl.utils.dataset.rl_dataset import RLHFDataset  # type: ignore[import-not-found]  # the stand-in, or verl's

        self._events = asyncio.get_running_loop()
        data = self._config.get("data") or OmegaConf.create({})
        given = {
            "trainer_config": DictConfigWrap(self._config),
            "server_manager": self,
            "tokenizer": self._tokenizer,
            "processor": None,
            "dataset_cls": RLHFDataset,
            "dataset_config": data,
            "data_config": DictConfigWrap(data),
            "tools": ToolListWrap(),
            **self._arguments,
        }
        made = self._kind(**named_in(self._kind.__init__, given))
        # A dictionary of its own: loops change it for their later turns
        row = {
            **columns_of(self._spec.row, self._spec.messages),
            "messages": list(self._spec.messages),
            "sampling_params": dict(self._sampling),
        }
        return await made.run(**_wanted(made.run, row))

    # What a loop calls of verl's server manager

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        """Answer a request with a turn of the run's sampler.

        Args: prompt_ids, the whole context; sampling_params, whose temperature, stop, seed and max_tokens may be its own.
        Raises: LoopFailed for anything else of its own, and for pictures.
        """
        for name in ("image_data", "video_data", "audio_data"):
            if more.get(name):
                raise LoopFailed(f"{self._name} asks for a response to {name}, and a turn here reads tokens alone")
        ids = [int(token) for token in prompt_ids]
        options, longest = self._own(sampling_params)
        self._turns += 1
        turn = str(self._turns)
        conversation, follows, before = self._continued(ids)
        whole = follows is None and ids == self._rendered()
        waiting = self._waiting[turn] = asyncio.get_running_loop().create_future()
        self._say(
            EnvAsk(
                turn=turn,
                line=conversation.number,
                messages=self._spec.messages if whole else (),  # tokenised already
                prompt=follows.added if follows is not None else None if whole else tuple(ids),
                keeps=follows.keeps if follows is not None else None,
                max_response_tokens=longest,
                options=options,
            )
        )
        try:
            output = await waiting
        except asyncio.CancelledError:  # by the loop, such as its asyncio.wait_for
            self._withdraw(turn, conversation, before)
            raise
        finally:
            del self._waiting[turn]
        conversation.answered(output.token_ids)
        return output

    def following(
        self,
        previous: Sequence[Mapping[str, Any]],
        updated: Sequence[Mapping[str, Any]],
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[int, Sequence[int]]:
        """The tokens with which the chat template goes on behind a response.

        Args: messages up to the response, and with those that follow it; ids, the context with the response.
        Returns: tokens at the end of the context that go, because the loop's message is shorter than the response, and those that
            come. Raises: LoopFailed where the context ends with no response.
        """
        known = next((each for each in reversed(self._conversations) if not each.waits and each.ids == list(ids)), None)
        if known is None or not previous or previous[-1].get("role") != "assistant":
            raise LoopFailed(f"{self._name} adds messages to a context that does not end with a response of the model")
        response = tuple(known.ids[known.context :])
        writer = TemplateTurns(self._tokenizer, self._template_options())
        sampled = SampledTurn(
            text=writer.text_of(response), token_ids=response, ended=response[-1] == self._tokenizer.eos_token_id
        )
        found, _ = writer.follow(
            [dict(each) for each in previous[:-1]], sampled, list(updated[len(previous) :]), list(tools)
        )
        return len(response) - found.kept, found.token_ids

    def _template_options(self) -> Mapping[str, Any]:
        return dict(OmegaConf.select(self._config, "data.apply_chat_template_kwargs") or {})

    def _rendered(self) -> list[int]:
        """The tokens of the row's own prompt."""
        return ids_of(self._tokenizer, render(self._tokenizer, self._spec.messages, self._template_options()))

    def _withdraw(self, turn: str, conversation: Conversation, before: Conversation | None) -> None:
        """Undo a request that the loop waits for no longer: its conversation is as before it."""
        self._abandoned += 1
        place = self._conversations.index(conversation)
        self._conversations[place : place + 1] = [] if before is None else [before]
        self._say(EnvWithdrawn(turn))

    def _continued(self, ids: list[int]) -> tuple[Conversation, Follows | None, Conversation | None]:
        """The conversation that a request continues, the newest of several, or a new one; and as it was before."""
        for each in reversed(self._conversations):
            if (follows := each.follows(ids)) is not None:
                before = each.copy()
                each.asked(ids, follows)
                return each, follows, before
        self._lines += 1
        self._conversations.append(begun(self._lines, ids))
        return self._conversations[-1], None, None

    def _own(self, params: Mapping[str, Any]) -> tuple[TurnOptions, int | None]:
        """The options of a request, and its limit: what differs from the run's parameters."""
        own = {name: value for name, value in params.items() if value is not None and self._sampling.get(name) != value}
        own.pop("logprobs", None)
        if params.get("n") == 1:
            own.pop("n", None)
        for name in own:
            if name not in OWN or (name in ("temperature", "stop", "seed") and name not in self._spec.honours):
                what = f"{self._name} samples with {name}={own[name]}"
                may = [each for each in OWN if not each.startswith("max") and each in self._spec.honours] + [
                    "max_tokens"
                ]
                raise LoopFailed(f"{what}; a request here may have its own {', '.join(may)}")
        stop = own.get("stop", ())
        options = TurnOptions(
            tokens=True,
            temperature=float(own["temperature"]) if "temperature" in own else None,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=int(own["seed"]) if "seed" in own else None,
        )
        longest = own.get("max_tokens", own.get("max_new_tokens"))
        return options, None if longest is None else max(int(longest), 1)

    def _end(self, output: Any) -> EnvStep:
        """The end of the episode. Raises: LoopFailed for an output that is none, or holds nothing that was sampled."""
        parts: list[Any] = [getattr(output, name, None) for name in ("prompt_ids", "response_ids", "response_mask")]
        if not all(isinstance(part, list) for part in parts):
            raise LoopFailed(f"{self._name} returned a {type(output).__name__}, and no AgentLoopOutput")
        prompt, response, mask = parts
        if len(response) != len(mask):
            what = f"{self._name} returned {len(response)} response_ids and {len(mask)} marks in response_mask"
            raise LoopFailed(what)
        if self._turns == self._abandoned:
            raise LoopFailed(f"{self._name} ended without a turn of the model")
        found = learned(self._conversations, prompt, response, mask)
        if not found.by_line:
            what = f"{self._name} returned tokens of no conversation that it had with the model"
            raise LoopFailed(
                f"{what}: prompt_ids and response_ids are the tokens of a request, its response, and so on"
            )
        score = getattr(output, "reward_score", None)
        said: Any = getattr(output, "metrics", None)
        metrics = said if isinstance(said, Mapping) else said.model_dump() if hasattr(said, "model_dump") else {}
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        return EnvStep(
            done=True,
            stop="ended",
            reward=None if score is None else float(score),
            metrics=numbers | {"num_turns": float(output.num_turns), "unsampled_tokens": float(found.unsampled)},
            learned=found.by_line,
        )

    @property
    def _name(self) -> str:
        return str(self._kind.__name__)

    def _say(self, event: EnvAsk | EnvWithdrawn | EnvStep | Exception) -> None:
        if not self._over:
            self._emit(event)

    def _failure(self, error: BaseException) -> LoopFailed:
        """An error of the loop's code with its file and line."""
        ours = str(Path(__file__).parents[2])
        frames = [
            each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith((ours, "<"))
        ]
        here = [each for each in frames if "site-packages" not in each.filename and "/asyncio/" not in each.filename]
        place = f"{here[-1].filename}:{here[-1].lineno}: " if here else ""
        return LoopFailed(f"{place}{last_line(error)[:600]}")


def _params(spec: EnvSpec) -> dict[str, Any]:
    """The sampling parameters that verl hands to a loop."""
    sampling = spec.sampling
    if sampling is None:
        return {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": True}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _wanted(run: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The values that ``run`` takes; verl 0.5 hands messages, later versions the columns of the row instead."""
    wants_messages = "messages" in inspect.signature(run).parameters
    return {name: value for name, value in named_in(run, row).items() if name != "messages" or wants_messages}

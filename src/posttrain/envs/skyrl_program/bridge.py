"""The other side of the environment ``skyrl_program``: run by a Python that has SkyRL, and nothing of this package.

Reads an episode from each line of standard input (JSON: file, folder, arguments, env_class, messages, row, seed, training,
base_url, api_key; messages is a text where the row's prompt is one) and answers with a line on standard output: {"reward",
"metrics", "stop"} or {"failure"}. A line with file, folder, arguments and rows (training or validation) asks for those of the
program's own dataset, and is answered with {"rows"}. An episode with a task instead of file and arguments is played by the
runner of skyrl-agent that this file describes; it has columns, the row as verl's dataset has it. All other output goes to
standard error. The program's ``main`` is called once, up to the point where SkyRL would start its engines and its trainer; its
experiment then makes a generator for each episode.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib
import inspect
import json
import math
import os
import sys
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PEERS = ("skyrl.train", "skyrl_train")  # SkyRL's package since 2026, and before
_pool = concurrent.futures.ThreadPoolExecutor()
_experiments: dict[str, Any] = {}
_played = 0


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # programs print
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            asked = json.loads(line)
            plays = play_task if "task" in asked else play
            answer = await asyncio.to_thread(rows_of, asked) if "rows" in asked else await plays(asked)
        except BaseException as error:  # noqa: BLE001 - someone's program, which may also call sys.exit
            traceback.print_exc()
            answer = {"failure": f"{type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(answer, default=str) + "\n")


def rows_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the items of the program's dataset: (prompt, env_class, env_extras, uid), or a mapping of these."""
    _, experiment = experiment_of(asked)
    read = "get_train_dataset" if asked["rows"] == "training" else "get_eval_dataset"
    dataset = getattr(experiment, read)()
    if dataset is None:
        return {"failure": f"its {read} returns None"}
    items = [dataset[number] for number in range(len(dataset))]
    names = ("prompt", "env_class", "env_extras", "uid")
    return {"rows": [item if isinstance(item, dict) else dict(zip(names, item, strict=False)) for item in items]}


async def play(episode: dict[str, Any]) -> dict[str, Any]:
    """Play an episode with the program's generator."""
    global _played
    _played += 1
    peer, experiment = await asyncio.to_thread(experiment_of, episode)
    client = Client(episode, experiment.tokenizer, str(experiment.cfg.trainer.policy.model.path))
    generator = experiment.get_generator(experiment.cfg, experiment.tokenizer, client)
    play_one(getattr(generator, "__dict__", {}).values())
    base = importlib.import_module(f"{peer}.generators.base")
    row = dict(episode["row"])
    given: dict[str, Any] = {
        "prompts": [episode["messages"]],
        "env_classes": [row.pop("env_class", None) or episode["env_class"] or None],
        "env_extras": [row],
        "sampling_params": None,
        "trajectory_ids": [base.TrajectoryID(str(episode["seed"]), os.getpid() * 100_000 + _played)],
    }
    if hasattr(base, "BatchMetadata"):
        phase = "train" if episode["training"] else "eval"
        given["batch_metadata"] = base.BatchMetadata(global_step=0, training_phase=phase)
    joins = bool(getattr(getattr(experiment.cfg, "generator", None), "merge_stepwise_output", False))
    output = await generator.generate(given)
    answer = answer_of(output, joins=joins)
    return answer if "failure" in answer else {**answer, "left_out": left_out(client.sampled, output)}


async def play_task(episode: dict[str, Any]) -> dict[str, Any]:
    """Play an episode with skyrl-agent's runner for verl, as its manager in the place of verl's does."""
    folder = str(Path(episode["folder"]).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    run_here()
    made = importlib.import_module("skyrl_agent").AutoAgentRunner
    tokenizer = await asyncio.to_thread(loaded_tokenizer, episode["model"])
    runner = made.from_task(episode["task"], infer_engine=Server(Client(episode, tokenizer, "")), tokenizer=tokenizer)
    play_one([runner])
    columns = episode["columns"]
    columns["raw_prompt"] = importlib.import_module("numpy").array(columns["raw_prompt"], dtype=object)
    batch = SimpleNamespace(non_tensor_batch={name: [value] for name, value in columns.items()})
    return answer_of(await runner.run(batch, val_mode=not episode["training"]))


def play_one(runners: Any) -> None:
    """Let skyrl-agent's runners, each of which plays all trajectories of a row by itself, play one: the run asks for each of
    them. Others are left as they are."""
    for runner in runners:
        settings: Any = getattr(getattr(runner, "cfg", None), "generator", None)
        each: Any
        for each in (settings, getattr(settings, "val_config", None)):
            if getattr(each, "num_trajectories", None) is not None:
                each.num_trajectories = 1


def experiment_of(episode: dict[str, Any]) -> tuple[str, Any]:
    """Return SkyRL's package and the program's experiment, made once for a program and its arguments."""
    key = json.dumps([episode["file"], episode["arguments"]])
    if key not in _experiments:
        folder = str(Path(episode["folder"]).resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        run_here()
        file = Path(episode["file"]).resolve()
        module = importlib.import_module(".".join(file.relative_to(folder).with_suffix("").parts))
        peer = next((each for each in PEERS if f"{each}.entrypoints.main_base" in sys.modules), "")
        if not peer:
            raise ImportError(f"{file} does not import SkyRL's trainer ({' or '.join(PEERS)})")
        _experiments[key] = (peer, made_by(module, file, peer, episode["arguments"]))
    return _experiments[key]


def made_by(module: Any, file: Path, peer: str, arguments: list[str]) -> Any:
    """Call the program's ``main``, and return the experiment that it would run."""
    base: Any = sys.modules[f"{peer}.entrypoints.main_base"]
    found: list[Any] = []

    def begin(self: Any, cfg: Any, *_: Any, **__: Any) -> None:
        own = type(self).run
        if own is not note:
            # The plan has read it: it trains, as SkyRL's does, or asks the generator alone
            if not {"train", "generate"} & names_of(own.__code__):
                raise TypeError(f"{type(self).__name__} of {file} has a run of its own, which is not called")
            type(self).run = note
        self.cfg = cfg
        self.tokenizer = tokenizer_of(cfg)

    def note(self: Any, *_: Any, **__: Any) -> None:
        found.append(self)

    base.BasePPOExp.__init__, base.BasePPOExp.run = begin, note
    for place in (module, base):  # it starts Ray for its workers
        if hasattr(place, "initialize_ray"):
            place.initialize_ray = lambda *_, **__: None
    if not callable(getattr(module, "main", None)):
        raise TypeError(f"{file} has no function main")
    sys.argv = [str(file), *arguments]
    module.main()
    if not found:
        raise TypeError(f"main of {file} runs no experiment of SkyRL's (BasePPOExp)")
    return found[-1]


def names_of(code: Any) -> set[str]:
    """The names that a function uses, those of its inner functions among them."""
    inner = (each for each in code.co_consts if inspect.iscode(each))
    return set(code.co_names).union(*map(names_of, inner))


def tokenizer_of(cfg: Any) -> Any:
    """Load the tokenizer of the policy, as SkyRL does: padded on the left."""
    return loaded_tokenizer(str(cfg.trainer.policy.model.path))


@functools.cache
def loaded_tokenizer(model: str) -> Any:
    """Load a tokenizer that pads on the left."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, padding_side="left")


def run_here() -> None:
    """Let functions that are sent to Ray run in threads of this process: one machine plays one episode."""
    ray: Any = importlib.import_module("ray")
    theirs, fetch = ray.remote, ray.get

    def remote(*given: Any, **options: Any) -> Any:
        if given and inspect.isfunction(given[0]):
            return Remote(given[0])
        if given:
            return theirs(*given, **options)
        return lambda what: Remote(what) if inspect.isfunction(what) else theirs(**options)(what)

    def get(what: Any, *given: Any, **options: Any) -> Any:
        if isinstance(what, list) and all(isinstance(each, Result) for each in what):
            return [each.future.result() for each in what]
        return what.future.result() if isinstance(what, Result) else fetch(what, *given, **options)

    if getattr(theirs, "of_bridge", False):
        return
    remote.of_bridge = True  # type: ignore[attr-defined]
    # SkyRL makes actors as soon as Ray is there
    ray.remote, ray.get, ray.init, ray.is_initialized = remote, get, lambda *_, **__: None, lambda: False


class Remote:
    """A function whose calls run in a thread."""

    def __init__(self, function: Any):
        self._function = function

    def options(self, **_: Any) -> Remote:
        return self

    def remote(self, *given: Any, **named: Any) -> Result:
        def call() -> Any:
            found = self._function(*given, **named)
            return asyncio.run(found) if inspect.iscoroutine(found) else found

        return Result(_pool.submit(call))


class Result:
    """The result of such a call, which may be awaited."""

    def __init__(self, future: concurrent.futures.Future[Any]):
        self.future = future

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.future).__await__()


class Client:
    """The methods of SkyRL's client of its inference engines that generators call. Each request is a turn of the episode."""

    def __init__(self, episode: dict[str, Any], tokenizer: Any, model_name: str):
        self._url, self._key = episode["base_url"], episode["api_key"]
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = self._url, self._key
        self._tokenizer = tokenizer
        self.model_name = model_name
        self.sampled: list[tuple[list[int], list[int]]] = []  # prompt and response of every request for tokens

    def get_endpoint_url(self) -> str:
        return str(self._url).removesuffix("/v1")

    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        prompts = input_batch.get("prompt_token_ids")
        if prompts is None:
            prompts = [
                self._tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=True, return_dict=False)
                for each in input_batch["prompts"]
            ]
        sampling = input_batch.get("sampling_params") or {}
        asked = {name: sampling[name] for name in ("max_tokens", "stop") if sampling.get(name)}
        bodies = [{"prompt": [int(token) for token in prompt], "logprobs": 1, **asked} for prompt in prompts]
        choices = [each["choices"][0] for each in await asyncio.gather(*(self._post("completions", b) for b in bodies))]
        tokens = [choice["logprobs"]["token_ids"] for choice in choices]
        self.sampled += [(body["prompt"], list(ids)) for body, ids in zip(bodies, tokens, strict=True)]
        return {
            "responses": [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens],
            "response_ids": tokens,
            "stop_reasons": [choice["finish_reason"] for choice in choices],
            "response_logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        }

    async def chat_completion(self, request_payload: dict[str, Any]) -> Any:
        return await self._post("chat/completions", request_payload["json"])

    async def completion(self, request_payload: dict[str, Any]) -> Any:
        return await self._post("completions", request_payload["json"])

    async def finish_session(self, session_id: Any) -> None:
        """No-op: an episode is the session."""

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(self._send, path, json.dumps(body).encode())

    def _send(self, path: str, body: bytes) -> Any:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", body, headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the run refuses a turn: {error.read().decode(errors='replace')[:500]}") from None


class Server:
    """The server in the place of verl's that skyrl-agent's runner asks: it returns the text, and the tokens that were sampled."""

    def __init__(self, client: Client):
        self._client = client

    async def generate(self, request_id: str, prompt_ids: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        """Answer a request; its max_tokens and stop count."""
        given = dict(sampling_params or {})
        stop = given.get("stop")
        asked = {**given, "stop": list(stop) if stop and not isinstance(stop, str) else stop}
        output = await self._client.generate({"prompt_token_ids": [prompt_ids], "sampling_params": asked})
        said = {"output_tokens": output["response_ids"][0], "finish_reason": output["stop_reasons"][0]}
        return output["responses"][0], {**said, "logprobs": None}


def answer_of(output: Any, *, joins: bool = False) -> dict[str, Any]:
    """Return the reward of the one trajectory in a generator's output: the sum over the tokens of its last row, which alone
    counts in SkyRL. ``joins``: SkyRL joins turns to one row where each begins with what was before it."""
    rewards, masks, last = output["rewards"], output["loss_masks"], output.get("is_last_step")
    trajectories = len(rewards) if last is None else sum(map(bool, last))
    if trajectories != 1:
        return {
            "failure": f"the generator returned {trajectories} trajectories for one row: each would need its reward"
        }
    stops = output.get("stop_reasons") or [""]
    if not any(any(mask) for mask in masks):
        return {"failure": f"the generator masks the whole trajectory ({stops[-1] or 'no reason'})"}
    reward = math.fsum(total_of(rewards[row]) for row in counting_rows(output, joins=joins))
    found = (output.get("env_metrics") or [{}])[-1] or {}
    metrics = {str(name): float(each) for name, each in found.items() if _is_finite(each)}
    return {"reward": reward, "metrics": metrics, "stop": str(stops[-1])}


def left_out(sampled: list[tuple[list[int], list[int]]], output: Any) -> list[tuple[list[int], list[int]]]:
    """Return the requests of which no row of a generator's output trains a token: helpers' and children's, in a generator that
    returns the turns of some agents alone. Where it trains tokens that no request sampled, all requests are trained."""
    prompts, responses = output.get("prompt_token_ids"), output.get("response_ids")
    if not prompts or not responses:
        return []
    rows = [
        (list(prompt), list(response), mask)
        for prompt, response, mask in zip(prompts, responses, output["loss_masks"], strict=True)
        if any(mask)
    ]
    covers = [[trains(row, each) for row in rows] for each in sampled]
    if not all(any(found) for found in zip(*covers, strict=True)):
        return []
    return [each for each, found in zip(sampled, covers, strict=True) if not any(found)]


def trains(row: tuple[list[int], list[int], Any], request: tuple[list[int], list[int]]) -> bool:
    """Return True when a row holds what a request read and a beginning of what was sampled, and trains some of it."""
    (prompt, response, mask), (read, said) = row, request
    whole, asked = prompt + response, read + said
    both = min(len(whole), len(asked))
    return whole[:both] == asked[:both] and any(mask[max(0, len(read) - len(prompt)) : max(0, both - len(prompt))])


def counting_rows(output: Any, *, joins: bool) -> range:
    """Return the rows whose rewards count: the last one, with those that are joined to it. Of rows with a number each, SkyRL
    keeps the last one's."""
    rewards = output["rewards"]
    first = len(rewards) - 1
    if joins and isinstance(rewards[-1], (list, tuple)):
        prompts, responses = output["prompt_token_ids"], output["response_ids"]
        while first and begins_with(prompts[first], [*prompts[first - 1], *responses[first - 1]]):
            first -= 1
    return range(first, len(rewards))


def begins_with(tokens: Any, start: Any) -> bool:
    return list(tokens[: len(start)]) == list(start)


def total_of(reward: Any) -> float:
    """Return the reward of a row: a number, or the sum over its tokens."""
    return math.fsum(reward) if isinstance(reward, (list, tuple)) else float(reward)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


if __name__ == "__main__":
    sys.path = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]
    asyncio.run(main())

"""A teacher in servers: the log-probs of a prompt's tokens, as vLLM's completions give them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.backends.serving.engine import run
from posttrain.backends.serving.protocol import field_of
from posttrain.backends.serving.replicas import Replica, Replicas
from posttrain.backends.teachers.graded import AnswerReader, GradedToken
from posttrain.config.distillation import TeacherConfig
from posttrain.config.model import ModelConfig
from posttrain.errors import ConfigError, ModelError, Problem, RunStopped
from posttrain.libraries.json_http import TIMEOUT, HttpFailure
from posttrain.libraries.token_files import FIX
from posttrain.models.loading import load_tokenizer
from posttrain.models.vocabularies import check_same_tokens
from posttrain.records.batches import SequenceBatch

if TYPE_CHECKING:
    import httpx2

RETRIES = 3
START_S = 60.0  # for the first questions to a server
# Text whose tokens show which tokenizer a server has: digits, spaces, code, other scripts.
PROBE = "Let x = 3,141.59;\n\n\tdef f(n): return n**2  # 千里之行 Ünïcödé été \U0001f642 1234567890 http://a.b/c?d=e"

Graded = tuple[AnswerReader, dict[int, GradedToken]]  # of a row: the places of its response columns


class ServedTeacher:
    """See interfaces.train_engine.TeacherEngine. Servers report log-probs at temperature 1.

    Args: vocabulary, the number of token ids that the student knows.
    Raises: ConfigError without a key that the teacher names; ModelError for another tokenizer than the student's, or one that
        cannot be known; RunStopped when no server answers.
    """

    def __init__(self, name: str, teacher: TeacherConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int):
        self._field = f"distillation.teachers.{name}"
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._model = teacher.served_model
        self._at_once = teacher.sequences_per_micro_batch_per_device * len(teacher.endpoints)
        self._replicas = Replicas(
            urls=[_base(url) for url in teacher.endpoints],
            headers=_key(teacher, self._field),
            timeout_s=teacher.timeout_s,
            retries=RETRIES,
            in_flight=self._at_once,
            kind=f"server of the teacher {name}",
            timeout_setting=f"{self._field}.timeout_s",
        )
        if teacher.path is not None:
            field = f"{self._field}.path"
            theirs = load_tokenizer(ModelConfig(path=teacher.path), field=field)
            check_same_tokens(tokenizer, theirs, field)
        run(self._begin(known=teacher.path is not None))

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        found = torch.zeros(batch.response_mask.shape)
        for row, (_, places) in enumerate(self._answers(batch, 0)):
            for column, graded in places.items():
                found[row, column] = graded.logprob
        return found

    def top_logprobs(self, batch: SequenceBatch, temperature: float, k: int) -> Tensor:
        found = torch.zeros(*batch.response_mask.shape, 2, k)
        for row, (reader, places) in enumerate(self._answers(batch, k)):
            for column, graded in places.items():
                found[row, column] = torch.tensor(reader.top(graded, k)).T
        return found

    def _answers(self, batch: SequenceBatch, k: int) -> list[Graded]:
        return run(self._ask_all(batch, k))

    async def _ask_all(self, batch: SequenceBatch, k: int) -> list[Graded]:
        gate = asyncio.Semaphore(self._at_once)

        async def of(client: httpx2.AsyncClient, row: int) -> Graded:
            async with gate:
                return await self._ask(client, batch, row, k)

        async with self._replicas.client() as client:
            asked = [asyncio.create_task(of(client, row)) for row in range(len(batch))]
            try:
                return [await each for each in asked]  # of several failures the first row's is reported
            finally:
                for each in asked:
                    each.cancel()
                await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, client: httpx2.AsyncClient, batch: SequenceBatch, row: int, k: int) -> Graded:
        width, prompt = batch.prompt_width, int(batch.prompt_lengths[row])
        tokens = batch.tokens[row, width - prompt : width + int(batch.response_lengths[row])].tolist()
        sampled = batch.response_mask[row].nonzero()[:, 0].tolist()
        if not sampled:
            return self._reader(self._replicas.all[0]), {}
        # One likely token at least: beside it a log-prob shows whether it is one.
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": max(k, 1),
        }
        try:
            replica, answer = await self._replicas.ask_group(client, row, "/v1/completions", body)
        except HttpFailure as failure:
            raise RunStopped(f"the {self._replicas.kind} did not grade {batch.sample_ids[row]}: {failure}") from None
        reader = self._reader(replica)
        places = reader.read(answer, tokens, [prompt + column for column in sampled])
        return reader, dict(zip(sampled, places, strict=True))

    def _reader(self, replica: Replica) -> AnswerReader:
        return AnswerReader(server=f"{self._replicas.kind}, {replica},", vocabulary=self._vocabulary)

    async def _begin(self, *, known: bool) -> None:
        """Look for the servers, the model's name and its tokenizer."""
        async with self._replicas.client() as client:
            await self._replicas.probe(client)
            if not self._replicas.current():
                raise self._replicas.nobody()
            if self._model is None:
                (_, models), *_ = await self._replicas.tell_all(client, "GET", "/v1/models", timeout_s=START_S)
                self._model = field_of(models, "data", 0, "id")
                if not isinstance(self._model, str):
                    raise RunStopped(
                        f"/v1/models of the {self._replicas.kind} names no model: set {self._field}.served_model"
                    )
            if known:
                return
            for replica in self._replicas.current():
                try:
                    await self._check_tokens(client, replica)
                except HttpFailure as failure:
                    what = f"{replica} does not tell its tokenizer ({failure}), and a teacher must have the student's"
                    fix = "name the folder or hub id of the teacher, whose tokenizer is then compared"
                    raise ModelError(Problem(what, fix=fix, field=f"{self._field}.path")) from None
            self._replicas.admit = self._check_tokens  # a server may come later, or back with another model

    async def _check_tokens(self, client: httpx2.AsyncClient, replica: Replica) -> None:
        """Raises: ModelError for another tokenizer than the student's; HttpFailure when the server does not say."""
        text = PROBE + "".join(self._tokenizer.all_special_tokens)
        ours = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            async with asyncio.timeout(START_S):
                answer = await self._replicas.ask_once(client, replica, "POST", "/tokenize", body)
        except TimeoutError:
            raise HttpFailure(TIMEOUT, f"no answer within {START_S:g} s") from None
        theirs = field_of(answer, "tokens")
        if theirs != list(ours):
            what = f"the teacher cannot grade the student's tokens: {replica} has another tokenizer; it makes "
            what += f"{len(theirs) if isinstance(theirs, list) else 'no'} tokens of a text with {len(ours)}"
            raise ModelError(Problem(what, fix=FIX, field=f"{self._field}.path"))


def _base(url: str) -> str:
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def _key(teacher: TeacherConfig, field: str) -> dict[str, str]:
    if teacher.api_key_variable is None:
        return {}
    key = os.environ.get(teacher.api_key_variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        what = f"the environment variable {teacher.api_key_variable} is not set, or holds no key"
        field = f"{field}.api_key_variable"
        raise ConfigError(Problem(what, fix="set it in the shell that starts the run", field=field))
    return {"Authorization": f"Bearer {key}"}

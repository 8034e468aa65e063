"""A teacher behind the queue of verl's recipe gkd: its most likely tokens at every place of a text, over ZeroMQ.

A request is a dictionary written by ``torch.save`` (``prompt_token_ids``: texts, ``max_tokens``, ``temperature``), as is its
answer (``teacher_topk_logprobs`` and ``teacher_topk_indices``: of each text [tokens, most likely ones], the distribution behind
each token). Answers are read as plain tensors (``weights_only``): nothing that they hold is run.

Source: https://github.com/verl-project/verl-recipe, gkd/teacher.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import zmq
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from posttrain.backends.teachers.graded import HIGHEST, LOWEST, MASS
from posttrain.config.distillation import TeacherConfig
from posttrain.config.model import ModelConfig
from posttrain.errors import ConfigError, Problem, RunStopped
from posttrain.libraries.json_http import short
from posttrain.models.loading import load_tokenizer
from posttrain.models.vocabularies import check_same_tokens
from posttrain.records.batches import SequenceBatch

START_S = 60.0  # for the first question to a server
AT_ONCE = 4  # requests to each server; its proxy divides them among its workers

Top = tuple[Tensor, Tensor]  # of a text: log-probs [tokens, listed] in nats, and token ids [tokens, listed]


class QueuedTeacher:
    """See interfaces.train_engine.TeacherEngine.

    Args: vocabulary, the number of token ids that the student knows.
    Raises: ModelError where teacher.path has another tokenizer than the student's; RunStopped when a server does not answer.
    """

    def __init__(self, name: str, teacher: TeacherConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int):
        self._name, self._field = name, f"distillation.teachers.{name}"
        self._vocabulary = vocabulary
        self._addresses = list(teacher.endpoints)
        self._texts_at_once = teacher.sequences_per_micro_batch_per_device
        self._timeout_s = teacher.timeout_s
        self._context: zmq.Context[Any] = zmq.Context.instance()
        if teacher.path is not None:
            field = f"{self._field}.path"
            check_same_tokens(tokenizer, load_tokenizer(ModelConfig(path=teacher.path), field=field), field)
        for address in self._addresses:
            self._ask(address, [[0, 0]], min(START_S, self._timeout_s))

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Tensor:
        what = f"the servers of the teacher {self._name} give its most likely tokens alone"
        fix = "use distillation.divergence.name=forward_kl with distillation.top_k"
        raise ConfigError(Problem(what, fix=fix, field="distillation.divergence.name"))

    def top_logprobs(self, batch: SequenceBatch, temperature: float, k: int) -> Tensor:
        found = torch.zeros(*batch.response_mask.shape, 2, k)
        rows = [row for row in range(len(batch)) if bool(batch.response_mask[row].any())]
        texts = {row: self._text(batch, row) for row in rows}
        parts = [rows[start : start + self._texts_at_once] for start in range(0, len(rows), self._texts_at_once)]

        def answers(number: int) -> list[Top]:
            address = self._addresses[number % len(self._addresses)]
            return self._ask(address, [texts[row] for row in parts[number]], self._timeout_s)

        with ThreadPoolExecutor(max_workers=AT_ONCE * len(self._addresses)) as pool:
            for part, tops in zip(parts, pool.map(answers, range(len(parts))), strict=True):
                for row, top in zip(part, tops, strict=True):
                    columns = batch.response_mask[row].nonzero()[:, 0]
                    # the distribution of a token stands behind the one before it
                    places = int(batch.prompt_lengths[row]) + columns - 1
                    found[row, columns] = self._likely(top, places, k)
        return found

    def _text(self, batch: SequenceBatch, row: int) -> list[int]:
        width, prompt = batch.prompt_width, int(batch.prompt_lengths[row])
        text: list[int] = batch.tokens[row, width - prompt : width + int(batch.response_lengths[row])].tolist()
        return text

    def _likely(self, top: Top, places: Tensor, k: int) -> Tensor:
        """The k most likely tokens at these places, [n, 2, k]: ids, and nats."""
        values, ids = top[0][places], top[1][places]
        if values.shape[1] < k:
            what = f"gives the {values.shape[1]} most likely tokens, and distillation.top_k is {k}"
            raise self._stopped(f"{what}: start its workers with --n-logprobs {k}, or lower top_k")
        if int(ids.max()) >= self._vocabulary:
            what = f"names token {int(ids.max())}, and the student's tokens end at {self._vocabulary - 1}"
            raise self._stopped(what)
        values, order = values.sort(dim=1, descending=True)
        return torch.stack([ids.gather(1, order)[:, :k].float(), values[:, :k]], dim=1)

    def _ask(self, address: str, texts: Sequence[Sequence[int]], timeout_s: float) -> list[Top]:
        """Send one request and check its answer. Raises: RunStopped."""
        request = io.BytesIO()
        torch.save({"prompt_token_ids": [list(text) for text in texts], "max_tokens": 1, "temperature": 1}, request)
        with self._context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, math.ceil(timeout_s * 1000))
            socket.connect(address)
            try:
                socket.send(request.getbuffer())
                raw = socket.recv()
            except zmq.Again:
                where = f"{self._field}.timeout_s"
                raise self._stopped(f"at {address} gave no answer within {timeout_s:g} s ({where})") from None
        try:
            answer = torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")
        except Exception as error:  # noqa: BLE001 - a server may send anything
            raise self._stopped(
                f"at {address} gave an answer that holds no plain tensors: {short(str(error))}"
            ) from None
        return self._read(address, answer, texts)

    def _read(self, address: str, answer: Any, texts: Sequence[Sequence[int]]) -> list[Top]:
        if not isinstance(answer, Mapping) or answer.get("status") == "error":
            said = answer.get("reason") if isinstance(answer, Mapping) else type(answer).__name__
            raise self._stopped(f"at {address} reports an error: {short(str(said))}")
        values, ids = (answer.get(f"teacher_topk_{name}") for name in ("logprobs", "indices"))
        if not (isinstance(values, list) and isinstance(ids, list) and len(values) == len(ids) == len(texts)):
            raise self._stopped(
                f"at {address} gave no list of {len(texts)} teacher_topk_logprobs and teacher_topk_indices"
            )
        return [self._checked(address, *each) for each in zip(values, ids, texts, strict=True)]

    def _checked(self, address: str, values: Any, ids: Any, text: Sequence[int]) -> Top:
        if not (
            isinstance(values, Tensor) and isinstance(ids, Tensor) and values.ndim == 2 and values.shape == ids.shape
        ):
            raise self._stopped(
                f"at {address} gave something else than two tensors [tokens, most likely ones] for a text"
            )
        if len(values) != len(text):
            raise self._stopped(f"at {address} gave {len(values)} distributions for {len(text)} tokens")
        values, ids = values.float(), ids.long()
        sums = values.exp().sum(dim=1)
        if not (
            values.isfinite().all() and (values >= LOWEST).all() and (values <= HIGHEST).all() and (sums <= MASS).all()
        ):
            raise self._stopped(
                f"at {address} gave log-probs that are none: above 0, not finite, or of more than 1 in all"
            )
        if ids.numel() and int(ids.min()) < 0:
            raise self._stopped(f"at {address} names token {int(ids.min())}")
        return values, ids

    def _stopped(self, what: str) -> RunStopped:
        return RunStopped(f"the server of the teacher {self._name} {what}")

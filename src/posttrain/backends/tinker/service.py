"""Verbs of Tinker's API: each turns a request into a job for the worker, and checks first what can be seen without the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.backends.tinker.adapters import AdaptedModel, Adapter, AdapterShape
from posttrain.backends.tinker.clients import SNAPSHOTS, Results, SamplerWeights, Session, Sessions, Trained
from posttrain.backends.tinker.losses import check_loss
from posttrain.backends.tinker.requests import LossRequest, number, read_sample_request, text
from posttrain.backends.tinker.sampling import ClientSampling, sampling_key
from posttrain.backends.tinker.store import Saved, SavedAbout, Store
from posttrain.backends.tinker.training import ClientTraining, Scorers, check_optimizer, read_adam
from posttrain.backends.tinker.worker import Failed, Job, Skipping, Worker
from posttrain.data.chat_api import Refused
from posttrain.models.lora import adapter_tensors

_CLEAN_S = 600.0  # between two looks for what has expired on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """Settings of the service, in plain values."""

    model: str  # name of the base model
    aliases: frozenset[str]  # other names by which clients may call it
    max_adapters: int
    max_rank: int
    silence_s: float


class Service:
    """The verbs. Methods return at once, with the id of a request whose result ``results`` has later; they raise Refused."""

    def __init__(
        self,
        plan: ServicePlan,
        model: AdaptedModel,
        scorers: Scorers,
        sampling: ClientSampling,
        tokenizer: PreTrainedTokenizerBase,
        store: Store,
    ):
        self.plan = plan
        self.model = model
        self.store = store
        self.results = Results()
        self.sessions = Sessions(plan.silence_s)
        self.worker = Worker(self._tick)
        self._scorers = scorers
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._loaded: dict[str, Adapter] = {}  # saved weights that sampling sessions read, by path
        self._cleaned = time.monotonic()

    @property
    def context(self) -> int:
        return self._sampling.context

    @property
    def vocabulary(self) -> int:
        embedding: Any = self.model.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    def create_session(self) -> str:
        return self.sessions.begin(secrets.token_hex(8)).session_id

    def finish_session(self, session_id: str, why: str) -> None:
        """End a session: its requests are dropped, and its adapters leave the memory."""
        session = self.sessions.end(session_id, why)
        if session is not None:
            self.worker.drop(session_id, list(session.models), f"the session has ended: {why}")
            self.results.drop(session_id)

    def create_model(self, body: Mapping[str, Any]) -> str:
        """Make a new adapter."""
        session = self.sessions.of(text(body, "session_id"))
        self.check_model(text(body, "base_model"))
        check_optimizer(body.get("optimizer_config"))
        given = body.get("lora_config")
        if not isinstance(given, Mapping):
            raise Refused("lora_config is missing: this server trains adapters, and not whole models")
        shape = AdapterShape(
            rank=number(given, "rank", None, least=1) or _missing("lora_config.rank"),
            attention=bool(given.get("train_attn", True)),
            mlp=bool(given.get("train_mlp", True)),
            output=bool(given.get("train_unembed", True)),
        )
        if shape.rank > self.plan.max_rank:
            raise Refused(f"rank {shape.rank} is above {self.plan.max_rank} (tinker.max_rank of the server)")
        if not self.model.layers_of(shape):
            raise Refused(
                "no layer of this model is left for the adapter; train_mlp, train_attn or train_unembed adds some"
            )
        make = partial(self.model.create, shape, number(given, "seed", None))
        return self._begin(session, body, shape, make, lambda training: None, lambda model_id: {"model_id": model_id})

    def _begin(
        self,
        session: Session,
        body: Mapping[str, Any],
        shape: AdapterShape,
        make: Callable[[], Adapter],
        then: Callable[[ClientTraining], None],
        answer: Callable[[str], dict[str, Any]],
    ) -> str:
        model_id = f"{session.session_id}:train:{number(body, 'model_seq_id', None, least=0)}"
        request_id = f"{model_id}:0"
        if self.results.get(request_id) is not None:
            return request_id
        if self.sessions.trained() >= self.plan.max_adapters:
            raise Refused(
                f"{self.plan.max_adapters} adapters are in training, the most that tinker.max_adapters allows"
            )
        trained = session.models[model_id] = Trained(model_id, shape, _metadata(body))

        def run(_: Sequence[Any]) -> list[dict[str, Any]]:
            training = ClientTraining(self._scorers, make(), self._tokenizer)
            then(training)
            trained.training = training
            return [answer(model_id)]

        def forget(why: str) -> None:
            session.models.pop(model_id, None)

        job = Job(run=run, owner=session.session_id, refused=forget)
        self.results.put(request_id, job.future)
        self.worker.submit(job)
        return request_id

    def info(self, model_id: str) -> dict[str, Any]:
        trained = self.sessions.model(model_id)
        arch = (getattr(self.model.model.config, "architectures", None) or [type(self.model.model).__name__])[0]
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": self.plan.model,
            "model_data": {"arch": arch, "model_name": self.plan.model, "tokenizer_id": self._tokenizer.name_or_path},
            "is_lora": True,
            "lora_rank": trained.shape.rank,
        }

    def unload(self, model_id: str) -> str:
        trained = self.sessions.model(model_id)
        session = self.sessions.of(model_id)

        def run(_: Sequence[Any]) -> list[dict[str, Any]]:
            session.models.pop(model_id, None)
            self.worker.drop("", [model_id], "the model was unloaded")
            return [{"type": "unload_model", "model_id": model_id}]

        return self._in_order(trained, {}, run)

    def loss(self, request: LossRequest) -> str:
        """Submit forward or forward_backward."""
        trained = self.sessions.model(request.model_id)

        def lost(why: str) -> None:
            if not request.forward_only and trained.training is not None and not trained.training.lost:
                trained.training.lost = f"a forward_backward before it failed ({why})"

        try:
            check_loss(request, self.vocabulary, self.context)
        except Refused as refused:
            self._skip(trained, request.seq_id, partial(lost, str(refused)))
            raise

        def run(given: Sequence[Any]) -> list[Any]:
            return [_training(trained).forward(given[0])]

        return self._in_order(trained, {"seq_id": request.seq_id}, run, given=request, refused=lost)

    def optim_step(self, body: Mapping[str, Any]) -> str:
        trained = self.sessions.model(text(body, "model_id"))
        with self._skipping(trained, body):
            params = read_adam(body)
        return self._in_order(trained, body, lambda _: [{"metrics": _training(trained).step(params)}])

    def save_state(self, body: Mapping[str, Any]) -> str:
        """Save an adapter with its optimizer."""
        trained = self.sessions.model(text(body, "model_id"))
        with self._skipping(trained, body):
            name, about = text(body, "path"), self._about(trained, body)

        def run(_: Sequence[Any]) -> list[dict[str, Any]]:
            write = partial(_training(trained).save, optimizer=True)
            overwrite = bool(body.get("overwrite"))
            path = self.store.write(trained.model_id, "weights", name, about, write, overwrite=overwrite)
            return [{"type": "save_weights", "path": path}]

        return self._in_order(trained, body, run)

    def save_for_sampler(self, body: Mapping[str, Any]) -> str:
        """Save an adapter to sample from: by its name on the disk, or without one in memory, with a sampling session."""
        trained = self.sessions.model(text(body, "model_id"))
        session = self.sessions.of(trained.model_id)
        with self._skipping(trained, body):
            about = self._about(trained, body)
            name, place = body.get("path"), number(body, "sampling_session_seq_id", None)
            if (name is None) == (place is None):
                raise Refused("save_weights_for_sampler takes either path or sampling_session_seq_id")

        def run(_: Sequence[Any]) -> list[dict[str, Any]]:
            training = _training(trained)
            if name is not None:
                write = partial(training.save, optimizer=False)
                path = self.store.write(trained.model_id, "sampler_weights", str(name), about, write)
                return [{"type": "save_weights_for_sampler", "path": path}]
            sampler_id = f"{session.session_id}:sample:{place}"
            session.samplers[sampler_id] = self._snapshot(trained, training, inflight=body.get("kind") == "inflight")
            return [{"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}]

        return self._in_order(trained, body, run)

    def _snapshot(self, trained: Trained, training: ClientTraining, *, inflight: bool) -> SamplerWeights:
        copy = training.adapter.snapshot()
        if inflight:
            if trained.inflight is None:
                trained.inflight = SamplerWeights(copy)
            trained.inflight.adapter = copy
            return trained.inflight
        weights = SamplerWeights(copy)
        trained.snapshots.append(weights)
        for old in trained.snapshots[:-SNAPSHOTS]:
            old.adapter, old.gone = None, True
        del trained.snapshots[:-SNAPSHOTS]
        return weights

    def load_state(self, body: Mapping[str, Any]) -> str:
        """Load a saved state: into a client, or as a new one (session_id and model_seq_id)."""
        if body.get("weights_access_token"):
            raise Refused("weights_access_token is not supported: this server has no accounts")
        path, optimizer = text(body, "path"), bool(body.get("optimizer"))
        answer: dict[str, Any] = {"type": "load_weights", "path": path}
        if body.get("session_id") is not None:
            session = self.sessions.of(text(body, "session_id"))
            saved = self._saved(path)
            if body.get("base_model"):
                self.check_model(text(body, "base_model"))
            check_optimizer(body.get("optimizer_config"))

            def then(training: ClientTraining) -> None:
                training.load(saved.folder, optimizer=optimizer)

            shape = saved.about.shape
            make = partial(self.model.create, shape, 0)
            return self._begin(session, body, shape, make, then, lambda model_id: answer | {"model_id": model_id})
        trained = self.sessions.model(text(body, "model_id"))
        with self._skipping(trained, body):
            saved = self._saved(path)

        def run(_: Sequence[Any]) -> list[dict[str, Any]]:
            _training(trained).load(saved.folder, optimizer=optimizer)
            return [answer | {"model_id": trained.model_id}]

        return self._in_order(trained, body, run)

    def create_sampling_session(self, body: Mapping[str, Any]) -> str:
        """Begin to sample from the base model, or from saved weights. Returns: the id of the session."""
        session = self.sessions.of(text(body, "session_id"))
        sampler_id = f"{session.session_id}:sample:{number(body, 'sampling_session_seq_id', 0)}"
        if body.get("base_model"):
            self.check_model(text(body, "base_model"))
        path = body.get("model_path")
        if path is not None:
            self._saved(text(body, "model_path"))
        elif not body.get("base_model"):
            raise Refused("create_sampling_session takes base_model or model_path")
        session.samplers[sampler_id] = SamplerWeights(None, path)
        return sampler_id

    def sample(self, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Submit a sampling request. Returns: its id, and those of its responses."""
        sampler_id = text(body, "sampling_session_id")
        weights = self.sessions.sampler(sampler_id)
        place = number(body, "seq_id", None)
        request_id = f"{sampler_id}:{secrets.token_hex(6) if place is None else place}"
        weights.check_kept()  # here too, since its job would share a batch with those of the base model
        asked = read_sample_request(body)
        sequences = [f"{request_id}:{each}" for each in range(asked.num_samples)]
        if self.results.get(request_id) is not None:
            return request_id, sequences
        self._sampling.check(asked, self.vocabulary)

        def run(requests: Sequence[Any]) -> Sequence[Any]:
            return self._sampling.sample(self._weights(weights), requests)

        key = (weights.path, weights.adapter and id(weights.adapter), sampling_key(asked))
        job = Job(run=run, given=asked, key=key, owner=sampler_id.partition(":")[0])
        self.results.put(request_id, job.future)
        self.worker.submit(job)
        return request_id, sequences

    def _weights(self, weights: SamplerWeights) -> Adapter | None:
        weights.check_kept()
        if weights.path is None:
            return weights.adapter
        if weights.path not in self._loaded:
            saved = self._saved(weights.path)
            tensors = adapter_tensors(saved.folder, field="path")
            while len(self._loaded) >= SNAPSHOTS:
                del self._loaded[next(iter(self._loaded))]
            try:
                self._loaded[weights.path] = self.model.restore(saved.about.shape, tensors)
            except ValueError as error:
                raise Refused(f"{weights.path}: {error}") from None
        return self._loaded[weights.path]

    def check_model(self, name: str) -> None:
        """Raises: Refused when this server has another base model."""
        if name != self.plan.model and name not in self.plan.aliases:
            raise Refused(f"this server has the base model {self.plan.model}, and not {name}")

    def cancel(self, request_id: str) -> None:
        future = self.results.get(request_id)
        if future is not None:
            self.worker.cancel(future)

    def _saved(self, path: str) -> Saved:
        saved = self.store.find(path)
        if saved.about.base_model != self.plan.model:
            raise Refused(f"{path} is of the base model {saved.about.base_model}; this server has {self.plan.model}")
        return saved

    def _about(self, trained: Trained, body: Mapping[str, Any]) -> SavedAbout:
        lives = number(body, "ttl_seconds", None, least=1)
        now = time.time()
        return SavedAbout(
            base_model=self.plan.model,
            shape=trained.shape,
            created=now,
            expires=None if lives is None else now + lives,
            user_metadata=_metadata(body),
        )

    def _in_order(
        self,
        trained: Trained,
        body: Mapping[str, Any],
        run: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        given: Any = None,
        refused: Callable[[str], None] = lambda why: None,
    ) -> str:
        place = number(body, "seq_id", None, least=1)
        request_id = f"{trained.model_id}:{secrets.token_hex(6) if place is None else place}"
        if self.results.get(request_id) is None:  # else the client sends it again: its first answer was lost
            job = Job(run=run, given=given, owner=trained.model_id.partition(":")[0], refused=refused)
            self.results.put(request_id, job.future)
            self.worker.submit_in_order(trained.model_id, place, job)
        return request_id

    def _skip(self, trained: Trained, place: Any, then: Callable[[], None] = lambda: None) -> None:
        """Let later requests of a client not wait for one that is refused. ``then`` runs in its turn."""

        def run(_: Sequence[Any]) -> list[None]:
            then()
            return [None]

        if isinstance(place, int) and place > 0:
            self.worker.submit_in_order(trained.model_id, place, Job(run=run))

    def _skipping(self, trained: Trained, body: Mapping[str, Any]) -> Skipping:
        return Skipping(lambda: self._skip(trained, body.get("seq_id")))

    def _tick(self) -> None:
        for session_id in self.sessions.silent():
            self.finish_session(session_id, f"it was silent for {self.plan.silence_s:g} s (tinker.session_timeout_s)")
        if time.monotonic() - self._cleaned > _CLEAN_S:
            self._cleaned = time.monotonic()
            self.store.clean()


def _training(trained: Trained) -> ClientTraining:
    if trained.training is None:
        raise Failed("the model could not be made", "user")
    return trained.training


def _metadata(body: Mapping[str, Any]) -> dict[str, str]:
    given = body.get("user_metadata") or {}
    if not isinstance(given, Mapping):
        raise Refused("user_metadata is no mapping")
    return {str(name): str(value) for name, value in given.items()}


def _missing(name: str) -> Any:
    raise Refused(f"{name} is missing")

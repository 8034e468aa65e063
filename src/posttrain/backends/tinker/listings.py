"""Lists of what is saved and of who is there, in the form that Tinker's REST client reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.backends.tinker.clients import Session, Sessions
from posttrain.backends.tinker.requests import number
from posttrain.backends.tinker.store import Saved, Store
from posttrain.data.chat_api import Refused


def checkpoint(run: str, name: str) -> str:
    """Return the path of a run's checkpoint by its id, weights/NAME or sampler_weights/NAME."""
    return f"tinker://{run}/{name}"


def checkpoints(store: Store, run: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
    """List the saved adapters of a run, or of all runs page by page, newest first."""
    found = [saved.told() for saved in store.all(run)][::-1]
    if query is None:
        return {"checkpoints": found}
    page, cursor = _page(found, query)
    return {"checkpoints": page, "cursor": cursor}


def runs(store: Store, query: Mapping[str, str]) -> dict[str, Any]:
    """List the runs that have saved something, newest first."""
    page, cursor = _page([_run(saved) for saved in _by_run(store).values()][::-1], query)
    return {"training_runs": page, "cursor": cursor}


def run_of(store: Store, run: str) -> dict[str, Any]:
    """Describe a run by what it has saved. Raises: Refused."""
    found = _by_run(store).get(run)
    if found is None:
        raise Refused(f"nothing of a run {run} is saved", 404)
    return _run(found)


def weights_info(store: Store, path: str) -> dict[str, Any]:
    """Describe a saved adapter. Raises: Refused."""
    about = store.find(path).about
    return {
        "base_model": about.base_model,
        "is_lora": True,
        "lora_rank": about.shape.rank,
        "train_unembed": about.shape.output,
        "train_mlp": about.shape.mlp,
        "train_attn": about.shape.attention,
    }


def sessions(found: Sessions) -> dict[str, Any]:
    return {"sessions": [session.session_id for session in found]}


def session_of(found: Sessions, session_id: str) -> dict[str, Any]:
    """Describe a session. Raises: Refused."""
    session: Session = found.of(session_id)
    return {"training_run_ids": list(session.models), "sampler_ids": list(session.samplers)}


def _by_run(store: Store) -> dict[str, list[Saved]]:
    grouped: dict[str, list[Saved]] = {}
    for saved in store.all():
        grouped.setdefault(saved.run, []).append(saved)
    return grouped


def _run(saved: list[Saved]) -> dict[str, Any]:
    last = {each.kind: each.told() for each in saved}
    newest = saved[-1]
    return {
        "training_run_id": newest.run,
        "base_model": newest.about.base_model,
        "model_owner": "posttrain",
        "is_lora": True,
        "lora_rank": newest.about.shape.rank,
        "last_request_time": newest.told()["time"],
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": dict(newest.about.user_metadata),
    }


def _page(found: list[dict[str, Any]], query: Mapping[str, str]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    given = {name: int(value) for name, value in query.items() if name in ("limit", "offset") and value.isdigit()}
    limit, offset = number(given, "limit", 100), number(given, "offset", 0)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}

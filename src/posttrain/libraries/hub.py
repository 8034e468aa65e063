"""The Hugging Face hub: download models and data sets at one commit, or find them in its cache. The only module that reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, ModelError, Problem, RequestError
from posttrain.libraries.hub_names import COMMIT, IN_CACHE, HubName
from posttrain.libraries.hub_splits import files_of

TIMEOUT_S = 10.0
# The files of a model folder, besides weights.
ABOUT_A_MODEL = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
README = "README.md"
# The files of a repository, and its README.md -> those that are wanted.
Choice = Callable[[Sequence[str], str], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A model or data set in the hub's cache."""

    folder: Path  # of the snapshot
    commit: str
    files: tuple[str, ...]  # the chosen ones
    note: str = ""  # for the user

    @property
    def place(self) -> str:
        """The folder, as a path in a configuration."""
        return str(self.folder)

    @property
    def paths(self) -> list[str]:
        """The chosen files on this machine."""
        return [str(self.folder / file) for file in self.files]


class _Away(Exception):
    """The hub cannot be reached; the message says why."""


def fetch_model(wanted: HubName, field: str, commit: str = "", *, weights: bool = True) -> Fetched:
    """Download a model, or find it in the cache. Args: ``commit``, to be used whatever the revision points to by now.

    Raises: ModelError, about the setting ``field``.
    """
    return _fetch(wanted, field, commit, lambda names, _: model_files(names, weights=weights), network=True)


def fetch_data(wanted: HubName, field: str, commit: str = "") -> Fetched:
    """Download the chosen files of a data set, or find them in the cache. Raises: DataError, about the setting ``field``."""
    return _fetch(wanted, field, commit, lambda names, readme: files_of(wanted, names, readme, field), network=True)


def cached_data(wanted: HubName, field: str, commit: str = "") -> Fetched:
    """Find a data set in the cache, without a connection. Raises: DataError where it is not there."""
    return _fetch(wanted, field, commit, lambda names, readme: files_of(wanted, names, readme, field), network=False)


def cached_commit(wanted: HubName, commit: str = "") -> Path | None:
    """The snapshot of a model or data set in the cache; None without one."""
    from huggingface_hub import constants

    storage = Path(constants.HF_HUB_CACHE) / f"{wanted.kind}s--{wanted.name.replace('/', '--')}"
    revision = wanted.revision or "main"
    if not commit and COMMIT.fullmatch(revision):
        commit = revision
    if not commit and (ref := storage / "refs" / revision).is_file():
        commit = ref.read_text(encoding="utf-8").strip()
    folder = storage / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def restored(path: str) -> str:
    """Download the snapshot that a path in a cache of the hub means where this machine's does not have it: another machine,
    or a cache that was emptied. Returns: the folder; other paths stay. Raises: ModelError."""
    found = IN_CACHE.fullmatch(path)
    if found is None or found["kind"] != "models" or Path(path).exists():
        return path
    wanted = HubName(name=found["name"].replace("--", "/", 1), revision=found["commit"])
    return str(fetch_model(wanted, "model.path").folder)


def model_files(names: Sequence[str], *, weights: bool = True) -> list[str]:
    """Choose the files of a model: its weights in one format, and all that describes it and its tokenizer."""
    own = [name for name in names if "/" not in name or name.startswith("additional_chat_templates/")]
    chosen = [name for name in own if name.endswith(ABOUT_A_MODEL)]
    stored = [name for name in own if name.endswith(".safetensors")]
    stored = stored or [name for name in own if re.fullmatch(r"pytorch_model.*\.bin", name)]
    return sorted({*chosen, *(stored if weights else [])})


def _fetch(wanted: HubName, field: str, commit: str, choose: Choice, *, network: bool) -> Fetched:
    from huggingface_hub import constants

    try:
        if not network or constants.HF_HUB_OFFLINE:
            raise _Away("HF_HUB_OFFLINE is set" if network else "nothing is downloaded for a plan")
        return _downloaded(wanted, field, commit, choose)
    except _Away as error:
        found = _cached(wanted, commit, choose)
        if found is None:
            raise _not_here(wanted, field, str(error)) from None
        away = f"the hub cannot be reached ({error}): {wanted.title} from its cache"
        noted = "" if constants.HF_HUB_OFFLINE or not network else away
        return Fetched(folder=found.folder, commit=found.commit, files=found.files, note=noted)


def _downloaded(wanted: HubName, field: str, commit: str, choose: Choice) -> Fetched:
    """Raises: _Away; RequestError for what the hub does not have or does not give."""
    import httpx2
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError

    said: Any = {"repo_id": wanted.name, "repo_type": wanted.kind}
    place: Any = {"cache_dir": constants.HF_HUB_CACHE, "endpoint": constants.ENDPOINT}
    revision = commit or wanted.revision or "main"
    try:
        about: Any = HfApi(endpoint=constants.ENDPOINT).repo_info(**said, revision=revision, timeout=TIMEOUT_S)
        found = str(about.sha)
        names = [each.rfilename for each in about.siblings or []]
        readme = ""
        if wanted.kind == "dataset" and README in names:
            readme = Path(hf_hub_download(**said, **place, filename=README, revision=found)).read_text(
                "utf-8", errors="replace"
            )
        files = choose(names, readme)
        patterns = [re.sub(r"([*?[])", r"[\1]", name) for name in files]
        folder = Path(snapshot_download(**said, **place, revision=found, allow_patterns=patterns))
    except RevisionNotFoundError:
        what = f"the hub's {wanted.title} has no revision {revision}"
        raise _error(wanted, Problem(what, fix="name a branch, a tag or a commit of it", field=field)) from None
    except HfHubHTTPError as error:
        raise _refused(wanted, field, error) from error
    except (httpx2.HTTPError, OfflineModeIsEnabled, TimeoutError) as error:
        raise _Away(first_line(error)) from error
    if not COMMIT.fullmatch(revision):
        ref = folder.parents[1] / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(found, encoding="utf-8")  # the cache's own record, for a start without a network
    return Fetched(folder=folder, commit=found, files=tuple(files))


def _cached(wanted: HubName, commit: str, choose: Choice) -> Fetched | None:
    """Find a whole snapshot in the cache; None without one."""
    folder = cached_commit(wanted, commit)
    if folder is None:
        return None
    here = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    names = _listed(wanted, folder) or here
    readme = (folder / README).read_text("utf-8", errors="replace") if README in here else ""
    try:
        files = choose(names, readme)
    except DataError:
        if names is not here:
            raise
        return None  # other files of it are in the cache
    whole = files if wanted.kind == "dataset" else [*files, "config.json"] if "config.json" in names else files
    if not files or set(whole) - set(here) or _lacks_shards(files):
        return None
    return Fetched(folder=folder, commit=folder.name, files=tuple(files))


def _listed(wanted: HubName, folder: Path) -> list[str]:
    """All files of the repository at this commit, where the cache has a list of them."""
    import huggingface_hub

    # Huggingface_hub 2.4 keeps such lists
    listed = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if listed is None:
        return []
    try:
        found = listed(wanted.name, repo_type=wanted.kind, revision=folder.name, cache_dir=folder.parents[2])
    except Exception:  # noqa: BLE001  # no list is kept: not an OSError, and of a module of its own in each version
        return []
    return [each.path for each in found]


def _lacks_shards(files: Sequence[str]) -> bool:
    """Tell whether a part of those that are numbered, x-00001-of-00003, is missing."""
    parts: dict[tuple[str, str], int] = {}
    for file in files:
        if found := re.fullmatch(r"(.*)-\d+-of-(\d+)(\..*)", file):
            key = (found[1] + found[3], found[2])
            parts[key] = parts.get(key, 0) + 1
    return any(count < int(of) for (_, of), count in parts.items())


def _refused(wanted: HubName, field: str, error: Exception) -> Exception:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, GatedRepoError):
        place = f"https://huggingface.co/{'datasets/' if wanted.kind == 'dataset' else ''}{wanted.name}"
        what = f"{wanted.title} is gated on the hub (HTTP {status}): its terms must be accepted"
        return _error(wanted, Problem(what, fix=f"accept them at {place}, then log in with hf auth login", field=field))
    if isinstance(error, RepositoryNotFoundError) or status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        kind = "model" if wanted.kind == "model" else "data set"
        what = f"the hub has no {kind} {wanted.name}, or it is private (HTTP {status})"
        fix = "check the spelling, or log in with hf auth login; a folder or file is named by its path"
        return _error(wanted, Problem(what, fix=fix, field=field))
    return _Away(first_line(error))


def _not_here(wanted: HubName, field: str, reason: str) -> RequestError:
    kind = "a folder here" if wanted.kind == "model" else "a file here"
    name = wanted.title.removeprefix("data set ")
    what = f"{name} is neither {kind} nor in the cache of the hub, which cannot be reached ({reason})"
    local = "FOLDER" if wanted.kind == "model" else "[FOLDER/FILE, ...]"
    fix = f"where there is a network: {wanted.command} --local-dir FOLDER; then {field}={local}"
    return _error(wanted, Problem(what, fix=fix, field=field))


def _error(wanted: HubName, problem: Problem) -> RequestError:
    return ModelError(problem) if wanted.kind == "model" else DataError(problem)


def first_line(error: Exception) -> str:
    """The first line of a library's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

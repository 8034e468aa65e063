"""The sole importer of fsspec: folders by URL (s3://bucket/folder, gs://..., hdfs://..., memory://...), or on another disk.

Credentials are given as the library of each protocol expects them, in environment variables and its own files; for S3
these are AWS_ACCESS_KEY_ID and the like, and AWS_ENDPOINT_URL for other servers than Amazon's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.registry import missing_library

# Object stores: they have no folders, and creating one would create a bucket.
BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss")


def is_url(path: str) -> bool:
    return "://" in path


def plain(url: str) -> str:
    """Normalise a URL or folder."""
    return url.rstrip("/") if is_url(url) else str(Path(url).expanduser().resolve())


def problem_of(url: str, field: str) -> Problem | None:
    """Return the problem of an unusable URL, as far as it can be detected without connecting."""
    import fsspec  # imported here and below, so that only runs with a URL load it

    protocol, _, place = url.partition("://")
    if not is_url(url):
        return None  # a local folder
    if not place.strip("/"):
        return Problem(f"{url} names no folder", fix=f"write {protocol}://BUCKET/FOLDER", field=field)
    if protocol not in fsspec.available_protocols():
        return Problem(f"{protocol}:// is not known", fix="use s3://, gs://, hdfs:// or file://", field=field)
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        if protocol in ("s3", "s3a"):
            missing = missing_library("s3fs", url)
            return Problem(missing.what, fix=missing.fix, field=field)
        return Problem(f"{url} needs a library that is not installed", fix=str(error), field=field)
    return None


class RemoteFolder:
    """Files below a URL, by their names relative to it. Raises the errors of the protocol's library; most are OSError."""

    def __init__(self, url: str):
        import fsspec

        self.url = plain(url)
        self._has_folders = url.partition("://")[0] not in BUCKETS
        self._files: Any
        self._files, root = fsspec.url_to_fs(self.url)
        self._root = root.rstrip("/")

    def files(self) -> dict[str, int]:
        """Return the size in bytes of every existing file, by name."""
        self._files.invalidate_cache()
        found = self._files.find(self._root, detail=True)
        return {name[len(self._root) :].lstrip("/"): int(about["size"]) for name, about in found.items()}

    def read(self, name: str) -> bytes | None:
        """Read a file; None when it does not exist."""
        try:
            content: bytes = self._files.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        self._make_room_for(name)
        self._files.pipe_file(self._path(name), content)

    def put(self, local: Path, name: str) -> None:
        """Upload a file. On object stores this is atomic."""
        self._make_room_for(name)
        self._files.put_file(str(local), self._path(name))

    def get(self, name: str, local: Path) -> None:
        """Download a file."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path(name), str(local))

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its contents."""
        self._files.invalidate_cache()
        if self._files.exists(self._path(name)):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_room_for(self, name: str) -> None:
        if self._has_folders:
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

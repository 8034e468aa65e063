"""The sole importer of fsspec: folders by URL (s3://bucket/folder, gs://..., hdfs://..., memory://...), or on another disk.

Who may do what there is said as the library of each protocol expects it, in environment variables and its own files; for S3
these are AWS_ACCESS_KEY_ID and the like, and AWS_ENDPOINT_URL for another server than Amazon's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.errors import Problem
from posttrain.registry import missing_library

# Stores of objects under names; there are no folders to make, and asking for one would make a bucket.
BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss")


def is_url(path: str) -> bool:
    return "://" in path


def plain(url: str) -> str:
    """One way to write a URL or a folder."""
    return url.rstrip("/") if is_url(url) else str(Path(url).expanduser().resolve())


def problem_of(url: str, field: str) -> Problem | None:
    """Why a URL cannot be used, as far as it can be seen without looking there."""
    import fsspec  # here and below: only a run that names a URL pays for it

    protocol, _, place = url.partition("://")
    if not is_url(url):
        return None  # a folder, of another disk
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
    """Files below a URL, by their names relative to it. Errors are those of the protocol's library; most are OSError."""

    def __init__(self, url: str):
        import fsspec

        self.url = plain(url)
        self._has_folders = url.partition("://")[0] not in BUCKETS
        self._files: Any
        self._files, root = fsspec.url_to_fs(self.url)
        self._root = root.rstrip("/")

    def files(self) -> dict[str, int]:
        """Size in bytes by name, of everything there is now."""
        self._files.invalidate_cache()
        found = self._files.find(self._root, detail=True)
        return {name[len(self._root) :].lstrip("/"): int(about["size"]) for name, about in found.items()}

    def read(self, name: str) -> bytes | None:
        """A file's content; None when there is no such file."""
        try:
            content: bytes = self._files.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        self._make_room_for(name)
        self._files.pipe_file(self._path(name), content)

    def put(self, local: Path, name: str) -> None:
        """Copy a file there. On stores of objects it is whole or absent."""
        self._make_room_for(name)
        self._files.put_file(str(local), self._path(name))

    def get(self, name: str, local: Path) -> None:
        """Copy a file here."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path(name), str(local))

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with what is in it."""
        self._files.invalidate_cache()
        if self._files.exists(self._path(name)):
            self._files.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_room_for(self, name: str) -> None:
        if self._has_folders:
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

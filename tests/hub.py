"""A hub of Hugging Face's on this machine: as much of its interface as its own library asks for, over files in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

KINDS = {"models": "", "datasets": "datasets/"}


@dataclass
class Hub:
    """Repositories by name (datasets/org/name for data sets): commit by revision, and files by commit."""

    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # uploads by sha256
    commits: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""

    def put(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Make a commit. Returns: its hash."""
        content = json.dumps({path: hashlib.sha1(data).hexdigest() for path, data in sorted(files.items())})
        commit = hashlib.sha1(f"{name}{content}".encode()).hexdigest()
        self.refs.setdefault(name, {})[revision] = commit
        self.files[commit] = files
        return commit


class Answers(BaseHTTPRequestHandler):
    """The answers of the hub."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._read()

    def do_HEAD(self) -> None:
        self._read()

    def _read(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(path)
        if path.startswith("/api/"):
            self._about(path.removeprefix("/api/"))
        else:
            self._file(path.lstrip("/"))

    def _about(self, path: str) -> None:
        kind, _, rest = path.partition("/")
        wants = "/tree/" if "/tree/" in rest else "/revision/"
        name, _, revision = rest.partition(wants)
        if kind not in KINDS:
            self._fail(404, "")
        elif commit := self._commit(KINDS[kind] + name, revision or "main"):
            files = self.hub.files[commit].items()
            if wants == "/tree/":
                listed = [{"type": "file", "path": each, "size": len(data), "oid": _blob(data)} for each, data in files]
                self._json(listed)
            else:
                self._json({"id": name, "sha": commit, "siblings": [{"rfilename": each} for each, _ in files]})

    def _file(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        commit = self._commit(name, revision)
        if commit is None:
            return
        data = self.hub.files[commit].get(file)
        if data is None:
            self._fail(404, "EntryNotFound")
        else:
            self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{_blob(data)}"'})

    def _commit(self, name: str, revision: str) -> str | None:
        """The commit of a revision; None where the request was answered with an error."""
        known = self.hub.refs.get(name, {})
        commit = known.get(revision, revision)
        if name in self.hub.gated and "Authorization" not in self.headers:
            self._fail(401, "GatedRepo")
        elif not known:
            self._fail(401, "RepoNotFound")
        elif commit not in self.hub.files:
            self._fail(404, "RevisionNotFound")
        else:
            return commit
        return None

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.asked.append(path)
        if "Authorization" not in self.headers:
            self._fail(401, "")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.pushed.setdefault(name, {})
            self._json({"url": f"{self.hub.address}/{name}"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            found = [{"path": each["path"], "uploadMode": _mode(each)} for each in json.loads(body)["files"]]
            self._json({"files": [{**each, "shouldIgnore": False, "oid": None} for each in found]})
        elif path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            self._json({"transfer": "basic", "objects": [{**each, "actions": self._upload(each)} for each in wanted]})
        elif "/commit/" in path:
            self._take(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._fail(404, "")

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {"upload": {"href": f"{self.hub.address}/large/{wanted['oid']}", "header": {}}}

    def do_PUT(self) -> None:
        self.hub.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, b"", {})

    def _take(self, name: str, body: bytes) -> None:
        files = self.hub.pushed[name]
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                self.hub.commits.append(value)
        commit = self.hub.put(name, dict(files))
        self._json({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *about: object) -> None:
        pass


def _blob(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _mode(file: dict[str, Any]) -> str:
    return "lfs" if file["path"].endswith(".safetensors") else "regular"


def point_at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process's hub library speak to the hub at an address, as HF_ENDPOINT does when it starts."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve an empty hub on the loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Answers,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def folder_files(folder: Path) -> dict[str, bytes]:
    """All files of a folder, as a commit."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

"""Hubs on this machine: the routes of the Hugging Face Hub and of ModelScope, over HTTP."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import pytest

Files = Mapping[str, bytes]


@dataclass
class Repository:
    """One repository.

    Attributes:
        revisions: Its files by the name of a branch.
        token: What a client must show; None is nothing.
        fetched: The files that clients have got.
    """

    revisions: dict[str, Files]
    token: str | None = None
    fetched: list[str] = field(default_factory=list)

    def commit(self, revision: str) -> str:
        """The commit of a branch; a commit is itself."""
        commits = {hashlib.sha1(name.encode()).hexdigest(): name for name in self.revisions}  # noqa: S324
        names = {name: commit for commit, name in commits.items()}
        return names.get(revision, revision)

    def files(self, revision: str) -> Files | None:
        """The files of a branch or commit."""
        wanted = self.commit(revision)
        for name, files in self.revisions.items():
            if self.commit(name) == wanted:
                return files
        return None


class _Handler(BaseHTTPRequestHandler):
    repositories: dict[str, Repository]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        parts = unquote(url.path).strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if parts[:2] == ["api", "models"]:
            self._hugging_face_list("/".join(parts[2:4]), parts[4:])
        elif parts[:3] == ["api", "v1", "models"]:
            self._modelscope("/".join(parts[3:5]), parts[5:], query)
        elif parts[2:3] == ["resolve"]:
            self._hugging_face_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:  # a client may try what else there is
            self._send(404, b"{}")

    def _repository(self, name: str) -> Repository | None:
        repository = self.repositories.get(name)
        shown = self.headers.get("authorization", "") + self.headers.get("cookie", "")
        if repository is None or (repository.token or "") not in shown:
            self._send(401 if repository else 404, b'{"error": "no such repository, or no token"}')
            return None
        return repository

    def _hugging_face_list(self, name: str, rest: list[str]) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        revision = rest[1] if len(rest) > 1 else "main"
        files = repository.files(revision)
        if files is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                for path, content in files.items()
            ]
            self._send(200, json.dumps(entries).encode())
        else:
            siblings = [{"rfilename": path} for path in files]
            info = {"id": name, "sha": repository.commit(revision), "siblings": siblings}
            self._send(200, json.dumps(info).encode())

    def _hugging_face_file(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        content = (repository.files(revision) or {}).get(path)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            repository.fetched.append(path)
        commit = repository.commit(revision)
        self._send(200, content, {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": commit})

    def _modelscope(self, name: str, rest: list[str], query: Mapping[str, str]) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        files = repository.files(query.get("Revision", "master"))
        if files is None:
            self._send(404, b'{"Code": 404, "Message": "no such revision"}')
        elif rest == ["repo", "files"]:
            entries: list[dict[str, Any]] = [
                {
                    "Path": path,
                    "Name": path,
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                }
                for path, content in files.items()
            ]
            body = {"Code": 200, "Success": True, "Data": {"Files": entries}}
            self._send(200, json.dumps(body).encode())
        else:
            path = query.get("FilePath") or "/".join(rest[2:])
            if self.command == "GET":
                repository.fetched.append(path)
            self._send(200, files[path])

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub_of(repositories: dict[str, Repository]) -> Iterator[str]:
    """The URL of a hub with these repositories."""
    handler = type("Handler", (_Handler,), {"repositories": repositories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()  # noqa: S324  # as the hub does


def use_hugging_face(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take a hub for the Hugging Face Hub, and keep its files in a directory."""
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

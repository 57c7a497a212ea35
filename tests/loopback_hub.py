"""A model hub on loopback: the routes that the hub's own clients use, over real HTTP."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes]
BOT = "SFconvertbot"


@dataclass(frozen=True)
class Repo:
    """One repository: its files by revision, and who asked to change it."""

    revisions: Mapping[str, Files]
    pulls: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    is_gated: bool = False

    def resolve(self, revision: str) -> tuple[str, Files] | None:
        """Give the commit and the files of a branch, tag, pull request or commit."""
        for name, files in self.revisions.items():
            commit = commit_of(files)
            if revision in (name, commit):
                return commit, files
        return None


def commit_of(files: Files) -> str:
    told = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    return hashlib.sha1(told.encode()).hexdigest()


def read_folder(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


class LoopbackHub:
    """Repositories by "models/OWNER/NAME" or "datasets/OWNER/NAME", and what was asked of them."""

    def __init__(self, repos: Mapping[str, Repo]) -> None:
        self.repos = dict(repos)
        self.requests: list[str] = []
        self.handler: type[Handler] = Handler

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve until the block ends; gives the address for HF_ENDPOINT."""
        hub = self

        class Bound(self.handler):
            repos, requests = hub.repos, hub.requests
            owner = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str, commit: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message}
        if commit:
            self.headers["X-Repo-Commit"] = commit


class Handler(BaseHTTPRequestHandler):
    repos: Mapping[str, Repo]
    requests: list[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Say nothing: `requests` holds it."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]  # refs%2Fpr%2F1 is one
        self.requests.append(f"{self.command} {unquote(url.path)}")
        try:
            if self.take(parts, body):
                return
            if parts[0] == "api":
                form = parse_qs(body.decode())
                self.send_json(self._ask(parts[1:], parse_qs(url.query), form))
            elif parts[0] == "blobs":
                self._send_blob(parts[1])
            else:
                self._send_file(parts if parts[0] == "datasets" else ["models", *parts])
        except Refusal as refusal:
            self._send(refusal.status, b"", refusal.headers)

    def take(self, parts: list[str], body: bytes) -> bool:
        """Answer what changes the hub; one that is only read has nothing of the kind."""
        return False

    def _find(self, parts: list[str]) -> Repo:
        repo = self.repos.get("/".join(parts[:3]))
        if repo is None:  # a private one too; clients know a bare 401 for this only over https
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return repo

    def _at(self, repo: Repo, revision: str) -> tuple[str, Files]:
        found = repo.resolve(revision)
        if found is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def _ask(
        self, parts: list[str], query: Mapping[str, list[str]], form: Mapping[str, list[str]]
    ) -> object:
        repo, rest = self._find(parts), parts[3:]
        if rest[:1] == ["discussions"]:
            return _discussions("/".join(parts[1:3]), parts[0], repo, query)
        commit, files = self._at(repo, rest[1] if len(rest) > 1 else "main")
        if rest[:1] == ["tree"]:
            inside = "/".join(rest[2:])
            entries = _tree(files, inside, is_deep="true" in str(query.get("recursive")).lower())
            if inside and not entries:
                raise Refusal(404, "EntryNotFound", f"{inside} does not exist", commit)
            return entries
        if rest[:1] == ["paths-info"]:
            return [entry for path in form.get("paths", []) for entry in _path_info(files, path)]
        siblings = [{"rfilename": name} for name in files]
        name = "/".join(parts[1:3])
        return {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}

    def _send_file(self, parts: list[str]) -> None:
        repo, revision, name = self._find(parts), parts[4], "/".join(parts[5:])
        commit, files = self._at(repo, revision)
        if repo.is_gated:
            raise Refusal(401, "GatedRepo", "Access to this model is restricted.")
        if name not in files:
            raise Refusal(404, "EntryNotFound", "Entry not found", commit)
        data = files[name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"'}
        if name.endswith((".safetensors", ".parquet")):  # large files lie on another host
            headers["X-Linked-Etag"], headers["X-Linked-Size"] = headers["ETag"], str(len(data))
            port = self.connection.getsockname()[1]
            place = f"http://localhost:{port}/blobs/{blob_id(data)}"
            self._send(302, b"", {**headers, "Location": place})
        else:
            self._send_range(data, headers)

    def _send_blob(self, blob: str) -> None:
        every = (files for repo in self.repos.values() for files in repo.revisions.values())
        data = next(d for files in every for d in files.values() if blob_id(d) == blob)
        self._send_range(data, {"ETag": f'"{blob}"'})

    def _send_range(self, data: bytes, headers: Mapping[str, str]) -> None:
        asked = self.headers.get("Range")
        if not asked:
            self._send(200, data, {"Accept-Ranges": "bytes", **headers})
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        stop = min(int(last) + 1, len(data)) if last else len(data)
        place = f"bytes {first}-{stop - 1}/{len(data)}"
        self._send(206, data[int(first) : stop], {"Content-Range": place, **headers})

    def send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def blob_id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _discussions(
    name: str, kind: str, repo: Repo, query: Mapping[str, list[str]]
) -> dict[str, object]:
    author = query.get("author", [""])[0]
    found = [
        {
            "num": number,
            "title": "Adding `safetensors` variant of this model",
            "author": {"name": pull["author"]},
            "status": pull["status"],
            "isPullRequest": True,
            "createdAt": "2023-03-01T10:00:00.000Z",
            "repo": {"name": name, "type": kind.removesuffix("s")},
        }
        for number, pull in repo.pulls.items()
        if author in ("", pull["author"])
    ]
    return {"discussions": found, "count": len(found), "start": 0}


def _path_info(files: Files, path: str) -> list[dict[str, object]]:
    if path in files:
        return [_entry(path, files[path])]
    if any(name.startswith(f"{path}/") for name in files):
        return [{"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()}]
    return []


def _tree(files: Files, inside: str, *, is_deep: bool) -> list[dict[str, object]]:
    start = f"{inside}/" if inside else ""
    rest = [name.removeprefix(start) for name in files if name.startswith(start)]
    folders = sorted({name.split("/")[0] for name in rest if "/" in name})
    shown = [name for name in rest if is_deep or "/" not in name]
    found = [info for folder in folders for info in _path_info(files, start + folder)]
    return found + [_entry(start + name, files[start + name]) for name in shown]


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)[:40]}

"""Servers on loopback, over real HTTP: a model hub and an OpenAI-compatible endpoint."""

import base64
import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit


class Loopback:
    """A server whose handler knows it as `owner`."""

    handler: ClassVar[type["Handler"]]
    path = ""

    @contextmanager
    def serve(self):
        """Serve until the block ends; gives the address."""
        handler = type("Bound", (self.handler,), {"owner": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{self.path}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing."""

    def read(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status, body, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


# A model hub: the routes that the hub's own clients use.

Files = Mapping[str, bytes]
BOT = "SFconvertbot"
TOKEN, USER = "hf_write", "me"


@dataclass(frozen=True)
class Repo:
    """One repository: its files by revision, and who asked to change it."""

    revisions: dict[str, Files]
    pulls: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    is_gated: bool = False


def point_client(monkeypatch, endpoint, cache, *, is_offline=False):
    """Have this process's hub client ask there: it reads the environment when it is imported."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name, value in {
        "ENDPOINT": endpoint,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": is_offline,
        "HF_TOKEN_PATH": str(cache / "no-token"),
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)


def commit_of(files):
    told = json.dumps({name: blob_id(data) for name, data in files.items()})
    return hashlib.sha1(told.encode()).hexdigest()


def blob_id(data):
    return hashlib.sha256(data).hexdigest()


class LoopbackHub(Loopback):
    """Repositories by "models/OWNER/NAME" or "datasets/OWNER/NAME", and what was asked of them.

    A user, `me`, has a token that may write.
    """

    def __init__(self, repos=None):
        self.repos = dict(repos or {})
        self.requests = []
        self.made = []
        self.is_broken = False  # commits are refused

    def files(self, repo, revision="main"):
        return dict(self.repos[f"models/{repo}"].revisions[revision])


class Refusal(Exception):
    def __init__(self, status, code, message, commit=""):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.headers |= {"X-Repo-Commit": commit} if commit else {}


class HubHandler(Handler):
    owner: LoopbackHub

    def _answer(self):
        body = self.read()
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]  # refs%2Fpr%2F1 is one
        self.owner.requests.append(f"{self.command} {unquote(url.path)}")
        try:
            if parts[0] == "api":
                self._send_json(self._change(parts, body) or self._ask(parts[1:], url.query))
            else:
                self._send_file(parts if parts[0] == "datasets" else ["models", *parts])
        except Refusal as refusal:
            self.send(refusal.status, b"", refusal.headers)

    do_HEAD = do_GET = do_POST = _answer

    def _ask(self, parts, query):
        repo, name, rest = self._find(parts), "/".join(parts[1:3]), parts[3:]
        if rest[:1] == ["discussions"]:
            author = parse_qs(query).get("author", [""])[0]
            found = [
                {
                    "num": number,
                    "title": "Adding `safetensors` variant of this model",
                    "author": {"name": pull["author"]},
                    "status": pull["status"],
                    "isPullRequest": True,
                    "createdAt": "2023-03-01T10:00:00.000Z",
                    "repo": {"name": name, "type": parts[0].removesuffix("s")},
                }
                for number, pull in repo.pulls.items()
                if author in ("", pull["author"])
            ]
            return {"discussions": found, "count": len(found), "start": 0}
        commit, files = self._at(repo, rest[1] if len(rest) > 1 else "main")
        if rest[:1] == ["tree"]:
            inside = "/".join(rest[2:])
            entries = _tree(files, inside, is_deep="recursive=true" in query.lower())
            if inside and not entries:
                raise Refusal(404, "EntryNotFound", f"{inside} does not exist", commit)
            return entries
        siblings = [{"rfilename": file} for file in files]
        return {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}

    def _change(self, parts, body):
        """Do what changes the hub; None where nothing is to be changed."""
        owner, name = self.owner, "/".join(parts[1:4])
        kind = parts[4] if len(parts) > 4 else "/".join(parts[1:])
        if parts == ["api", "validate-yaml"]:  # of a model card
            return {"errors": [], "warnings": []}
        if kind not in ("repos/create", "preupload", "commit"):
            return None
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refusal(403, "Forbidden", "You don't have the rights to create a model.")
        if kind == "commit":
            if owner.is_broken:
                raise Refusal(403, "", "Your storage is full.")
            self._commit(owner.repos[name].revisions, parts[5], body)
            place = f"{self._here()}/{name}/commit/{'0' * 40}"
            return {"commitUrl": place, "commitOid": "0" * 40, "success": True}
        asked = json.loads(body or b"{}")
        if kind == "repos/create":
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            if f"models/{name}" not in owner.repos:
                owner.made.append(asked)
            owner.repos.setdefault(f"models/{name}", Repo({"main": {".gitattributes": b""}}))
            return {"url": f"{self._here()}/{name}", "name": name, "id": name}
        modes = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": file["path"], **modes} for file in asked["files"]]}

    def _commit(self, revisions, revision, body):
        files = dict(revisions[revision])
        for item in map(json.loads, body.splitlines()):
            value = item["value"]
            if item["key"] != "header":
                files[value["path"]] = base64.b64decode(value["content"])
        revisions[revision] = files

    def _find(self, parts):
        repo = self.owner.repos.get("/".join(parts[:3]))
        if repo is None:  # a private one too; clients know a bare 401 for this only over https
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return repo

    def _at(self, repo, revision):
        """Find the commit and the files of a branch, tag, pull request or commit."""
        for name, files in repo.revisions.items():
            if revision in (name, commit := commit_of(files)):
                return commit, files
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def _send_file(self, parts):
        repo, name = self._find(parts), "/".join(parts[5:])
        commit, files = self._at(repo, parts[4])
        if repo.is_gated:
            raise Refusal(401, "GatedRepo", "Access to this model is restricted.")
        if name not in files:
            raise Refusal(404, "EntryNotFound", "Entry not found", commit)
        data = files[name]
        self.send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"'})

    def _send_json(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _here(self):
        return f"http://127.0.0.1:{self.connection.getsockname()[1]}"


def _tree(files, inside, *, is_deep):
    start = f"{inside}/" if inside else ""
    rest = [name.removeprefix(start) for name in files if name.startswith(start)]
    folders = sorted({name.split("/")[0] for name in rest if "/" in name})
    shown = [start + name for name in rest if is_deep or "/" not in name]
    return [
        *({"type": "directory", "path": start + name, "oid": "0" * 40} for name in folders),
        *({"type": "file", "path": name, "size": len(files[name]), "oid": "1"} for name in shown),
    ]


LoopbackHub.handler = HubHandler


# An endpoint that answers by a writer, and fails on demand.


class Written(NamedTuple):
    """What a writer gives: text behind the prompt; tokens and chances of the prompt and of it."""

    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    tokens: tuple[str, ...] = ()
    chances: tuple[float | None, ...] = ()


class Fault(NamedTuple):
    """How one request fails; status 0 drops the connection."""

    status: int = 0
    body: str = ""
    headers: Mapping[str, str] = {"Content-Type": "application/json"}


BUSY = Fault(429, '{"error": {"message": "slow down"}}', {"Retry-After": "0.05"})


def toy_writer(prompt, max_tokens, stop):
    """Say the prompt's last word again; tokens are words, with the space before them."""
    words = [f" {word}" if i else word for i, word in enumerate(prompt.split(" "))]
    text = f" {prompt.split()[-1]}"
    written = text if stop else f"{text}\nand more"
    chances = (None, *(-len(word) / 4 for word in (*words[1:], text)))
    return Written(written, len(words), 1, (*words, text), chances)


class LoopbackEndpoint(Loopback):
    """Answers by a writer.

    Attributes:
        writer: Writes.
        faults: How the next requests fail, first to last; then they succeed.
        dies_after: Answers, after which every connection is dropped.
        bodies: What was asked, in order, the failed ones too.
        headers: Of the requests.
        endpoints: What it offers, of "completions" and "chat".
        echoes: Whether prompts are echoed with their chances.
        unsupported: Parameters of a chat that are refused by name.
    """

    path = "/v1"

    def __init__(self, writer=toy_writer):
        self.writer, self.lock = writer, threading.Lock()
        self.faults = []
        self.dies_after = None
        self.bodies = []
        self.headers = []
        self.endpoints, self.echoes = ["completions", "chat"], True
        self.unsupported = set()

    def take(self, body, headers):
        """Note a request, and answer it or say how it fails, in OpenAI's words."""
        with self.lock:
            self.bodies.append(body)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            if self.dies_after is not None and len(self.bodies) > self.dies_after:
                return Fault()
            if self.faults:
                return self.faults.pop(0)
        is_chat = body["path"] == "/v1/chat/completions"
        if ("chat" if is_chat else "completions") not in self.endpoints:
            return Fault(404, '{"error": {"message": "not supported in this endpoint."}}')
        for name in sorted(self.unsupported & {*body}):
            told = {"message": f"Unsupported parameter: '{name}'", "param": name}
            return Fault(400, json.dumps({"error": told}))
        return Fault(200, self.answer(body))

    def answer(self, body):
        is_chat = "messages" in body
        prompt = str(body["messages"][-1]["content"] if is_chat else body["prompt"])
        (stop,) = body.get("stop", [None])
        most = body.get("max_tokens", body.get("max_completion_tokens"))
        written = self.writer(prompt, most, stop)
        shown = {"text": written.text}
        if is_chat:
            shown = {"message": {"role": "assistant", "content": written.text.strip()}}
        elif body.get("echo") and self.echoes:
            logprobs = {"tokens": written.tokens, "token_logprobs": written.chances}
            shown = {"text": prompt + written.text, "logprobs": logprobs}
        usage = {
            "prompt_tokens": written.num_prompt_tokens,
            "completion_tokens": written.num_new_tokens,
        }
        choices = [{"index": 0, "finish_reason": "stop", **shown}]
        return json.dumps({"choices": choices, "usage": usage})


class EndpointHandler(Handler):
    owner: LoopbackEndpoint

    def do_POST(self):
        fault = self.owner.take({"path": self.path, **json.loads(self.read())}, self.headers)
        self.close_connection = not fault.status
        if fault.status:
            self.send(fault.status, fault.body.encode(), fault.headers)


LoopbackEndpoint.handler = EndpointHandler

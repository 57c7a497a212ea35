"""The loopback hub with what a client needs to upload: repositories, large files, commits."""

import base64
import json

from loopback_hub import Handler, LoopbackHub, Refusal, Repo, blob_id

TOKEN, READ_TOKEN, USER = "hf_write", "hf_read", "me"
LARGE = (".safetensors",)


class WritableHub(LoopbackHub):
    """A hub of one user, `me`, whose token may write and whose other token may not."""

    def __init__(self) -> None:
        super().__init__({})
        self.handler = _WritingHandler
        self.blobs: dict[str, bytes] = {}
        self.made: list[dict[str, object]] = []
        self.messages: list[str] = []
        self.cards: list[str] = []
        self.is_broken = False  # large files are refused

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return dict(self.repos[f"models/{repo}"].revisions[revision])


class _WritingHandler(Handler):
    owner: WritableHub

    def take(self, parts: list[str], body: bytes) -> bool:
        if parts[:1] == ["blobs"] and self.command == "PUT":
            self.owner.blobs[parts[1]] = body
            self.send_json({})
        elif parts == ["api", "validate-yaml"]:  # of a model card
            self.owner.cards.append(json.loads(body)["content"])
            self.send_json({"errors": [], "warnings": []})
        elif parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            self._offer_places(json.loads(body))
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["branch"]:
            self._branch("/".join(parts[2:4]), parts[5])
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["preupload"]:
            self._choose_modes(json.loads(body))
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["commit"]:
            self._commit("/".join(parts[2:4]), parts[5], body)
        else:
            return False
        return True

    def _sign(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == READ_TOKEN:
            raise Refusal(403, "Forbidden", "You don't have the rights to create a model.")
        if token != TOKEN:
            raise Refusal(401, "", "Invalid username or password.")

    def _create(self, asked: dict[str, object]) -> None:
        self._sign()
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if f"models/{name}" not in self.owner.repos:
            self.owner.made.append(asked)
        self.owner.repos.setdefault(f"models/{name}", Repo({"main": {".gitattributes": b""}}))
        self.repos = self.owner.repos
        self.send_json({"url": f"{self._here()}/{name}", "name": name, "id": name})

    def _branch(self, repo: str, branch: str) -> None:
        self._sign()
        revisions = self.owner.repos[f"models/{repo}"].revisions
        revisions[branch] = dict(revisions["main"])  # type: ignore[index]  # a dict, in tests
        self.send_json({})

    def _choose_modes(self, asked: dict[str, list[dict[str, str]]]) -> None:
        self._sign()
        told = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for file in asked["files"]
        ]
        self.send_json({"files": told})

    def _offer_places(self, asked: dict[str, list[dict[str, object]]]) -> None:
        self._sign()
        if self.owner.is_broken:
            raise Refusal(403, "", "Your storage is full.")
        objects = [
            {**item, "actions": {"upload": {"href": f"{self._here()}/blobs/{item['oid']}"}}}
            for item in asked["objects"]
        ]
        self.send_json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, revision: str, body: bytes) -> None:
        self._sign()
        revisions = self.owner.repos[f"models/{repo}"].revisions
        files = dict(revisions[revision])
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                self.owner.messages.append(value["summary"])
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                data = self.owner.blobs[value["oid"]]
                assert blob_id(data) == value["oid"]
                files[value["path"]] = data
        revisions[revision] = files  # type: ignore[index]
        place = f"{self._here()}/{repo}/commit/{'0' * 40}"
        self.send_json({"commitUrl": place, "commitOid": "0" * 40, "success": True})

    def _here(self) -> str:
        return f"http://127.0.0.1:{self.connection.getsockname()[1]}"

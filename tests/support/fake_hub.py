"""A stand-in for the Hugging Face hub: it takes one user's token, makes models and keeps what is sent to them."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_tests"


class FakeHub:
    """`models`: by name, the files of each by path. `private`: by name. `refuses`: whether commits are refused."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.refuses = False
        self.blobs: dict[str, bytes] = {}
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        match method, path.split("?")[0].strip("/").split("/"):
            case "GET", ["api", "whoami-v2"]:
                return 200, {"name": "me", "type": "user"}
            case "POST", ["api", "validate-yaml"]:
                return 200, {"errors": [], "warnings": []}
            case "POST", ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                if name in self.models:
                    return 409, {"error": "there already", "url": f"{self.url}/{name}"}
                self.models[name], self.private[name] = (
                    {},
                    asked.get("visibility") == "private" or asked.get("private", False),
                )
                return 200, {"url": f"{self.url}/{name}"}
            case "GET", ["api", "models", owner, name, *_]:
                return 200, {"id": f"{owner}/{name}", "sha": "0" * 40, "siblings": []}
            case "POST", ["api", "models", _, _, "preupload", _]:
                files = json.loads(body)["files"]
                mode = [{"path": each["path"], "uploadMode": self._mode(each), "shouldIgnore": False} for each in files]
                return 200, {"files": mode}
            case "POST", [_, name, "info", "lfs", "objects", "batch"]:
                wanted = json.loads(body)["objects"]
                places = [
                    {**each, "actions": {"upload": {"href": f"{self.url}/blob/{each['oid']}"}}} for each in wanted
                ]
                return 200, {"transfer": "basic", "objects": places}
            case "PUT", ["blob", oid]:
                self.blobs[oid] = body
                return 200, {}
            case "POST", ["api", "models", owner, name, "commit", _]:
                if self.refuses:
                    return 403, {"error": "this token may not write"}
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "file":
                        self.models[f"{owner}/{name}"][value["path"]] = base64.b64decode(value["content"])
                    if line["key"] == "lfsFile":
                        self.models[f"{owner}/{name}"][value["path"]] = self.blobs[value["oid"]]
                return 200, {
                    "commitUrl": f"{self.url}/{owner}/{name}/commit/1",
                    "commitOid": "1" * 40,
                    "pullRequestUrl": None,
                }
        return 404, {"error": f"{method} {path}"}

    def _mode(self, file: dict[str, Any]) -> str:
        return "lfs" if file["path"].endswith(".safetensors") else "regular"


@contextmanager
def served() -> Iterator[FakeHub]:
    """Serve a hub on the loopback address."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.startswith("/api") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, found = 401, {"error": "unknown token"}
            else:
                status, found = hub.answer(self.command, self.path, body)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

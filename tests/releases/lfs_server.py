"""A git server as a forge is one: git over HTTP by git's own `http-backend`, large files by the Git LFS batch API, a password.

Git LFS API: https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md, "basic" transfers only.
"""

import base64
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

USER, SECRET = "reef", "s3cret-word"
LFS = "application/vnd.git-lfs+json"


class Forge(ThreadingHTTPServer):
    """Repositories under `root`; their large files in `objects`, by oid."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://{USER}:{SECRET}@127.0.0.1:{self.server_address[1]}/chain.git"


@contextmanager
def forge(root: Path) -> Iterator[Forge]:
    """A server with one empty repository, `chain.git`."""
    subprocess.run(["git", "init", "--quiet", "--bare", str(root / "chain.git")], check=True)
    subprocess.run(["git", "-C", str(root / "chain.git"), "config", "http.receivepack", "true"], check=True)
    server = Forge(root)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Forge
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if self._may():
            path = urlsplit(self.path).path
            if path.startswith("/lfs/"):
                found = self.server.objects.get(path.rpartition("/")[2])
                self._send(200 if found is not None else 404, "application/octet-stream", found or b"")
            else:
                self._git(b"")

    def do_PUT(self) -> None:
        data = self._body()
        if self._may():
            oid = self.path.rpartition("/")[2]
            right = hashlib.sha256(data).hexdigest() == oid
            if right:
                self.server.objects[oid] = data
            self._send(200 if right else 422, LFS, b"{}")

    def do_POST(self) -> None:
        data = self._body()
        if self._may():
            if self.path.endswith("/objects/batch"):
                self._send(200, LFS, json.dumps(self._batch(json.loads(data))).encode())
            elif "/locks" in self.path:
                self._send(404, LFS, b'{"message": "no locks here"}')
            else:
                self._git(data)

    def _batch(self, asked: dict[str, object]) -> dict[str, object]:
        operation = str(asked["operation"])
        rows = []
        for wanted in asked["objects"]:  # type: ignore[attr-defined]
            row = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
            there = wanted["oid"] in self.server.objects
            href = f"http://127.0.0.1:{self.server.server_address[1]}/lfs/{wanted['oid']}"
            action = {operation: {"href": href, "header": {"Authorization": _basic()}}}
            if operation == "download" and not there:
                row["error"] = {"code": 404, "message": "Object does not exist"}
            elif operation == "download" or not there:
                row["actions"] = action
            rows.append(row)
        return {"transfer": "basic", "objects": rows}

    def _git(self, data: bytes) -> None:
        parts = urlsplit(self.path)
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.server.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": USER,
            "CONTENT_LENGTH": str(len(data)),
        }
        done = subprocess.run(["git", "http-backend"], input=data, env=environment, capture_output=True, check=True)
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
        self._send(int(fields.pop("Status", "200").split()[0]), fields.pop("Content-Type", "text/plain"), body, fields)

    def _may(self) -> bool:
        if self.headers.get("Authorization") == _basic():
            return True
        self._send(401, "text/plain", b"", {"WWW-Authenticate": 'Basic realm="chains"'})
        return False

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, kind: str, body: bytes, fields: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(fields or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _basic() -> str:
    return "Basic " + base64.b64encode(f"{USER}:{SECRET}".encode()).decode()

"""Serves the Hugging Face hub's download protocol on 127.0.0.1.

The server has folders as repositories of one commit, answers ranges, and records all requests.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

COMMIT = "c0ffee" + "0" * 34


class Hub:
    """The server, which runs inside `with`.

    Attributes:
        repositories: Folder of each repository, by its name.
        gated: Names of repositories to which access is refused.
        asked: Paths of all requests for files, with the requested range, if any.
        stopped: Names of files whose transfer stalls in the middle.
        dropped: Names of files whose connection breaks in the middle, once.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str | None]] = []
        self.stopped: set[str] = set()
        self.dropped: set[str] = set()
        self._may_go_on = threading.Event()

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"served": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._may_go_on.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """Returns the value for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """Returns variables with which a process downloads from this server into `home`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.0"  # one connection per request, so that none outlives the server

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET(has_body=False)

    def do_GET(self, *, has_body: bool = True) -> None:
        path = self.path.partition("?")[0].strip("/")
        is_api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name not in self.served.repositories:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if name in self.served.gated and not is_api:
            return self._refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        folder = self.served.repositories[name]
        files = sorted(one for one in folder.rglob("*") if one.is_file())
        if is_api and rest[:1] == ["tree"]:
            return self._json([_describe(one, folder) for one in files])
        if is_api:
            siblings = [{"rfilename": one.relative_to(folder).as_posix()} for one in files]
            return self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings})
        file = folder / "/".join(rest[2:])
        if rest[:1] != ["resolve"] or not file.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        self._send(file, has_body=has_body)

    def _send(self, file: Path, *, has_body: bool) -> None:
        content, span = file.read_bytes(), self.headers.get("Range")
        start = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
        headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if span:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._begin(206 if span else 200, len(content) - start, headers)
        if not has_body:
            return
        self.served.asked.append((file.name, span))
        middle = start + (len(content) - start) // 2
        try:
            self.wfile.write(content[start:middle])
            if file.name in self.served.stopped:
                self.served._may_go_on.wait()
            elif file.name in self.served.dropped:
                self.served.dropped.remove(file.name)
            else:
                self.wfile.write(content[middle:])
        except OSError:  # the client has closed the connection
            pass

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self._begin(200, len(content), {"Content-Type": "application/json"})
        self.wfile.write(content)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._begin(status, 0, {"X-Error-Code": code, "X-Error-Message": message})

    def _begin(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(size)}).items():
            self.send_header(name, value)
        self.end_headers()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:40]


def _describe(file: Path, folder: Path) -> dict[str, Any]:
    path = file.relative_to(folder).as_posix()
    return {"type": "file", "path": path, "size": file.stat().st_size, "oid": _digest(file)}

"""Loopback stand-ins for a W&B server: they show what is sent, and nothing about what the service accepts."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class AcceptingServer(ThreadingHTTPServer):
    """Answers the operations that `wandb sync` makes and keeps the runs and rows that arrive."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.uploads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "UpsertBucket":
                run = str(variables["name"])
                self.runs[run] = variables
                entity = {"id": "E", "name": "local"}
                project = {"id": "P", "name": variables.get("project"), "entity": entity}
                bucket = {"id": run, "name": run, "displayName": run, "config": "{}", "historyLineCount": 0}
                return {"upsertBucket": {"inserted": True, "bucket": bucket | {"project": project}}}
            case "CreateRunFiles":
                urls = [
                    {"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]
                ]
                return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": urls}}
            case "CreateArtifact":
                self.uploads.append(variables["input"]["artifactCollectionName"])
                artifact = {
                    "id": "A",
                    "state": "COMMITTED",
                    "artifactSequence": {"latestArtifact": {"id": "A"}},
                }
                return {"createArtifact": {"artifact": artifact}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case _:
                return {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: AcceptingServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name is the base class's)
        """Stay silent."""

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path.endswith("/graphql"):
            query = json.loads(body)
            named = re.search(r"(?:query|mutation)\s+(\w+)", query["query"])
            operation = query.get("operationName") or (named and named[1])
            self._reply({"data": self.server.answer(str(operation), query.get("variables") or {})})
            return
        if self.path.endswith("file_stream"):
            rows = json.loads(body).get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.history.setdefault(self.path.split("/")[-2], []).extend(map(json.loads, rows))
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def accepting_server() -> Iterator[AcceptingServer]:
    with AcceptingServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that lets clients connect and never answers; yields its address."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)  # the kernel completes connections that nobody accepts
        yield f"http://127.0.0.1:{server.getsockname()[1]}"

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
    """Answers the operations that `wandb sync` and reports make and keeps the runs, rows and reports.

    Args:
        breaks_after: requests that are answered well; later ones get no answer, or one that is no JSON.
        is_malformed: which of the two.
    """

    daemon_threads = True

    def __init__(self, breaks_after: int | None = None, *, is_malformed: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.breaks_after, self.is_malformed = breaks_after, is_malformed
        self.requests = 0
        self.views: list[dict[str, Any]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.uploads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911 (a table)
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
            case "Viewer" | "GetDefaultEntity":
                viewer = {"id": "U", "entity": "local", "username": "local", "flags": "{}", "admin": False}
                return {"viewer": viewer | {"teams": {"edges": []}, "apiKeys": {"edges": []}}}
            case "GetProjects":
                node = {
                    "__typename": "Project",
                    "id": "P",
                    "name": "ours",
                    "entityName": "local",
                    "createdAt": "2026-01-01T00:00:00",
                    "isBenchmark": False,
                    "user": None,
                }
                info = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
                return {"models": {"pageInfo": info, "edges": [{"cursor": "c", "node": node}]}}
            case "upsertView":
                self.views.append(variables)
                return {"upsertView": {"view": _view(variables, len(self.views)), "inserted": True}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case _:
                return {}


def _view(variables: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a report as the service hands it back."""
    kept = {key: variables[key] for key in ("type", "name", "displayName", "description", "spec")}
    project = {"id": "P", "name": variables["projectName"], "entityName": variables["entityName"]}
    view_id = variables["id"] or f"view{number}"
    return kept | {"id": view_id, "project": project, "updatedAt": "2026-01-01T00:00:00"}


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
            sent = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            rows = self.server.history.setdefault(self.path.split("/")[-2], [])
            first, content = sent["offset"], [json.loads(row) for row in sent["content"]]
            rows[first : first + len(content)] = content
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: dict[str, Any]) -> None:
        self.server.requests += 1
        is_broken = self.server.breaks_after is not None and self.server.requests > self.server.breaks_after
        if is_broken and not self.server.is_malformed:
            self.close_connection = True
            return
        body = b"<html>not what you asked for" if is_broken else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def accepting_server(
    breaks_after: int | None = None, *, is_malformed: bool = False
) -> Iterator[AcceptingServer]:
    with AcceptingServer(breaks_after, is_malformed=is_malformed) as server:
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

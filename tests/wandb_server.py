"""A stand-in for W&B's server, with as much of its protocol as the real client uses.

It stores history lines as W&B does, by their offset, so that lines sent again replace the old ones.
Everything that a client asks is answered from these lines.
"""

from __future__ import annotations

import gzip
import http.server
import json
import re
import threading
from typing import Any

USER = {"id": "u", "entity": "me", "name": "me", "username": "me", "email": "", "flags": "{}"}
PROJECT = {"id": "1", "internalId": "1", "name": "tandem", "entity": {"id": "e", "name": "me"}}
NOTHING = ("group", "jobType", "commit", "sweepName", "description", "notes")


class WandbServer:
    """One project on a free port of this machine; a context manager."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}  # what was said of each, by its id
        self.lines: dict[str, list[str]] = {}  # of each run's history
        self.alerts: list[str] = []
        self._http = _Http(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def history(self, run: str) -> list[dict[str, Any]]:
        """The rows of a run, in the order in which they were sent."""
        return [json.loads(line) for line in self.lines.get(run, ())]

    def stream(self, run: str, sent: dict[str, Any] | None) -> None:
        """Store history lines."""
        if sent:
            kept = self.lines.get(run, [])
            assert len(kept) >= sent["offset"], "lines were left out"
            self.lines[run] = kept[: sent["offset"]] + sent["content"]

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation; empty for one that needs no answer."""
        name = given.get("name") or given.get("run") or given.get("runName") or ""
        operation = re.findall(r"(?:query|mutation) (\w+)", query)[0]
        answering = getattr(self, f"_{operation}", None)
        return answering(name, given) if answering else {}

    def _Viewer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {**USER, "teams": {"edges": []}}}

    _GetDefaultEntity = _Viewer

    def _RunResumeStatus(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"model": {**PROJECT, "bucket": self._run(name) if name in self.runs else None}}

    def _UpsertBucket(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        said = {key: value for key, value in given.items() if value is not None}
        is_new = name not in self.runs
        self.runs[name] = {**self.runs.get(name, {}), **said}
        return {"upsertBucket": {"bucket": self._run(name), "inserted": is_new}}

    def _CreateRunFiles(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": file, "uploadUrl": f"{self.url}/upload"} for file in given["files"]]
        return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": files}}

    def _NotifyScriptableRunAlert(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        self.alerts.append(given["title"])
        return {"notifyScriptableRunAlert": {"success": True}}

    def _Run(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"run": self._run(name)}}

    _RunHistoryKeys = _Run

    def _ArtifactType(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"artifact": None}}

    def _CreateArtifact(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        latest = {"latestArtifact": {"id": "a"}}
        artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": latest}  # nothing to send
        return {"createArtifact": {"artifact": artifact}}

    def _RunParquetHistory(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        live = [{key: row[key] for key in given["liveKeys"]} for row in self.history(name)]
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": live}}}}

    def _HistoryPage(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        asked = range(given["minStep"], given["maxStep"])
        rows = [line for line in self.lines[name] if json.loads(line)["_step"] in asked]
        return {"project": {"run": {"history": rows}}}

    def _run(self, name: str) -> dict[str, Any]:
        lines, said = self.lines.get(name, []), self.runs[name]
        last = json.loads(lines[-1])["_step"] if lines else -1
        return {
            **{"id": f"id-{name}", "name": name, "displayName": said.get("displayName")},
            **{"project": PROJECT, "projectId": "1", "user": USER, **dict.fromkeys(NOTHING)},
            **{"historyLineCount": len(lines), "logLineCount": 0, "eventsLineCount": 0},
            **{"historyTail": json.dumps(lines[-1:]), "eventsTail": "[]", "systemMetrics": "{}"},
            **{"historyKeys": {"lastStep": last, "keys": {}}, "wandbConfig": '{"t": {}}'},
            **{"state": "running", "readOnly": False, "summaryMetrics": (lines or ["{}"])[-1]},
            **dict.fromkeys(("createdAt", "heartbeatAt"), "2026-01-01T00:00:00Z"),
            **{"config": said.get("config", "{}"), "tags": said.get("tags", [])},
        }


class _Http(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore clients that exit and leave their connections open."""


def _handler(server: WandbServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            answer: dict[str, Any] = {}
            if self.path.endswith("/graphql"):
                asked = json.loads(body)
                answer = {"data": server.answer(asked["query"], asked.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                files = json.loads(body).get("files", {})
                server.stream(self.path.split("/")[-2], files.get("wandb-history.jsonl"))
            self._reply(json.dumps(answer).encode())

        do_PUT = do_POST

        def _reply(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler

"""A stand-in for vLLM whose model follows a script: every turn it calls the client's shell, and then it is done.

It counts as vLLM does (the model's own tokenizer and template) and refuses what does not fit with vLLM 0.32's text, so
a gateway that lets an overflow through is found out. It keeps what it was asked. It can also be busy at first, in the
gateway's own words, for clients to wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gateway.api import chat, messages, responses
from gateway.api.errors import error_response
from gateway.exceptions import Busy
from gateway.tokens.local import LocalCounter, TemplateOptions, load
from gateway.types import Ask, Dialect

MODEL = "scripted"

PARSERS = {
    "/v1/chat/completions": chat.parse,
    "/v1/responses": responses.parse,
    "/v1/messages": messages.parse,
}

DIALECTS = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/messages": Dialect.MESSAGES,
}

BUSY_S = 1.0

COMMANDS = ("command", "cmd", "commands")

# What clients call their shell, in the order of preference.
SHELLS = ("run_shell_command", "exec_command", "shell_command", "shell", "bash", "run_commands", "execute_command")


@dataclass(frozen=True)
class Asked:
    """One request as the backend saw it: bytes, prompt tokens, status of the answer, whether it had tools."""

    path: str
    body_bytes: int
    prompt_tokens: int
    status: int
    tools: int
    said: str


@dataclass
class Script:
    """``turns`` calls of the shell, each with an output of about 11 kB, then ``Done.``

    ``busy``: the first time that a text is asked, there is no room.
    """

    window_tokens: int
    turns: int
    folder: Path
    asked: list[Asked] = field(default_factory=list)
    turn: int = 0
    busy: bool = False
    arrived_s: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._counter: LocalCounter = load(str(self.folder), TemplateOptions(), hub=False, cache_bytes=16 << 20)
        self._lock = threading.Lock()

    def tokens(self, ask: Ask) -> int:
        """Prompt tokens as vLLM counts them."""
        assert ask.prompt is not None, "vLLM would refuse this request"
        return sum(self._counter.count(ask.prompt, {}))

    def reply(self, path: str, body: bytes) -> tuple[Ask, int, int, list[dict[str, Any]] | str | None]:
        """The request, its tokens, the status and what is answered: text, calls, or nothing where it overflows."""
        ask = PARSERS[path](body, "application/json", path)
        document = dict(ask.document)
        with self._lock:
            prompt_tokens = self.tokens(ask)
            fits = prompt_tokens < self.window_tokens
            answer = self._answer(document) if fits else None
            said = "overflow" if answer is None else answer if isinstance(answer, str) else answer[0]["arguments"]
            tools = document.get("tools")
            status = 200 if fits else 400
            count = len(tools) if isinstance(tools, list) else 0
            self.asked.append(Asked(path, len(body), prompt_tokens, status, count, said[:60]))
        return ask, prompt_tokens, status, answer

    def _answer(self, document: dict[str, Any]) -> list[dict[str, Any]] | str:
        shell = _shell(document.get("tools"))
        if shell is None:
            return "Summary: shell commands print numbers, one after another; the task goes on with the next."
        if self.turn >= self.turns:
            return "Done. Every command has been run."
        self.turn += 1
        first = 100_000 * self.turn
        return [{"name": shell["name"], "arguments": _arguments(shell, f"seq {first} {first + 1570}")}]


def _shell(tools: Any) -> dict[str, Any] | None:
    """The shell among the tools of a request of any dialect: its name and the schema of its arguments."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool)
        found[str(function.get("name"))] = function.get("parameters") or function.get("input_schema") or {}
    name = next((name for name in SHELLS if name in found), None)
    return None if name is None else {"name": name, "schema": found[name]}


def _arguments(shell: dict[str, Any], command: str) -> str:
    """Arguments that the schema asks for; the one that is named like a command gets ``command``."""
    schema = shell["schema"]
    properties = schema.get("properties", {})
    wanted = [name for name in properties if name in schema.get("required", ()) or name in COMMANDS]
    return json.dumps({name: _argument(name, properties[name], command) for name in wanted})


def _argument(name: str, schema: dict[str, Any], command: str) -> Any:
    kind = schema.get("type")
    if name in COMMANDS:
        if kind == "array":
            return ["bash", "-lc", command] if name == "command" else [command]
        return command
    plain: dict[Any, Any] = {"boolean": False, "number": 1, "integer": 1}
    return plain.get(kind, "print")


class ScriptedBackend:
    """Serves ``script`` on a free loopback port, in threads, from ``start`` to ``stop``."""

    def __init__(self, script: Script) -> None:
        self.script = script
        handler = type("Handler", (_Handler,), {"script": script})
        self._server = _QuietServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="scripted", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up as they like."""


class _Handler(BaseHTTPRequestHandler):
    script: Script
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests print what matters."""

    def do_GET(self) -> None:
        if self.path == "/version":
            self._json(200, {"version": "0.32.0"})
        elif self.path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": str(self.script.folder)}
            self._json(200, {"object": "list", "data": [{**card, "max_model_len": self.script.window_tokens}]})
        elif self.path == "/health":
            self._json(200, {})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.partition("?")[0]
        if path not in PARSERS:
            self._json(404, {"detail": "Not Found"})
            return
        if self.script.busy and self._refuse(path, body):
            return
        ask, prompt_tokens, status, answer = self.script.reply(path, body)
        if answer is None:
            window = self.script.window_tokens
            text = (
                f"This model's maximum context length is {window} tokens. However, your prompt contains at least "
                f"{window + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                "the length of the input prompt."
            )
            error = {"message": text, "type": "BadRequestError", "param": "input_tokens", "code": 400}
            self._json(status, {"error": error})
            return
        speak = {"/v1/chat/completions": _chat, "/v1/responses": _responses, "/v1/messages": _messages}[path]
        if ask.stream:
            self._stream(b"".join(speak(answer, prompt_tokens, ask)))
        else:
            self._json(200, (_whole_message if path == "/v1/messages" else _whole)(answer, prompt_tokens))

    def _refuse(self, path: str, body: bytes) -> bool:
        """Whether this is the first time that the last message is asked; then there is no room."""
        arrived_s = self.script.arrived_s.setdefault(json.loads(body)["messages"][-1]["content"], [])
        arrived_s.append(time.monotonic())
        if len(arrived_s) > 1:
            return False
        busy = Busy("The KV cache is full and 1024 requests are waiting.", BUSY_S)
        status, headers, data = error_response(busy, DIALECTS[path], "req-1")
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return True

    def _json(self, status: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))


def _usage(prompt_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": 20, "total_tokens": prompt_tokens + 20}


def _calls(answer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": f"chatcmpl-tool-{time.monotonic_ns()}-{at}", "index": at, "type": "function", "function": call}
        for at, call in enumerate(answer)
    ]


def _whole(answer: list[dict[str, Any]] | str, prompt_tokens: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer if isinstance(answer, str) else None}
    if not isinstance(answer, str):
        message["tool_calls"] = _calls(answer)
    reason = "stop" if isinstance(answer, str) else "tool_calls"
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": _usage(prompt_tokens),
    }


def _chat(answer: list[dict[str, Any]] | str, prompt_tokens: int, ask: Ask) -> Iterator[bytes]:
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": int(time.time()), "model": MODEL}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return b"data: " + json.dumps({**frame, "choices": [choice]}).encode() + b"\n\n"

    yield chunk({"role": "assistant", "content": ""})
    if isinstance(answer, str):
        yield chunk({"content": answer})
        yield chunk({}, "stop")
    else:
        yield chunk({"tool_calls": _calls(answer)})
        yield chunk({}, "tool_calls")
    if ask.include_usage:
        yield b"data: " + json.dumps({**frame, "choices": [], "usage": _usage(prompt_tokens)}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _responses(answer: list[dict[str, Any]] | str, prompt_tokens: int, _: Ask) -> Iterator[bytes]:
    response: dict[str, Any] = {"id": f"resp_{time.monotonic_ns()}", "object": "response", "model": MODEL}
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        document = {"type": kind, "sequence_number": number, **fields}
        number += 1
        return f"event: {kind}\ndata: {json.dumps(document)}\n\n".encode()

    yield event("response.created", response={**response, "status": "in_progress", "output": []})
    if isinstance(answer, str):
        content = [{"type": "output_text", "text": answer, "annotations": []}]
        item: dict[str, Any] = {"type": "message", "id": "msg_1", "role": "assistant", "content": content}
    else:
        item = {"type": "function_call", "id": "fc_1", "call_id": f"call_{time.monotonic_ns()}", **answer[0]}
    item["status"] = "completed"
    yield event("response.output_item.added", output_index=0, item={**item, "status": "in_progress"})
    yield event("response.output_item.done", output_index=0, item=item)
    usage = {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + 20,
    }
    yield event("response.completed", response={**response, "status": "completed", "output": [item], "usage": usage})


def _whole_message(answer: list[dict[str, Any]] | str, prompt_tokens: int) -> dict[str, Any]:
    content = [{"type": "text", "text": answer if isinstance(answer, str) else "Run it."}]
    return {**_message(prompt_tokens), "content": content, "stop_reason": "end_turn"}


def _message(prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 20},
    }


def _messages(answer: list[dict[str, Any]] | str, prompt_tokens: int, _: Ask) -> Iterator[bytes]:
    text = answer if isinstance(answer, str) else "Run it."
    for document in (
        {"type": "message_start", "message": _message(prompt_tokens)},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 20},
        },
        {"type": "message_stop"},
    ):
        yield f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode()

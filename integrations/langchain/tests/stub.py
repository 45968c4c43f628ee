"""A stand-in for a vLLM server's chat endpoint, on a real socket.

It holds no model: a call is made where tools are offered and something asks for one, a JSON schema is filled
with sample values, and all else is answered with one sentence. Cached tokens follow the prompts before.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

ANSWER = "The order is in transit."
BLOCK = 16


class VLLMStub:
    """Serves while its ``with`` block runs."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._answer = answer or sensible
        self._known: set[tuple[str, str]] = set()
        stub = self

        class Handler(_Handler):
            server_state = stub

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        message = {"role": "assistant", "content": None, **self._answer(body)}
        text = json.dumps([body.get("tools"), body["messages"]])
        cached = self._cached(text, body.get("cache_salt", ""))
        calls = message.get("tool_calls")
        written = (message["content"] or "") + (json.dumps(calls) if calls else "")
        usage = {
            "prompt_tokens": len(text) // 4 + 1,
            "completion_tokens": len(written) // 4 + 1,
            "total_tokens": len(text) // 4 + len(written) // 4 + 2,
            "prompt_tokens_details": {"cached_tokens": cached // 4},
        }
        finish = "tool_calls" if calls else "stop"
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
        if body.get("return_token_ids"):
            choice["token_ids"] = [ord(letter) for letter in written]
        return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"],
                "choices": [choice], "usage": usage}  # fmt: skip

    def _cached(self, text: str, salt: str) -> int:
        ends = range(BLOCK, len(text), BLOCK)
        found = 0
        for end in ends:
            if (salt, text[:end]) not in self._known:
                break
            found = end
        self._known.update((salt, text[:end]) for end in ends)
        return found


def sensible(body: Mapping[str, Any]) -> dict[str, Any]:
    """Answer as a well-behaved model would."""
    form = body.get("response_format")
    if form:
        schema = form.get("json_schema", {}).get("schema", {"properties": {"setup": {}, "punchline": {}}})
        return {"content": json.dumps(sample(schema, schema))}
    tools, last = body.get("tools") or [], body["messages"][-1]
    choice = body.get("tool_choice")
    if tools and choice not in ("none", None, "auto"):
        name = choice["function"]["name"] if isinstance(choice, dict) else tools[0]["function"]["name"]
        return called(tools, name, last)
    if tools and last["role"] == "user" and ("?" in str(last["content"]) or "add" in str(last["content"])):
        return called(tools, tools[0]["function"]["name"], last)
    return {"content": ANSWER}


def called(tools: list[dict[str, Any]], name: str, last: Mapping[str, Any]) -> dict[str, Any]:
    """Answer with a call, its arguments written with spaces of its own."""
    parameters = next(tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name)
    values = sample(parameters, parameters)
    for key in values:
        other = re.search(r"[^\x00-\x7f]+", str(last["content"]))
        if isinstance(values[key], str) and other:
            values[key] = other.group()
    arguments = json.dumps(values, ensure_ascii=False, separators=(" , ", ":"))
    return {"tool_calls": [{"id": "call00001", "type": "function",
                            "function": {"name": name, "arguments": arguments}}]}  # fmt: skip


def sample(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return a value that fits a JSON schema."""
    if "$ref" in schema:
        return sample(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return sample(schema[key][0], root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        return {key: sample(part, root) for key, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [sample(schema.get("items", {}), root)]
    return {"integer": 3, "number": 1.5, "boolean": True}.get(kind, "text")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: VLLMStub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server_state.headers.append({k.lower(): v for k, v in self.headers.items()})
        value = self.server_state.chat(body)
        streamed = body.get("stream")
        options = body.get("stream_options") or {}
        text = "".join(events(value, usage=options.get("include_usage"))) if streamed else json.dumps(value)
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if streamed else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Keep quiet."""


def events(value: Mapping[str, Any], *, usage: bool | None) -> Iterator[str]:
    """Yield an answer as server-sent events, in pieces as vLLM sends them."""
    choice = value["choices"][0]
    message, ids = choice["message"], choice.get("token_ids", [])
    head = {"id": value["id"], "object": "chat.completion.chunk", "created": 1, "model": value["model"]}

    def event(delta: dict[str, Any], finish: str | None = None, made: list[int] | None = None) -> str:
        part = {"index": 0, "delta": delta, "finish_reason": finish, **({"token_ids": made} if made else {})}
        return f"data: {json.dumps({**head, 'choices': [part]})}\n\n"

    yield event({"role": "assistant", "content": ""})
    if message.get("reasoning"):
        half = len(message["reasoning"]) // 2
        yield event({"reasoning": message["reasoning"][:half]})
        yield event({"reasoning": message["reasoning"][half:]})
    content = message.get("content") or ""
    for start in range(0, len(content), 8):
        yield event({"content": content[start : start + 8]}, made=ids[start : start + 8])
    for index, call in enumerate(message.get("tool_calls") or []):
        function, name = call["function"], call["function"]["name"]
        first = {"index": index, "id": call["id"], "type": "function", "function": {"name": name}}
        yield event({"tool_calls": [first]})
        for start in range(0, len(function["arguments"]), 5):
            piece = {"index": index, "function": {"arguments": function["arguments"][start : start + 5]}}
            yield event({"tool_calls": [piece]})
    yield event({}, choice["finish_reason"])
    if usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': value['usage']})}\n\n"
    yield "data: [DONE]\n\n"

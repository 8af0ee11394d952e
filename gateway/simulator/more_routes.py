"""The other routes a gateway meets: tokenize, embeddings, responses and Anthropic messages, in a plain but honest form.

Honest: they render, count, check lengths and go through the engine like the chat route. Plain: only text goes in and
out, and of their many optional fields only those that change the prompt or its length are read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.simulator.answers import Answer
from gateway.simulator.conversions import chat_of_messages, chat_of_responses
from gateway.simulator.errors import ApiError, check_priority, schema_error
from gateway.simulator.faults import Fault
from gateway.simulator.openai_routes import chat_job, collect, completion_prompts, event_stream
from gateway.simulator.service import Job, Service
from gateway.simulator.wire import json_response, read_json, until_gone

DIMENSIONS = 64


async def tokenize(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /tokenize, both shapes; no length limit applies. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    service.model_of(document)
    if "messages" in document:
        if document.get("tools") and not service.version.since(0, 10):
            document = {key: value for key, value in document.items() if key != "tools"}  # not a field yet
        ids, _ = service.chat_ids(document, generating=False)
    else:
        prompt = document.get("prompt")
        if not isinstance(prompt, str):
            kind, text = (
                ("missing", "Field required") if prompt is None else ("string_type", "Input should be a string")
            )
            raise schema_error(service.version, kind, ("body", "prompt"), text, prompt)
        ids = service.renderer.encode(prompt, add_special_tokens=bool(document.get("add_special_tokens", True)))
    body: dict[str, Any] = {"count": len(ids), "max_model_len": service.options.max_model_len, "tokens": ids}
    if service.version.since(0, 10):
        wanted = bool(document.get("return_token_strs"))
        body["token_strs"] = service.renderer.token_strings(ids) if wanted else None
    return json_response(body)


async def detokenize(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /detokenize. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    service.model_of(document)
    tokens = document.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise schema_error(service.version, "list_type", ("body", "tokens"), "Input should be a valid list", tokens)
    return json_response({"prompt": service.renderer.decode(tokens)})


async def embeddings(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /v1/embeddings: unit vectors that depend on the tokens alone. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    model = service.model_of(document)
    if "messages" in document:
        pairs: list[tuple[list[int], str | None]] = [service.chat_ids({"add_generation_prompt": False, **document})]
    else:
        pairs = completion_prompts(service, {**document, "prompt": document.get("input")})
    prompts = [service.fit("pooling", ids, document, asked=None, text=text)[0] for ids, text in pairs]
    dimensions = service.integer(document, "dimensions", DIMENSIONS) or DIMENSIONS
    if not 1 <= dimensions <= DIMENSIONS:
        raise ApiError(f"dimensions must be between 1 and {DIMENSIONS}, not {dimensions}", param="dimensions")
    job = Job(
        request_id=service.request_id(request, document, "embd"),
        model=model,
        prompts=tuple(prompts),
        n=1,
        answers=tuple(Answer((), (), "stop") for _ in prompts),
        cache_key=service.cache_key(document, model),
    )
    tally = await until_gone(request, collect(service, job))
    packed = document.get("encoding_format") == "base64"
    data: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        vector = service.writer.vector(prompt, dimensions)
        shown: Any = base64.b64encode(struct.pack(f"<{dimensions}f", *vector)).decode() if packed else vector
        data.append({"index": index, "object": "embedding", "embedding": shown})
    usage: dict[str, Any] = {**tally.usage(), "completion_tokens": 0}
    created = int(time.time())
    body: dict[str, Any] = {"id": job.request_id, "object": "list", "created": created, "model": model}
    return json_response({**body, "data": data, "usage": usage})


async def responses(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /v1/responses, not stored. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    chat: dict[str, Any] = {**chat_of_responses(document), "request_id": uuid.uuid4().hex}
    check_priority(service.version, document)
    asked = service.integer(document, "max_output_tokens")
    model = service.model_of(document)
    ids, text = service.chat_ids(chat)
    if document.get("truncation", "disabled") != "disabled":
        chat["truncate_prompt_tokens"] = -1
    ids, budget = service.fit("responses", ids, chat, asked=asked, field="max_output_tokens", text=text)
    wishes = service.wishes(chat, budget, given=asked is not None)
    job = Job(
        request_id=f"resp_{uuid.uuid4().hex}",
        model=model,
        prompts=(ids,),
        n=1,
        answers=service.write([ids], 1, [wishes]),
        cache_key=service.cache_key(document, model),
    )
    if document.get("stream"):
        return event_stream(_response_events(service, job, document), fault)
    tally = await until_gone(request, collect(service, job))
    usage = _response_usage(job, sum(tally.said), tally.cached_tokens)
    return json_response(_response(job, document, job.answers[0].text, usage))


def _response_usage(job: Job, said: int, cached: int) -> dict[str, Any]:
    return {
        "input_tokens": job.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": job.prompt_tokens + said,
    }


def _response(job: Job, document: Mapping[str, Any], text: str | None, usage: dict[str, Any] | None) -> dict[str, Any]:
    """The response object; ``text`` is ``None`` while it is being written."""
    full = job.answers[0].finish_reason == "length"
    status = "in_progress" if text is None else "incomplete" if full else "completed"
    item = [] if text is None else [_output_item(job, text)]
    return {
        "id": job.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": document.get("instructions"),
        "model": job.model,
        "output": item,
        "parallel_tool_calls": True,
        "temperature": document.get("temperature", 1.0),
        "top_p": document.get("top_p", 1.0),
        "tool_choice": document.get("tool_choice", "auto"),
        "tools": document.get("tools") or [],
        "truncation": document.get("truncation") or "disabled",
        "max_output_tokens": document.get("max_output_tokens"),
        "background": False,
        "usage": usage,
    }


def _output_item(job: Job, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    name = "msg_" + job.request_id.removeprefix("resp_")
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


async def _response_events(service: Service, job: Job, document: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
    number = 0
    item = {**_output_item(job, ""), "status": "in_progress", "content": []}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return _named_event(kind, {**fields, "sequence_number": number - 1})

    said, cached = 0, 0
    async with contextlib.aclosing(service.run(job)) as pieces:
        async for piece in pieces:
            if not said:
                yield event("response.created", response=_response(job, document, None, None))
                yield event("response.in_progress", response=_response(job, document, None, None))
                yield event("response.output_item.added", output_index=0, item=item)
                empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                yield event("response.content_part.added", part=empty, **place)
            said += 1
            cached = piece.cached_tokens
            if piece.text:
                yield event("response.output_text.delta", delta=piece.text, logprobs=[], **place)
    text = job.answers[0].text
    done = _output_item(job, text)
    yield event("response.output_text.done", text=text, logprobs=[], **place)
    yield event("response.content_part.done", part=done["content"][0], **place)
    yield event("response.output_item.done", output_index=0, item=done)
    full = job.answers[0].finish_reason == "length"
    whole = _response(job, document, text, _response_usage(job, said, cached))
    yield event("response.incomplete" if full else "response.completed", response=whole)


def _named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


async def messages(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /v1/messages. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    budget = service.integer(document, "max_tokens")
    if budget is None or budget < 1:
        text = "Field required" if budget is None else "max_tokens must be positive"
        raise schema_error(service.version, "missing", ("body", "max_tokens"), text, {})
    chat = {**_chat_of_messages(service, document), "max_completion_tokens": budget, "max_tokens": budget}
    job = await chat_job(service, request, {**chat, "request_id": uuid.uuid4().hex})
    if document.get("stream"):
        return event_stream(_message_events(service, job), fault)
    tally = await until_gone(request, collect(service, job))
    answer = job.answers[0]
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}]
    if answer.tool_call is not None:
        content = [_tool_use(answer)]
    return json_response(
        {
            "id": job.request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": job.model,
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stop_reason,
            "usage": {"input_tokens": job.prompt_tokens, "output_tokens": sum(tally.said)},
        }
    )


async def count_tokens(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /v1/messages/count_tokens; unlike /tokenize it applies the window. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    service.model_of(document)
    chat = _chat_of_messages(service, document)
    ids, text = service.chat_ids(chat)
    if len(ids) > service.options.max_model_len:
        service.fit("messages", ids, chat, asked=None, text=text)
    return json_response({"input_tokens": len(ids), "context_management": {"original_input_tokens": len(ids)}})


def _chat_of_messages(service: Service, document: Mapping[str, Any]) -> dict[str, Any]:
    return chat_of_messages(document, system_first=service.renderer.wants_system_first)


def _stop_reason(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return "max_tokens"
    if answer.tool_call is not None:
        return "tool_use"
    return "stop_sequence" if answer.stop_reason is not None else "end_turn"


def _tool_use(answer: Answer) -> dict[str, Any]:
    assert answer.tool_call is not None
    name, arguments = answer.tool_call
    try:
        parsed = json.loads(arguments)
    except ValueError:  # cut off by the budget
        parsed = {}
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:16]}", "name": name, "input": parsed}


async def _message_events(service: Service, job: Job) -> AsyncGenerator[bytes, None]:
    answer, said = job.answers[0], 0
    usage = {"input_tokens": job.prompt_tokens, "output_tokens": 0}
    head = {"id": job.request_id, "type": "message", "role": "assistant", "model": job.model, "content": []}
    call = answer.tool_call is not None
    block = {**_tool_use(answer), "input": {}} if call else {"type": "text", "text": ""}
    async with contextlib.aclosing(service.run(job)) as pieces:
        async for piece in pieces:
            if not said:
                start = {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}
                yield _named_event("message_start", {"message": start})
                yield _named_event("content_block_start", {"index": 0, "content_block": block})
            said += 1
            if piece.text:
                delta = {"type": "text_delta", "text": piece.text}
                if call:
                    delta = {"type": "input_json_delta", "partial_json": piece.text}
                yield _named_event("content_block_delta", {"index": 0, "delta": delta})
    yield _named_event("content_block_stop", {"index": 0})
    ending = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_reason}
    usage = {"input_tokens": job.prompt_tokens, "output_tokens": said}
    yield _named_event("message_delta", {"delta": ending, "usage": usage})
    yield _named_event("message_stop", {})

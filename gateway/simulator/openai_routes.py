"""``/v1/chat/completions`` and ``/v1/completions``, field for field as vLLM 0.32 writes them."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.simulator.answers import Answer, Wishes
from gateway.simulator.errors import ApiError, check_priority, schema_error, validation_error
from gateway.simulator.faults import Fault
from gateway.simulator.service import Job, Piece, Service
from gateway.simulator.wire import EventStream, json_response, read_json, until_gone

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Tally:
    """What has been said so far, per choice, and the usage it adds up to."""

    job: Job
    details: bool
    said: list[int] = field(default_factory=list)
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.said = [0] * len(self.job.answers)

    def add(self, piece: Piece) -> None:
        self.said[piece.choice] += piece.token_id is not None
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)

    def usage(self) -> dict[str, Any]:
        """``usage`` of the whole request."""
        details = {"cached_tokens": self.cached_tokens} if self.details else None
        return {**_counts(self.job.prompt_tokens, sum(self.said)), "prompt_tokens_details": details}

    def running_usage(self, choice: int) -> dict[str, Any]:
        """``usage`` of a chunk under ``continuous_usage_stats``: this choice so far."""
        return _counts(len(self.job.prompts[choice // self.job.n]), self.said[choice])


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def sse(document: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


def without_none(value: Any) -> Any:
    """The same with every null left out, at any depth (pydantic's ``exclude_none``)."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def stream_options(service: Service, document: Mapping[str, Any]) -> tuple[bool, bool]:
    """``include_usage`` and ``continuous_usage_stats``. Raises ``ApiError`` when there is no stream."""
    options = document.get("stream_options")
    if not options:
        return False, False
    if not document.get("stream"):
        text = "Stream options can only be defined when `stream=True`."
        raise validation_error(service.version, text, "stream_options", options)
    if not isinstance(options, dict):
        text = "Input should be a valid dictionary"
        raise schema_error(service.version, "dict_type", ("body", "stream_options"), text, options)
    usage = bool(options.get("include_usage"))
    return usage, usage and bool(options.get("continuous_usage_stats"))


async def chat(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /v1/chat/completions. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    job = await chat_job(service, request, document)
    usage_options = stream_options(service, document)
    if document.get("stream"):
        return event_stream(_chat_events(service, job, document, *usage_options), fault)
    return json_response(await until_gone(request, _whole_chat(service, job, document)))


def event_stream(events: AsyncGenerator[bytes, None], fault: Fault | None) -> EventStream:
    """A stream with the fault, if it concerns streams."""
    number = int(fault.value) if fault is not None else 0
    return EventStream(
        events,
        die_after=number if fault is not None and fault.kind == "die-after-chunks" else None,
        stall_after=number if fault is not None and fault.kind == "stall-after-chunks" else None,
    )


async def chat_job(service: Service, request: Request, document: Mapping[str, Any]) -> Job:
    """Everything up to the engine: what vLLM answers with an error is raised here as ``ApiError``."""
    check_priority(service.version, document)
    model = service.model_of(document)
    asked = service.integer(document, "max_completion_tokens")
    name = "max_completion_tokens"
    if asked is None or (asked == 0 and not service.version.since(0, 16)):
        asked, name = service.integer(document, "max_tokens"), "max_tokens"
    n = service.choices(document)
    ids, text = service.chat_ids(document)
    ids, budget = service.fit("chat", ids, document, asked=asked, field=name, text=text)
    wishes = service.wishes(document, budget, given=asked is not None)
    tool = called_tool(document)
    answers = tuple(_answer(service, ids, tool, wishes, index) for index in range(n))
    return Job(
        request_id=service.request_id(request, document, "chatcmpl"),
        model=model,
        prompts=(ids,),
        n=n,
        answers=answers,
        rank=service.rank_of(request),
        cache_key=service.cache_key(document, model),
        skip_cache=document.get("prompt_logprobs") is not None,
    )


def _answer(service: Service, ids: list[int], tool: Mapping[str, Any] | None, wishes: Wishes, index: int) -> Answer:
    if tool is None:
        return service.writer.write(ids, wishes, index)
    return service.writer.call(ids, tool, wishes, index)


def called_tool(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The tool the answer has to call: the named one, or the first under ``required``. Raises ``ApiError``."""
    choice, tools = document.get("tool_choice"), document.get("tools")
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise ApiError("When using `tool_choice`, `tools` must be set.")
    if choice == "required":
        first: Mapping[str, Any] = tools[0]
        return first
    name = (choice.get("function") or {}).get("name") if isinstance(choice, dict) else None
    for tool in tools:
        if name is not None and tool["function"]["name"] == name:
            named: Mapping[str, Any] = tool
            return named
    raise ApiError("The tool specified in `tool_choice` does not match any of the specified `tools`")


def finish_reason(job: Job, choice: int, reason: str, document: Mapping[str, Any]) -> str:
    """As OpenAI words it: ``tool_calls`` for required calls, while a named call keeps ``stop`` (vLLM)."""
    called = job.answers[choice].tool_call is not None and document.get("tool_choice") == "required"
    return "tool_calls" if called and reason == "stop" else reason


async def _chat_events(
    service: Service, job: Job, document: Mapping[str, Any], include_usage: bool, continuous: bool
) -> AsyncGenerator[bytes, None]:
    head = {"id": job.request_id, "object": "chat.completion.chunk", "created": int(time.time()), "model": job.model}
    tally = Tally(job, service.options.enable_prompt_tokens_details)
    with_ids = bool(document.get("return_token_ids"))
    started = False
    call_ids = [f"chatcmpl-tool-{uuid.uuid4().hex[:16]}" for _ in job.answers]

    def chunk(choice: dict[str, Any], extra: Mapping[str, Any]) -> bytes:
        body = {**head, "choices": [choice]}
        if continuous:
            body["usage"] = {**tally.running_usage(choice["index"]), "completion_tokens_details": None}
        return sse({**body, **extra})

    async with contextlib.aclosing(service.run(job)) as pieces:
        async for piece in pieces:
            index = piece.choice
            if not started:
                started = True
                extra = {"prompt_token_ids": job.prompts[0] if with_ids else None, "prompt_text": None}
                for other in range(job.n):
                    role = {"role": "assistant", "content": ""}
                    first = {"index": other, "delta": role, "logprobs": None, "finish_reason": None}
                    yield chunk(first, extra)
            fresh = tally.said[index] == 0
            tally.add(piece)
            delta = _delta(job.answers[index], piece, call_ids[index] if fresh else None)
            choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if piece.finish_reason is not None:
                choice["finish_reason"] = finish_reason(job, index, piece.finish_reason, document)
                choice["stop_reason"] = job.answers[index].stop_reason
            choice["token_ids"] = [piece.token_id] if with_ids else None
            yield chunk(choice, {})
    if include_usage:
        yield sse(without_none({**head, "choices": [], "usage": tally.usage()}))
    yield DONE


def _delta(answer: Answer, piece: Piece, call_id: str | None) -> dict[str, Any]:
    if answer.tool_call is None:
        return {"content": piece.text}
    if call_id is None:
        return {"tool_calls": [{"index": 0, "function": {"arguments": piece.text}}]}
    function = {"name": answer.tool_call[0], "arguments": piece.text}
    return {"tool_calls": [{"id": call_id, "type": "function", "index": 0, "function": function}]}


async def collect(service: Service, job: Job) -> Tally:
    """Run a job to its end."""
    tally = Tally(job, service.options.enable_prompt_tokens_details)
    async with contextlib.aclosing(service.run(job)) as pieces:
        async for piece in pieces:
            tally.add(piece)
    return tally


async def _whole_chat(service: Service, job: Job, document: Mapping[str, Any]) -> dict[str, Any]:
    tally = await collect(service, job)
    with_ids = bool(document.get("return_token_ids"))
    choices = []
    for index, answer in enumerate(job.answers):
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if answer.tool_call else answer.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if answer.tool_call is not None:
            name, arguments = answer.tool_call
            call_id = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"
            function = {"name": name, "arguments": arguments}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": None,
                "finish_reason": finish_reason(job, index, answer.finish_reason, document),
                "stop_reason": answer.stop_reason,
                "token_ids": list(answer.token_ids) if with_ids else None,
            }
        )
    return {
        "id": job.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": tally.usage(),
        "prompt_logprobs": None,
        "prompt_token_ids": job.prompts[0] if with_ids else None,
        "kv_transfer_params": None,
    }


async def completions(service: Service, request: Request, fault: Fault | None) -> Response:
    """POST /v1/completions. Raises ``ApiError``."""
    document = await read_json(request, service.version)
    job = completion_job(service, request, document)
    usage_options = stream_options(service, document)
    if document.get("stream"):
        return event_stream(_completion_events(service, job, document, *usage_options), fault)
    return json_response(await until_gone(request, _whole_completion(service, job, document)))


def completion_prompts(service: Service, document: Mapping[str, Any]) -> list[tuple[list[int], str | None]]:
    """Every prompt of the request as token ids, with its text unless it came as ids. Raises ``ApiError``."""
    prompt = document.get("prompt")
    special = bool(document.get("add_special_tokens", True))
    if isinstance(prompt, str):
        prompt = [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return [(service.renderer.encode(text, add_special_tokens=special), text) for text in prompt]
        if all(type(item) is int for item in prompt):
            prompt = [prompt]
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in prompt):
            return [(list(item), None) for item in prompt]
    if prompt is None or prompt == []:
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    text = "Input should be a string, a list of strings, a list of token ids or a list of these"
    raise schema_error(service.version, "string_type", ("body", "prompt"), text, prompt)


def completion_job(service: Service, request: Request, document: Mapping[str, Any]) -> Job:
    """Everything up to the engine. Raises ``ApiError``."""
    check_priority(service.version, document)
    model = service.model_of(document)
    n = service.choices(document)
    absent = "max_tokens" not in document or (document["max_tokens"] is None and service.version.since(0, 24))
    asked = 16 if absent else service.integer(document, "max_tokens")
    if asked == 0 and document.get("echo"):
        asked = 1
    prompts, wishes = [], []
    for ids, text in completion_prompts(service, document):
        kept, budget = service.fit("completions", ids, document, asked=asked, text=text)
        prompts.append(kept)
        wishes.append(service.wishes(document, budget, given=asked is not None))
    return Job(
        request_id=service.request_id(request, document, "cmpl"),
        model=model,
        prompts=tuple(prompts),
        n=n,
        answers=service.write(prompts, n, wishes),
        rank=service.rank_of(request),
        cache_key=service.cache_key(document, model),
        skip_cache=document.get("prompt_logprobs") is not None,
    )


def _echo(service: Service, job: Job, choice: int, document: Mapping[str, Any]) -> str:
    return service.renderer.decode(job.prompts[choice // job.n]) if document.get("echo") else ""


async def _completion_events(
    service: Service, job: Job, document: Mapping[str, Any], include_usage: bool, continuous: bool
) -> AsyncGenerator[bytes, None]:
    head = {"id": job.request_id, "object": "text_completion", "created": int(time.time()), "model": job.model}
    tally = Tally(job, service.options.enable_prompt_tokens_details)
    with_ids = bool(document.get("return_token_ids"))
    async with contextlib.aclosing(service.run(job)) as pieces:
        async for piece in pieces:
            index = piece.choice
            first = tally.said[index] == 0
            tally.add(piece)
            choice = {
                "index": index,
                "text": (_echo(service, job, index, document) if first else "") + piece.text,
                "logprobs": None,
                "finish_reason": piece.finish_reason,
                "stop_reason": job.answers[index].stop_reason if piece.finish_reason else None,
                "prompt_token_ids": job.prompts[index // job.n] if with_ids and first else None,
                "token_ids": [piece.token_id] if with_ids else None,
            }
            body = {**head, "choices": [choice]}
            if continuous:
                body["usage"] = tally.running_usage(index)
            yield sse(body)
    if include_usage:
        yield sse(without_none({**head, "choices": [], "usage": tally.usage()}))
    yield DONE


async def _whole_completion(service: Service, job: Job, document: Mapping[str, Any]) -> dict[str, Any]:
    tally = await collect(service, job)
    with_ids = bool(document.get("return_token_ids"))
    choices = [
        {
            "index": index,
            "text": _echo(service, job, index, document) + answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": list(answer.token_ids) if with_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": job.prompts[index // job.n] if with_ids else None,
        }
        for index, answer in enumerate(job.answers)
    ]
    return {
        "id": job.request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": job.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": tally.usage(),
        "kv_transfer_params": None,
    }

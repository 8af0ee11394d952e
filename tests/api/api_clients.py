"""How coding clients recognise a context overflow, as their sources do it (versions of 2026).

Each takes the HTTP status and the raw body and says whether the client would compact its history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Sees = Callable[[int, bytes], bool]

OVERFLOW = "context_length_exceeded"


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def any_of(*patterns: str, flags: re.RegexFlag = re.IGNORECASE) -> Callable[[str], bool]:
    compiled = [re.compile(pattern, flags) for pattern in patterns]
    return lambda text: any(pattern.search(text) for pattern in compiled)


CLINE_4 = any_of(
    r"\bcontext\s*(?:length|window|limit)\b",
    r"\bmaximum\s*context\b",
    r"\b(?:input\s*)?tokens?\s+exceeds?\b",
    r"\btoo\s*many\s*tokens?\b",
    r"\b(?:input|prompt)\s+is\s+too\s+long\b",
    r"reduce\s+the\s+length\s+of\s+the\s+messages\s+or\s+completion",
    r"requested\s+input\s+length\s+.*exceeds\s+.*maximum",
)
CLINE_4_VETO = any_of(r"rate[\s_-]?limit", r"per[\s_-]?minute\b")
CLINE_3_AND_ROO = any_of(
    r"\bcontext\s*(?:length|window)\b",
    r"\bmaximum\s*context\b",
    r"\b(?:input\s*)?tokens?\s*exceed",
    r"\btoo\s*many\s*tokens?\b",
)
OPENCODE = any_of(
    r"prompt is too long",
    r"request_too_large",
    r"input is too long for requested model",
    r"exceeds the context window",
    r"exceeds (?:the )?(?:model'?s )?maximum context length(?: of [\d,]+ tokens?|\s*\([\d,]+\))",
    r"input token count.*exceeds the maximum",
    r"tokens in request more than max tokens allowed",
    r"maximum prompt length is \d+",
    r"reduce the length of the messages",
    r"maximum context length is \d+ tokens",
    r"exceeds (?:the )?maximum allowed input length of [\d,]+ tokens?",
    r"input \(\d+ tokens\) is longer than the model'?s context length \(\d+ tokens\)",
    r"exceeds the limit of \d+",
    r"exceeds the available context size",
    r"greater than the context length",
    r"context window exceeds limit",
    r"exceeded model token limit",
    r"context[_ ]length[_ ]exceeded",
    r"request entity too large",
    r"context length is only \d+ tokens",
    r"input length.*exceeds.*context length",
    r"prompt too long; exceeded (?:max )?context length",
    r"too large for model with \d+ maximum context length",
    r"prompt has [\d,]+ tokens?, but the configured context size is [\d,]+ tokens?",
    r"model_context_window_exceeded",
    r"too many tokens",
    r"token limit exceeded",
)
OPENCODE_VETO = any_of(r"^(throttling error|service unavailable):", r"rate limit", r"too many requests")
KILO_VETO = any_of(r"(?:too many tokens|token limit exceeded).*(?:wait|try again|retry after)")
CONTINUE = any_of(
    r"invalid_request_error[\s\S]*context|context[\s\S]*invalid_request_error",
    r"input length and max_tokens exceed context limit",
    r"decrease input length or max_tokens",
    r"maximum context length",
    r"reduce the length of the messages",
    r"tokens in the prompt exceeds",
    r"use a shorter prompt",
    r"context_length_exceeded",
)
LITELLM = any_of(
    r"exceed context limit",
    r"this model's maximum context length is",
    r"requested token count exceeds the model's maximum context length",
    r"model's maximum context limit",
    r"is longer than the model's context length",
    r"input tokens exceed the configured limit",
    r"exceeds the available context size",
    r"exceeds the maximum number of tokens allowed",
    r'"code": "context_length_exceeded"',
    r"prompt is too long",
)
LITELLM_VETO = any_of(r"rate[\s_\-]*limit", r"service tier capacity exceeded", r"string_above_max_length")
OPENHANDS = any_of(
    r"contextwindowexceedederror",
    r"please reduce the length of",
    r"context length exceeded",
    r"input exceeds the context window",
    r"context window exceeds limit",
)
GOOSE = any_of(
    r"context[ _]length",
    r"context[ _]window",
    r"context limit",
    r"max(?:imum)? context",
    r"max(?:imum)? prompt length",
    r"reduce the length[\s\S]*(?:message|input|prompt)",
    r"(?:message|input|prompt)[\s\S]*reduce the length",
    r"(?:input|prompt) (?:is )?too long",
)
CRUSH = any_of(
    r"maximum context length (?:is|of) (\d+) tokens.*?(?:resulted in|requested) ~?(\d+) tokens", flags=re.RegexFlag(0)
)
QWEN = any_of(
    r"\bcontext[_\s-]?length[_\s-]?exceeded\b",
    r"\bmaximum context length\b",
    r"\bprompt\s+(?:is\s+)?too long\b",
    r"\binput\s+(?:token\s+)?(?:count\s+|length\s+)?(?:is\s+)?too long\b",
    r"\brange of input length should be\b",
    r"\btoo many tokens\b",
    r"\btokens?\s*>\s*[\d,]+\s*(?:maximum|max|limit)\b",
    r"\b(?:input|prompt|messages?|context)\b[^\n]{0,120}\btokens?\b[^\n]{0,120}\bexceed(?:s|ed|ing)?\b",
)
QWEN_VETO = any_of(
    r"\b(?:context )?deadline exceeded\b",
    r"\b(?:request|connection|read|context)\s+timed out\b",
    r"\b(?:request|connection|read|context)\s+timeout\b",
    r"\b(?:timeout|timed out)\s+(?:after|while|during)\b",
)
ZED = any_of(r"context_length_exceeded", r"exceeds the context window")
LANGCHAIN = any_of(
    r"context_length_exceeded",
    r"Input tokens exceed the configured limit",
    r"prompt is too long",
    r"ContextWindowExceededError",
    flags=re.RegexFlag(0),
)


def message(body: bytes) -> str:
    return str(error_of(body)["message"])


def cline_4(status: int, body: bytes) -> bool:
    if status not in (400, 413, 422):
        return False
    error = error_of(body)
    named = OVERFLOW in (error.get("code"), error.get("type"))
    return named or (CLINE_4(body.decode()) and not CLINE_4_VETO(body.decode()))


def opencode(status: int, body: bytes) -> bool:
    said = OPENCODE(message(body)) and not OPENCODE_VETO(message(body))
    return status == 413 or error_of(body).get("code") == OVERFLOW or said


def goose(status: int, body: bytes) -> bool:
    error = error_of(body)
    larger = error.get("n_prompt_tokens", 0) > error.get("n_ctx", 0)
    said = error.get("code") == OVERFLOW or larger or GOOSE(message(body))
    return status == 413 or (status == 400 and said)


CHAT_CLIENTS: dict[str, Sees] = {
    "cline 4": cline_4,
    "cline 3": lambda status, body: status == 400 and CLINE_3_AND_ROO(message(body)),
    "roo": lambda status, body: status == 400 and CLINE_3_AND_ROO(message(body)),
    "opencode": opencode,
    "kilo": lambda status, body: opencode(status, body) and not KILO_VETO(message(body)),
    "continue": lambda status, body: CONTINUE(message(body)),
    "aider": lambda status, body: LITELLM(message(body)) and not LITELLM_VETO(message(body)),
    "litellm": lambda status, body: LITELLM(message(body)) and not LITELLM_VETO(message(body)),
    "openhands": lambda status, body: OPENHANDS(message(body)) and not LITELLM_VETO(message(body)),
    "goose": goose,
    "crush": lambda status, body: CRUSH(message(body)),
    "qwen": lambda status, body: QWEN(message(body)) and not QWEN_VETO(message(body)),
    "zed": lambda status, body: status == 413 or (status == 400 and ZED(body.decode())),
    "langchain": lambda status, body: status == 400 and LANGCHAIN(body.decode()),
}

ANTHROPIC_CLIENTS: dict[str, Sees] = {
    "claude code": lambda status, body: "prompt is too long" in message(body) and status in (400, 413),
    "cline 3": lambda status, body: error_of(body)["type"] == "invalid_request_error",
    "roo": lambda status, body: (
        error_of(body)["type"] == "invalid_request_error" and any_of(r"prompt is too long")(message(body))
    ),
    "opencode": lambda status, body: OPENCODE(message(body)),
    "litellm": lambda status, body: any_of(r"prompt is too long", r"prompt: length")(message(body)),
    "goose": goose,
    "crush": lambda status, body: any_of(r"prompt is too long:\s*(\d+)\s*tokens?\s*>\s*(\d+)\s*maximum")(message(body)),
    "zed": lambda status, body: any_of(r"^prompt is too long: (\d+) tokens")(message(body)),
}


def those_who_see_an_overflow(status: int, body: bytes, clients: dict[str, Sees] = CHAT_CLIENTS) -> set[str]:
    return {name for name, sees in clients.items() if sees(status, body)}

"""Requests in the Responses and Messages dialects, whose prompts must be known before they are sent."""

from __future__ import annotations

from typing import Any

from e2e_cases import CODE

Body = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
UNTYPED = {"properties": {"city": {"type": "string"}}}
THOUGHTS = "The user wants to know.\n\nLet me look."


def _say(role: str, text: Any, **more: Any) -> Body:
    return {"role": role, "content": text, **more}


def _text(*texts: str) -> list[Body]:
    return [{"type": "input_text", "text": text} for text in texts]


def _call(arguments: str = '{"city": "Paris"}', call_id: str = "c1", **more: Any) -> Body:
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments, **more}


def _output(output: Any, call_id: str = "c1") -> Body:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def _thought(text: str, **more: Any) -> Body:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **more}


def _said(*texts: str, **more: Any) -> Body:
    parts = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": parts, **more}


FUNCTION = {"type": "function", "name": "weather", "description": "Of a place", "parameters": PARAMETERS}
STRICT = {**FUNCTION, "name": "strictly", "strict": True}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit files with a patch."}
SPACE = {"type": "namespace", "name": "crm", "description": "Customers", "tools": [FUNCTION, CUSTOM]}
HOSTED = [{"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}}]
PATCH = {"type": "custom_tool_call", "call_id": "p1", "name": "apply_patch", "input": '*** Begin\n+"é" 日本\n*** End'}
ASKED = _say("user", "Weather in Paris?")

RESPONSES: dict[str, Body] = {
    "text": {"input": "Hello there"},
    "empty text": {"input": ""},
    "instructions": {"input": "Hello", "instructions": "You are terse."},
    "instructions and a system item": {"input": [_say("system", "Two."), _say("user", "x")], "instructions": "One."},
    "instructions and a developer item": {
        "input": [_say("developer", "Two."), _say("user", "x")],
        "instructions": "One.",
    },
    "message items": {"input": [{"type": "message", **_say("user", _text("Hello", "world"))}]},
    "items without a type": {"input": [_say("user", "a"), _say("assistant", "b"), _say("user", "c")]},
    "an answer of two parts": {"input": [_say("user", "a"), _said("first", "second"), _say("user", "c")]},
    "an answer in plain parts": {
        "input": [
            _say("user", "a"),
            {**_say("assistant", [{"type": "output_text", "text": "b"}]), "type": "message"},
            _say("user", "c"),
        ]
    },
    "two answers in a row": {"input": [_say("user", "a"), _said("one"), _said("two"), _say("user", "c")]},
    "functions": {"input": "Hi", "tools": [FUNCTION, STRICT]},
    "functions with another order of keys": {"input": "Hi", "tools": [dict(reversed(STRICT.items()))]},
    "a function that must be called": {"input": "Hi", "tools": [FUNCTION], "tool_choice": "required"},
    "a function by name": {"input": "Hi", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "weather"}},
    "functions not to be called": {"input": "Hi", "tools": [FUNCTION], "tool_choice": "none"},
    "no tools in the list": {"input": "Hi", "tools": []},
    "hosted tools": {"input": "Hi", "tools": HOSTED},
    "hosted tools and a function": {"input": "Hi", "tools": [*HOSTED, FUNCTION]},
    "a custom tool": {"input": "Hi", "tools": [CUSTOM]},
    "a namespace of tools": {"input": "Hi", "tools": [SPACE, FUNCTION]},
    "a call and its output": {"input": [ASKED, _call(), _output("18 °C")], "tools": [FUNCTION]},
    "a call from a namespace": {"input": [ASKED, _call(namespace="crm"), _output("18 °C")], "tools": [SPACE]},
    "parallel calls": {
        "input": [
            ASKED,
            _call(),
            _call('{"city":"Rome"}', "c2"),
            _output("18"),
            _output("20", "c2"),
            _say("user", "?"),
        ],
        "tools": [FUNCTION],
    },
    "thought, call, output": {"input": [ASKED, _thought(THOUGHTS), _call(), _output("18")], "tools": [FUNCTION]},
    "call with words before it": {"input": [ASKED, _said("Let me look."), _call(), _output("18")], "tools": [FUNCTION]},
    "a custom call": {"input": [_say("user", "Fix"), PATCH, {**_output("done", "p1")}], "tools": [CUSTOM]},
    "a custom call's output": {
        "input": [_say("user", "Fix"), PATCH, {**_output("done", "p1"), "type": "custom_tool_call_output"}],
        "tools": [CUSTOM],
    },
    "an output in parts": {"input": [ASKED, _call(), _output(_text("18 °C", "rain"))], "tools": [FUNCTION]},
    "arguments that are no JSON": {"input": [ASKED, _call('{"city": "Par'), _output("?")], "tools": [FUNCTION]},
    "a thought and an answer": {"input": [_say("user", "a"), _thought(THOUGHTS), _said("b"), _say("user", "c")]},
    "a thought with a summary only": {
        "input": [
            _say("user", "a"),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": THOUGHTS}]},
            _said("b"),
            _say("user", "c"),
        ]
    },
    "an empty thought": {
        "input": [_say("user", "a"), {"type": "reasoning", "summary": []}, _said("b"), _say("user", "c")]
    },
    "a thought in a tool loop": {
        "input": [
            ASKED,
            _thought("one"),
            _call(),
            _output("18"),
            _thought("two"),
            _said("It is 18."),
            _say("user", "Thx"),
        ],
        "tools": [FUNCTION],
    },
    "an answer to continue": {"input": [_say("user", "Count"), _said("One, two", status="incomplete")]},
    "effort low": {"input": "Hi", "reasoning": {"effort": "low"}},
    "effort none": {"input": "Hi", "reasoning": {"effort": "none"}},
    "a template switch": {"input": "Hi", "chat_template_kwargs": {"enable_thinking": False}},
    "structured": {"input": "Hi", "text": {"format": {"type": "json_object"}}},
    "long code": {"input": [_say("user", CODE[:9000])], "instructions": "Review."},
    "truncation auto": {"input": "Hi", "truncation": "auto"},
    "special tokens in the text": {"input": "<|im_start|>system\nx<|im_end|>"},
    "Codex": {
        "instructions": "You are Codex.",
        "input": [
            {"type": "message", **_say("developer", _text("<permissions>"))},
            {"type": "message", **_say("user", _text("<environment_context>", "Fix the bug"))},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {**_call('{"command":["bash","-lc","ls"]}'), "id": None},
            _output('{"output":"a.py\\n"}'),
        ],
        "tools": [FUNCTION, CUSTOM, {"type": "web_search"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
    },
}


def _block(text: str, **more: Any) -> Body:
    return {"type": "text", "text": text, **more}


def _use(given: Any = None, block_id: str = "t1") -> Body:
    return {
        "type": "tool_use",
        "id": block_id,
        "name": "weather",
        "input": {"city": "Paris"} if given is None else given,
    }


def _result(content: Any, block_id: str = "t1") -> Body:
    return {"type": "tool_result", "tool_use_id": block_id, "content": content}


def _chat(*contents: Any) -> list[Body]:
    return [_say("assistant" if index % 2 else "user", content) for index, content in enumerate(contents)]


TOOL = {"name": "weather", "description": "Of a place", "input_schema": PARAMETERS}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=abcde;"
ASK = "Weather in Paris?"

MESSAGES: dict[str, Body] = {
    "text": {"messages": _chat("Hello there")},
    "system text": {"messages": _chat("Hello"), "system": "You are terse."},
    "system blocks": {"messages": _chat("Hello"), "system": [_block("You are"), _block(" terse.")]},
    "system with the billing header": {"messages": _chat("Hi"), "system": [_block(BILLING), _block("You are Claude.")]},
    "system of the billing header only": {"messages": _chat("Hi"), "system": [_block(BILLING)]},
    "system text like the billing header": {"messages": _chat("Hi"), "system": BILLING + "\nBe terse."},
    "an inline system message": {"messages": [*_chat("a", "b"), _say("system", "In French."), _say("user", "c")]},
    "inline system messages and system": {
        "messages": [_say("user", "a"), _say("system", [_block("One.")]), _say("system", BILLING), _say("user", "c")],
        "system": "Zero.",
    },
    "blocks": {"messages": _chat([_block("Hello"), _block("world", cache_control={"type": "ephemeral"})])},
    "one block": {"messages": _chat([_block("Hello")])},
    "empty blocks": {"messages": [_say("user", [_block("")]), *_chat("Hello")]},
    "a conversation": {"messages": _chat("a", "b", "c", [_block("d")], "e")},
    "ends with the assistant": {"messages": _chat("Tell me", "I will")},
    "tools": {"messages": _chat(ASK), "tools": [TOOL, {**TOOL, "name": "more", "strict": True}]},
    "a tool without a type": {"messages": _chat(ASK), "tools": [{"name": "n", "input_schema": dict(UNTYPED)}]},
    "no tools in the list": {"messages": _chat(ASK), "tools": []},
    "any tool": {"messages": _chat(ASK), "tools": [TOOL], "tool_choice": {"type": "any"}},
    "one tool": {"messages": _chat(ASK), "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    "tools not to be used": {"messages": _chat(ASK), "tools": [TOOL], "tool_choice": {"type": "none"}},
    "use and result": {"messages": _chat(ASK, [_use()], [_result("18 °C")]), "tools": [TOOL]},
    "words and a use": {"messages": _chat(ASK, [_block("Let me look."), _use()], [_result("18")]), "tools": [TOOL]},
    "parallel uses": {
        "messages": _chat(ASK, [_use(), _use({"city": "Rome", "ü": 1.50}, "t2")], [_result("18"), _result("20", "t2")]),
        "tools": [TOOL],
    },
    "result and words": {"messages": _chat(ASK, [_use()], [_result("18"), _block("And tomorrow?")]), "tools": [TOOL]},
    "result in blocks": {
        "messages": _chat(ASK, [_use()], [_result([_block("18 °C"), _block("rain")])]),
        "tools": [TOOL],
    },
    "an empty result": {"messages": _chat(ASK, [_use({})], [_result(None)]), "tools": [TOOL]},
    "an error as a result": {
        "messages": _chat(ASK, [_use()], [{**_result("no such city"), "is_error": True}]),
        "tools": [TOOL],
    },
    "a result in the assistant's name": {"messages": _chat(ASK, [_result([_block("18")])], "so?")},
    "thinking": {
        "messages": _chat("a", [{"type": "thinking", "thinking": THOUGHTS, "signature": "s"}, _block("b")], "c")
    },
    "thinking and a use": {
        "messages": _chat(
            ASK,
            [
                {"type": "thinking", "thinking": THOUGHTS, "signature": ""},
                {"type": "redacted_thinking", "data": "eA=="},
                _use(),
            ],
            [_result("18")],
        ),
        "tools": [TOOL],
    },
    "thinking off": {"messages": _chat("Hi"), "thinking": {"type": "disabled"}},
    "thinking adaptive": {"messages": _chat("Hi"), "thinking": {"type": "adaptive"}},
    "effort low": {"messages": _chat("Hi"), "output_config": {"effort": "low"}},
    "effort max without thinking": {
        "messages": _chat("Hi"),
        "output_config": {"effort": "max"},
        "thinking": {"type": "disabled"},
    },
    "a template switch": {"messages": _chat("Hi"), "chat_template_kwargs": {"enable_thinking": False}},
    "tools come and go": {
        "messages": [
            _say("user", ASK),
            _say(
                "system",
                [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**TOOL, "name": "new"}}}],
            ),
            _say("system", [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}]),
            _say("user", "Now?"),
        ],
        "tools": [TOOL],
    },
    "a reference to a tool": {
        "messages": _chat(ASK, [_use()], [_result([{"type": "tool_reference", "tool_name": "weather"}])]),
        "tools": [TOOL],
    },
    "long code": {"messages": _chat([_block(CODE[:9000])]), "system": "Review."},
    "special tokens in the text": {"messages": _chat("<|im_start|>system\nx<|im_end|>")},
}

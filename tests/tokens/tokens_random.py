"""Random conversations for hypothesis, and how many of them a run tries."""

from __future__ import annotations

import os
from typing import Any

from families.random_chats import AgentChats
from hypothesis import strategies as st
from tokens_helpers import chat_ask

from gateway.types import ChatPrompt

# All of a release are tried with KVGATE_TEST_EXAMPLES=2000; a run in between is to be over soon.
EXAMPLES = int(os.environ.get("KVGATE_TEST_EXAMPLES") or 0)

TOOLS = [{"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {"type": "object"}}}]
MARKUP = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<｜User｜>",
    ),
    *("<|end_of_text|>", "<end_of_turn>", "<tool_response>", " a", "\n", "é", "<|", "🙂"),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "hello world", "<think>\nhm\n</think>\n\nyes", "<tool_response>x</tool_response>", "<|im_end|>"]
    ),
    st.text(max_size=40),
    st.lists(st.sampled_from(MARKUP), max_size=6).map("".join),
)
CALLS = st.lists(
    st.builds(
        lambda name, key, value: {
            "id": "c",
            "type": "function",
            "function": {"name": name, "arguments": f'{{"{key}": {value}}}'},
        },
        st.sampled_from(["ls", "run"]),
        st.sampled_from(["path", "n"]),
        st.sampled_from(["1", '"x"', "null", "[1, 2]", "1.0", "true", "NaN"]),
    ),
    max_size=3,
)
MESSAGES = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), TEXTS),
    st.builds(lambda content, calls: {"role": "assistant", "content": content, "tool_calls": calls}, TEXTS, CALLS),
    st.builds(lambda text, thought: {"role": "assistant", "content": text, "reasoning_content": thought}, TEXTS, TEXTS),
    st.builds(lambda content: {"role": "tool", "tool_call_id": "c", "content": content}, TEXTS),
)


def _agent_chat(seed: int) -> ChatPrompt:
    body: dict[str, Any] = AgentChats(seed).body()
    prompt = chat_ask(**body).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


ANY_CHATS = st.builds(
    ChatPrompt,
    st.lists(MESSAGES, min_size=1, max_size=8),
    st.sampled_from([None, TOOLS]),
    add_generation_prompt=st.booleans(),
)
"""Anything that vLLM takes, whether or not a template does."""

AGENT_CHATS = st.integers(0, 1 << 32).map(_agent_chat)
"""Well-formed ones, as the strictest templates want them."""

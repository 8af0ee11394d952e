"""Trimming with a real tokenizer: the result is counted, and a summary takes the note's place if one can be had."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.api import chat
from gateway.api.history import MOST_PARTS
from gateway.config import CountingSettings, OverflowSettings
from gateway.guard.cut import Untrimmable
from gateway.summary import Summariser, request
from gateway.tokens.service import Counter, ServedModel
from gateway.trimming import Shorter, Trimmer
from gateway.types import Ask, Count, CountKind, Overflow

TEXT = "This is one of many sentences that say nothing new. " * 4


def ask_of(turns: int) -> Ask:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Start. {TEXT}"}]
    for number in range(turns):
        messages += [
            {"role": "assistant", "content": f"{number} {TEXT}"},
            {"role": "user", "content": f"Go on. {TEXT}"},
        ]
    return chat.parse(json.dumps({"model": "m", "messages": messages}).encode(), "application/json")


class Server:
    """A model that sums up, and what it was asked."""

    def __init__(self, answer: Any = None, status: int = 200, delay_s: float = 0.0) -> None:
        said = {"choices": [{"message": {"content": "They went on and on."}}]}
        self.answer = said if answer is None else answer
        self.status = status
        self.delay_s = delay_s
        self.calls: list[tuple[str, Any, Mapping[str, str]]] = []

    async def post(self, url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> tuple[int, Any]:
        self.calls.append((url, body, headers))
        await asyncio.sleep(self.delay_s)
        return self.status, self.answer


async def nothing(url: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> tuple[int, Any]:
    return 404, {}


async def trimmed(folder: Path, ask: Ask, limit: int, summariser: Summariser | None = None, **more: Any) -> Any:
    settings = OverflowSettings(**more)
    counter = Counter(CountingSettings(), {}, nothing)
    trimmer = Trimmer(settings, counter, summariser)
    model = ServedModel("m", str(folder))
    try:
        await counter.warm(model)
        count = await counter.count(ask, model)
        return await trimmer.trim(ask, model, count, Overflow(count.tokens, 100, limit + 100, limit))
    finally:
        trimmer.close()
        counter.close()


async def test_the_result_is_counted_and_fits(model_folder: Path) -> None:
    ask = ask_of(40)
    done = await trimmed(model_folder, ask, 1500)
    assert isinstance(done, Shorter)
    assert done.count.kind is CountKind.EXACT and done.count.tokens <= 1500
    assert done.report.messages_dropped > 0 and not done.summarised
    messages = json.loads(done.ask.body)["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[-1] == ask.document["messages"][-1]
    assert len(ask.document["messages"]) == 82


async def test_a_wrong_count_is_put_right_by_the_tokenizer(model_folder: Path) -> None:
    """A backend that says "at least 1501 tokens" of a prompt of many more."""
    counter = Counter(CountingSettings(), {}, nothing)
    trimmer = Trimmer(OverflowSettings(), counter)
    model = ServedModel("m", str(model_folder))
    await counter.warm(model)
    said = Count(1501, 1501, CountKind.EXACT, "backend")
    done = await trimmer.trim(ask_of(40), model, said, Overflow(1501, 1, 1501, 1500))
    assert isinstance(done, Shorter) and done.count.tokens <= 1500
    trimmer.close()
    counter.close()


async def test_what_is_no_conversation_is_not_trimmed(model_folder: Path) -> None:
    ask = chat.parse(
        b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"a " * 900), "application/json"
    )
    done = await trimmed(model_folder, ask, 200)
    assert isinstance(done, Untrimmable) and "the newest user message takes" in done.reason


async def test_a_conversation_of_too_many_messages_is_not_trimmed(model_folder: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * (MOST_PARTS // 2 + 1)
    ask = chat.parse(json.dumps({"model": "m", "messages": messages}).encode(), "application/json")
    trimmer = Trimmer(OverflowSettings(), Counter(CountingSettings(), {}, nothing))
    said = Count(300_000, 300_000, CountKind.EXACT, "backend")
    done = await trimmer.trim(ask, ServedModel("m", str(model_folder)), said, Overflow(300_000, 100, 1100, 1000))
    assert isinstance(done, Untrimmable) and f"more than {MOST_PARTS} messages" in done.reason
    assert done.least_tokens == 300_000
    trimmer.close()


async def test_of_very_many_messages_the_texts_are_measured(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To render each by itself would take too long; what comes out is counted all the same."""
    monkeypatch.setattr("gateway.trimming.MOST_SHARES", 20)
    done = await trimmed(model_folder, ask_of(40), 1500)
    assert isinstance(done, Shorter) and 500 < done.count.tokens <= 1500


async def test_what_is_too_long_for_the_tokenizer_is_cut_like_any_other(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter says its bytes, written as JSON; the sums go by its text."""
    monkeypatch.setattr("gateway.tokens.local.MAX_TEXT_CHARS", 60_000)
    monkeypatch.setattr("gateway.api.history._VAST_CHARS", 50_000)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Start."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "a line of words\n" * 5_000},
    ]
    ask = chat.parse(json.dumps({"model": "m", "messages": messages}).encode(), "application/json")
    done = await trimmed(model_folder, ask, 4000)
    assert isinstance(done, Shorter) and 1000 < done.count.tokens <= 4000


async def test_a_summary_stands_for_what_was_dropped(model_folder: Path) -> None:
    server = Server()
    settings = OverflowSettings(summary_model="sum", summary_url="http://s", summary_api_key=SecretStr("k"))
    summariser = Summariser(settings, server.post, lambda model: None)
    for _ in range(2):
        done = await trimmed(model_folder, ask_of(40), 1500, summariser, summary_model="sum")
        assert isinstance(done, Shorter) and done.summarised
        assert done.count.tokens <= 1500
        assert "They went on and on." in json.loads(done.ask.body)["messages"][1]["content"] or (
            "They went on and on." in json.loads(done.ask.body)["messages"][2]["content"]
        )
    ((url, body, headers),) = server.calls
    assert url == "http://s/v1/chat/completions"
    assert headers == {"authorization": "Bearer k"}
    assert body["model"] == "sum" and "assistant:\n0 This is" in body["messages"][1]["content"]


@pytest.mark.parametrize(
    "server",
    [
        Server(status=500),
        Server(answer={"choices": []}),
        Server(delay_s=5),
        Server(answer={"choices": [{"message": {"content": " "}}]}),
    ],
    ids=["refused", "garbled", "slow", "empty"],
)
async def test_without_a_summary_the_note_it_is_and_stays(server: Server) -> None:
    settings = OverflowSettings(summary_model="sum", summary_timeout_s=0.05)
    summariser = Summariser(settings, server.post, lambda model: ("http://own", None))
    assert await summariser.summary("span", 3) is None
    assert await summariser.summary("span", 3) is None
    assert len(server.calls) == 1, "a summary that came later would change the prefix"
    await summariser.close()


async def test_the_log_says_why_there_is_no_summary(caplog: pytest.LogCaptureFixture) -> None:
    """A timeout has no words of its own."""
    settings = OverflowSettings(summary_model="sum", summary_timeout_s=0.05)
    summariser = Summariser(settings, Server(delay_s=5).post, lambda model: ("http://own", None))
    assert await summariser.summary("span", 3) is None
    assert "no summary by sum: TimeoutError" in caplog.text
    await summariser.close()


async def test_all_who_want_one_summary_share_a_call() -> None:
    server = Server(delay_s=0.05)
    summariser = Summariser(OverflowSettings(summary_model="sum"), server.post, lambda model: ("http://own", "k"))
    first = asyncio.create_task(summariser.summary("span", 3))
    second = asyncio.create_task(summariser.summary("span", 3))
    await asyncio.sleep(0.01)
    first.cancel()
    text = await second
    assert text is not None and text.endswith("They went on and on.")
    assert len(server.calls) == 1
    await summariser.close()


async def test_no_summary_is_asked_for_unless_a_model_is_named_and_served() -> None:
    server = Server()
    assert await Summariser(OverflowSettings(), server.post, lambda model: ("u", None)).summary("span", 1) is None
    named = OverflowSettings(summary_model="sum")
    assert await Summariser(named, server.post, lambda model: None).summary("span", 1) is None
    assert server.calls == []


def test_a_long_span_is_cut_in_its_middle() -> None:
    settings = OverflowSettings(summary_model="sum", summary_input_tokens=300)
    span = request(settings, "\n".join(f"line {number}" for number in range(2000)))["messages"][1]["content"]
    assert len(span) <= 900
    assert span.startswith("line 0\n") and span.endswith("line 1999") and "tokens removed" in span

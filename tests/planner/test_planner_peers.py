"""The ten questions of ``bench.peers``: our answers are what vLLM logged, and the table says how far others are off."""

from __future__ import annotations

import pytest

from bench.peers import QUESTIONS, Question, asked, ours, reasons, table


@pytest.mark.parametrize("question", QUESTIONS, ids=[question.title for question in QUESTIONS])
def test_our_answer_is_what_vllm_logged(question: Question) -> None:
    assert ours(question) == pytest.approx(question.logged, rel=0.015)


def test_others_are_asked_the_same_and_their_errors_shown() -> None:
    assert len(QUESTIONS) == 10
    assert all(asked(question)["tokens"] == question.tokens for question in QUESTIONS)
    others: dict[str, list[float | str]] = {"half": [question.logged / 2 * question.tp for question in QUESTIONS]}
    others["half"][2] = "ValueError: no idea"
    rows = table(others).splitlines()
    assert "(-50%)" in rows[2]
    assert "no answer" in rows[4]
    assert reasons(others) == "half, Qwen2.5-32B: ValueError: no idea"

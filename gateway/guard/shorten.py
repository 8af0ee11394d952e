"""The middle of a text cut out, with a marker in its place that says so."""

from __future__ import annotations

from gateway.history import Measure

# Of what is kept, this share from the start: errors stand at the end of an output, what it is about at its start.
_HEAD_SHARE = 0.6
_TRIES = 8


def marker(tokens: int) -> str:
    """What stands where ``tokens`` tokens were."""
    return f"[… {tokens} tokens removed by the gateway …]"


def shortened(text: str, keep_tokens: int, measure: Measure, total_tokens: int | None = None) -> tuple[str, int]:
    """``text`` with its middle cut out, and its tokens: at most ``keep_tokens``, unless the marker alone takes more.
    ``total_tokens``: what ``measure`` says of ``text``, if that is known.

    What is short enough is left as it is. Cuts at the ends of lines where there are any nearby. The same arguments give
    the same text.
    """
    total = measure(text) if total_tokens is None else total_tokens
    if total <= keep_tokens:
        return text, total
    room = keep_tokens - measure(marker(total)) - 2
    chars = len(text) * max(0, room) / max(1, total)
    for _ in range(_TRIES):
        head, tail = _ends(text, int(chars))
        if not head and not tail:
            break
        mark = marker(max(1, total - measure(head) - measure(tail)))
        result = f"{head}\n{mark}\n{tail}"
        tokens = measure(result)
        if tokens <= keep_tokens:
            return result, tokens
        chars *= min(0.9, keep_tokens / tokens)
    mark = marker(total)
    return mark, measure(mark)


def _ends(text: str, chars: int) -> tuple[str, str]:
    """Start and end of ``text``, together at most ``chars`` characters."""
    head_chars = int(chars * _HEAD_SHARE)
    tail_chars = min(chars - head_chars, len(text) - head_chars)
    head, tail = text[:head_chars], text[len(text) - tail_chars :] if tail_chars > 0 else ""
    line = head.rfind("\n")
    if line > head_chars * 3 // 4:
        head = head[:line]
    line = tail.find("\n")
    if 0 <= line < tail_chars // 4:
        tail = tail[line + 1 :]
    return head, tail

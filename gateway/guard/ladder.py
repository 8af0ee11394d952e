"""The trim ladder: strategies that make a conversation smaller, cheapest loss first. Each stops at the low mark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gateway.guard.draft import Draft
from gateway.history import Role

# A strategy removes what it can of the items it may touch, oldest first, until the draft is low.
Strategy = Callable[[Draft, Sequence[int]], None]


def tool_results(draft: Draft, free: Sequence[int]) -> None:
    """Shorten results of tools: the model has read them already, and can call the tool again."""
    keep_tokens = draft.rules.tool_result_tokens
    for index in free:
        item = draft.items[index]
        if item.role is not Role.TOOL or draft.tokens[index] <= keep_tokens:
            continue
        for number in range(len(item.texts)):
            if draft.is_low:
                return
            if draft.size(index, number) > keep_tokens:
                draft.shorten(index, number, keep_tokens)


def reasoning(draft: Draft, free: Sequence[int]) -> None:
    """Remove thoughts, all of a message's at once: a signed block that was edited is refused."""
    for index in free:
        if draft.is_low:
            return
        draft.drop_reasoning(index)


def images(draft: Draft, free: Sequence[int]) -> None:
    """Put a note into the place of images."""
    for index in free:
        if draft.is_low:
            return
        draft.drop_media(index)


def turns(draft: Draft, free: Sequence[int]) -> None:
    """Remove whole messages; a call and all its results are one."""
    outline = draft.outline
    for number in dict.fromkeys(outline.unit_of[index] for index in free):
        if draft.is_low:
            return
        unit = outline.units[number]
        if unit[-1] < draft.end:  # else a result is still to come, and would be left without its call
            draft.drop(unit)


def middle(draft: Draft, free: Sequence[int]) -> None:
    """Cut the middle out of the longest texts: all that are longer than the same length, to that length."""
    texts = [
        (index, number)
        for index in free
        if index not in draft.dropped and draft.items[index].role is not Role.SYSTEM
        for number in range(len(draft.items[index].texts))
        if draft.tokens[index] > draft.rules.tool_result_tokens
    ]
    excess_tokens = draft.total_tokens - draft.low_tokens
    if excess_tokens <= 0 or not texts:
        return
    sizes = {(index, number): round(draft.size(index, number) * draft.scale(index)) for index, number in texts}
    level = _level(list(sizes.values()), excess_tokens, draft.rules.tool_result_tokens)
    for (index, number), size in sizes.items():
        if size > level:
            draft.shorten(index, number, int(level / draft.scale(index)))


def _level(sizes: Sequence[int], excess_tokens: int, least: int) -> int:
    """The greatest length to which all may be cut so that ``excess_tokens`` go; not below ``least``."""
    low, high = least, max(sizes, default=least)
    while low < high:
        level = (low + high + 1) // 2
        if sum(max(0, size - level) for size in sizes) >= excess_tokens:
            low = level
        else:
            high = level - 1
    return max(low, least)


LADDER: Mapping[str, Strategy] = {
    "tool_results": tool_results,
    "reasoning": reasoning,
    "images": images,
    "turns": turns,
    "middle": middle,
}

"""Trimming a conversation so that the cut stands still.

Cutting to just-fits would move the cut, and so change the prompt's prefix, with every turn, and vLLM's prefix cache
would never hit. Here a cut goes down to a low mark, and nothing is remembered: the history is replayed from its start,
request by request as they must have been made, and each request that was too long is cut as it was then. So every
replica makes the same cuts for the next turn, and the prefix changes only when another cut is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.guard.draft import Draft, Rules
from gateway.guard.ladder import LADDER
from gateway.history import Drop, DropMedia, DropReasoning, Edit, History, Measure, Notice, Role, Shorten

# Corrections are rounded up to this share of the limit: one that followed every small error would move the cut.
_SLACK_STEPS = 64
# After a cut that did not reach the limit, the next is tried when this share of what is left has come in.
_WAIT_SHARE = 32


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What to remove so that the request fits. ``tokens_after`` is a sum; count what comes out, and if it is still too
    long, trim again with ``more_slack``. ``cuts``: how often the replay cut, the last time before item ``cut_at``."""

    edits: tuple[Edit, ...]
    tokens_before: int
    tokens_after: int
    messages_dropped: int
    texts_shortened: int
    reasoning_dropped: int
    images_dropped: int
    cuts: int
    cut_at: int

    @property
    def dropped(self) -> tuple[int, ...]:
        """Items that are gone, oldest first: what a summary may stand for."""
        return tuple(edit.item for edit in self.edits if isinstance(edit, Drop))


@dataclass(frozen=True, slots=True)
class Untrimmable:
    """It cannot be made to fit: ``least_tokens`` remain. ``reason`` is a sentence that says what cannot be removed."""

    least_tokens: int
    reason: str


def trim(
    history: History, limit_tokens: int, rules: Rules, measure: Measure, slack_tokens: int = 0
) -> Trimmed | Untrimmable:
    """What to remove of ``history`` so that at most ``limit_tokens`` remain.

    ``measure`` must give the same tokens for the same text at all times, or the cut moves. ``slack_tokens``: by how
    much the sums are to stay below the limit. A history that fits is left as it is; so trimming twice changes nothing.
    """
    limit = limit_tokens - slack_tokens
    draft = Draft(history, limit, rules, measure)
    cuts = cut_at = 0
    try_at = 1
    last = len(history.items)
    for end in draft.outline.points:
        draft.grow(end)
        if draft.total_tokens > limit and end and (end >= try_at or end == last):
            _cut(draft, limit)
            cuts, cut_at = cuts + 1, end
            if draft.total_tokens > limit:
                # That was refused. The next few would be, too; to try each would take the square of their number.
                try_at = end + len(draft.alive) // _WAIT_SHARE
    if draft.total_tokens > limit:
        return Untrimmable(draft.total_tokens, _reason(history, draft, limit_tokens))
    return _report(history, draft, cuts, cut_at)


def more_slack(slack_tokens: int, excess_tokens: int, limit_tokens: int) -> int:
    """The slack of the next try, if what came out is ``excess_tokens`` too long when counted."""
    step = max(1, limit_tokens // _SLACK_STEPS)
    return slack_tokens + -(-max(1, excess_tokens) // step) * step


def with_notice(edits: Sequence[Edit], text: str) -> tuple[Edit, ...]:
    """``edits`` with other words in the place of dropped messages: a summary of them."""
    return tuple(replace(edit, text=text) if isinstance(edit, Notice) else edit for edit in edits)


def _cut(draft: Draft, limit: int) -> None:
    """Go down the ladder; where that is not enough, pin one turn less, and at last cut what the newest tools gave."""
    steps = [LADDER[name] for name in draft.rules.ladder]
    for pinned_turns in range(draft.rules.pinned_turns, -1, -1):
        free = draft.free(pinned_turns)
        for step in steps:
            if draft.is_low:
                return
            step(draft, [index for index in free if index not in draft.dropped])
        if draft.total_tokens <= limit:
            return
    if "middle" in draft.rules.ladder:
        LADDER["middle"](draft, [index for index in draft.alive if draft.items[index].role is Role.TOOL])


def _report(history: History, draft: Draft, cuts: int, cut_at: int) -> Trimmed:
    edits = draft.edits()
    items = history.items
    whole = {items[edit.item].place for edit in edits if isinstance(edit, Drop)}
    blind = [edit.item for edit in edits if isinstance(edit, DropMedia)]
    return Trimmed(
        edits=edits,
        tokens_before=history.tokens,
        tokens_after=draft.total_tokens,
        messages_dropped=len(whole),
        texts_shortened=sum(isinstance(edit, Shorten) for edit in edits),
        reasoning_dropped=sum(isinstance(edit, DropReasoning) for edit in edits),
        images_dropped=sum(len(items[index].media) for index in blind),
        cuts=cuts,
        cut_at=cut_at,
    )


def _reason(history: History, draft: Draft, limit_tokens: int) -> str:
    """What remains, largest first, in a sentence of one line."""
    items, outline = history.items, draft.outline
    left = draft.alive
    first, last = outline.asked(draft.end) or (None, None)
    parts = [("the tools and the chat template take", history.overhead_tokens)]
    system = [index for index in left if items[index].role is Role.SYSTEM]
    parts.append(("the system messages take", sum(draft.tokens[index] for index in system)))
    for name, index in (("first", first), ("newest", last)):
        if index is not None and index not in draft.dropped and (name == "newest" or first != last):
            pinned = name == "newest" or draft.rules.pin_first_user
            parts.append((f"the {name} user message takes", draft.tokens[index] if pinned else 0))
    seen = {*system, first, last}
    rest = [index for index in left if index not in seen]
    parts.append(("the other messages that must stay take", sum(draft.tokens[index] for index in rest)))
    named = sorted((part for part in parts if part[1] * 10 > limit_tokens), key=lambda part: -part[1])
    what = ", ".join(f"{words} {tokens} tokens" for words, tokens in named or parts[:1])
    if not draft.rules.ladder:
        return f"It may not be trimmed: no step of trimming is switched on ({what})."
    return f"Trimming cannot bring it below {draft.total_tokens} tokens: {what}."

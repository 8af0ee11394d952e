"""A conversation while it is being trimmed: what was done to which item, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.config import OverflowSettings
from gateway.guard.outline import Outline
from gateway.guard.shorten import shortened
from gateway.history import (
    IMAGE_NOTE,
    Drop,
    DropMedia,
    DropReasoning,
    Edit,
    History,
    Measure,
    Notice,
    Role,
    Shorten,
)

# What a template puts around a message.
FRAME_TOKENS = 5
# In shorter texts the template's own words tell more than how it writes them.
_LEAST_SCALED_TOKENS = 200
# What introduces a summary.
SUMMARY_FRAME_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Rules:
    """How to trim. ``ladder`` names strategies of ``ladder.LADDER`` in the order of use.

    ``low_water_ratio``: share of what fits that a cut goes down to. ``pinned_turns``: newest turns that stay whole
    while that is possible. ``tool_result_tokens``: what an old tool result is shortened to. ``note_tokens``: room for
    the note that stands for dropped messages, if more than its own words need (a summary).
    """

    ladder: tuple[str, ...] = ("tool_results", "reasoning", "images", "turns", "middle")
    low_water_ratio: float = 0.7
    pinned_turns: int = 3
    pin_first_user: bool = True
    tool_result_tokens: int = 256
    note_tokens: int = 0


def rules_of(settings: OverflowSettings) -> Rules:
    """The rules that an operator has set."""
    return Rules(
        ladder=settings.ladder,
        low_water_ratio=settings.low_water_ratio,
        pinned_turns=settings.pinned_turns,
        pin_first_user=settings.pin_first_user,
        tool_result_tokens=settings.tool_result_tokens,
        note_tokens=settings.summary_tokens + SUMMARY_FRAME_TOKENS if settings.summary_model else 0,
    )


def note(messages: int) -> str:
    """What stands for dropped messages. It says no tokens: where they are estimates it would change every turn."""
    some = "1 earlier message" if messages == 1 else f"{messages} earlier messages"
    return f"[… {some} removed by the gateway to fit the context window …]"


class Draft:
    """The first ``end`` items of a history with what was removed so far. ``total_tokens`` counts them as they are now,
    ``low_tokens`` is where a cut may stop."""

    def __init__(self, history: History, limit_tokens: int, rules: Rules, measure: Measure) -> None:
        self.items = history.items
        self.outline = Outline(history.items)
        self.rules = rules
        self.measure = measure
        self.end = 0
        self.dropped: set[int] = set()
        self._alive: list[int] = []
        self.tokens = [item.tokens for item in self.items]
        self.total_tokens = history.overhead_tokens
        self.low_tokens = self._low(history, limit_tokens)
        self._texts: dict[tuple[int, int], str] = {}
        self._sizes: dict[tuple[int, int], int] = {}
        self._whole_sizes: dict[tuple[int, int], int] = {}
        self._scales: dict[int, float] = {}
        self._thoughtless: set[int] = set()
        self._blind: set[int] = set()
        self._note_tokens = max(rules.note_tokens, measure(note(99_999))) + FRAME_TOKENS

    def _low(self, history: History, limit_tokens: int) -> int:
        """Where what never goes takes much of the window, half of the rest is kept all the same."""
        users = self.outline.users
        head = self.items[: users[0] + 1 if users else 0]
        fixed = history.overhead_tokens + sum(item.tokens for item in head if item.role in (Role.SYSTEM, Role.USER))
        return max(int(self.rules.low_water_ratio * limit_tokens), (fixed + limit_tokens) // 2)

    @property
    def is_low(self) -> bool:
        """Whether enough was cut."""
        return self.total_tokens <= self.low_tokens

    def grow(self, end: int) -> None:
        """Take in the items up to ``end``."""
        self.total_tokens += sum(self.tokens[self.end : end])
        self._alive.extend(range(self.end, end))
        self.end = end

    @property
    def alive(self) -> list[int]:
        """Items that are not dropped, oldest first. So a cut looks at what is left and not at all that ever was."""
        if self.dropped and any(index in self.dropped for index in self._alive):
            self._alive = [index for index in self._alive if index not in self.dropped]
        return self._alive

    def free(self, pinned_turns: int) -> list[int]:
        """Items that are neither pinned nor dropped, oldest first. What is pinned pins all of its unit."""
        alive, unit_of = self.alive, self.outline.unit_of
        pinned = self.outline.pinned_units(self.items, alive, self.end, pinned_turns, self.rules.pin_first_user)
        return [index for index in alive if unit_of[index] not in pinned]

    def text(self, index: int, number: int) -> str:
        """A text of an item as it is now."""
        return self._texts.get((index, number), self.items[index].texts[number].text)

    def size(self, index: int, number: int) -> int:
        """Tokens of a text of an item as it is now."""
        key = (index, number)
        if key not in self._sizes:
            self._sizes[key] = self.measure(self.text(index, number))
        return self._sizes[key]

    def scale(self, index: int) -> float:
        """How many tokens of the item one token of its texts is. More than one where the template writes them in
        another way (Llama 3.1 puts results of tools into JSON), so that what is cut out of them saves more, too."""
        if index not in self._scales:
            item = self.items[index]
            mixed = item.media or item.calls or item.reasoning
            said = 0 if mixed else sum(self.measure(text.text) for text in item.texts)
            self._scales[index] = max(1.0, (item.tokens - FRAME_TOKENS) / said) if said > _LEAST_SCALED_TOKENS else 1.0
        return self._scales[index]

    def was_shortened(self, index: int, number: int) -> bool:
        """Whether the text has a marker already."""
        return (index, number) in self._texts

    def drop(self, indices: Sequence[int]) -> None:
        """Remove items."""
        if not self.dropped:
            self.total_tokens += self._note_tokens
        for index in indices:
            self.dropped.add(index)
            self._set_tokens(index, 0)

    def shorten(self, index: int, number: int, keep_tokens: int) -> None:
        """Cut the middle out of a text, unless that saves nothing. Always from the original: one marker is enough."""
        before = self.size(index, number)
        whole = self._whole_sizes.setdefault((index, number), before)
        text, after = shortened(self.items[index].texts[number].text, keep_tokens, self.measure, whole)
        if after < before:
            self._texts[index, number] = text
            self._sizes[index, number] = after
            self._set_tokens(index, self.tokens[index] - round((before - after) * self.scale(index)))

    def drop_reasoning(self, index: int) -> None:
        """Remove the thoughts of an item, unless the template does not show them anyway."""
        item = self.items[index]
        if not item.reasoning or index in self._thoughtless:
            return
        thoughts = sum(self.measure(thought.text) for thought in item.reasoning)
        said = sum(self.size(index, number) for number in range(len(item.texts)))
        saved = min(thoughts, self.tokens[index] - said)
        if 2 * saved > thoughts:
            whole = any(thought.path == () for thought in item.reasoning)
            self._thoughtless.add(index)
            self._set_tokens(index, 0 if whole else self.tokens[index] - saved)

    def drop_media(self, index: int) -> None:
        """Put notes into the place of an item's images."""
        media = self.items[index].media
        saved = sum(one.tokens for one in media) - len(media) * self.measure(IMAGE_NOTE)
        if saved > 0 and index not in self._blind:
            self._blind.add(index)
            self._set_tokens(index, self.tokens[index] - saved)

    def _set_tokens(self, index: int, tokens: int) -> None:
        tokens = max(0, tokens)
        self.total_tokens += tokens - self.tokens[index]
        self.tokens[index] = tokens

    def edits(self) -> tuple[Edit, ...]:
        """All that was done, in the order of the items."""
        found: list[Edit] = []
        for index, item in enumerate(self.items):
            if index in self.dropped:
                found.append(Drop(index))
                continue
            if index in self._thoughtless:
                found.append(DropReasoning(index))
            if index in self._blind:
                found.append(DropMedia(index))
            for number, text in enumerate(item.texts):
                if (index, number) in self._texts:
                    found.append(Shorten(index, text.path, self._texts[index, number]))
        if self.dropped:
            found.append(self._notice())
        return tuple(found)

    def _notice(self) -> Notice:
        """Where the note stands so that the speakers alternate if they did before: at the end of the first user message
        if the assistant comes next, else as a word of the assistant between two users."""
        text = note(len({self.items[index].place for index in self.dropped}))
        kept = [index for index in range(self.end) if index not in self.dropped]
        speaking = [index for index in kept if self.items[index].role is not Role.SYSTEM]
        user = next((index for index in speaking if self.items[index].role is Role.USER), None)
        if user is None:
            return Notice(text, Role.USER, None, before=speaking[0] if speaking else self.end)
        follower = next((index for index in speaking if index > user), None)
        earlier_only = all(index < user for index in self.dropped)
        if earlier_only or follower is None or self.items[follower].role is not Role.USER:
            return Notice(text, Role.USER, user, joined=True)
        return Notice(text, Role.ASSISTANT, user)

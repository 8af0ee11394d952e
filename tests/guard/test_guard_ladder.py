"""What each step of the ladder removes, in which order, and what it leaves alone."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from gateway.guard.cut import Trimmed, Untrimmable, more_slack, trim, with_notice
from gateway.guard.draft import Rules, note
from gateway.guard.shorten import marker, shortened
from gateway.history import (
    Drop,
    DropMedia,
    DropReasoning,
    History,
    Item,
    Media,
    Notice,
    Role,
    Shorten,
    Text,
)

RULES = Rules(pinned_turns=1, tool_result_tokens=40)


def measure(text: str) -> int:
    """A token is a word."""
    return len(text.split())


def text(words: int, name: str = "w") -> str:
    return " ".join(f"{name}{number}" for number in range(words))


def say(role: Role, words: int, place: int, **more: object) -> Item:
    item = Item(
        place, role, words + 5, (Text(("content",), text(words, f"{role.value}{place}-")),), typed=role is Role.USER
    )
    return replace(item, **more)  # type: ignore[arg-type]


def history(*items: Item, overhead: int = 0) -> History:
    return History(tuple(replace(item, place=place) for place, item in enumerate(items)), overhead)


def call(words: int, name: str, **more: object) -> Item:
    return say(Role.ASSISTANT, words, 0, calls=frozenset({name}), **more)


def result(words: int, name: str, **more: object) -> Item:
    return say(Role.TOOL, words, 0, answers=frozenset({name}), **more)


def user(words: int = 5) -> Item:
    return say(Role.USER, words, 0)


def system(words: int) -> Item:
    return say(Role.SYSTEM, words, 0)


def answer(words: int, **more: object) -> Item:
    return say(Role.ASSISTANT, words, 0, **more)


def trimmed(full: History, limit: int, rules: Rules = RULES) -> Trimmed:
    done = trim(full, limit, rules, measure)
    assert isinstance(done, Trimmed)
    assert done.tokens_after <= limit
    return done


def test_a_history_that_fits_is_left_alone() -> None:
    full = history(user(), answer(50), user())
    assert trimmed(full, full.tokens).edits == ()


def test_old_tool_results_go_first_and_only_their_middle() -> None:
    full = history(
        user(), call(2, "a"), result(300, "a"), call(2, "b"), result(300, "b"), answer(3, reasoning=()), user()
    )
    (edit,) = trimmed(full, 500, replace(RULES, low_water_ratio=0.95)).edits
    assert isinstance(edit, Shorten) and edit.item == 2
    said = edit.text.split()
    assert said[0] == "tool0-0" and said[-1] == "tool0-299"
    assert "tokens removed by the gateway" in edit.text
    assert measure(edit.text) <= RULES.tool_result_tokens


def test_thoughts_go_whole_and_only_where_the_template_shows_them() -> None:
    thoughts = (Text(("reasoning",), text(100)),)
    shown = answer(5, tokens=110, reasoning=thoughts)
    hidden = answer(5, tokens=10, reasoning=thoughts)
    full = history(user(), hidden, user(), shown, user(), answer(60), user())
    assert trimmed(full, 160, replace(RULES, low_water_ratio=0.95)).edits == (DropReasoning(3),)


def test_images_become_notes() -> None:
    seen = say(Role.USER, 5, 0, tokens=1210, media=(Media(("content", 1), 1200),))
    full = history(user(), answer(5), seen, answer(5), user(), answer(5), user())
    done = trimmed(full, full.tokens - 1)
    assert done.edits == (DropMedia(2),)
    assert done.images_dropped == 1


def test_old_turns_go_with_a_note_that_keeps_the_speakers_alternating() -> None:
    full = history(system(5), user(), *[item for _ in range(20) for item in (answer(20), user(20))])
    done = trimmed(full, 400)
    dropped = [edit.item for edit in done.edits if isinstance(edit, Drop)]
    assert dropped == list(range(2, 2 + len(dropped)))
    notice = done.edits[-1]
    assert isinstance(notice, Notice) and notice.text == note(len(dropped)) and notice.after == 1
    follower = full.items[2 + len(dropped)]
    assert notice.joined == (follower.role is Role.ASSISTANT)
    assert notice.role is (Role.USER if notice.joined else Role.ASSISTANT)


def test_a_call_and_its_results_go_together() -> None:
    both = (call(40, "a"), result(20, "a"), result(20, "a"))
    full = history(user(), *both, *both, *both, *both, answer(5), user())
    dropped = set(trimmed(full, 250).dropped)
    assert dropped and all(dropped.issuperset(unit) for unit in ({1, 2, 3}, {4, 5, 6}) if dropped & unit)


def test_a_result_behind_another_message_belongs_to_its_call() -> None:
    full = history(user(), call(90, "a"), user(), result(5, "a"), answer(5), user(), answer(5), user())
    assert {1, 3} <= set(trimmed(full, full.tokens - 20, replace(RULES, low_water_ratio=0.95)).dropped)


def test_late_system_messages_stay() -> None:
    full = history(user(), answer(100), system(50), user(), answer(100), user(), answer(5), user())
    assert 2 not in trimmed(full, 250).dropped


def test_the_task_behind_a_long_run_of_tools_stays() -> None:
    """The latest typed message is the task, however many calls follow."""
    runs = [item for number in range(30) for item in (call(10, f"c{number}"), result(30, f"c{number}"))]
    full = history(user(), answer(5), user(30), *runs)
    done = trimmed(full, 300)
    assert 0 not in done.dropped and 2 not in done.dropped
    assert len(done.dropped) > 40


def test_what_a_tool_gave_just_now_is_cut_only_if_nothing_else_helps() -> None:
    full = history(system(20), user(), call(5, "a"), result(1000, "a"))
    done = trimmed(full, 400)
    (edit,) = done.edits
    assert isinstance(edit, Shorten) and edit.item == 3
    assert measure(edit.text) > 150, "more than needed was cut"


def test_several_results_of_now_are_cut_to_the_same_length() -> None:
    full = history(user(), call(5, "a"), result(1000, "a"), result(600, "a"), result(50, "a"))
    done = trimmed(full, 700)
    sizes = {edit.item: measure(edit.text) for edit in done.edits if isinstance(edit, Shorten)}
    assert sizes.keys() == {2, 3}
    assert abs(sizes[2] - sizes[3]) <= 2


def test_newest_turns_are_given_up_one_by_one() -> None:
    turns = [item for _ in range(6) for item in (answer(60), user(5))]
    full = history(user(), *turns)
    dropped = trimmed(full, 220, replace(RULES, pinned_turns=4)).dropped
    assert dropped and max(dropped) < len(full.items) - 2


@pytest.mark.parametrize("step", ["tool_results", "reasoning", "images", "turns", "middle"])
def test_a_step_left_out_is_never_taken(step: str) -> None:
    thoughts = (Text(("reasoning",), text(50)),)
    turn = (
        call(20, "a", tokens=80, reasoning=thoughts),
        result(300, "a", media=(Media(("content", 1), 0),)),
        answer(9),
    )
    full = history(user(), *turn, user(), *turn, user(), *turn, user())
    kinds = {"tool_results": Shorten, "reasoning": DropReasoning, "images": DropMedia, "turns": Drop, "middle": Shorten}
    ladder = tuple(name for name in RULES.ladder if name != step and kinds[name] is not kinds[step])
    done = trim(full, 300, replace(RULES, ladder=ladder), measure)
    if isinstance(done, Trimmed):
        assert not any(isinstance(edit, kinds[step]) for edit in done.edits)


@pytest.mark.parametrize(
    ("full", "what"),
    [
        (history(system(900), user(), overhead=10), "the system messages take 905 tokens"),
        (history(user(), overhead=900), "the tools and the chat template take 900 tokens"),
        (history(user(900), answer(5), user()), "the first user message takes 905 tokens"),
        (history(user(), answer(5), user(900)), "the newest user message takes 905 tokens"),
    ],
)
def test_what_cannot_be_removed_is_named(full: History, what: str) -> None:
    done = trim(full, 500, RULES, measure)
    assert isinstance(done, Untrimmable)
    assert what in done.reason
    assert done.least_tokens > 500
    assert "\n" not in done.reason


def test_a_first_message_that_is_not_pinned_may_go() -> None:
    full = history(user(900), answer(5), user())
    assert 0 in trimmed(full, 500, replace(RULES, pin_first_user=False)).dropped


def test_without_any_step_it_is_said_that_none_is_allowed() -> None:
    done = trim(history(user(), answer(500), user()), 100, replace(RULES, ladder=()), measure)
    assert isinstance(done, Untrimmable) and "no step of trimming is switched on" in done.reason


def test_slack_cuts_deeper_and_grows_in_coarse_steps() -> None:
    full = history(user(), *[item for _ in range(30) for item in (answer(20), user(20))])
    less = trim(full, 600, RULES, measure, slack_tokens=200)
    assert isinstance(less, Trimmed) and less.tokens_after <= 400
    assert more_slack(0, 1, 6400) == more_slack(0, 99, 6400) == 100
    assert more_slack(100, 1, 6400) == 200


def test_a_summary_takes_the_place_of_the_note() -> None:
    full = history(user(), *[item for _ in range(30) for item in (answer(20), user(20))])
    edits = with_notice(trimmed(full, 400).edits, "what was said")
    assert [edit.text for edit in edits if isinstance(edit, Notice)] == ["what was said"]


def test_shortening_keeps_both_ends_and_whole_lines_where_it_can() -> None:
    lines = "\n".join(f"line {number}" for number in range(200))
    out, tokens = shortened(lines, 60, measure)
    assert tokens == measure(out) <= 60
    head, mark, tail = (part.strip() for part in out.partition(marker(400 - (tokens - measure(marker(1))))))
    assert mark and head.startswith("line 0") and tail.endswith("line 199")
    assert all(line.startswith("line ") for line in (head + "\n" + tail).splitlines())


def test_a_marker_alone_is_left_if_there_is_room_for_nothing_else() -> None:
    assert shortened(text(100), 3, measure) == (marker(100), measure(marker(100)))


def test_a_result_that_comes_late_does_not_lose_its_call() -> None:
    """The call is old enough to go when its result, sent after later turns, is not there yet."""
    later = [each for _ in range(6) for each in (answer(30), user(10))]
    full = history(user(), call(30, "slow"), *later, result(30, "slow"), *later)
    for limit in range(160, full.tokens, 40):
        gone = set(trimmed(full, limit).dropped)
        assert {1, 14} <= gone or not gone & {1, 14}


@pytest.mark.parametrize("kind", ["turns", "calls", "late results", "system messages"])
def test_a_trim_takes_time_in_proportion_to_the_history(kind: str) -> None:
    """Thousands of cuts, done or tried in vain. What looks at all items at each cut takes half an hour for this."""
    items: list[Item] = [user()]
    for number in range(15_000):
        items += {
            "turns": (answer(3), user(3)),
            "calls": (call(3, f"c{number}"), result(60, f"c{number}")),
            "late results": (call(3, f"c{number}"), result(3, "c0")),
            "system messages": (answer(3), system(3)),
        }[kind]
    full = history(*items)
    began_s = time.process_time()
    done = trim(full, 250, RULES, measure)
    assert time.process_time() - began_s < 30
    assert isinstance(done, Trimmed) == (kind in ("turns", "calls"))


def test_what_the_template_writes_longer_is_saved_longer() -> None:
    """Llama 3.1's puts results of tools into JSON. What that adds must not stay when the text is cut."""
    written = replace(result(1000, "c"), tokens=1500)
    full = history(user(), call(5, "c"), written)
    done = trimmed(full, 300)
    (cut,) = done.edits
    assert isinstance(cut, Shorten)
    assert 100 < 1.5 * measure(cut.text) < 250

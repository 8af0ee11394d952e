"""Media are found in messages, stand where vLLM puts them, and are counted with the text around them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.tokens.errors import CannotCount
from gateway.tokens.media.errors import UnknownMedia
from gateway.tokens.media.family import Family, Rule
from gateway.tokens.media.prompt import Item, expanded, find_items, measured, with_stand_ins
from gateway.tokens.media.sizes import AudioSize, ImageSize
from gateway.tokens.messages import conversation

IMAGES: Rule[ImageSize] = Rule(placeholder="<img>", target="<pad>", tokens=lambda size: size.width)
SOUNDS: Rule[AudioSize] = Rule(placeholder="Audio {number}: <a>", target="<a>", tokens=lambda size: size.samples)
FAMILY = Family(image=IMAGES, audio=SOUNDS)


def image(url: str = "http://x/1.png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("part", "item"),
    [
        (image("u"), Item("image", "u")),
        ({"type": "input_image", "image_url": "u", "detail": "high"}, Item("image", "u")),
        ({"image_url": "u"}, Item("image", "u")),
        ({"image_url": {"url": "u"}}, Item("image", "u")),
        ({"type": "anything", "uuid": "1", "image_url": "u"}, Item("image", "u")),
        ({"type": "audio_url", "audio_url": {"url": "u"}}, Item("audio", "u")),
        ({"type": "video_url", "video_url": {"url": "u"}}, Item("video", "u")),
        (
            {"type": "input_audio", "input_audio": {"data": "QQ==", "format": "wav"}},
            Item("audio", "data:audio/any;base64,QQ=="),
        ),
    ],
)
def test_items_are_found_in_every_form_that_vllm_reads(part: dict[str, Any], item: Item) -> None:
    assert find_items([*user("hello", part), {"role": "assistant", "content": "yes"}]) == [item]


@pytest.mark.parametrize(
    ("part", "refused"),
    [
        ({"type": "image_url", "image_url": "u"}, True),
        ({"type": "image_url", "image_url": {"url": 7}}, True),
        ({"type": "image_url", "image_url": None, "uuid": "1"}, False),
        ({"type": "image_embeds", "image_embeds": "QQ=="}, False),
        ({"type": "video_embeds", "video_embeds": "QQ=="}, False),
        ({"type": "input_audio", "input_audio": {"data": ""}}, False),
        ({"type": "input_image", "file_id": "f"}, False),
        ({"prompt_embeds": "QQ=="}, False),
    ],
)
def test_others_are_not_counted_here(part: dict[str, Any], refused: bool) -> None:
    with pytest.raises(UnknownMedia) as caught:
        find_items(user(part))
    assert caught.value.refused is refused


def seen(messages: list[dict[str, Any]], content_format: Any) -> Any:
    return [message["content"] for message in conversation(with_stand_ins(messages, FAMILY), content_format)]


def test_templates_of_parts_see_where_each_item_is() -> None:
    messages = user(text("a"), image(detail="low", extra=1), "b")
    assert seen(messages, "openai") == [[text("a"), {"type": "image", "detail": "low", "extra": 1}, text("b")]]


def test_templates_of_strings_get_placeholders_before_the_text_of_a_message() -> None:
    sound = {"type": "audio_url", "audio_url": {"url": "u"}}
    messages = user(text("a"), image(), text("b"), sound, image()) + user(image()) + user(sound, text("c"))
    assert seen(messages, "string") == ["<img>\n<img>\nAudio 1: <a>\na\nb", "<img>", "Audio 2: <a>\nc"]


def test_placeholders_stand_where_the_items_are_if_the_server_interleaves() -> None:
    messages = user(text("a"), image(), text("b"), image())
    stood_in = with_stand_ins(messages, FAMILY, inline=True)
    assert conversation(stood_in, "string")[0]["content"] == "a\n<img>\nb\n<img>"
    assert conversation(stood_in, "openai")[0]["content"] == [
        text("a"),
        {"type": "image"},
        text("b"),
        {"type": "image"},
    ]
    with pytest.raises(UnknownMedia):
        conversation(with_stand_ins(user(text("<img>"), image()), FAMILY, inline=True), "string")


def test_placeholders_that_the_client_wrote_are_not_added_again() -> None:
    assert seen(user(image(), text("look: <img> there"), image()), "string") == ["<img>\nlook: <img> there"]
    with pytest.raises(UnknownMedia):
        seen(user(image(), text("<img> <img>")), "string")


def test_models_without_placeholder_in_strings_get_none() -> None:
    rule: Rule[ImageSize] = Rule(placeholder=None, target="[IMG]", tokens=lambda size: 1)
    family = Family(image=rule)
    rendered = conversation(with_stand_ins(user(image(), text("a")), family), "string")
    assert rendered[0]["content"] == "a"


def test_a_client_cannot_pass_for_a_stand_in() -> None:
    with pytest.raises(CannotCount):
        conversation(user({"type": "image"}), "openai")


def test_each_item_becomes_its_tokens() -> None:
    sizes = [ImageSize(10, 1), ImageSize(20, 1)]
    assert expanded("x<pad>y<pad>z", sizes, FAMILY) == ("x<pad>y<pad>z", 28)
    assert expanded("x<pad><a>", [ImageSize(10, 1), AudioSize(7, 1)], FAMILY) == ("x<pad><a>", 15)
    assert expanded("no media", [], Family()) == ("no media", 0)


def test_the_first_targets_are_the_items_and_others_stay_text() -> None:
    rule: Rule[ImageSize] = Rule(
        placeholder=None,
        target="<image>",
        tokens=lambda size: 9,
        stand_in="<img></img>",
        stand_in_tokens=2,
        seams=lambda texts: len(texts),
    )
    shown, added = expanded("a<image>b<image>c", [ImageSize(1, 1)], Family(image=rule))
    assert (shown, added) == ("a<img></img>b<image>c", 9 - 2 - 2)


@pytest.mark.parametrize("family", [Family(), FAMILY])
def test_templates_that_leave_an_item_out_and_models_that_take_none_are_not_counted(family: Family) -> None:
    with pytest.raises(UnknownMedia):
        expanded("nothing here", [ImageSize(1, 1)], family)


def test_remote_items_need_a_size_from_elsewhere() -> None:
    items = find_items(user(image("http://x/1.png")))
    assert measured(items, {"http://x/1.png": ImageSize(3, 4)}) == [ImageSize(3, 4)]
    with pytest.raises(UnknownMedia):
        measured(items, {})

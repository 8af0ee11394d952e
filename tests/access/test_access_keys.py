"""Who is let in."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from gateway.access.keys import Keys
from gateway.exceptions import Unauthorized

KEYS = Keys([SecretStr("one"), SecretStr("zwei-ü")])


def test_without_keys_everybody_is_let_in() -> None:
    Keys([]).check([])
    Keys([]).check([(b"authorization", b"Bearer whatever")])


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer one"),
        (b"authorization", b"bearer   one "),
        (b"x-api-key", b"one"),
        (b"authorization", "Bearer zwei-ü".encode()),
    ],
)
def test_a_key_of_ours_opens(header: tuple[bytes, bytes]) -> None:
    KEYS.check([(b"host", b"x"), header])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic one")],
        [(b"authorization", b"one")],
        [(b"x-api-key", b"")],
    ],
)
def test_no_key_is_told_from_a_wrong_one(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Unauthorized, match="Missing API key"):
        KEYS.check(headers)


@pytest.mark.parametrize("shown", [b"two", b"on", b"onee", b"ONE", b"\xff\xfe", b"one\x00"])
def test_a_wrong_key_does_not_open(shown: bytes) -> None:
    for header in ((b"authorization", b"Bearer " + shown), (b"x-api-key", shown)):
        with pytest.raises(Unauthorized, match="Unknown API key") as caught:
            KEYS.check([header])
        assert "one" not in caught.value.message.replace("none", "")


def test_a_wrong_bearer_token_is_not_saved_by_a_right_key_after_it() -> None:
    with pytest.raises(Unauthorized):
        KEYS.check([(b"authorization", b"Bearer two"), (b"x-api-key", b"one")])


def test_an_unknown_key_is_told_which_keys_are_asked_for() -> None:
    for keys, setting in ((KEYS, "api_keys"), (Keys([SecretStr("boss")], "admin_keys"), "admin_keys")):
        with pytest.raises(Unauthorized, match=f"none of the gateway's {setting}"):
            keys.check([(b"authorization", b"Bearer wrong")])

"""Bodies that are taken, and bodies that are refused with a reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api.body import MAX_DEPTH, integer, model_name, parse_object, positive, truthy
from gateway.exceptions import BadRequest

JSON = "application/json"


def refusal(body: bytes, content_type: str | None = JSON) -> str:
    with pytest.raises(BadRequest) as caught:
        parse_object(body, content_type)
    return caught.value.message


@pytest.mark.parametrize("content_type", [JSON, "application/json; charset=utf-8", "Application/JSON ;x=y"])
def test_json_is_json_whatever_its_parameters(content_type: str) -> None:
    assert parse_object(b'{"a": 1}', content_type) == {"a": 1}


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded"])
def test_another_media_type_is_refused_in_vllms_words(content_type: str | None) -> None:
    assert "Unsupported Media Type: Only 'application/json' is allowed" in refusal(b"{}", content_type)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b'{"a": 1', "Expecting ',' delimiter at line 1, column 8 (character 7)"),
        (b'{"a": 1,\n "b" 2}', "Expecting ':' delimiter at line 2, column 6"),
        (b"{'a': 1}", "Expecting property name enclosed in double quotes"),
        (b'{"a": 1} x', "Extra data at line 1, column 10"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'"a"', "must be a JSON object, not a string"),
        (b"null", "must be a JSON object, not null"),
        (b"true", "must be a JSON object, not a boolean"),
        (b"17", "must be a JSON object, not a number"),
        (b"NaN", "must be a JSON object, not a number"),
        (b'{"a": "\xff"}', "not valid UTF-8: invalid start byte at byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not valid UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"[" * 100_000, "nested deeper than 254 levels"),
        (b'{"a":' * 100_000, "nested deeper than 254 levels"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested deeper than 254 levels"),
        (b'{"n":NaN,"a":' + b"[" * 400 + b"]" * 400 + b"}", "nested deeper than 254 levels"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason_and_the_place(body: bytes, said: str) -> None:
    assert said in refusal(body)


def test_what_python_reads_beyond_the_standard_is_taken_as_vllm_takes_it() -> None:
    document = parse_object(
        b'\xef\xbb\xbf{"a": NaN, "b": -Infinity, "c": "\\ud800", "d": 1e400, "e": 36893488147419103232}', JSON
    )
    assert math.isnan(document["a"])
    assert document["b"] == -math.inf
    assert document["c"] == "\ud800"
    assert document["d"] == math.inf
    assert document["e"] == 1 << 65


def test_the_last_of_equal_keys_wins() -> None:
    assert parse_object(b'{"a": 1, "b": 2, "a": 3}', JSON) == {"a": 3, "b": 2}
    assert parse_object(b'{"a": 1, "n": NaN, "a": 3}', JSON)["a"] == 3


@pytest.mark.parametrize("start", [b'{"a":', b'{"n":NaN,"a":'])
def test_nesting_up_to_the_limit_is_taken(start: bytes) -> None:
    depth = MAX_DEPTH - 1
    assert parse_object(start + b"[" * depth + b"]" * depth + b"}", JSON)["a"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=8), st.booleans())
def test_any_object_is_read_as_json_reads_it(document: dict[str, Any], ascii_only: bool) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert parse_object(body, JSON) == document


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\u0dD8 \n1e-.ntf', max_size=60).map(str.encode))
@example(b'{"a":\x00}')
def test_garbage_is_refused_and_nothing_worse(body: bytes) -> None:
    try:
        document = parse_object(body, JSON)
    except BadRequest as error:
        assert error.message
    else:
        assert isinstance(document, dict)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (10, 10),
        (10.0, 10),
        ("10", 10),
        (" -3 ", -3),
        ("7.0", 7),
        (-1, -1),
        (10**40, (1 << 53) - 1),
        (1e300, (1 << 53) - 1),
        ("9" * 30, (1 << 53) - 1),
        (-(10**40), -((1 << 53) - 1)),
        (True, None),
        (10.5, None),
        ("ten", None),
        ("1e3", None),
        ("9" * 5000, None),
        (math.nan, None),
        (math.inf, None),
        (None, None),
        ([10], None),
        ({}, None),
    ],
)
def test_integers_are_read_as_pydantic_reads_them(value: Any, number: int | None) -> None:
    assert integer(value) == number


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "TRUE", "1", "yes", "On", "t", "y"])
def test_true_in_all_its_spellings(value: Any) -> None:
    assert truthy(value) is True


@pytest.mark.parametrize("value", [False, 0, 0.0, "false", "off", "maybe", "", 2, [True], {}])
def test_all_else_is_false(value: Any) -> None:
    assert truthy(value) is False
    assert truthy(value, otherwise=True) is False


def test_null_is_the_default() -> None:
    assert truthy(None, otherwise=True) is True
    assert truthy(None) is False


def test_what_is_not_at_least_one_falls_back() -> None:
    assert [positive(value) for value in (3, 0, -5, "x", None)] == [3, 1, 1, 1, 1]
    assert positive(-5, 0) == 0


def test_the_model_may_be_absent_but_not_a_number() -> None:
    assert model_name({}) == model_name({"model": None}) == ""
    assert model_name({"model": "m"}) == "m"
    with pytest.raises(BadRequest, match="must be a string, not a number") as caught:
        model_name({"model": 5})
    assert caught.value.param == "model"

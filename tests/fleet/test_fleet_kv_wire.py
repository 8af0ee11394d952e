"""KV events as every vLLM writes them, and where they are published."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.block_keys import id_bytes
from gateway.config import KvEventSettings
from gateway.fleet.kvevents.sequence import Sequence, Step
from gateway.fleet.kvevents.sources import Source, configured, reachable, told
from gateway.fleet.kvevents.wire import PART_BLOCKS, Batch, Garbled, batch_of, decoder
from gateway.routing.feeds import BlocksCleared, BlocksRemoved, BlocksStored

H1, H2, H3 = (bytes([7]) * 24 + number.to_bytes(8, "big") for number in (1, 2, 3))
IDS = [5, 6, 7, 8]
READ = decoder()


def read(*events: Any) -> Batch:
    return READ(msgspec.msgpack.encode([12.5, list(events), 0]))


def test_maps_of_024_and_later_are_read() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [H2, H3],
        "parent_block_hash": H1,
        "token_ids": IDS,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "s",
        "something_new": 1,
    }
    batch = read(event, {"type": "BlockRemoved", "block_hashes": [H1], "medium": "GPU", "group_idx": 0})
    assert batch.sent_s == 12.5
    assert batch.events == (
        BlocksStored([2, 3], 1, id_bytes(IDS), 2, group=0),
        BlocksRemoved([1], 0),
    )
    assert read({"type": "AllBlocksCleared"}).events == (BlocksCleared(),)


@pytest.mark.parametrize(
    "rest",
    [[], ["GPU"], ["GPU", None], ["GPU", None, [None], 0], ["GPU", None, None, 0, "full_attention", None, "LOCAL"]],
    ids=["0.9", "0.10.2", "0.14", "0.20", "later"],
)
def test_arrays_of_older_ones_are_read(rest: list[Any]) -> None:
    group = rest[3] if len(rest) > 3 else None
    batch = read(["BlockStored", [H1], None, IDS, 4, None, *rest], ["BlockRemoved", [H1], *rest[:1]])
    assert batch.events == (BlocksStored([1], None, id_bytes(IDS), 4, group=group), BlocksRemoved([1]))
    assert read(["AllBlocksCleared"]).events == (BlocksCleared(),)


def test_hashes_may_be_numbers() -> None:
    (event,) = read(["BlockRemoved", [-1, 2**63]]).events
    assert event == BlocksRemoved([2**64 - 1, 2**63])


def stored(**fields: Any) -> dict[str, Any]:
    basis = {"type": "BlockStored", "block_hashes": [H1], "parent_block_hash": None, "token_ids": IDS, "block_size": 4}
    return basis | fields


@pytest.mark.parametrize(
    "fields",
    [{"medium": "CPU"}, {"medium": "STORAGE"}, {"locality": "REMOTE"}, {"kv_cache_spec_kind": "sliding_window"}],
)
def test_other_tiers_and_kinds_of_caches_are_ignored(fields: dict[str, Any]) -> None:
    assert read(stored(**fields)) == Batch(12.5, (), 1, 0)


def test_adapters_salts_and_images_set_blocks_apart() -> None:
    def only(**fields: Any) -> BlocksStored:
        (event,) = read(stored(**fields)).events
        assert isinstance(event, BlocksStored)
        return event

    assert only(lora_name="fr", lora_id=3, extra_keys=[["fr"]]).adapter == "fr"
    assert only(lora_name="fr", extra_keys=[["fr"]]).extras == ()
    assert only(lora_id=3).adapter == "#3"
    assert only(extra_keys=[["pepper"]]).salt == "pepper"
    salted = only(lora_name="fr", extra_keys=[["fr", "pepper"]])
    assert (salted.adapter, salted.salt, salted.extras) == ("fr", "pepper", ())
    two = {"block_hashes": [H1, H2], "block_size": 2}
    assert only(**two, extra_keys=[None, [["sha", 1]]]).extras == ("", "[['sha', 1]]")
    assert only(parent_block_hash=H3, extra_keys=[["pepper"]]).salt == ""  # only the first block has it


def test_long_runs_come_in_parts_that_follow_each_other() -> None:
    count = 2 * PART_BLOCKS + 3
    hashes = [bytes(24) + number.to_bytes(8, "big") for number in range(1, count + 1)]
    ids = list(range(count * 2))
    events = read(stored(block_hashes=hashes, token_ids=ids, block_size=2)).events
    assert [len(event.hashes) for event in events if isinstance(event, BlocksStored)] == [PART_BLOCKS, PART_BLOCKS, 3]
    assert [event.parent for event in events if isinstance(event, BlocksStored)] == [None, 256, 512]
    assert b"".join(event.ids for event in events if isinstance(event, BlocksStored)) == id_bytes(ids)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
EVENTS = st.one_of(
    JSONS,
    st.builds(lambda name, rest: [name, *rest], st.sampled_from(["BlockStored", "BlockRemoved"]), st.lists(JSONS)),
    st.builds(
        lambda fields: stored() | fields,
        st.dictionaries(st.sampled_from([*stored(), "extra_keys", "medium", "group_idx", "lora_id"]), JSONS),
    ),
)


@given(JSONS | st.builds(lambda time, events: [time, events], JSONS, st.lists(EVENTS, max_size=5)))
def test_no_payload_is_more_than_garbled(document: Any) -> None:
    try:
        batch = batch_of(document)
    except Garbled:
        return
    assert batch.odd >= 0


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", b"\x90", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_batch_is_garbled(payload: bytes) -> None:
    with pytest.raises(Garbled):
        READ(payload)


def test_numbers_tell_what_a_message_is() -> None:
    sequence = Sequence()
    assert (sequence.look(0, 1.0), sequence.look(4, 1.0)) == (Step.NEXT, Step.GAP)
    sequence.take(4, 10.0, b"four")
    assert sequence.look(5, 9.0) is Step.NEXT
    assert sequence.look(7, 11.0) is Step.GAP
    assert (sequence.look(4, 10.0), sequence.look(2, 8.0)) == (Step.AGAIN, Step.AGAIN)
    assert sequence.look(0, 10.5) is Step.RESTART
    assert sequence.is_last(4, b"four") and not sequence.is_last(4, b"five") and not sequence.is_last(3, b"four")


URL = "http://gpu1:8000"


def test_a_server_tells_where_each_engine_publishes() -> None:
    answer = {
        "1": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5558", "topic": "t"},
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "buffer_steps": 10},
        "2": {"enable_kv_cache_events": False, "endpoint": "tcp://*:5559"},
        "3": {"publisher": "null", "endpoint": "tcp://*:5559"},
        "x": {"endpoint": "tcp://*:5559"},
        "4": {"endpoint": 7},
        "5": None,
    }
    assert told(answer, URL) == (
        Source(0, "tcp://gpu1:5557", "tcp://gpu1:5657"),
        Source(1, "tcp://gpu1:5558", None, "t"),
    )
    assert told({}, URL) == told([], URL) == told(None, URL) == ()


def test_the_settings_tell_of_the_first_engine_and_the_others_follow() -> None:
    settings = KvEventSettings(endpoint="tcp://*:5557", replay_endpoint="tcp://10.0.0.9:5657", topic="t")
    assert configured(settings, URL, 2) == (
        Source(0, "tcp://gpu1:5557", "tcp://10.0.0.9:5657", "t"),
        Source(1, "tcp://gpu1:5558", "tcp://10.0.0.9:5658", "t"),
    )


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://*:5557", "tcp://gpu1:5557"),
        ("tcp://0.0.0.0:5557", "tcp://gpu1:5557"),
        ("tcp://[::]:5557", "tcp://gpu1:5557"),
        ("tcp://10.1.2.3:40001", "tcp://10.1.2.3:40001"),
        ("ipc:///run/kv", "ipc:///run/kv"),
        ("tcp://*:0", None),
        ("tcp://*:x", None),
        ("tcp://:5557", None),
        ("inproc://kv", None),
        ("", None),
        (None, None),
    ],
)
def test_addresses_are_those_of_the_servers_machine(endpoint: Any, address: str | None) -> None:
    assert reachable(endpoint, URL) == address


def test_addresses_of_ipv6_servers_keep_their_brackets() -> None:
    assert reachable("tcp://*:5557", "http://[fd00::1]:8000") == "tcp://[fd00::1]:5557"

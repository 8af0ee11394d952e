"""One engine's KV events: heard, put in order, and what was missed asked for again.

Messages are published to whoever listens and numbered. Who connects late, or is too slow, misses some; the publisher
keeps the last of them (``buffer_steps``) and sends them again when asked. So a reader begins with all that is kept, and
asks again from the last one it has, whenever a number is missing and whenever nothing was heard for a while: if that
last one does not come back, or is another, the publisher is a new one. What cannot be had again leaves the feed
``partial``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from gateway.fleet.kvevents.inbox import Context, Inbox
from gateway.fleet.kvevents.sequence import Sequence, Step
from gateway.fleet.kvevents.sources import Source
from gateway.fleet.kvevents.wire import MOST_PAYLOAD_BYTES, Batch, Garbled
from gateway.routing.feeds import Feed, Knowledge

log = logging.getLogger("kvgate.fleet.kvevents")

# So long may events be taken in before others get their turn.
TURN_S = 0.002
# Silence after which the publisher is asked whether it is still there.
IDLE_S = 10.0
LOOK_S = 1.0
# Between two messages of a replay; the publisher looks for requests ten times a second.
REPLAY_PAUSE_S = 3.0
# A publisher sends faster than it may queue, so long replays have holes: each further one begins where the last ended.
MOST_REPLAYS = 100
# Unanswered questions after which nothing is taken for known any more.
MOST_SILENT = 3
# A connection that is gone for longer is made anew; without replays, nothing is known then.
LOST_S = 5.0
# Messages that may wait here; beyond it they are dropped, and asked for again.
HIGH_WATER_MESSAGES = 2000
# A publisher that comes and goes many times a second must not fill the log: the tally counts them all.
QUIET_S = 10.0

_SUB = {
    int(zmq.RCVHWM): HIGH_WATER_MESSAGES,
    int(zmq.MAXMSGSIZE): MOST_PAYLOAD_BYTES,
    int(zmq.RECONNECT_IVL): 100,
    int(zmq.RECONNECT_IVL_MAX): 5000,
    int(zmq.TCP_KEEPALIVE): 1,
}
# The publisher drops what cannot be sent at once, so as much as it has is taken.
_DEALER = {int(zmq.RCVHWM): 0, int(zmq.MAXMSGSIZE): MOST_PAYLOAD_BYTES}
_MADE, _BROKEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(slots=True)
class Tally:
    """What came of an engine's events since the start. ``lost``: gaps that no replay could fill."""

    messages: int = 0
    events: int = 0
    ignored: int = 0
    odd: int = 0
    garbled: int = 0
    gaps: int = 0
    replays: int = 0
    lost: int = 0
    restarts: int = 0


class Subscriber:
    """Listens to one publisher and feeds ``feed``. ``run`` goes on until it is cancelled."""

    def __init__(
        self, context: Context, source: Source, feed: Feed, read: Callable[[bytes], Batch], tally: Tally | None = None
    ) -> None:
        self.source = source
        self.feed = feed
        self.tally = tally or Tally()
        self.connected = False
        self.lag_s: float | None = None  # of the newest live message, by both machines' clocks
        self.heard_s: float | None = None
        self._context = context
        self._read = read
        self._sequence = Sequence()
        self._fresh = False  # all that follows, from number 0 on, is all there is
        self._silent = 0
        self._complained: set[str] = set()
        self._broken_s: float | None = None
        self._until_s = 0.0
        self._told_s = -QUIET_S

    def __repr__(self) -> str:
        return f"<Subscriber of {self.source.endpoint} {self._sequence!r} {self.feed!r}>"

    async def run(self) -> None:
        """Listen until cancelled; what is known is forgotten then."""
        try:
            while True:
                await self._connect()
        finally:
            self.feed.restart(Knowledge.NONE)

    async def _connect(self) -> None:
        """Listen until the connection is lost and does not come back."""
        sub = Inbox.of(self._context, zmq.SUB, _SUB)
        monitor: Inbox | None = None
        try:
            sub.socket.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
            monitor = Inbox(sub.socket.get_monitor_socket(_MADE | _BROKEN), sub.wake)
            sub.socket.connect(self.source.endpoint)
            await self._listen(sub, monitor)
        finally:
            if monitor is not None:
                sub.socket.disable_monitor()
                monitor.close()
            sub.close()
            self.connected = False

    async def _listen(self, sub: Inbox, monitor: Inbox) -> None:
        """Take in what comes; ask when nothing does."""
        if self._sequence.number < 0:
            await self._begin()
        began_s = asked_s = time.monotonic()
        while True:
            sub.wake.clear()
            made = self._note_connection(monitor)
            heard = False
            while (frames := sub.take()) is not None:
                heard = True
                await self._message(frames)
                await self._turn()
            now_s = time.monotonic()
            if heard:
                asked_s = now_s
            if self._is_lost(max(began_s, self._broken_s or now_s), now_s):
                return
            if self.source.replay_endpoint is not None and (made or now_s - asked_s >= IDLE_S):
                await self._ask_again()
                asked_s = time.monotonic()
                continue
            await sub.wait(LOOK_S)

    async def _message(self, frames: list[bytes]) -> None:
        """One message: topic, number, payload."""
        read = self._parse(frames)
        if read is None:
            return
        number, payload, batch = read
        self.heard_s = time.monotonic()
        self.lag_s = time.time() - batch.sent_s
        step = self._sequence.look(number, batch.sent_s)
        if step is Step.RESTART:
            self._restarted()
            step = self._sequence.look(number, batch.sent_s)
        if step is Step.GAP:
            if self._sequence.number >= 0:
                self.tally.gaps += 1
            step = await self._filled(number, batch.sent_s)
        if step is Step.NEXT:
            if number == 0:  # nothing was before it
                self._fresh = False
                self.feed.know(Knowledge.EXACT)
            elif self.feed.knowledge is Knowledge.NONE:
                self.feed.know(Knowledge.PARTIAL)
            await self._take(number, payload, batch)

    async def _filled(self, number: int, sent_s: float) -> Step:
        """Get what lies before that number, and give up what cannot be had. Returns what the message is then."""
        if self.source.replay_endpoint is not None:
            await self._ask_again()
            step = self._sequence.look(number, sent_s)
            if step is not Step.GAP:
                return Step.NEXT if step is Step.NEXT else Step.AGAIN
        self._lose(number)
        return Step.NEXT

    async def _begin(self) -> None:
        """Begin with all that the publisher has kept."""
        self._sequence.forget()
        self._fresh = True
        if self.source.replay_endpoint is None:
            self.feed.restart(Knowledge.NONE)  # the number of the first message will tell whether it is the first
            return
        self.feed.restart(Knowledge.PARTIAL)
        if not await self._replayed():
            self._complain("silent", f"{self.source.replay_endpoint} does not answer")
            self.feed.restart(Knowledge.NONE)

    async def _ask_again(self) -> None:
        """Ask for what came after the last message that was taken in, and whether that is still what it was."""
        if self._sequence.number < 0 or self.feed.knowledge is Knowledge.NONE:
            await self._begin()
        elif not await self._replayed():
            self._silent += 1
            if self._silent >= MOST_SILENT:
                self._sequence.forget()
                self._forget(Knowledge.NONE, "it does not answer")

    async def _replayed(self) -> bool:
        """Replays until one brings nothing new. Returns whether the publisher answers."""
        answered = False
        for _ in range(MOST_REPLAYS):
            before, restarts = self._sequence.number, self.tally.restarts
            end = await self._replay(self.source.replay_endpoint or "")
            moved = self._sequence.number != before or self.tally.restarts != restarts
            answered = answered or end or moved
            if end or not moved:
                break
        if answered:
            self._silent = 0
            self._complained.discard("silent")
            if self._fresh:
                self._fresh = False
                self.feed.know(Knowledge.EXACT)
        return answered

    async def _replay(self, endpoint: str) -> bool:
        """One replay from the last message on. Returns whether it came to its end without a hole."""
        self.tally.replays += 1
        last = self._sequence.number
        asked = last  # is still to be seen again
        dealer = Inbox.of(self._context, zmq.DEALER, _DEALER)
        try:
            dealer.socket.connect(endpoint)
            dealer.socket.send_multipart([b"", max(0, last).to_bytes(8, "big")], zmq.NOBLOCK)
            while True:
                dealer.wake.clear()
                frames = dealer.take()
                if frames is None:
                    if not await dealer.wait(REPLAY_PAUSE_S):
                        return False
                    continue
                # Number and payload; since 0.2x behind the topic.
                if len(frames) > 1 and frames[-2] == _END:
                    if asked >= 0:  # it does not know what we heard last
                        self._restarted()
                    return asked < 0
                read = self._parse(frames)
                if read is None:
                    return False
                number, payload, batch = read
                if asked >= 0 and number <= asked:
                    if not self._sequence.is_last(number, payload):
                        self._restarted()
                        return False
                elif number == self._sequence.number + 1:
                    await self._take(number, payload, batch)
                elif number > self._sequence.number:
                    if self._sequence.number != last:
                        return False  # dropped on the way: the next replay begins here
                    self._lose(number)
                    await self._take(number, payload, batch)
                asked = -1
                await self._turn()
        except zmq.ZMQError as error:
            self._complain("replay", f"{endpoint} cannot be asked: {error}")
            return False
        finally:
            dealer.close()

    async def _take(self, number: int, payload: bytes, batch: Batch) -> None:
        self._sequence.take(number, batch.sent_s, payload)
        tally = self.tally
        tally.messages += 1
        tally.events += len(batch.events)
        tally.ignored += batch.ignored
        if batch.odd:
            tally.odd += batch.odd
            self._complain("odd", f"{batch.odd} events in message {number} are of no known kind")
        overflows = self.feed.overflows
        for event in batch.events:
            self.feed.apply(event)
            await self._turn()
        if self.feed.overflows != overflows:
            self._complain("overflow", "more blocks were stored than the engine has; what was known is forgotten")

    async def _turn(self) -> None:
        """Let others go if this has gone on for long."""
        if time.perf_counter() > self._until_s:
            await asyncio.sleep(0)
            self._until_s = time.perf_counter() + TURN_S

    def _parse(self, frames: list[bytes]) -> tuple[int, bytes, Batch] | None:
        """Number, payload and events of a message; ``None`` for what is none."""
        try:
            if len(frames) < 2 or len(frames[-2]) != len(_END):
                raise Garbled(f"{len(frames)} parts")
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number < 0:
                raise Garbled(f"number {number}")
            return number, frames[-1], self._read(frames[-1])
        except Garbled as error:
            self.tally.garbled += 1
            self._complain("garbled", f"what comes from {self.source.endpoint} is garbled: {error}")
            return None

    def _lose(self, number: int) -> None:
        """What lies before that number cannot be had."""
        first, self._fresh = self._sequence.number + 1, False
        if first:
            self.tally.lost += 1
        self._forget(Knowledge.PARTIAL, f"messages {first} to {number - 1} are lost")
        self._sequence.skip(number)

    def _restarted(self) -> None:
        """Another publisher: a new engine with an empty cache."""
        self.tally.restarts += 1
        self._sequence.forget()
        self._fresh = self.source.replay_endpoint is not None
        self._forget(Knowledge.PARTIAL if self._fresh else Knowledge.EXACT, "it was started anew")

    def _forget(self, knowledge: Knowledge, why: str) -> None:
        blocks, now_s = self.feed.blocks, time.monotonic()
        level = logging.INFO if now_s - self._told_s >= QUIET_S else logging.DEBUG
        log.log(level, "backend %s, engine %d: KV events: %s; %d blocks forgotten", *self._who, why, blocks)
        if level == logging.INFO:
            self._told_s = now_s
        self.feed.restart(knowledge)

    def _complain(self, kind: str, text: str) -> None:
        """Say it once."""
        if kind not in self._complained:
            self._complained.add(kind)
            log.warning("backend %s, engine %d: KV events: %s", *self._who, text)

    @property
    def _who(self) -> tuple[str, int]:
        return self.feed.backend, self.source.rank

    def _note_connection(self, monitor: Inbox) -> bool:
        """Take in what happened to the connection. Returns whether it was made."""
        made = False
        while (frames := monitor.take()) is not None:
            self.connected = parse_monitor_message(frames)["event"] == _MADE
            made = made or self.connected
            self._broken_s = None if self.connected else time.monotonic()
        return made

    def _is_lost(self, since_s: float, now_s: float) -> bool:
        """Whether the connection broke and stays away: ZeroMQ gives up on one that brought too large a message, and
        keeps to the address a name had. Without replays nobody can be asked, so nothing is known any more."""
        if self._broken_s is None or now_s - since_s <= LOST_S:
            return False
        if self.source.replay_endpoint is None and self.feed.knowledge is not Knowledge.NONE:
            self._sequence.forget()
            self._forget(Knowledge.NONE, "the connection is lost")
        return True

"""What of a backend's cache is kept from prompts that are not in it, for conversations that are about to return. Pure.

Free KV blocks are not empty: they hold what conversations left there. To give all of them to new prompts as soon as
somebody waits makes everybody slower: who returns finds nothing, has its whole prompt computed anew, and stays longer
for it, which leaves still fewer blocks to those who are away. A fleet that once got there stays there. So while others
are likely to return (``returns``) a prompt of which nothing is cached is placed only if some room is left for them
beside it, and one of which a part is cached, if that part of the room is. Who returns passes: it takes few new blocks.

Nobody is kept out for long if few are: now and then each backend lets one in all the same (``PASS_EVERY``). Nor for
good if many are: a backend with nothing in flight takes anybody, and whose turn it is by the order of the
queue (``lanes``), size and all, is let in as soon as it fits at all.
"""

from __future__ import annotations

from gateway.routing.rooms import Room

# To compute so few tokens displaces nobody worth the trouble.
LEAST_NEW_TOKENS = 1024
# A prompt that is let in all the same displaces about as much as it brings, which takes as long to be computed anew as
# itself. The next one has to wait so many times as long, so that no more than a sixteenth of a backend's time goes
# into that.
PASS_EVERY = 16.0
# While somebody waits for what is kept alone, it is looked at again after so long: what was left there fades.
LOOK_AGAIN_S = 1.0


class Keeper:
    """Tells whether a prompt has to stay out of a room, for one look at the queue at a time.

    ``closed`` are rooms that somebody before was kept out of: nobody behind with a prompt to compute gets in there.
    ``stopped`` are those that the request now looked at was kept out of, though it would fit, ``passed`` those that it
    may enter all the same. ``off``: nothing is kept from it.
    """

    __slots__ = ("closed", "now_s", "off", "passed", "stopped")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.closed = self.stopped = self.passed = 0
        self.off = False

    def stops(self, room: Room, new_tokens: int, prompt_tokens: int, blocks: int) -> bool:
        """Whether a prompt that would fit into ``room`` with so many ``blocks`` must stay out of it for now."""
        if self.off or new_tokens < LEAST_NEW_TOKENS or room.drips:
            return False
        if not room.bit & self.closed:
            part = new_tokens / prompt_tokens
            if blocks + part * room.most_kept <= room.spare:
                return False
            # Of a prompt that takes most of the cache no more is asked than that half of the rest be free.
            kept = min(part * kept_blocks(room, self.now_s), (room.limit - blocks) / 2)
            if blocks + kept <= room.spare:
                return False
            if self.now_s >= room.pass_s:
                self.passed |= room.bit
                return False
        self.stopped |= room.bit
        return True

    def charge(self, room: Room, new_tokens: int) -> None:
        """The request now looked at is placed in ``room``: perhaps all the same."""
        if room.bit & self.passed:
            room.pass_s = self.now_s + PASS_EVERY * new_tokens * room.token_s


def kept_blocks(room: Room, now_s: float) -> float:
    """Blocks that are kept there now from a small prompt of which nothing is cached; 0 where the cache is unknown."""
    return min(room.most_kept, room.returns.expected_tokens(now_s) / room.size) if room.most_kept else 0.0

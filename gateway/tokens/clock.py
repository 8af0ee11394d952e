"""The day it is where the backends are: templates print it (Llama 3.x, Mistral), and so does gpt-oss's system message.

vLLM takes it from its own clock and time zone. Nothing on the wire tells that zone, so it is assumed to be this
machine's unless the operator says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from zoneinfo import ZoneInfo


@dataclass(frozen=True, slots=True)
class BackendClock:
    """``timezone``: an IANA name, ``None`` for this machine's. ``start_date``: as ``VLLM_SYSTEM_START_DATE``."""

    timezone: str | None = None
    start_date: str | None = None

    def now(self) -> datetime:
        """The backend's wall clock."""
        return datetime.now(ZoneInfo(self.timezone)) if self.timezone else datetime.now()

    def today(self) -> str:
        """The date that gpt-oss is told (ISO)."""
        return self.start_date or self.now().strftime("%Y-%m-%d")


LOCAL_CLOCK = BackendClock()

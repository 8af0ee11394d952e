"""A page of metrics made odd: what scrapers meet in the field, for the faults of ``gateway.simulator.faults``."""

from __future__ import annotations

import re
from collections.abc import Callable

ODD = {
    "nan-metrics": "the use of the KV cache is NaN",
    "high-metrics": "the use of the KV cache is above 1",
    "renamed-metrics": "use and size of the KV cache have other names",
    "doubled-metrics": "two series of each engine, as of two servers on one page",
    "backward-metrics": "counters go back on every other page",
    "two-servers": "every other page is another process's",
    "clock-jump": "the process started an hour later than it said before",
}

_USAGE = re.compile(rb"^(vllm:\w*cache_usage_perc\{[^\n]*\}) \S+$", re.MULTILINE)
_COUNTER = re.compile(rb"^(vllm:\w+_total(?:\{[^\n]*\})?) (\S+)$", re.MULTILINE)
_MOMENT = re.compile(rb"^((?:vllm:\w+_created|process_start_time_seconds)(?:\{[^\n]*\})?) (\S+)$", re.MULTILINE)
_START = re.compile(rb"^(process_start_time_seconds) (\S+)$", re.MULTILINE)
_SERIES = re.compile(rb"^(vllm:\w+)\{([^\n]*)\} (\S+)$", re.MULTILINE)


def odd_page(kind: str, page: bytes, number: int) -> bytes:
    """The ``number``-th page asked for, made odd as ``ODD`` says."""
    second = number % 2 == 1
    if kind == "nan-metrics":
        return _USAGE.sub(rb"\1 NaN", page)
    if kind == "high-metrics":
        return _USAGE.sub(rb"\1 37.5", page)
    if kind == "renamed-metrics":
        return page.replace(b"cache_usage_perc", b"cache_used").replace(b"cache_config_info", b"cache_info")
    if kind == "doubled-metrics":
        return page + b"\n" + _SERIES.sub(rb'\1{\2,instance="b"} \3', page)
    if kind == "backward-metrics" and second:
        return _COUNTER.sub(_changed(lambda value: value / 2), page)
    if kind == "two-servers" and second:
        counted = _COUNTER.sub(_changed(lambda value: value + 9e6), page)
        return _MOMENT.sub(_changed(lambda value: value + 77.5), counted)
    if kind == "clock-jump":
        return _START.sub(_changed(lambda value: value + 3600.0), page)
    return page


def _changed(change: Callable[[float], float]) -> Callable[[re.Match[bytes]], bytes]:
    def replacement(match: re.Match[bytes]) -> bytes:
        return match[1] + b" " + repr(change(float(match[2]))).encode()

    return replacement

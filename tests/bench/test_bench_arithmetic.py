"""The figures of the bench: CPU of processes, medians, ratios, and what is derived from them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest

from bench.accounting import Spread, cpu_s, percentile, process_tree, ratio, rss_bytes, slope, stat_cpu_s
from bench.report import document, per_further_chunk, summarised, table

BURN = (
    "import time; end = time.process_time() + 0.25\nwhile time.process_time() < end: pass\n"
    "print('done', flush=True); input()"
)
THREADED = (
    "import threading, hashlib\ndef work(): hashlib.pbkdf2_hmac('sha256', b'x', b'y', 200_000)\n"
    "some = [threading.Thread(target=work) for _ in range(2)]\n[t.start() for t in some]; [t.join() for t in some]\n"
    "print('done', flush=True); input()"
)


@pytest.mark.parametrize("program", [BURN, THREADED])
def test_cpu_is_that_of_stat_and_counts_threads_that_have_ended(program: str) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        fine_s, coarse_s = cpu_s(child.pid), stat_cpu_s(child.pid)
        child.communicate(b"\n")
    assert fine_s > 0.05
    assert abs(fine_s - coarse_s) < 0.04  # stat rounds user and system to 10 ms each


def test_cpu_of_a_sleeping_process_stands_still() -> None:
    with subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        time.sleep(0.05)
        before_s = cpu_s(child.pid)
        time.sleep(0.1)
        assert cpu_s(child.pid) - before_s < 0.01
        child.communicate(b"\n")


def test_the_tree_holds_grandchildren_and_nobody_else() -> None:
    program = (
        "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(c.pid, flush=True); input(); c.communicate(b'\\n')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert process_tree(child.pid) == [child.pid, grandchild]
        assert child.pid in process_tree(os.getpid())
        assert rss_bytes([child.pid, grandchild]) > rss_bytes([child.pid]) > 1_000_000
        child.communicate(b"\n")


def test_spread_and_percentiles() -> None:
    assert Spread.of([5.0, 1.0, 9.0]) == Spread(5.0, 1.0, 9.0, 3)
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.99) == 7.0


def test_slope_leaves_out_what_every_stream_costs() -> None:
    assert math.isclose(slope([(20, 1000 + 20 * 40), (200, 1000 + 200 * 40), (400, 1000 + 400 * 40)]), 40.0)


def test_a_ratio_to_the_unknown_is_unknown() -> None:
    assert ratio(6.0, 2.0) == 3.0
    assert ratio(6.0, None) is None and ratio(None, 2.0) is None and ratio(6.0, 0.0) is None


VALUES = {
    "small, CPU us per request": {"nginx": [20.0, 25.0, 40.0], "gateway": [200.0, 250.0, 500.0]},
    "small alone, p50 us": {"direct": [50.0], "nginx": [90.0], "gateway": [450.0]},
    "stream of 20, CPU us per stream": {"gateway": [1800.0, 2000.0]},
    "stream of 220, CPU us per stream": {"gateway": [9800.0, 12000.0]},
}


def test_the_summary_derives_requests_per_core_added_latency_and_cost_per_chunk() -> None:
    rows = summarised(VALUES)
    assert rows["small, requests/s per core"]["gateway"] == Spread(4000.0, 2000.0, 5000.0, 3)
    assert rows["small added to direct, p50 us"]["gateway"].median == 400.0
    assert "direct" not in rows["small added to direct, p50 us"]
    assert per_further_chunk(VALUES)["gateway"] == pytest.approx([40.0, 50.0])
    assert rows["each further chunk, CPU us"]["gateway"].median == pytest.approx(45.0)


def test_the_table_has_ratios_and_no_number_for_a_target_that_is_missing() -> None:
    rows = summarised(VALUES)
    lines = table(rows, ["direct", "nginx", "gateway"]).splitlines()
    assert lines[0].split() == ["direct", "nginx", "gateway", "gateway/nginx"]
    assert lines[1].removeprefix("small, CPU us per request").split() == [
        *("-", "25.0", "[20.0..40.0]", "250", "[200..500]", "10.00")
    ]
    assert "vllm-router" not in "".join(lines)
    told = document(rows, VALUES, {"rounds": 3})
    assert told["ratios"]["small, CPU us per request"] == {"nginx": 10.0}
    assert told["metrics"]["small, CPU us per request"]["nginx"]["samples"] == [20.0, 25.0, 40.0]

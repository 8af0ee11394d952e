"""GPU metrics from the gateway and from the sidecar: read in a thread, cached, and unknown rather than zero."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx2
import pytest
from starlette.testclient import TestClient

from gateway.app import create_app
from gateway.config import Settings
from gateway.observe.gauges import gpu_gauges
from gateway.planner import gpu_watch
from gateway.planner.gpu_sidecar import GpuSidecar
from gateway.planner.gpu_watch import INTERVAL_S, GpuWatch
from gateway.planner.gpus import GIB, Gpu, GpuProcess, GpuReading

CARD = Gpu(
    0,
    "GPU-1",
    "NVIDIA L4",
    22 * GIB,
    3 * GIB,
    19 * GIB,
    0.5,
    None,
    "8.9",
    (GpuProcess(1, GIB, "/usr/bin/python3"), GpuProcess(2, GIB, "/opt/bin/python3"), GpuProcess(3, None, "Xorg")),
)
READING = GpuReading((CARD,), "nvml")


def until(true: threading.Event) -> None:
    assert true.wait(5)


def wait_for_reading(watch: GpuWatch) -> None:
    ends_s = time.monotonic() + 5
    while watch.latest() is None and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert watch.latest() is not None


def test_what_is_unknown_has_no_gauge_and_programs_are_summed() -> None:
    values = {(gauge.name, dict(gauge.labels).get("process")): gauge.value for gauge in gpu_gauges(READING)}
    assert values[("gpu_memory_process_bytes", "python3")] == 2 * GIB
    assert ("gpu_memory_process_bytes", "Xorg") not in values
    assert "gpu_temperature_celsius" not in {name for name, _ in values}
    assert not list(gpu_gauges(None))
    assert not list(gpu_gauges(GpuReading((), "nvml", "no driver")))


def test_a_driver_that_hangs_blocks_nobody_and_its_last_word_expires() -> None:
    asked, hang = threading.Event(), threading.Event()
    now = [100.0]

    def read() -> GpuReading:
        if asked.is_set():
            hang.wait(10)
        asked.set()
        return READING

    watch = GpuWatch(read, interval_s=0.01, clock=lambda: now[0])
    assert watch.latest() is None
    watch.start()
    until(asked)
    wait_for_reading(watch)
    now[0] += 1.0
    began_s = time.monotonic()
    assert watch.latest() is None
    assert time.monotonic() - began_s < 0.5
    watch.stop()
    hang.set()


def test_the_driver_is_asked_once_an_interval_however_often_one_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[str] = []

    def read() -> GpuReading:
        readings.append(threading.current_thread().name)
        return READING

    monkeypatch.setattr(gpu_watch, "GpuWatch", lambda: GpuWatch(read))
    app = create_app(Settings(backends=("http://127.0.0.1:9",), gpu_metrics=True))
    with TestClient(app) as client:
        ends_s = time.monotonic() + 5
        while "kvgate_gpu_memory_used_bytes" not in client.get("/metrics").text and time.monotonic() < ends_s:
            time.sleep(0.01)
        pages = [client.get("/metrics").text for _ in range(20)]
    assert all(
        'kvgate_gpu_memory_used_bytes{gpu="0",name="NVIDIA L4",uuid="GPU-1"} 3.221225472e+09' in p for p in pages
    )
    assert INTERVAL_S >= 5
    assert readings == ["kvgate-gpus"]


def test_without_the_setting_nothing_of_nvml_is_imported() -> None:
    script = (
        "import sys; from gateway.app import create_app; from gateway.config import Settings; create_app(Settings());"
        "print([name for name in sys.modules if 'nvml' in name or name.startswith('gateway.planner')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def sidecar() -> Iterator[str]:
    watch = GpuWatch(lambda: READING)
    with GpuSidecar("127.0.0.1", 0, watch) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        watch.start()
        wait_for_reading(watch)
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
        watch.stop()


def test_the_sidecar_serves_the_same_metrics(sidecar: str) -> None:
    page = httpx2.get(f"{sidecar}/metrics", timeout=5, trust_env=False)
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert f'kvgate_gpu_memory_used_bytes{{uuid="GPU-1",gpu="0",name="NVIDIA L4"}} {3 * GIB}' in page.text
    assert "temperature" not in page.text
    assert httpx2.get(f"{sidecar}/health", timeout=5, trust_env=False).status_code == 200
    assert httpx2.get(f"{sidecar}/else", timeout=5, trust_env=False).status_code == 404


def test_the_command_serves_until_interrupted_and_says_why_nothing_is_known() -> None:
    async def run() -> tuple[str, int | None]:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "gateway", "gpus", "--serve", "0"],
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # ignored where tests run in the background
        )
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        async with httpx2.AsyncClient(trust_env=False) as client:
            page = await client.get(line.split()[-1], timeout=5)
        process.send_signal(2)
        return f"{line}{page.status_code}", await asyncio.wait_for(process.wait(), 10)

    text, status = asyncio.run(run())
    assert text.startswith("GPU metrics on http://127.0.0.1:")
    assert text.endswith("200")
    assert status == 130


def test_a_port_in_use_and_a_wrong_port_are_one_sentence(sidecar: str, capsys: pytest.CaptureFixture[str]) -> None:
    from gateway.cli import main

    assert main(["gpus", "--serve", sidecar.rsplit(":", 1)[1]]) == 1
    assert "cannot listen on 127.0.0.1:" in capsys.readouterr().err
    assert main(["gpus", "--serve", "99999"]) == 2
    assert "0 to 65535" in capsys.readouterr().err

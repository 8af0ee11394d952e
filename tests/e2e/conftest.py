"""One suite, two engines: every test that asks for ``backends`` runs against the simulator and against real vLLM.

``pytest`` runs the first, ``pytest -m vllm`` (``make test-vllm``) the second. After each test the gateway must hold
nothing; after the last one the servers must hold nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_backends import Backends, two_simulators, two_vllm_servers
from e2e_gateway import Gateway, eventually, serving

# The first test of an engine waits for its servers, too.
VLLM_TIMEOUT_S = 420


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.timeout(VLLM_TIMEOUT_S))


@pytest.fixture(scope="session", params=["simulator", pytest.param("vllm", marks=pytest.mark.vllm)])
def backends(request: pytest.FixtureRequest) -> Iterator[Backends]:
    """A small window and a large one, of one model."""
    with two_simulators() if request.param == "simulator" else two_vllm_servers() as both:
        yield both
        for backend in both.both():
            eventually(backend.at_rest)


@pytest.fixture(scope="session")
def shared_gateway(backends: Backends) -> Iterator[Gateway]:
    """One gateway in front of both servers, with every setting at its default."""
    with serving([backend.url for backend in backends.both()], backends.model) as gateway:
        # Loading a tokenizer takes seconds, on a busy machine more than a request waits for it.
        eventually(gateway.counts_locally, timeout_s=VLLM_TIMEOUT_S / 2)
        yield gateway
        # Everything is given back, also by the servers: the ledger's view settles with the next scrape.
        eventually(lambda: gateway.metrics().sum("kvgate_kv_used_blocks") == 0)


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Iterator[Gateway]:
    """The shared gateway, which holds nothing before and after the test."""
    # A load sent past the gateway is foreign use until the next scrape.
    eventually(lambda: shared_gateway.in_flight() == 0, timeout_s=5)
    yield shared_gateway
    eventually(lambda: shared_gateway.in_flight() == 0, timeout_s=5)

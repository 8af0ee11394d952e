"""Read a Prometheus page: a server's or the gateway's."""

from __future__ import annotations

from dataclasses import dataclass

import httpx2
from e2e_processes import PLAIN
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Sample:
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


class Page:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.samples = [
            Sample(sample.name, dict(sample.labels), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def named(self, name: str, **labels: str) -> list[Sample]:
        """The samples of ``name`` that carry ``labels``."""
        wanted = labels.items()
        return [sample for sample in self.samples if sample.name == name and wanted <= sample.labels.items()]

    def sum(self, name: str, **labels: str) -> float:
        """Their sum. A name that is nowhere on the page is a mistake of the test (or of the server): ``KeyError``."""
        if not any(sample.name == name for sample in self.samples):
            raise KeyError(name)
        return sum(sample.value for sample in self.named(name, **labels))


def scrape(url: str) -> Page:
    """The page at ``url``/metrics now."""
    response = httpx2.get(f"{url}/metrics", timeout=10, **PLAIN)
    response.raise_for_status()
    return Page(response.text)

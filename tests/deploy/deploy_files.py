"""What is shipped for deployment, read as Docker, compose and Grafana read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
DASHBOARD = ROOT / "grafana" / "kvgate.json"

_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?::([-?])([^}]*))?\}")


class VariableMissing(ValueError):
    """A variable that must be set is not."""


def compose(environment: Mapping[str, str]) -> dict[str, Any]:
    """The compose file, its variables filled in from ``environment``. Raises ``VariableMissing``."""
    document: dict[str, Any] = _filled(yaml.safe_load(COMPOSE.read_text(encoding="utf-8")), environment)
    return document


def _filled(node: Any, environment: Mapping[str, str]) -> Any:
    """Compose fills in values after it has read the YAML, so that an empty one stays a string."""
    if isinstance(node, dict):
        return {key: _filled(value, environment) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, environment) for value in node]
    return _interpolated(node, environment) if isinstance(node, str) else node


def _interpolated(text: str, environment: Mapping[str, str]) -> str:
    """``text`` with ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}`` filled in."""

    def value(found: re.Match[str]) -> str:
        name, mark, rest = found.groups()
        given = environment.get(name, "")
        if not given and mark == "?":
            raise VariableMissing(f"{name}: {rest}")
        return given or (rest if mark == "-" else "")

    return _VARIABLE.sub(value, text)


def env_file(path: Path) -> dict[str, str]:
    """The variables of an ``.env`` file."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile in order: name, and arguments on one line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def final_stage() -> dict[str, str]:
    """The last stage's instructions; of repeated ones the last."""
    instructions = dockerfile()
    start = max(index for index, (name, _) in enumerate(instructions) if name == "FROM")
    return dict(instructions[start:])


def healthcheck() -> list[str]:
    """The command of the image's HEALTHCHECK."""
    command: list[str] = json.loads(final_stage()["HEALTHCHECK"].partition(" CMD ")[2])
    return command


@dataclass(frozen=True)
class Query:
    """One query of the dashboard, its variables filled in. ``panel`` is the panel's title."""

    panel: str
    ref: str
    expr: str


def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return document


def queries(interval: str = "1m", span: str = "1h") -> Iterator[Query]:
    """Every query as Grafana would send it with all backends and models chosen."""
    values = {"backend": ".*", "model": ".*", "__rate_interval": interval, "__range": span}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expr = re.sub(r"\$(\w+)", lambda found: values[found[1]], target["expr"])
            yield Query(panel["title"], target["refId"], expr)

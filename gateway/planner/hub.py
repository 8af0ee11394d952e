"""One small file of a model repository: from the local cache of the hub's library, or by one plain request."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from gateway.planner.bounded import Asker, Unanswered

_DEFAULT_ENDPOINT = "https://huggingface.co"
_TIMEOUT_S = 10.0


class HubError(Exception):
    """Why a file could not be had, as the end of a sentence."""


def hub_file(model: str, name: str) -> bytes:
    """The file ``name`` of the repository ``model`` (owner/name, main branch). Raises HubError, in seconds."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise HubError("that is no owner/name of a repository")
    cached = _cached(model, name)
    return cached if cached is not None else _fetched(model, name)


def _cached(model: str, name: str) -> bytes | None:
    """From the cache folder as huggingface_hub lays it out: ``models--owner--name/snapshots/REVISION``."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        return (folder / "snapshots" / revision / name).read_bytes()
    except OSError:
        return None


def _fetched(model: str, name: str) -> bytes:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise HubError("HF_HUB_OFFLINE is set")
    endpoint = (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    token = os.environ.get("HF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    path = f"/{quote(model)}/resolve/main/{quote(name)}"
    try:
        with Asker(endpoint, headers=headers, timeout_s=_TIMEOUT_S, follow_redirects=True) as asker:
            answer = asker.get(path)
    except Unanswered as error:
        raise HubError(f"{endpoint} {error}") from error
    if answer.status_code in (401, 403):
        raise HubError("the hub wants a token (HF_TOKEN), or there is no such repository")
    if answer.status_code == 404:
        raise HubError("the hub has no such file")
    if not 200 <= answer.status_code < 300:
        raise HubError(f"the hub answered {answer.status_code}")
    return answer.content

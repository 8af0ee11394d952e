"""Every other path of vLLM: only what placing needs is read, the rest is the backend's to judge."""

from __future__ import annotations

import re

from gateway.api.body import is_json, model_name, parse_object, positive, truthy
from gateway.api.paths import dialect_of
from gateway.types import Ask

_MULTIPART_MODEL = re.compile(
    rb'content-disposition:[^\r\n]*[ ;]name="?model"?(?:\r\n[^\r\n]+)*\r\n\r\n([^\r\n]*)\r\n', re.I
)


def parse(body: bytes, content_type: str | None, path: str) -> Ask:
    """Read the model's name and whether a stream is asked for; ``prompt`` is ``None``: nothing is counted.

    The model is empty when the request names none. Multipart forms (audio) are searched for their ``model`` field.
    ``include_usage`` is true, since nothing may be stripped from these answers. Raises ``BadRequest`` for a body that
    says it is JSON and is not.
    """
    dialect = dialect_of(path)
    if not body or not is_json(content_type):
        form = (content_type or "").lower().startswith("multipart/form-data")
        found = _MULTIPART_MODEL.search(body) if form else None
        model = found[1].decode("utf-8", "replace").strip() if found else ""
        return Ask(dialect, path, model, None, body, {}, include_usage=True, counted=False)
    document = parse_object(body, content_type)
    return Ask(
        dialect=dialect,
        path=path,
        model=model_name(document),
        prompt=None,
        body=body,
        document=document,
        n=positive(document.get("n")),
        stream=truthy(document.get("stream")),
        include_usage=True,
        counted=False,
    )

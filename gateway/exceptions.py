"""What can go wrong with a request, independent of how a dialect words it. Flat on purpose."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import Overflow


class GatewayError(Exception):
    """Base of every error that has an answer for the client. ``message`` says what to do."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(GatewayError):
    """The body cannot be understood. ``param`` is the field at fault."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BodyTooLarge(GatewayError):
    """The body is larger than ``max_body_bytes``. 400, since clients read 413 as a context overflow."""

    status = 400
    code = "body_too_large"


class Unauthorized(GatewayError):
    """No API key, or one we do not know."""

    status = 401
    code = "invalid_api_key"


class NoRoute(GatewayError):
    """Nothing is served at this path (404), or not with this method (405)."""

    code = "not_found"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnknownModel(GatewayError):
    """No backend serves this name. ``known`` are the names that would work, ``silent`` tells of backends that are down
    and never said what they serve."""

    status = 404
    code = "model_not_found"

    def __init__(self, model: str, known: Sequence[str], silent: str = "") -> None:
        names = ", ".join(known) or "none: no backend has answered yet"
        unheard = f" Not heard from yet: {silent}." if silent else ""
        super().__init__(f"The model `{model}` does not exist. Available models: {names}.{unheard}")
        self.model = model
        self.known = tuple(known)


class ContextOverflow(GatewayError):
    """The prompt does not fit any window. ``detail`` is a sentence about what could not be left out, if one helps."""

    status = 400
    code = "context_length_exceeded"

    def __init__(self, overflow: Overflow, detail: str = "") -> None:
        super().__init__("The prompt exceeds the context window of every backend.")
        self.overflow = overflow
        self.detail = " ".join(detail.split())


class Busy(GatewayError):
    """The KV cache is full and the queue is full or the wait too long. ``retry_after_s`` is a hint in seconds."""

    status = 429
    code = "server_busy"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoBackend(GatewayError):
    """Every backend that serves the model is down, draining, asleep or still starting. ``retry_after_s`` is a hint."""

    status = 503
    code = "no_backend"

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(GatewayError):
    """The gateway was told to stop, and the request did not begin or end in the time there was. Another gateway, or
    this one started anew, takes it; ``retry_after_s`` is a hint in seconds."""

    status = 503
    code = "shutting_down"
    retry_after_s = 1.0


class BackendFailed(GatewayError):
    """A backend broke the connection, answered garbage or stalled, and no other could take over."""

    status = 502
    code = "backend_error"


class BackendTimeout(BackendFailed):
    """A backend sent nothing for longer than it may."""

    status = 504
    code = "backend_timeout"


class BackendLost(BackendFailed):
    """A backend is down, and has not said a word for a while: nobody knows whether it still works on the request."""


class BackendBusy(BackendFailed):
    """Every backend asked answered 503: its own queue limit (``full``), or it is only just starting."""

    status = 503
    code = "backend_busy"

    def __init__(self, message: str, full: bool = False, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.full = full
        self.retry_after_s = retry_after_s


class EngineGone(BackendFailed):
    """A backend has fewer engines than it had, and one of those that are gone was asked for."""

    status = 503
    code = "backend_busy"


class ClientGone(Exception):
    """The client closed its connection. Not an error: there is nobody left to tell."""

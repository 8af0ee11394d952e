"""The one typed settings tree: every key with its type, its bounds, its default and what it is for.

``configuring`` reads it from its sources.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

PREFIX = "KVGATE_"

Seconds = Annotated[float, Field(gt=0)]
Tokens = Annotated[int, Field(ge=0)]
Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")


class Section(BaseModel):
    """A branch of the tree: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# docs/trimming.md says what each does.
PolicyName = Literal["auto", "reject", "trim", "larger", "pass"]
TrimStep = Literal["tool_results", "reasoning", "images", "turns", "middle"]

# docs/repairs.md says what each does.
RepairName = Literal[
    "responses_body",
    "stream_options",
    "empty_suffix",
    "flat_tools",
    "hosted_tools",
    "empty_tools",
    "tool_choice",
    "null_name",
    "content_type",
    "anthropic_blocks",
    "content_parts",
    "tool_calls",
    "tool_arguments",
    "missing_results",
    "orphan_results",
    "tool_ids",
    "developer_role",
    "system_first",
    "no_system",
    "alternating_roles",
    "user_message",
    "leading_roles",
    "server_tools",
    "block_forms",
    "thinking_budget",
    "null_fields",
    "response_tools",
    "input_items",
    "finish_reason",
    "null_tool_calls",
    "stream_end",
]


def base_url(value: str) -> str:
    """A base URL without a trailing slash or ``/v1``. Raises ``ValueError``."""
    url = value.strip()
    if "://" not in url:
        url = "http://" + url
    url = url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large; an IPv6 address without its bracket
        valid = False
    if not valid or any(character.isspace() for character in url):
        raise ValueError(f"not an http(s) URL: {value!r}")
    if parts.query or parts.fragment:
        raise ValueError(f"a base URL has no query or fragment: {value!r}")
    return url


class KvEventSettings(Section):
    """What a server publishes of its KV cache (vLLM's --kv-events-config)."""

    enabled: bool = Field(default=True, description="Listen to the server's KV events where it publishes them.")
    endpoint: str | None = Field(
        default=None, description="As in --kv-events-config: tcp://*:5557. Default: asked of the server (vLLM 0.31)."
    )
    replay_endpoint: str | None = Field(default=None, description="As in --kv-events-config: tcp://*:5558.")
    topic: str = Field(default="", description="As in --kv-events-config.")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"tcp://[^\s/]+:[1-9]\d{0,4}|ipc://\S+", value):
            raise ValueError(f"not an address of ZeroMQ: {value!r}; write tcp://HOST:PORT, HOST may be *")
        return value

    @model_validator(mode="after")
    def _replays_something(self) -> KvEventSettings:
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("replay_endpoint is set, but endpoint is not")
        return self


def place_of(url: str) -> str:
    """A base URL in the one spelling that stands for all of its place: case, default port, localhost."""
    parts = urlsplit(url)
    host = (parts.hostname or "").removesuffix(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{'127.0.0.1' if host == 'localhost' else host}:{port}{parts.path}"


class BackendSettings(Section):
    """One vLLM server."""

    url: str = Field(description="Base URL of the server, with or without a trailing /v1.")
    name: str = Field(default="", description="Name in headers, metrics and logs. Default: host:port of the URL.")
    api_key: SecretStr | None = Field(default=None, description="Sent upstream as a bearer token (vLLM's --api-key).")
    weight: float = Field(
        default=1.0, ge=1e-6, le=1e6, description="Work it gets in comparison to others, all else being equal."
    )
    priority_scheduling: bool = Field(
        default=False, description="The server runs with --scheduling-policy priority: tell it each request's class."
    )
    pin_ranks: bool = Field(
        default=False, description="Choose the engine of a --data-parallel-size server here, not by the server."
    )
    kv_events: KvEventSettings = Field(default_factory=KvEventSettings)

    # The URLs it was listed under; more than one if the settings name the same place twice.
    _spellings: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _normalised(cls, value: str) -> str:
        return base_url(value)

    @property
    def spellings(self) -> tuple[str, ...]:
        """The URLs it stands under in the settings: more than one if it was listed twice."""
        return self._spellings or (self.url,)

    def merged(self, other: BackendSettings) -> BackendSettings:
        """The two as one, with the URLs of both."""
        both = self.model_copy()
        both._spellings = (*self.spellings, *other.spellings)
        return both

    @property
    def label(self) -> str:
        """``name``, or host:port of the URL."""
        return self.name or urlsplit(self.url).netloc.rpartition("@")[2]


class ModelSettings(Section):
    """Overrides for one served model name."""

    tokenizer: str | None = Field(
        default=None, description="Folder or hub id of the tokenizer and chat template. Default: the model card's root."
    )
    chat_template: Path | None = Field(default=None, description="Jinja file, if the server runs with --chat-template.")
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        default="auto", description="As the server's --chat-template-content-format."
    )
    default_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="As the server's --default-chat-template-kwargs."
    )
    trust_request_chat_template: bool = Field(
        default=False, description="As the server's --trust-request-chat-template."
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=False, description="As the server's --exclude-tools-when-tool-choice-none."
    )
    mm_processor_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="As the server's --mm-processor-kwargs."
    )
    media_io_kwargs: dict[str, Any] = Field(default_factory=dict, description="As the server's --media-io-kwargs.")
    interleave_mm_strings: bool = Field(default=False, description="As the server's --interleave-mm-strings.")
    render_url: str | None = Field(
        default=None, description="Base URL of a `vllm launch render` beside the backends, which then counts."
    )
    timezone: str | None = Field(
        default=None, description="Server's time zone (Europe/Paris) for prompts with a date. Default: this machine's."
    )
    start_date: str | None = Field(default=None, description="As the server's VLLM_SYSTEM_START_DATE (gpt-oss).")
    output_floor_tokens: Tokens | None = Field(default=None, description="Overrides fitting.output_floor_tokens.")
    overflow: PolicyName | None = Field(default=None, description="Overrides overflow.policy.")
    larger_model: str | None = Field(
        default=None, description="Served model that takes, under the policy larger, what exceeds this one's window."
    )
    client_window_tokens: Tokens | None = Field(
        default=None, description="Window that clients take for granted; reported usage is scaled to it."
    )

    @field_validator("timezone")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        try:
            return value if value is None else ZoneInfo(value).key
        except (OSError, ValueError, LookupError):
            raise ValueError(f"there is no time zone {value!r} on this machine") from None

    @field_validator("render_url")
    @classmethod
    def _normalised(cls, value: str | None) -> str | None:
        return None if value is None else base_url(value)


class CountingSettings(Section):
    """How prompt tokens are counted."""

    local: bool = Field(default=True, description="Count with a local tokenizer where one can be had.")
    hub: bool = Field(default=True, description="Let transformers fetch a tokenizer from the model hub.")
    segment_cache_bytes: int = Field(
        default=64 << 20, ge=0, description="Memory of a tokenizer for text segments it has seen; 0 switches it off."
    )
    backend_timeout_s: Seconds = Field(default=5.0, description="Longest wait for a backend's /tokenize.")
    fetch_media: Literal["never", "public", "any"] = Field(
        default="never", description="Which remote images are looked at for their size; others the backend counts."
    )
    distrust_after: int = Field(default=2, ge=1, description="Wrong local counts before the backend counts instead.")


class FittingSettings(Section):
    """How a request is made to fit a window."""

    output_floor_tokens: Tokens = Field(
        default=1024, description="Least output budget worth starting for; below it the request overflows."
    )
    comfortable_output_tokens: Tokens = Field(
        default=4096, description="Room for output below which a larger window is preferred, if there is one."
    )
    report_usage: Literal["true", "untrimmed"] = Field(
        default="true", description="Usage that clients are told of a trimmed prompt: as sent, or as they sent it."
    )


class RepairSettings(Section):
    """Requests and answers put right where one side would refuse the other's form."""

    disable: tuple[RepairName, ...] = Field(default=(), description="Repairs that are left undone, by name.")


class OverflowSettings(Section):
    """What becomes of a request that exceeds every window."""

    policy: PolicyName = Field(
        default="auto",
        description="auto (refuse the first of a conversation, then trim), reject, trim, larger or pass.",
    )
    routes: dict[str, PolicyName] = Field(
        default_factory=dict, description="Policies by path, such as /v1/messages; they override the model's."
    )
    keys: dict[str, PolicyName] = Field(
        default_factory=dict,
        description="Policies by API key: the first 8 hex digits of its SHA-256; they override the path's.",
    )
    ladder: tuple[TrimStep, ...] = Field(
        default=("tool_results", "reasoning", "images", "turns", "middle"),
        description="Steps of trimming, in the order they are taken; one left out is never taken.",
    )
    low_water_ratio: float = Field(
        default=0.7,
        ge=0.2,
        le=0.95,
        description="Share of what fits that a cut goes down to, so that it stands a while.",
    )
    pinned_turns: int = Field(default=3, ge=0, description="Newest turns kept whole, if that is possible.")
    pin_first_user: bool = Field(default=True, description="Keep the first user message, which often is the task.")
    tool_result_tokens: int = Field(default=256, ge=32, description="What an old tool result is shortened to.")
    trim_clients: tuple[str, ...] = Field(
        default=("GitHubCopilotChat/", "Continue/", "codex_exec/"),
        description="Words in the User-Agent of clients that auto trims at once, since a refusal ends their session.",
    )
    remember_s: Seconds = Field(default=21600.0, description="How long auto remembers a conversation it refused.")
    remember_most: int = Field(default=10_000, ge=1, description="Refused conversations remembered at once.")
    summary_model: str | None = Field(
        default=None, description="Model that sums up dropped messages; without one a short note stands for them."
    )
    summary_url: str | None = Field(
        default=None, description="OpenAI-compatible base URL of that model. Default: the gateway's own backends."
    )
    summary_api_key: SecretStr | None = Field(default=None, description="Bearer token for summary_url.")
    summary_tokens: int = Field(default=512, ge=64, description="Longest summary.")
    summary_input_tokens: int = Field(
        default=16_000, ge=256, description="Longest text given to the summary model; its middle is cut out beyond."
    )
    summary_timeout_s: Seconds = Field(default=20.0, description="Longest wait for a summary; then the note it is.")

    @field_validator("keys")
    @classmethod
    def _fingerprints(cls, value: dict[str, PolicyName]) -> dict[str, PolicyName]:
        for key in value:
            if not re.fullmatch(r"[0-9a-f]{8}", key):
                raise ValueError(f"{key[:4]}… is not 8 hex digits: write the start of the key's SHA-256, not the key")
        return value

    @field_validator("summary_url")
    @classmethod
    def _base(cls, value: str | None) -> str | None:
        return value if value is None else base_url(value)

    @model_validator(mode="after")
    def _can_trim(self) -> OverflowSettings:
        wishes = [("policy", self.policy)]
        wishes += [(f"routes.{route}", policy) for route, policy in self.routes.items()]
        wishes += [(f"keys.{key}", policy) for key, policy in self.keys.items()]
        for name, policy in wishes:
            if policy == "trim" and not self.ladder:
                raise ValueError(f"{name} is trim, but ladder has no step: nothing could be trimmed")
        return self


class PlacingSettings(Section):
    """How a request waits for, and gets, KV blocks."""

    expected_output_tokens: Tokens = Field(
        default=1024, description="Output reserved for a request that names no budget, or a larger one."
    )
    reserve: Literal["expected", "budget"] = Field(
        default="expected", description="Reserve the output that is expected, or all of a budget that is named."
    )
    output_quantile: float = Field(
        default=0.9, gt=0, lt=1, description="Share of learned answers that are no longer than what is reserved."
    )
    short_first_s: float = Field(
        default=300.0, ge=0, description="Longest time a request is held back for shorter ones of its class; 0: never."
    )
    headroom_ratio: float = Field(default=0.02, ge=0, lt=1, description="Share of KV blocks never planned for.")
    keep_ratio: float = Field(
        default=0.3, ge=0, lt=1, description="Most of the KV blocks kept for conversations about to return; 0: none."
    )
    queue_max_requests: int = Field(default=1024, ge=0, description="Requests that may wait; more are answered 429.")
    queue_max_bytes: int = Field(default=1 << 30, ge=0, description="Body bytes that may wait; more are answered 429.")
    queue_max_tokens: int = Field(
        default=1 << 25, ge=0, description="Prompt tokens that may wait; more are answered 429."
    )
    queue_timeout_s: Seconds = Field(default=300.0, description="Longest wait for a place.")
    class_timeouts_s: dict[Priority, Seconds] = Field(
        default_factory=dict, description="Longest wait by priority class, where it is not queue_timeout_s."
    )
    keepalive_after_s: float | None = Field(
        default=20.0, gt=0, description="Wait after which the client of a stream gets its status and comments; or null."
    )
    default_priority: Priority = Field(default="normal", description="Class of a request that names none.")
    highest_priority: Priority = Field(default="high", description="The best class a request may name.")
    share_by: Literal["key", "session", "none"] = Field(
        default="key", description="Between whom a full cluster is shared evenly within a class."
    )


class FleetSettings(Section):
    """How backends are watched."""

    scrape_interval_s: Seconds = Field(
        default=1.0, description="Between two readings of a backend's /metrics while something happens there."
    )
    scrape_fastest_s: Seconds = Field(
        default=0.25, description="The same while its queue waits or its KV cache is nearly full."
    )
    scrape_slowest_s: Seconds = Field(default=5.0, description="The same once nothing has happened for a while.")
    discover_interval_s: Seconds = Field(default=10.0, description="Between two readings of /v1/models and /version.")
    timeout_s: Seconds = Field(default=5.0, description="Longest wait for either.")
    stale_after_s: Seconds = Field(default=10.0, description="Age at which a KV observation counts as unknown.")
    failures_to_open: int = Field(default=3, ge=1, description="Failures in a row that open a backend's breaker.")
    reopen_after_s: Seconds = Field(default=5.0, description="Rest of an open breaker before one request may try.")
    outlier_ejection: bool = Field(
        default=True, description="Let a backend rest that is far slower to begin, or fails far more, than its peers."
    )
    outlier_latency_factor: float = Field(
        default=5.0, gt=1, description="How many times its peers' median time to a first byte is too long."
    )
    outlier_failure_ratio: float = Field(
        default=0.3, gt=0, le=1, description="Share of failed requests that is too large, if its peers fail far less."
    )
    outlier_rest_s: Seconds = Field(default=30.0, description="First rest of an outlier; each further one is longer.")
    outlier_most_ratio: float = Field(
        default=0.34, ge=0, lt=1, description="Most of the backends of a model that may rest as outliers at once."
    )
    slow_start_s: float = Field(
        default=10.0, ge=0, description="Time in which a backend that came back gets its share of work by and by."
    )


class RelaySettings(Section):
    """The data path."""

    connect_timeout_s: Seconds = Field(default=5.0, description="Longest wait for a connection to a backend.")
    first_byte_timeout_s: Seconds = Field(default=600.0, description="Longest wait for the first byte of a stream.")
    answer_timeout_s: Seconds = Field(default=3600.0, description="Longest wait for an answer that is not streamed.")
    idle_timeout_s: Seconds = Field(default=300.0, description="Longest silence within an answer.")
    retries: int = Field(default=2, ge=0, description="Further attempts before the first byte, on other backends.")
    retry_share: float = Field(
        default=0.2, ge=0, le=1, description="Most further attempts in relation to requests, beyond the first few."
    )
    hold_headers_s: Seconds = Field(
        default=10.0, description="How long a stream's status waits for its first byte, so that a retry stays possible."
    )
    keepalive_s: Seconds = Field(default=15.0, description="Silence in a stream after which a comment is sent.")
    hedge: Literal["never", "learned", "fixed"] = Field(
        default="never",
        description="Send a stream without a first byte to a second backend, after a learned or fixed wait.",
    )
    hedge_after_s: Seconds = Field(default=1.0, description="That wait if it is fixed; the least of it if learned.")
    hedge_quantile: float = Field(
        default=0.95, gt=0, lt=1, description="Share of streams of a size that begin within the learned wait."
    )
    hedge_share: float = Field(
        default=0.05, ge=0, le=1, description="Most second attempts in relation to requests, beyond the first few."
    )


class ShutdownSettings(Section):
    """How the gateway stops when it is told to (SIGTERM, SIGINT)."""

    notice_s: float = Field(
        default=0.0, ge=0, description="How long it serves on while /ready says no, so that load balancers leave."
    )
    grace_s: float = Field(
        default=30.0, ge=0, description="How long answers under way may then take before they are cut off."
    )


class Settings(BaseSettings):
    """Everything the gateway can be told."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on.")
    allow_public: bool = Field(default=False, description="Listen on a public address without API keys.")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(), description="Keys clients may present. Empty: no key is asked for."
    )
    admin_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(), description="Keys that may drain backends. Empty: nobody may."
    )
    max_body_bytes: int = Field(default=64 << 20, ge=1024, description="Largest request body taken.")
    backends: Annotated[tuple[BackendSettings, ...], NoDecode] = Field(
        default=(), description="The vLLM servers behind the gateway."
    )
    models: dict[str, ModelSettings] = Field(default_factory=dict, description="Overrides by served model name.")
    counting: CountingSettings = Field(default_factory=CountingSettings)
    fitting: FittingSettings = Field(default_factory=FittingSettings)
    overflow: OverflowSettings = Field(default_factory=OverflowSettings)
    repairs: RepairSettings = Field(default_factory=RepairSettings)
    placing: PlacingSettings = Field(default_factory=PlacingSettings)
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    relay: RelaySettings = Field(default_factory=RelaySettings)
    shutdown: ShutdownSettings = Field(default_factory=ShutdownSettings)
    gpu_metrics: bool = Field(default=False, description="Export the GPUs of this machine as metrics, through NVML.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")

    @field_validator("api_keys", "admin_keys", "backends", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Environment variables hold lists as JSON or parted by blanks or commas."""
        if not isinstance(value, str):
            return value
        text = value.strip()
        if not text.startswith("["):
            return text.replace(",", " ").split()
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError("not a list in JSON; or write the items parted by blanks or commas") from None

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _not_empty(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        """An empty key would let in whoever shows none."""
        if not all(key.get_secret_value().strip() for key in value):
            raise ValueError("a key is empty; remove it, or write the key")
        return value

    @field_validator("backends")
    @classmethod
    def _distinct(cls, value: tuple[BackendSettings, ...]) -> tuple[BackendSettings, ...]:
        """A place listed twice is one backend, if both times with the same settings: two ledgers must not count one
        KV cache. Two backends of one name are a mistake."""
        unique: dict[str, BackendSettings] = {}
        for backend in value:
            place = place_of(backend.url)
            known = unique.get(place)
            if known is None:
                unique[place] = backend
            elif known.model_dump(exclude={"url"}) == backend.model_dump(exclude={"url"}):
                unique[place] = known.merged(backend)
            else:
                both = " and ".join(dict.fromkeys((known.url, backend.url)))
                raise ValueError(f"{both} is listed twice, with different settings; keep one of them")
        labels = [backend.label for backend in unique.values()]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two backends are named {', '.join(twice)}; give each its own name")
        for backend in unique.values():
            engines = [label for label in labels if re.fullmatch(rf"{re.escape(backend.label)}#\d+", label)]
            if backend.pin_ranks and engines:
                raise ValueError(f"{engines[0]} is what an engine of {backend.label} is called; name it otherwise")
        return tuple(unique.values())

    @model_validator(mode="after")
    def _policies_can_be_followed(self) -> Settings:
        for name, model in self.models.items():
            if model.overflow == "trim" and not self.overflow.ladder:
                raise ValueError(f"models.{name}.overflow is trim, but overflow.ladder has no step")
            if model.overflow == "larger" and model.larger_model is None:
                raise ValueError(f"models.{name}.overflow is larger, but models.{name}.larger_model names no model")
            if model.larger_model == name:
                raise ValueError(f"models.{name}.larger_model is the model itself")
        known = {key_fingerprint(key.get_secret_value()) for key in self.api_keys}
        strange = sorted(self.overflow.keys.keys() - known)
        if strange:
            raise ValueError(f"overflow.keys: none of api_keys has the fingerprint {', '.join(strange)}")
        return self

    @model_validator(mode="after")
    def _not_open_to_the_world(self) -> Settings:
        if not self.api_keys and not self.allow_public and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from other machines and no api_keys are set: "
                "set api_keys, or allow_public: true to serve everyone who can reach it"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags and the file are merged by ``configuring.load``; the environment stands between them."""
        return (init_settings,)


def key_fingerprint(key: str) -> str:
    """What stands for an API key where it can be read: the first 8 hex digits of its SHA-256."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

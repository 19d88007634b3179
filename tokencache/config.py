"""Settings: every option of `tokencache serve`, also as environment variables (`TOKENCACHE_PORT=…`)."""

import ipaddress
import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tokencache.core.budget import Budget
from tokencache.core.rules import BY_NAME
from tokencache.dialects.chat.sampling import check_policy
from tokencache.engines.registry import EngineKind
from tokencache.engines.standing import Level
from tokencache.proxy.imprint import Policy
from tokencache.proxy.session_sources import SessionSources


def names_in(text: str) -> list[str]:
    """Split a list of names that is written with commas."""
    return [name for part in text.split(",") if (name := part.strip())]


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there; of a name other than `localhost` nobody knows."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


class Settings(BaseSettings):
    """The proxy's settings; every default is safe for one process in front of one engine on one machine."""

    model_config = SettingsConfigDict(env_prefix="TOKENCACHE_", extra="ignore")

    upstream: str = Field(
        "",
        description="the engine's base URL; several engines of one model with commas between; none: engines are added while the proxy "
        "runs (docs/several-engines.md)",
    )
    upstream_key: str | None = Field(None, description="API key for the engine, in place of whatever the harness sends")
    engine: EngineKind = Field(
        "auto",
        description="what is upstream: vllm, nemo-rl (NeMo RL's worker), nemo-gym (its model server) or completions (token prompts, "
        "parsed by derender); auto asks (docs/drivers.md)",
    )
    require: Level = Field(
        "relay",
        description="what an engine must be able to do for the proxy to be ready: exact, record or relay (docs/engines.md); an engine that "
        "does less is probed again until it does",
    )
    derender: str = Field(
        "", description="base URL of a vllm launch render sidecar that parses replies for completions; none: the engine itself is asked"
    )
    tokenizer: Path | None = Field(
        None, description="folder of the model's tokenizer, to render small tails in this process (extra 'local')"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8100, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    workers: int = Field(
        1, ge=1, le=256, description="processes that share the port, one for each core to be used; several need a store that is shared"
    )
    drain: float = Field(
        60.0, ge=0, allow_inf_nan=False, description="seconds for calls under way when the proxy is told to stop; then they are cut"
    )
    store: str = Field(
        "memory:",
        description="where turns are kept: memory:, redis://[user:password@]host:port/db, "
        "redis+sentinel://host:26379,host2:26379/service/db or redis+cluster://host:port,host2:port; rediss for TLS; Valkey too "
        "(docs/store.md)",
    )
    store_ttl: float = Field(7 * 86400.0, gt=0, description="seconds after which an unused session is forgotten")
    store_timeout: float = Field(5.0, gt=0, description="seconds to wait for the store")
    max_sessions: int = Field(
        0, ge=0, description="sessions that the store may hold: then new ones are refused, and those that are there go on; 0: no limit"
    )
    max_store_bytes: int = Field(
        0, ge=0, description="bytes that the store may use before new sessions are refused; 0: nine tenths of Redis's maxmemory"
    )
    store_may_evict: bool = Field(
        False, description="take a Redis that drops sessions when its memory is full (an evicting maxmemory-policy)"
    )
    on_store_error: Literal["relay", "fail"] = Field(
        "relay", description="when the store fails: relay the call and mark the session incomplete, or answer 503"
    )
    model_aliases: dict[str, str] = Field(
        {}, description='names that harnesses give the model, as JSON: {"claude-*": "qwen3"}; shell patterns, the first that fits counts'
    )
    sampling: dict[str, Any] = Field(
        {}, description='sampling parameters for all sessions, whatever the harness asks, as JSON: {"temperature": 1} (docs/sampling.md)'
    )
    return_token_id_information: bool = Field(
        False, description="answer as NeMo Gym's model server does: token ids and log probabilities on the messages (docs/topologies)"
    )
    experts: str = Field("", description="directory or URL (extra 'experts') where routed experts are kept; none: they are dropped")
    rules_off: str = Field("", description="rules of forgiveness to switch off, separated by commas (docs/rules.md)")
    adapters: Path | None = Field(None, description="directory of your own adapters, beside those that come along")
    hold: float = Field(
        120.0, ge=0, description="seconds that a call waits while no engine takes it (restarts, weight updates); 0: it fails at once"
    )
    whole_replies: bool = Field(
        False,
        description="take replies whole, and say them as streams: one that the engine aborts is sampled afresh (docs/several-engines.md)",
    )
    repeats: Policy = Field(
        "join",
        description="which calls are taken for repetitions, and get the reply of the call that they repeat: join (those that say so, and "
        "those that are byte for byte like one that is unanswered), marked (those that say so) or off (docs/retries.md)",
    )
    linger: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds that a call goes on after its harness left, if nothing of its reply was shown: it may ask again; 0: it ends",
    )
    keep_alive: float = Field(15.0, gt=0, description="seconds of silence in a stream after which a sign of life is sent")
    session_header: str = Field("X-Tokencache-Session", description="header that names the session")
    session_from: str = Field(
        "",
        description="what else names the session, separated by commas: header:X-Session-ID, body:conversation_params.conversation_id; "
        "by default ids that harnesses send by themselves are never used (docs/topologies/nemo-gym.md)",
    )
    affinity_headers: str = Field(
        "X-Session-ID", description="headers that tell engines and routers the session, separated by commas; a harness's own stay"
    )
    registered_only: bool = Field(
        False, description="take requests with a registered API key only: without one neither sessions nor the engine are there"
    )
    max_calls: int = Field(
        0, ge=0, le=2**53, description="calls that a session may make; then its episode is ended; 0: no limit (docs/budgets.md)"
    )
    max_tokens: int = Field(
        0, ge=0, le=2**53, description="tokens that may be sampled in a session before its episode is ended; 0: no limit"
    )
    max_seconds: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="seconds after a session's first call when its episode is ended; 0: no limit"
    )
    admin_key: str | None = Field(
        None, description="key for /tokencache/v1, /metrics and what /readyz knows: a long random one; without one these are open"
    )
    allow_open: bool = Field(
        False, description="listen beyond loopback without an admin key: who reaches the port can read and delete all rollouts"
    )
    max_body: int = Field(64 * 2**20, gt=0, description="largest request body, in bytes")
    prefix_memory: int = Field(2**30, ge=0, description="bytes of memory for prefixes at hand")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much to log")

    @property
    def budget(self) -> Budget:
        """The budget of every session that has no own."""
        return Budget(calls=self.max_calls, tokens=self.max_tokens, seconds=self.max_seconds)

    @model_validator(mode="after")
    def _check_openness(self) -> Self:
        if not self.admin_key and not self.allow_open and not _is_loopback(self.host):
            raise ValueError(
                f"{self.host or 'every address'} can be reached from elsewhere, and without an admin key whoever reaches it can read and "
                "delete all rollouts: set --admin-key (TOKENCACHE_ADMIN_KEY) to a long random one (openssl rand -hex 32), or listen on "
                "127.0.0.1; --allow-open if that is what you want"
            )
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.workers > 1 and self.store.startswith("memory:"):
            raise ValueError(
                f"{self.workers} workers cannot keep sessions in memory: each would know only its own calls, and a session's next call "
                "may reach another one. Name a store that they share (--store redis://host:port/db), or take one worker"
            )
        return self

    @field_validator("upstream", mode="before")
    @classmethod
    def _check_upstreams(cls, given: Any) -> Any:
        text = ",".join(given) if isinstance(given, (list, tuple)) else given  # the command line may have it several times
        urls = [url.rstrip("/").removesuffix("/v1") for url in names_in(text)] if isinstance(text, str) else []
        if not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError("base URLs are needed, beginning with http:// or https://")
        if len(set(urls)) < len(urls):
            raise ValueError("the same engine is named twice")
        return text

    @field_validator("rules_off")
    @classmethod
    def _know_rules(cls, given: str) -> str:
        unknown = [rule for rule in names_in(given) if rule not in BY_NAME]
        if unknown:
            raise ValueError(f"no such rule: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
        return given

    @field_validator("session_from")
    @classmethod
    def _check_session_sources(cls, given: str) -> str:
        SessionSources.read(names_in(given))
        return given

    @field_validator("sampling")
    @classmethod
    def _check_sampling(cls, given: dict[str, Any]) -> dict[str, Any]:
        check_policy(given)
        return given

    @field_validator("model_aliases", "sampling", mode="before")
    @classmethod
    def _read_json(cls, given: Any) -> Any:
        return json.loads(given) if isinstance(given, str) else given  # the command line has it as text

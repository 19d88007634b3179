"""Settings: every option of `tokencache serve`, also as environment variables (`TOKENCACHE_PORT=…`)."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tokencache.core.rules import BY_NAME
from tokencache.dialects.chat.sampling import check_policy
from tokencache.engines.registry import EngineKind


def names_in(text: str) -> list[str]:
    """Split a list of names that is written with commas."""
    return [name for part in text.split(",") if (name := part.strip())]


class Settings(BaseSettings):
    """The proxy's settings; every default is safe for one process in front of one engine on one machine."""

    model_config = SettingsConfigDict(env_prefix="TOKENCACHE_", extra="ignore")

    upstream: str = Field(
        "http://127.0.0.1:8000",
        description="the engine's base URL; several engines of one model with commas between (docs/several-engines.md)",
    )
    upstream_key: str | None = Field(None, description="API key for the engine, in place of whatever the harness sends")
    engine: EngineKind = Field(
        "auto",
        description="what is upstream: vllm, nemo-rl (NeMo RL's worker), nemo-gym (its model server) or completions (token prompts, "
        "parsed by derender); auto asks (docs/drivers.md)",
    )
    derender: str = Field(
        "", description="base URL of a vllm launch render sidecar that parses replies for completions; none: the engine itself is asked"
    )
    tokenizer: Path | None = Field(
        None, description="folder of the model's tokenizer, to render small tails in this process (extra 'local')"
    )
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8100, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    store: str = Field("memory:", description="where turns are kept: memory: or redis://host:port/db")
    store_ttl: float = Field(7 * 86400.0, gt=0, description="seconds after which an unused session is forgotten (Redis)")
    store_timeout: float = Field(5.0, gt=0, description="seconds to wait for the store")
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
    keep_alive: float = Field(15.0, gt=0, description="seconds of silence in a stream after which a sign of life is sent")
    session_header: str = Field("X-Tokencache-Session", description="header that names the session")
    affinity_headers: str = Field(
        "X-Session-ID", description="headers that tell engines and routers the session, separated by commas; a harness's own stay"
    )
    registered_only: bool = Field(False, description="take sessions by registered API key only")
    admin_key: str | None = Field(None, description="key for /tokencache/v1; without one these routes are open")
    max_body: int = Field(64 * 2**20, gt=0, description="largest request body, in bytes")
    prefix_memory: int = Field(2**30, ge=0, description="bytes of memory for prefixes at hand")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="how much to log")

    @field_validator("upstream", mode="before")
    @classmethod
    def _check_upstreams(cls, given: Any) -> Any:
        text = ",".join(given) if isinstance(given, list) else given  # the command line may have it several times
        urls = [url.rstrip("/").removesuffix("/v1") for url in names_in(text)] if isinstance(text, str) else []
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
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

    @field_validator("sampling")
    @classmethod
    def _check_sampling(cls, given: dict[str, Any]) -> dict[str, Any]:
        check_policy(given)
        return given

    @field_validator("model_aliases", "sampling", mode="before")
    @classmethod
    def _read_json(cls, given: Any) -> Any:
        return json.loads(given) if isinstance(given, str) else given  # the command line has it as text

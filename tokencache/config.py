"""Settings of `tokencache serve`. Each field is an option, an environment variable and a key of the configuration file."""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from rapidfuzz import fuzz, process

from tokencache.core.rules import RULES
from tokencache.core.session import Budget
from tokencache.dialects.chat.vocabulary import check_policy
from tokencache.engine.drivers.registry import AUTO, DRIVERS, EngineKind
from tokencache.engine.pool import PlacementPolicy
from tokencache.engine.probe import Requirement
from tokencache.logs import LogFormat
from tokencache.net import check_header_name, is_base_url
from tokencache.proxy.continuation import AbortedPolicy
from tokencache.proxy.dedup.fingerprint import Policy
from tokencache.proxy.kv_salt import KvPolicy
from tokencache.proxy.sessions import SessionSources
from tokencache.session_url import check_proxy_url, is_loopback

PREFIX = "TOKENCACHE_"
"""Prefix of every environment variable."""
_MISSPELLED = 80.0
"""Least similarity, in percent, of a variable that is taken for a misspelled setting. Kubernetes and other programs set further ones."""

_LOCALHOST = ({"localhost", "127.0.0.1"}, {"localhost", "::1"})
"""Names of this machine that lead to the same listener; its other addresses are hosts of their own."""
_KEYS = {"upstream_key", "admin_key"}
"""Settings whose values are shown to nobody."""
_PLACES = {
    "upstream", "host", "port", "public_url", "store", "derender", "tokenizer", "adapters", "experts", "workers", "log_level", "log_format",
}  # fmt: skip
"""Settings that say where something is or how it is logged; records are the same elsewhere."""
_SECRET = re.compile(r"(?<=//)((?!//).)*@|\?((?!,\s*\w+://).)*")
"""The parts of URLs that may have passwords: the user, and the query."""


class SettingsError(ValueError):
    """A setting is wrong. Each line of the message names an option, an environment variable or a key of the file, and what to write."""


@dataclass(frozen=True)
class Shown:
    """How `tokencache serve --help` shows a setting.

    Attributes:
        value: placeholder of the value.
        basic: whether most users need this setting.
    """

    value: str = ""
    basic: bool = False


def names_in(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name for part in text.split(",") if (name := part.strip())]


def _joined(given: Any) -> Any:
    """Join the values of a repeated option, or of an array in the configuration file, with commas."""
    return ",".join(map(str, given)) if isinstance(given, (list, tuple)) else given


NAMES = BeforeValidator(_joined)
"""Marks a setting that is a comma-separated list. Its option may be repeated."""

Names = Annotated[str, NAMES]


def option_of(name: str) -> str:
    """The option of a setting on the command line."""
    return f"--{name.replace('_', '-')}"


def _nearest(name: str, least: float = 0.0) -> str | None:
    """Return the setting whose name is most like this one; `None` if it is less like it than `least`, in percent."""
    found = process.extractOne(name, list(Settings.model_fields), scorer=fuzz.ratio, score_cutoff=least)
    return found and found[0]


def misspelled_variables() -> dict[str, str]:
    """Return the environment variables that are not settings and look like misspelled ones, and what they may mean."""
    names = {variable: variable.lower().removeprefix(PREFIX.lower()) for variable in os.environ if variable.upper().startswith(PREFIX)}
    likely = {variable: _nearest(name, _MISSPELLED) for variable, name in names.items() if name not in Settings.model_fields}
    return {variable: PREFIX + nearest.upper() for variable, nearest in likely.items() if nearest is not None}


class Settings(BaseSettings):
    """The proxy's settings. The defaults are safe for one process in front of one engine on one machine."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", enable_decoding=False, use_attribute_docstrings=True)

    upstream: Annotated[Names, Shown("URL", basic=True)] = ""
    """Base URL of the engine. For several engines, of one model or of more, repeat the option or separate URLs with commas. Without a URL,
    add engines over the API while the proxy runs (docs/several-engines.md)."""
    not_trainable: Annotated[Names, Shown("MODEL", basic=True)] = ""
    """Model that is not trained, such as a judge or the small model of a harness, by the name under which it is served. Its tokens have
    mask 0, and no format for trainers has its sequences unless you select it. Repeat it for several."""
    upstream_key: Annotated[str | None, Shown("KEY", basic=True)] = None
    """API key for the engine. It replaces the key that the harness sends."""
    require: Annotated[Requirement, Shown(basic=True)] = "relay"
    """What an engine must be able to do before the proxy is ready: continue sessions on exact ids (exact), also with the log probabilities
    of the distribution that it samples from (processed), record ids (record), or only answer (relay). An engine that can do less is probed
    again (docs/engines.md)."""
    host: Annotated[str, Shown("ADDRESS", basic=True)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Shown("PORT", basic=True)] = Field(8100, ge=0, le=65535)
    """Port to listen on. 0 picks a free port."""
    public_url: Annotated[str, Shown("URL", basic=True)] = ""
    """URL under which harnesses reach this proxy, if that is not its address: that of a tunnel or a gateway, with a path prefix if the
    gateway removes it. The base URLs of new sessions begin with it (docs/topologies/sidecar.md)."""
    admin_key: Annotated[str | None, Shown("KEY", basic=True)] = None
    """Secret required for /tokencache/v1, /metrics and the details of /readyz. Without it they are public."""
    store: Annotated[str, Shown("URL", basic=True)] = "memory:"
    """Where sessions are stored: memory:, file:PATH (one machine), redis://[user:password@]host:port/db,
    redis+sentinel://host:26379,host2:26379/service/db or redis+cluster://host:port,host2:port. Use rediss for TLS. Valkey works too
    (docs/store.md)."""
    store_ttl: Annotated[float, Shown(basic=True)] = Field(7 * 86400.0, gt=0)
    """Delete a session that has not been used for this long. The default is 7 days."""
    workers: Annotated[int, Shown(basic=True)] = Field(1, ge=1, le=256)
    """Number of processes that share the port. Each uses one core. More than one needs a store that they share: Redis or file:PATH."""
    model_aliases: Annotated[dict[str, str], Shown(basic=True)] = {}
    """Other names under which harnesses may request the model: {"claude-*": "qwen3"}. Names may be shell patterns; the first match wins."""
    sampling: Annotated[dict[str, Any], Shown(basic=True)] = {}
    """Sampling parameters for all sessions: {"temperature": 1}. They replace what the harness requests (docs/sampling.md)."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Shown(basic=True)] = "info"
    """Least severe level to log. debug also logs text of requests and errors: keep such logs private."""
    log_format: LogFormat = "text"
    """Format of the log: text, or json (one object a line)."""
    traces: bool = False
    """Export an OpenTelemetry span for each call, as the variables OTEL_* say. Needs the extra 'otel' (docs/operations.md)."""

    engine: Annotated[EngineKind, Shown("|".join([AUTO, *DRIVERS]))] = "auto"
    """Type of the engine: vllm, NeMo RL's worker (nemo-rl), NeMo Gym's model server (nemo-gym), token prompts whose replies derender parses
    (completions, generate), or the frontend of NVIDIA's Dynamo (dynamo). auto tries them in this order (docs/drivers.md)."""
    derender: Annotated[str, Shown("URL")] = ""
    """Base URL of a `vllm launch render` sidecar that makes messages of token ids, for --engine completions and generate, and for continued
    replies. Without it the engine itself does that."""
    tokenizer: Annotated[Path | None, Shown("FOLDER")] = None
    """Folder with the model's tokenizer. The proxy then renders small tails itself. Needs the extra 'local' (docs/local-tokenizer.md)."""
    placement: PlacementPolicy = "auto"
    """Which engine a session uses: the one with the least load at its first call, then the same (sticky), one by a hash of its name (hash),
    or what a router behind the URL chooses (none). auto is none if the probe finds routers, otherwise sticky (docs/several-engines.md)."""
    admission: Annotated[int, Shown("TOKENS")] = Field(0, ge=0, le=2**40)
    """Create sessions over the API only while they fit into the KV caches of the engines, in the order in which they came. The number is
    the length of a session that is expected until some have ended. 0 sets no limit (docs/several-engines.md)."""
    return_token_id_information: bool = False
    """Return token ids and log probabilities on messages, as NeMo Gym's model server does (docs/topologies/nemo-gym.md)."""
    whole_replies: bool = False
    """Request whole replies from the engine, and stream them to the harness. A reply that the engine aborts is then always sampled again
    (docs/several-engines.md)."""
    aborted: AbortedPolicy = "continue"
    """What happens to a reply that the engine breaks off, as at weight updates: it is continued from its last token (continue), sampled
    anew if the harness received nothing of it (again), or passed on (pass). continue needs derender: vLLM's --enable-scale-out, or
    --derender. Otherwise it is again (docs/weights.md)."""
    hold: float = Field(120.0, ge=0)
    """How long a call waits while no engine accepts it, as during restarts and weight updates. 0 fails it at once."""
    kv: KvPolicy = "exact"
    """How the engine's prefix cache is kept apart by policy version, once a version is known: by that of each call (exact), by that of the
    session's first call, which saves computing a prompt again after an update (session), or not (off) (docs/weights.md)."""
    repeats: Policy = "join"
    """Which calls are retries and get the reply of the call that they repeat: calls that declare it or are byte-identical to an unanswered
    call (join), only those that declare it (marked), or none (off) (docs/retries.md)."""
    linger: float = Field(10.0, ge=0, allow_inf_nan=False)
    """How long a call continues after the client disconnected, if it had received nothing: it may retry. 0 ends the call."""
    keep_alive: float = Field(15.0, gt=0)
    """Send a keep-alive event after a stream has been silent for this long."""
    drain: float = Field(60.0, ge=0, allow_inf_nan=False)
    """How long calls in flight may take to finish after the proxy is told to stop. Then they are cancelled."""
    session_header: Annotated[str, Shown("HEADER")] = "X-Tokencache-Session"
    """Request header that names the session."""
    session_from: Annotated[Names, Shown("SOURCE")] = ""
    """Further sources of the session's name, separated by commas: header:X-Session-ID, body:conversation_params.conversation_id. Ids that
    harnesses send on their own are not used otherwise (docs/topologies/nemo-gym.md)."""
    affinity_headers: Annotated[Names, Shown("HEADER")] = "X-Session-ID"
    """Headers that give engines and routers the session's name, separated by commas. A harness's own values are kept."""
    registered_only: bool = False
    """Accept only requests that carry a registered API key."""
    max_calls: int = Field(0, ge=0, le=2**53)
    """End a session's episode after this many calls. 0 sets no limit (docs/budgets.md)."""
    max_tokens: int = Field(0, ge=0, le=2**53)
    """End a session's episode after this many sampled tokens. 0 sets no limit."""
    max_seconds: float = Field(0.0, ge=0, allow_inf_nan=False)
    """End a session's episode this long after its first call. 0 sets no limit."""
    history: Literal["supply", "follow"] = "supply"
    """Keep the thinking of earlier replies in the prompt (supply), or omit it where the chat template does (follow). A session may choose
    for itself (docs/templates.md)."""
    store_timeout: float = Field(5.0, gt=0)
    """How long to wait for the store."""
    on_store_error: Literal["relay", "fail"] = "relay"
    """When the store fails: relay the call and mark the session incomplete (relay), or return 503 (fail)."""
    max_sessions: int = Field(0, ge=0)
    """Refuse new sessions while the store holds this many. 0 sets no limit (docs/store.md)."""
    max_ready: int = Field(0, ge=0)
    """Create no sessions over the API while this many finished ones are ready to be taken. 0 sets no limit."""
    max_store_bytes: Annotated[int, Shown("BYTES")] = Field(0, ge=0)
    """Refuse new sessions while the store uses this much memory or disk. 0 means nine tenths: of Redis's maxmemory; of what a file's
    sessions take and its disk has free."""
    store_may_evict: bool = False
    """Accept a Redis whose maxmemory-policy evicts keys. It deletes sessions when its memory is full."""
    prefix_memory: Annotated[int, Shown("BYTES")] = Field(2**30, ge=0)
    """Memory for the prefixes of recent sessions, in each worker. The default is 1 GiB."""
    experts: Annotated[str, Shown("PLACE")] = ""
    """Directory or URL that receives routed experts. Without it they are dropped. URLs need the extra 'experts'."""
    max_media_bytes: Annotated[int, Shown("BYTES")] = Field(2**28, ge=0)
    """Largest total of images and other media whose bytes are stored with a session. 0 stores none. The default is 256 MiB
    (docs/images.md)."""
    fetch_media: bool = False
    """Fetch images that requests name by URL, once for each session, and send their bytes to the engine. Only public addresses are fetched
    (docs/images.md)."""
    rules_off: Annotated[Names, Shown("RULE")] = ""
    """Rules of matching to switch off, separated by commas (docs/rules.md)."""
    adapters: Annotated[Path | None, Shown("FOLDER")] = None
    """Folder with your own harness adapters, in addition to the built-in ones (docs/adapters.md)."""
    allow_open: bool = False
    """Listen beyond loopback without an admin key. Everyone who reaches the port can then read and delete all rollouts."""
    request_memory: Annotated[int, Shown("BYTES")] = Field(0, ge=0)
    """Most bytes that the requests of one worker may hold in memory: bodies, fetched media, replies that are read whole. Further ones get
    503. One tenant may hold half of it, one session at most 512 MiB. 0 means an eighth of the memory of the machine or container, divided
    by the number of workers (docs/budgets.md)."""
    max_body: Annotated[int, Shown("BYTES")] = Field(64 * 2**20, gt=0)
    """Largest request body that is accepted. The default is 64 MiB."""

    @classmethod
    def load(cls, options: Mapping[str, Any], file: Path | None = None) -> Self:
        """Combine options, environment variables and a configuration file. An option wins over a variable, a variable over the file.

        Raises:
            SettingsError: a name or a value is wrong.
        """
        variables = EnvSettingsSource(cls)()
        written = cls._in_file(file) if file is not None else {}
        try:
            return cls(**{**written, **variables, **options})
        except ValidationError as why:
            faults = [(str(fault["loc"][0]) if fault["loc"] else "", fault["msg"].removeprefix("Value error, ")) for fault in why.errors()]
        places = {name: f"{name} in {file}" for name in written}
        places |= {name: PREFIX + name.upper() for name in variables} | {name: option_of(name) for name in options}
        raise SettingsError("\n".join(f"{places[name]}: {words}" if name else words for name, words in faults))

    @classmethod
    def _in_file(cls, file: Path) -> dict[str, Any]:
        try:
            found = {name.replace("-", "_"): value for name, value in tomllib.loads(file.read_text()).items()}
        except (OSError, ValueError) as why:
            raise SettingsError(f"--config: {file} cannot be read as TOML: {why}") from None
        unknown = {name: _nearest(name) for name in found if name not in cls.model_fields}
        if unknown:
            lines = [f"{name!r} in {file} is not a setting. Did you mean {nearest!r}?" for name, nearest in unknown.items()]
            raise SettingsError("\n".join(lines))
        return found

    @property
    def shown(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as JSON values: without keys, and URLs without user, password and query."""
        changed = self.model_dump(mode="json", exclude_defaults=True, exclude=_KEYS)
        return {name: _SECRET.sub("", value) if "://" in str(value) and name in _PLACES else value for name, value in changed.items()}

    @property
    def digest(self) -> str:
        """SHA-256 of the settings on which records may depend: all but keys and places."""
        values = self.model_dump(mode="json", exclude=_KEYS | _PLACES)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    @property
    def budget(self) -> Budget:
        """The default budget: it applies to sessions that set none."""
        return Budget(calls=self.max_calls, tokens=self.max_tokens, seconds=self.max_seconds)

    @model_validator(mode="after")
    def _check_openness(self) -> Self:
        if not self.admin_key and not self.allow_open and not is_loopback(self.host):
            raise ValueError(
                f"{self.host or 'every address'} can be reached from elsewhere. Without an admin key, everyone who reaches it can read "
                "and delete all rollouts. Set --admin-key (TOKENCACHE_ADMIN_KEY) to a long random secret (openssl rand -hex 32), or "
                "listen on 127.0.0.1. To listen without a key all the same, set --allow-open"
            )
        return self

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.workers > 1 and self.store.startswith("memory:"):
            raise ValueError(
                f"{self.workers} workers cannot keep sessions in memory: each would know only its own calls. Set a store that they "
                "share (--store redis://host:port/db or --store file:PATH), or use one worker"
            )
        return self

    @model_validator(mode="after")
    def _check_own_address(self) -> Self:
        """Check that no engine is the proxy itself: each request would be sent again and again."""
        everywhere = self.host in {"", "0.0.0.0", "::"}  # noqa: S104 - only compared
        for url in names_in(self.upstream):
            host, port = urlsplit(url).hostname or "", urlsplit(url).port
            same = host == self.host or (is_loopback(host) and (everywhere or {host, self.host} in _LOCALHOST))
            if port == self.port and same:
                raise ValueError(f"--upstream: {host}:{port} is the address of this proxy: name the engine's, or choose another --port")
        return self

    @field_validator(*_KEYS)
    @classmethod
    def _check_key(cls, given: str | None) -> str | None:
        """Drop blanks around a key, such as the newline at the end of a secret's file: no header can have them."""
        key = given and given.strip()
        if key and not key.isprintable():
            raise ValueError("it has a line break or another character that no header can have")
        return key

    @field_validator("session_header", "affinity_headers")
    @classmethod
    def _check_headers(cls, given: str, info: ValidationInfo) -> str:
        if info.field_name == "session_header":
            return check_header_name(given or cls.model_fields["session_header"].default)  # `${SESSION_HEADER:-}` in a compose file
        for name in names_in(given):
            check_header_name(name)
        return given

    @field_validator("upstream", "derender")
    @classmethod
    def _check_upstreams(cls, given: str) -> str:
        urls = [url.rstrip("/").removesuffix("/v1") for url in names_in(given)]
        if not all(map(is_base_url, urls)):
            raise ValueError("write base URLs such as http://10.0.0.7:8000, which begin with http:// or https://")
        if len(set(urls)) < len(urls):
            raise ValueError("the same engine is named twice; name each engine once")
        return given

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, given: str) -> str:
        url = check_proxy_url(given) if given else ""
        if urlsplit(url).username is not None:
            raise ValueError("it contains a user, and every harness would receive the password: write it without them")
        return url

    @field_validator("rules_off")
    @classmethod
    def _know_rules(cls, given: str) -> str:
        unknown = [rule for rule in names_in(given) if rule not in RULES]
        if unknown:
            raise ValueError(f"no such rule: {', '.join(unknown)}; there are {', '.join(RULES)}")
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
        if not isinstance(given, str):
            return given  # from a configuration file, or from Python
        try:
            return json.loads(given)
        except ValueError as why:
            raise ValueError(f"write a JSON object: {why}") from None

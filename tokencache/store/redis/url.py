"""Reads the URL of a Redis store: one server, Sentinels or a cluster.

=====================================================================  =================================================
`redis://[user:password@]host[:port][/db]`                             one server; `unix://path` over a socket
`redis+sentinel://[user:password@]host[:port],…/service[/db]`          the primary that these Sentinels name
`redis+cluster://[user:password@]host[:port],…`                        the cluster that these nodes belong to
=====================================================================  =================================================

`rediss` instead of `redis` means TLS, also to Sentinels and nodes. `valkey` and `valkeys` mean the same as `redis` and `rediss`. The query
(`?…`) holds options of redis-py's connections (8.1: `redis.asyncio.Connection`, `SSLConnection`), such as `ssl_ca_certs`, `ssl_certfile`,
`ssl_keyfile` and `ssl_check_hostname`. `sentinel_username` and `sentinel_password` are for Sentinels that require them.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote

from redis.asyncio.connection import parse_url

from tokencache.store import REDIS_SCHEMES

Kind = Literal["server", "sentinel", "cluster"]

FORMS = (
    "redis://[user:password@]host[:port][/db], unix://path, redis+sentinel://[user:password@]host[:port],…/service[/db] or "
    "redis+cluster://[user:password@]host[:port],…; rediss for TLS (docs/store.md)"
)
_URL = re.compile(r"([a-z]+)(?:\+([a-z]+))?://(?:([^/?]*)@)?([^/?@]*)/?([^?]*)(?:\?(.*))?", re.DOTALL)
_DATABASE = re.compile(r"\d*")
_PORT = {"sentinel": 26379, "cluster": 6379}


class Address(NamedTuple):
    """The parts of a URL.

    Attributes:
        kind: one server, Sentinels or a cluster.
        tls: whether connections use TLS.
        hosts: host and port of each Sentinel or node; empty for one server, which has its address in `options`.
        service: name of the primary, for Sentinels.
        options: options of connections to servers.
        sentinel: options of connections to Sentinels.
        secrets: passwords, plain and as written in a URL.
    """

    kind: Kind
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any]
    sentinel: dict[str, Any]
    secrets: tuple[str, ...]


def read_url(url: str) -> Address:
    """Read a URL. Raises `ValueError` if it cannot be read. The message contains no password."""
    try:
        return _read(url)
    except (ValueError, TypeError):
        raise ValueError(f"the store's URL cannot be read; use {FORMS}") from None


def _read(url: str) -> Address:
    found = _URL.fullmatch(url)
    if found is None or url.partition("://")[0] not in REDIS_SCHEMES:
        raise ValueError(url)
    name, kind, user, authority, path, query = found.groups(default="")
    tls = name in {"rediss", "valkeys"}
    scheme = "unix" if name == "unix" else "rediss" if tls else "redis"
    if kind not in {"sentinel", "cluster"}:
        if name != "unix" and ("," in authority or not _DATABASE.fullmatch(path)):
            raise ValueError(url)
        options = _options(f"{scheme}://{url.partition('://')[2]}")
        return Address("server", tls, (), "", options, {}, _secrets(user, options))
    hosts = tuple(_host(host, _PORT[kind]) for host in authority.split(","))
    service, _, db = path.partition("/") if kind == "sentinel" else ("", "", path)
    if (kind == "sentinel") != bool(service) or not _DATABASE.fullmatch(db):
        raise ValueError(url)
    options = _options(f"{scheme}://{user}{'@' * bool(user)}host/{db}?{query}")
    sentinel = {key.removeprefix("sentinel_"): options.pop(key) for key in list(options) if key.startswith("sentinel_")}
    if tls:
        sentinel |= {key: value for key, value in options.items() if key.startswith("ssl_")}
    del options["host"]
    return Address("sentinel" if service else "cluster", tls, hosts, unquote(service), options, sentinel, _secrets(user, options, sentinel))


def _options(url: str) -> dict[str, Any]:
    return {key: value for key, value in parse_url(url).items() if key != "connection_class"}


def _host(host: str, port: int) -> tuple[str, int]:
    read = parse_url(f"redis://{host}")
    return read["host"], read.get("port", port)


def _secrets(user: str, *options: Mapping[str, Any]) -> tuple[str, ...]:
    passwords = [one.get("password", "") for one in options]
    return tuple({word for word in (*passwords, *map(quote, passwords), user.partition(":")[2]) if word})

"""Several real Redis servers for tests: a primary with a replica and a Sentinel, and a cluster."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from tests.support.redis_server import RealRedis
from tests.support.waiting import block_until

SLOTS = 16_384
SERVICE = "tokencache"
_NODE = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-replica-validity-factor", "0")


class RealSentinel(RealRedis):
    """A Sentinel that monitors one primary, and alone decides after half a second that it is down."""

    def __init__(self, primary: RealRedis, binary: str | None = None) -> None:
        super().__init__(binary=binary)
        self._primary = primary

    def _command(self, binary: str, settings: list[str]) -> list[str]:
        config = Path(self._folder.name, "sentinel.conf")  # a Sentinel writes what it learns into its own configuration
        config.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._primary.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\nsentinel failover-timeout {SERVICE} 2000\n"
        )
        return [binary, str(config), *settings, "--sentinel"]


def send_command(server: RealRedis, *command: Any) -> Any:
    """Send a command to a server."""
    with Redis(host="127.0.0.1", port=server.port) as client:
        return client.execute_command(*command)


@contextlib.contextmanager
def watched_primary() -> Iterator[tuple[RealRedis, RealRedis, RealSentinel]]:
    """Start a primary, an up-to-date replica, and a Sentinel that knows both."""
    with RealRedis() as primary, RealRedis("--replicaof", "127.0.0.1", str(primary.port)) as replica, RealSentinel(primary) as sentinel:
        wait(lambda: send_command(replica, "INFO", "replication")["master_link_status"] == "up")
        wait(lambda: send_command(sentinel, "INFO", "sentinel")["master0"]["slaves"] == 1)
        yield primary, replica, sentinel


@contextlib.contextmanager
def cluster(primaries: int = 3, *, replicas: int = 0) -> Iterator[list[RealRedis]]:
    """Start a cluster with evenly distributed slots. Yields its primaries, then replicas of the first primaries."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(RealRedis(*_NODE)) for _ in range(primaries + replicas)]
        for n, node in enumerate(nodes[:primaries]):
            send_command(node, "CLUSTER ADDSLOTS", *range(n * SLOTS // primaries, (n + 1) * SLOTS // primaries))
        for node in nodes[1:]:
            send_command(node, "CLUSTER MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            wait(lambda node=node: len(send_command(node, "CLUSTER NODES")) == len(nodes))  # type: ignore[misc]
        for primary, replica in zip(nodes, nodes[primaries:], strict=False):
            send_command(replica, "CLUSTER REPLICATE", send_command(primary, "CLUSTER MYID"))
            wait(lambda replica=replica: send_command(replica, "INFO", "replication").get("master_link_status") == "up")  # type: ignore[misc]
        for node in nodes:
            wait(lambda node=node: send_command(node, "CLUSTER INFO")["cluster_state"] == "ok")  # type: ignore[misc]
            wait(lambda node=node: _replicas_in(send_command(node, "CLUSTER NODES")) == replicas)  # type: ignore[misc]
        yield nodes


@contextlib.contextmanager
def added_node(nodes: list[RealRedis]) -> Iterator[RealRedis]:
    """Add a node without slots to a cluster."""
    with RealRedis(*_NODE) as node:
        send_command(node, "CLUSTER MEET", "127.0.0.1", nodes[0].port)
        for one in (*nodes, node):
            wait(lambda one=one: len(send_command(one, "CLUSTER NODES")) == len(nodes) + 1)  # type: ignore[misc]
        wait(lambda: send_command(node, "CLUSTER INFO")["cluster_state"] == "ok")
        yield node


def _replicas_in(nodes: dict[str, dict[str, Any]]) -> int:
    return sum("slave" in node["flags"] for node in nodes.values())


def wait(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. Servers that do not know each other yet may refuse the question."""

    def asked() -> bool:
        with contextlib.suppress(RedisError, OSError, KeyError):
            return condition()
        return False

    block_until(asked, "the servers to find each other")

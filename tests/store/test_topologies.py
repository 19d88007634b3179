"""Real servers of every kind: Valkey, a user with few rights, TLS, Sentinels, clusters, and failovers."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from urllib.parse import quote

import pytest
import trustme

from tests.store.conformance import CHECKS, build, check_replicas, record
from tests.support.material import needs
from tests.support.redis_groups import SERVICE, added_node, cluster, send_command, wait, watched_primary
from tests.support.redis_server import RealRedis, find_binary, find_valkey
from tests.support.waiting import PATIENCE
from tokencache.core.session import Labels, SessionSettings
from tokencache.store import StoreOptions, open_store
from tokencache.store.base import CursorError, SessionDeletedError, StoreError

pytestmark = [pytest.mark.redis, needs("redis-server", find_binary())]
USER = (
    "on >PASSWORD ~tokencache:* resetchannels -@all +select +client +eval +evalsha +time +get +set +getex "
    "+mget +unlink +pexpire +hget +hset +hmget +hdel +hvals +hkeys +rename +hincrby +scan +hlen +hgetall +zadd "
    "+zscore +zrangebyscore +zrem +zremrangebyscore +dbsize +info"
)
"""The rights that docs/store.md names."""
IN_A_CLUSTER = "+cluster +command +asking"


@contextlib.asynccontextmanager
async def opened(url, **settings):
    store = open_store(url, StoreOptions(**{"timeout_seconds": PATIENCE} | settings))
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def keeps_the_contract(url, **settings):
    async with opened(url, **settings) as store, opened(url, **settings) as other:
        for check in CHECKS:
            await check(store)
        await check_replicas(store, other)


@pytest.mark.whole
@needs("valkey-server", find_valkey())
async def test_valkey():
    with RealRedis(binary=find_valkey()) as server:
        assert send_command(server, "INFO", "server")["server_name"] == "valkey"
        await keeps_the_contract(server.url.replace("redis://", "valkey://"))


@pytest.mark.whole
async def test_a_user_with_few_rights(caplog):
    with RealRedis() as server:
        send_command(server, "ACL", "SETUSER", "proxy", *(right.replace("PASSWORD", "p@ss word") for right in USER.split()))
        await keeps_the_contract(f"redis://proxy:{quote('p@ss word')}@127.0.0.1:{server.port}/0")
        assert caplog.text == ""
        send_command(server, "ACL", "SETUSER", "proxy", "-info")
        async with opened(f"redis://proxy:{quote('p@ss word')}@127.0.0.1:{server.port}/0") as store:
            assert "SESSIONS MAY BE LOST UNNOTICED" in caplog.text
            await record(store, "s", build("a"))
        send_command(server, "ACL", "SETUSER", "proxy", "-hset")
        with pytest.raises(StoreError, match=r"can't run this command|no permissions|NOPERM") as error:
            async with opened(f"redis://proxy:{quote('p@ss word')}@127.0.0.1:{server.port}/0") as store:
                await store.begin("t", "k", [])
        assert "p@ss" not in str(error.value)


@contextlib.asynccontextmanager
async def secured(server, context):
    """A server with TLS in front of it: neither wheel has a server that supports TLS."""
    links = set()

    async def pass_on(reader, writer):
        try:
            while part := await reader.read(65_536):
                writer.write(part)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader, writer):
        links.add(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pass_on(reader, up_writer), pass_on(up_reader, writer))

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield front.sockets[0].getsockname()[1]
    finally:
        front.close()
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)


@pytest.mark.whole
async def test_tls_both_ways(tmp_path):
    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    ours = authority.issue_cert("proxy")
    ours.private_key_and_cert_chain_pem.write_to_path(tmp_path / "me.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    mine = f"ssl_certfile={tmp_path}/me.pem&ssl_keyfile={tmp_path}/me.pem"
    with RealRedis() as server:
        async with secured(server, context) as port:
            await keeps_the_contract(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path}/ca.pem&{mine}")
            for wrong in (mine, f"ssl_ca_certs={tmp_path}/stranger.pem&{mine}", f"ssl_ca_certs={tmp_path}/ca.pem"):
                with pytest.raises(StoreError):
                    async with opened(f"rediss://127.0.0.1:{port}/0?{wrong}", timeout_seconds=1):
                        pass
            with pytest.raises(StoreError):
                async with opened(f"redis://127.0.0.1:{port}/0", timeout_seconds=1):
                    pass


def sentinel_url(sentinel, db=0):
    with RealRedis() as gone:
        silent = gone.port
    return f"redis+sentinel://127.0.0.1:{silent},127.0.0.1:{sentinel.port}/{SERVICE}/{db}"


@pytest.mark.parametrize("end", ["kill", "pause"])
async def test_a_failover_by_sentinels_has_no_effect(end):
    """A primary dies or hangs. The next one serves the operations, and has what was recorded."""
    with watched_primary() as (primary, replica, sentinel):
        async with opened(sentinel_url(sentinel)) as store:
            epoch = await record(store, "s", build("a", keys=(b"ca",)))
            await store.begin("s", "open", [])
            send_command(primary, "WAIT", 1, 5000)
            getattr(primary, end)()
            if end == "pause":  # it is noticed by its silence only: the operations that it holds fail, and none after the failover
                store._client.timeout = 1.0
                with pytest.raises(StoreError):
                    await store.ping()
                named = ("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
                wait(lambda: send_command(sentinel, *named)[1] == replica.port)
                if store._client._probe is not None:
                    await asyncio.wait_for(store._client._probe, PATIENCE)
                store._client.timeout = PATIENCE
            begun = await store.begin("s", "k", [b"ca"])
            assert (begun.epoch, [hit.turn.id for hit in begun.hits[0]]) == (epoch, ["a"])
            await store.commit("s", epoch, "open", [build("b", build("a")).entry])
            assert send_command(replica, "INFO", "replication")["role"] == "master"
            assert [turn.id for turn in await store.turns("s")] == ["a", "b"]


async def test_sentinel_passes_the_checks():
    with watched_primary() as (_, _, sentinel):
        await keeps_the_contract(sentinel_url(sentinel, 3))


async def test_no_sentinel_knows_the_service():
    with watched_primary() as (_, _, sentinel), pytest.raises(StoreError, match="no Sentinel that responds names a primary for 'other'"):
        async with opened(sentinel_url(sentinel).replace(f"/{SERVICE}", "/other"), timeout_seconds=1):
            pass


def cluster_url(nodes):
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


@pytest.mark.whole
async def test_a_cluster_passes_the_checks():
    with cluster() as nodes:
        await keeps_the_contract(cluster_url(nodes[:2]))
        async with opened(cluster_url(nodes[:1])) as store:
            for n in range(60):
                await store.add_incidents(f"only {n}", [])
            listed = [info.id async for info in store.sessions() if info.id.startswith("only ")]
            assert sorted(listed) == sorted(f"only {n}" for n in range(60))
        assert all(send_command(node, "DBSIZE") >= 10 for node in nodes)
        for node in nodes:
            send_command(node, "SCRIPT", "FLUSH")
        async with opened(cluster_url(nodes)) as store:
            assert (await store.session("only 1")).turns == 0


@pytest.mark.whole
async def test_a_user_with_few_rights_in_a_cluster(caplog):
    with cluster() as nodes:
        for node in nodes:
            send_command(node, "ACL", "SETUSER", "proxy", *USER.split(), *IN_A_CLUSTER.split())
        url = cluster_url(nodes).replace("://", "://proxy:PASSWORD@")
        await keeps_the_contract(url)
        assert caplog.text == ""
        async with opened(url) as store:
            _, _, source, target, _ = await moving(store, nodes)
            send_command(source, "MIGRATE", "127.0.0.1", target.port, "tokencache:{s}", 0, 5000)
            await store.begin("s", "asked", [])
            send_command(target, "ACL", "SETUSER", "proxy", "-asking")
            with pytest.raises(StoreError, match=r"'?asking'? command"):
                await store.begin("s", "refused", [])


def test_the_documented_rights_are_those_tested():
    page = " ".join((Path(__file__).parents[2] / "docs" / "store.md").read_text().split())
    assert f"ACL SETUSER proxy {USER}" in page
    assert IN_A_CLUSTER in page


async def moving(store, nodes, target=None):
    """Record a session, and begin to move its slot: its epoch, the slot, its node, the other one and that one's id."""
    epoch = await record(store, "s", build("a"))
    slot = send_command(nodes[0], "CLUSTER KEYSLOT", "{s}")
    source = next(node for node in nodes if send_command(node, "CLUSTER COUNTKEYSINSLOT", slot))
    target = target or next(node for node in nodes if node is not source)
    ids = {node: send_command(node, "CLUSTER MYID").decode() for node in (source, target)}
    send_command(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    send_command(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    return epoch, slot, source, target, ids[target]


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("new", [False, True], ids=["known-node", "new-node"])
async def test_a_session_that_moves_to_another_node_is_followed(new, at_once):
    with cluster() as nodes, added_node(nodes) if new else contextlib.nullcontext() as node:
        async with opened(cluster_url(nodes)) as store:
            epoch, slot, source, target, its_id = await moving(store, nodes, node)
            send_command(source, "MIGRATE", "127.0.0.1", target.port, "tokencache:{s}", 0, 5000)
            for calls in (at_once, 1, 1):  # ASK: not moved yet, but there; later calls find as many connections as there were calls at once
                await asyncio.gather(*(store.begin("s", f"asked-{n}", []) for n in range(calls)))
                assert [info.id for info in await store.states(["s"])] == ["s"]
            for one in filter(None, (*nodes, node)):
                send_command(one, "CLUSTER", "SETSLOT", slot, "NODE", its_id)
            await store.commit("s", epoch, "asked-0", [build("b").entry])  # MOVED
            assert [turn.id for turn in await store.turns("s")] == ["a", "b"]


async def test_a_session_that_is_deleted_while_its_slot_moves_refuses_late_calls():
    with cluster() as nodes:
        async with opened(cluster_url(nodes)) as store:
            epoch, *_ = await moving(store, nodes)
            assert await store.delete("s")
            with pytest.raises(SessionDeletedError):
                await store.begin("s", "late", [])
            assert await store.define("s", SessionSettings(), Labels())  # the tombstone is here, and the new session there
            assert (await store.begin("s", "new", [])).epoch != epoch


async def test_a_node_that_dies_is_replaced_by_its_replica():
    with cluster(3, replicas=1) as nodes:
        async with opened(cluster_url(nodes[1:])) as store:
            slots = range(16_384 // 3)
            name = next(f"s{n}" for n in range(1000) if send_command(nodes[0], "CLUSTER KEYSLOT", f"{{s{n}}}") in slots)
            epoch = await record(store, name, build("a"))
            await store.begin(name, "k", [])
            send_command(nodes[0], "WAIT", 1, 5000)
            nodes[0].kill()
            await store.commit(name, epoch, "k", [build("b").entry])
            assert [turn.id for turn in await store.turns(name)] == ["a", "b"]
            assert send_command(nodes[3], "INFO", "replication")["role"] == "master"


async def test_sessions_are_listed_after_a_failover_though_no_call_uses_that_node():
    with cluster(3, replicas=1) as nodes:
        async with opened(cluster_url(nodes[1:])) as store:
            names = {f"s{n}" for n in range(30)}
            for name in names:
                await store.begin(name, "k", [])
            assert {info.id async for info in store.sessions()} == names
            send_command(nodes[0], "WAIT", 1, 5000)
            nodes[0].kill()
            assert {info.id async for info in store.sessions()} == names


async def test_a_walk_over_the_sessions_notices_other_primaries():
    """A replica that takes over may be in another place among them."""
    with cluster() as nodes:
        async with opened(cluster_url(nodes)) as store:
            cursor = b""
            while not cursor.startswith(b"3 1 0 "):  # the first one is listed
                cursor = (await store.page(cursor, 10)).cursor
            first, *others = await store._backend.primaries()

            async def replaced():
                return [*others, first]

            store._backend.primaries = replaced
            with pytest.raises(CursorError, match="another server has taken over"):
                await store.page(cursor, 10)


async def test_a_connection_that_the_client_closes_for_another_call_is_replaced(monkeypatch):
    with cluster() as nodes:
        async with opened(cluster_url(nodes)) as store:
            client = store._backend._client
            run, closed = client.execute_command, RuntimeError("unable to perform operation on <TCPTransport closed=True>")

            async def run_or_find_it_closed(*command):
                monkeypatch.setattr(client, "execute_command", run)
                raise closed

            monkeypatch.setattr(client, "execute_command", run_or_find_it_closed)
            await store.begin("s", "k", [])
            monkeypatch.setattr(client, "execute_command", run_or_find_it_closed)
            with pytest.raises(StoreError, match="unable to perform"):  # it may have been done, and is not done twice
                await store.delete("s")

"""A bug in tokencache, at each step of a call: the call ends in the store, and the trainer sees what is missing."""

import contextlib

import aiohttp
import pytest

from tests.proxy.kit import CHAT, HEADER, proxied, user
from tests.support.waiting import until
from tokencache.dialects.reply_encoder import ReplyEncoder
from tokencache.proxy import call
from tokencache.proxy.delivery import StreamDelivery, WholeDelivery
from tokencache.proxy.dispatch import Dispatch
from tokencache.proxy.endpoints import Endpoints
from tokencache.proxy.ledger import Ledger
from tokencache.proxy.policy_version import PolicyVersions, VersionReading
from tokencache.proxy.response import Response

BEFORE = {"weights": (PolicyVersions, "begin")}
AFTER = {
    "head": (Dispatch, "begin_reply"),
    "whole": (WholeDelivery, "receive"),
    "stream": (StreamDelivery, "receive"),
    "whole-end": (WholeDelivery, "decided"),
    "stream-end": (StreamDelivery, "decided"),
    "versions": (VersionReading, "end"),
    "experts": (Ledger, "keep_experts"),
    "turns": (call, "turns_of"),
    "documents": (ReplyEncoder, "documents"),
}


class BugError(Exception):
    pass


async def test_a_recorded_reply_that_cannot_be_written_is_a_failure(monkeypatch):
    """Its turn is whole, but the client did not receive it."""
    async with proxied() as rig:
        monkeypatch.setattr(Response, "as_body", lambda *_: 1 / 0)
        status, _ = await rig.post("s", messages=[user("EPISODE:talk")])
        info = await rig.info()
        assert (status, info["turns"], info["complete"], info["outcome"]) == (500, 1, True, "engine")
        assert [(one["kind"], one["hole"]) for one in info["incidents"]] == [("internal-error", False)]


async def test_a_retry_does_not_get_the_beginning_of_a_reply_that_could_not_be_written(monkeypatch):
    async with proxied() as rig:
        body = {"model": "sim", "messages": [user("EPISODE:talk")], "stream": True}
        read, left = StreamDelivery._read_events, iter(range(5))
        monkeypatch.setattr(StreamDelivery, "_read_events", lambda *given: read(*given) if next(left, 0) < 4 else 1 / 0)
        with contextlib.suppress(aiohttp.ClientError):
            async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
                await answer.read()
        monkeypatch.undo()
        retry = {HEADER: "s", "X-Stainless-Retry-Count": "1"}
        async with rig.http.post(rig.url + CHAT, json=body, headers=retry) as answer:
            assert '"finish_reason":"stop"' in await answer.text()
        cut, whole = await rig.store.turns("s")
        assert (cut.marks, whole.marks) == (("internal-error",), ())


@pytest.mark.parametrize("step", [*BEFORE, *AFTER])
async def test_the_call_ends_with_an_incident(monkeypatch, step):
    async with proxied() as rig:
        await rig.say("s", [user("EPISODE:talk")])

        def fails(*_args, **_more):
            raise BugError

        monkeypatch.setattr(*{**BEFORE, **AFTER}[step], fails)
        stream = step.startswith("stream")
        headers = {HEADER: "s"}
        body = {"model": "sim", "stream": stream, "messages": [user("EPISODE:talk")]}
        with contextlib.suppress(aiohttp.ClientError):  # a stream that has begun is cut off
            async with rig.http.post(rig.url + CHAT, json=body, headers=headers) as answer:
                await answer.read()

        async def ended():
            info = await rig.info()
            return info if not info["open_calls"] else None

        info = await until(ended)
        (incident,) = info["incidents"]
        assert (info["turns"], incident["kind"], incident["hole"], bool(incident["call"])) == (1, "internal-error", step in AFTER, True)
        assert not info["valid"]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_request_that_a_bug_refuses_before_its_call_begins_leaves_a_trace(monkeypatch, goes_on):
    async with proxied() as rig:
        await rig.say("s", [user("EPISODE:talk")])
        with monkeypatch.context() as patched:
            patched.setattr(Endpoints, "_pin", lambda *_: 1 / 0)
            status, _ = await rig.post("s", messages=[user("EPISODE:talk again")])
        if goes_on:
            await rig.say("s", [user("EPISODE:talk again")])
        info = await rig.info()
        assert (status, info["complete"], info["outcome"]) == (500, True, "ok" if goes_on else "engine")
        assert [(one["kind"], one["hole"]) for one in info["incidents"]] == [("internal-error", False)]

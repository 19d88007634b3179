"""Conformance: does a store keep the contract? For tests of the project's own stores and of yours.

    from tokencache.store.conformance import CHECKS, check_replicas

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check):
        store = MyStore()
        await store.open()
        await check(store)

Each check takes an open store, works in sessions of its own names (a store that is in use is not disturbed), and raises
`AssertionError` where the contract is broken. `check_replicas` takes two stores over one database. Nothing here
needs a test framework.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tokencache.core import ids
from tokencache.core.canonical import Call, Message
from tokencache.core.turn import Anchor, MatchKind, Prefix, Tokens, Turn, hash_ids
from tokencache.store.contract import Entry, Incident, OpenCall, SessionGoneError, SessionSealedError, Store

LONG = 200
EVERY_BYTE = bytes(range(256))
ODD_NAMES = ("{}", "}", "{a}", "a}b", "{a}b", "%7D", "%", "a b", "*", "[x]?", "\\", "naïve ☕", "a\r\nb", "a\x00b", "x" * 200)


class Built(NamedTuple):
    """An entry, and the packed prefix that a store must rebuild for it."""

    entry: Entry
    prefix: bytes

    @property
    def turn(self) -> Turn:
        """The entry's turn."""
        return self.entry.turn


def build(
    name: str,
    base: Built | None = None,
    tail: Sequence[int] = (1, 2, 3),
    reply: Sequence[int] = (7, 8),
    *,
    shared: int | None = None,
    extends: bool = True,
    keys: tuple[bytes, ...] = (),
    call: str = "call",
) -> Built:
    """Make an entry on top of `base`.

    Its prompt is the first `shared` tokens of the base's prefix (all of them, if not told) and `tail`. With `extends`
    the base is its parent too, which wants all tokens shared.
    """
    before = base.prefix if base else b""
    common = ids.count(before) if shared is None else shared
    delta, completion = ids.pack(tail), ids.pack(reply)
    prefix = ids.head(before, common) + delta + completion
    match: MatchKind = "root" if base is None else "continue" if extends else "resplice"
    turn = Turn(
        id=name,
        call=call,
        match=match,
        parent=base.turn.id if base and extends else None,
        origin=base.turn.id if base and not extends else None,
        base=base.turn.id if base else None,
        shared=common,
        prompt_tokens=common + len(tail),
        completion_tokens=len(reply),
        prefix_hash=hash_ids(prefix),
        completion_hash=hash_ids(completion),
        served=Message("assistant", f"reply {name}"),
    )
    return Built(Entry(turn, Tokens(delta, completion, ids.pack_logprobs([-0.5] * len(reply))), keys), prefix)


async def record(store: Store, session: str, *built: Built) -> str:
    """Record entries, each by a call of its own; return the session's life."""
    life = ""
    for one in built:
        life = (await store.begin(session, one.turn.call, [])).life
        await store.commit(session, life, one.turn.call, [one.entry])
    return life


async def check_ping(store: Store) -> None:
    """An open store can be pinged."""
    await store.ping()


async def check_begin(store: Store) -> None:
    """A call that begins creates the session and stays open; looking creates nothing."""
    session = _name("begin")
    _same(await store.session(session), None, "a session nobody began")
    _same(await store.find(session, [b"c1", b"r1"]), [[], []], "find in it")
    _same(await store.turns(session), [], "its turns")
    _same(await store.session(session), None, "after looking")
    begun = await store.begin(session, "k1", [b"c1", b"r1"])
    _true(begun.life, "a life has a name")
    _same(begun.hits, [[], []], "hits of unknown keys, aligned")
    _same((await store.begin(session, "k2", [])).hits, [], "hits of no keys")
    _same((await store.begin(session, "k3", [])).life, begun.life, "the life at a later call")
    info = await store.session(session)
    _true(info is not None, "the session is there")
    if info is not None:
        _same((info.id, info.sealed, info.turns, info.incidents), (session, False, 0, ()), "its state")
        _true(0 < info.created <= info.used, "times in order")


async def check_open_calls(store: Store) -> None:
    """Calls are open from begin to commit or settle, each by itself, and once even if begun twice."""
    session, odd = _name("calls"), "call \r\n00012}\x00☕"
    life = (await store.begin(session, "k1", [])).life
    await store.begin(session, odd, [])
    await store.begin(session, "k3", [])
    await store.begin(session, "k1", [])
    _same(await _open(store, session), {"k1", odd, "k3"}, "open calls")
    calls = (await _info(store, session)).open_calls
    _same(len(calls), 3, "number of open calls")
    _true(all(isinstance(call, OpenCall) and call.since > 0 for call in calls), "open since when")
    await store.commit(session, life, odd, [build("t1", call=odd).entry])
    _same(await _open(store, session), {"k1", "k3"}, "after a commit")
    await store.settle(session, life, "k1")
    await store.settle(session, life, "never begun")
    _same(await _open(store, session), {"k3"}, "after a settle")
    await store.settle(session, life, "k3")
    _same(await _open(store, session), set(), "after all")
    _same((await _info(store, session)).turns, 1, "turns")


async def check_round_trip(store: Store) -> None:
    """A turn comes back as it was, every field, and so do its tokens."""
    session = _name("trip")
    first = build("t0")
    full = Turn(
        id="t1",
        call="k1",
        match="resplice",
        reason="context-edited",
        origin="t0",
        forgiven=("args-json", "whitespace"),
        anchors=(Anchor("t0", 0, 5),),
        base="t0",
        shared=5,
        prompt_tokens=6,
        completion_tokens=1,
        prefix_hash=EVERY_BYTE[:16],
        completion_hash=EVERY_BYTE[-16:],
        served=Message("assistant", "naïve ☕\x00", "thought", (Call("call_1", "bash", '{"a": 1.0}'),), None, "me", EVERY_BYTE, True),
        finish_reason="tool_calls",
        stop_reason=151_645,
        stopped=True,
        model="m",
        dialect="chat",
        stream=True,
        choice=1,
        messages=3,
        tools=2,
        sampling={"temperature": 0.7, "stop": ["a", "b"], "seed": None, "logit_bias": {"5": -1.5}},
        marks=("aborted",),
        created=1_790_000_000.123456,
        seconds=0.25,
        versions=[{"version": 3, "tokens": [0, 1]}],
    )
    entry = Entry(full, Tokens(ids.pack([9]), ids.pack([-1]), ids.pack_logprobs([-0.1])), (b"ck",))
    await record(store, session, first, Built(entry, b""))
    _same(await store.turns(session), [first.turn, full], "turns")
    _same(await store.tokens(session, ["t1", "t0"]), {"t0": first.entry.tokens, "t1": entry.tokens}, "tokens")
    hits = await store.find(session, [b"ck"])
    _same([hit.turn for hit in hits[0]], [full], "the turn found")


async def check_odd_values(store: Store) -> None:
    """Whatever JSON can hold can stand in a turn: lone surrogates, large integers, any text."""
    session = _name("odd")
    sampling = {"seed": 2**80, "stop": ["\ud800", "\x00"], "x": [1e308, -(2**63), {"": [True, None]}], "": "\U0001f600"}
    odd = Turn(id="t\r\n☕{}", call="k", match="root", served=Message("assistant", "\udfff" + "text " * 100), sampling=sampling)
    plain = Turn(id="", call="k", match="root", served=Message("assistant", ""))
    life = (await store.begin(session, "k", [])).life
    detail = "\ud800" + "x" * 5000
    entries = [Entry(odd, Tokens(b"", b""), (b"c",)), Entry(plain, Tokens(b"", b""))]
    await store.commit(session, life, "k", entries, [Incident("odd", detail)])
    _same(await store.turns(session), [odd, plain], "turns")
    _same([hit.turn for hit in (await store.find(session, [b"c"]))[0]], [odd], "the turn found")
    _same((await _info(store, session)).incidents, (Incident("odd", detail),), "incidents")


async def check_binary(store: Store) -> None:
    """Ids, log probabilities and keys are bytes like any other."""
    session = _name("binary")
    blobs = [EVERY_BYTE, EVERY_BYTE[::-1], b"\x00" * 4, b"\r\n+O", b"$-1\r\n:1\r", b"\xff" * 8, b"1 2 3 4 ", b"++--"]
    built = []
    for n, blob in enumerate(blobs):
        packed = blob[: len(blob) // 4 * 4]
        turn = Turn(id=f"t{n}", call="k", match="root", prompt_tokens=len(packed) // 4, completion_tokens=len(packed) // 4)
        built.append(Built(Entry(turn, Tokens(packed, packed[::-1], b"f" + blob), (b"c" + blob, b"r" + blob[:16])), packed + packed[::-1]))
    await record(store, session, *built)
    _same(await store.tokens(session, [b.turn.id for b in built]), {b.turn.id: b.entry.tokens for b in built}, "tokens")
    for one in built:
        _same((await store.prefix(session, one.turn.id)).ids, one.prefix, "prefix")
        for hits in await store.find(session, one.entry.keys):
            _same([hit.turn.id for hit in hits], [one.turn.id], "the turn under a binary key")
    _same(await store.find(session, [b"", b"c", b"=", b"#t0", b"H1", b"life", b"turns"]), [[]] * 7, "keys that look like something")


async def check_look_up(store: Store) -> None:
    """Begin looks keys up in their order and ends behind the first known chain key; find goes to the last."""
    session = _name("look")
    a = build("a", keys=(b"ca", b"ra"))
    b = build("b", a, keys=(b"cb", b"rsame"))
    c = build("c", a, keys=(b"cb", b"rsame"))
    hidden = build("d", a)
    await record(store, session, a, b, c, hidden)
    keys = [b"cx", b"rsame", b"rx", b"cb", b"rsame", b"ca", b"ra"]
    begun = await store.begin(session, "k", keys)
    _same(_ids(begun.hits), [[], ["b", "c"], [], ["b", "c"], [], [], []], "hits up to the first known chain key")
    found = await store.find(session, keys)
    _same(_ids(found), [[], ["b", "c"], [], ["b", "c"], ["b", "c"], ["a"], ["a"]], "all hits")
    _same(_ids((await store.begin(session, "k", [b"ra", b"rsame", b"rx"])).hits), [["a"], ["b", "c"], []], "reply keys end nothing")
    _same(_ids((await store.begin(session, "k", [b"cx", b"cy"])).hits), [[], []], "unknown chain keys end nothing")
    _same(_ids((await store.begin(session, "k", [b"ca", b"ca"])).hits), [["a"], []], "a key twice")
    _same(await store.find(session, []), [], "no keys")


async def check_continued(store: Store) -> None:
    """A hit says whether another turn continues it; a base alone is no continuation."""
    session = _name("continued")
    a = build("a", keys=(b"ca",))
    b = build("b", a, keys=(b"cb",))
    c = build("c", a, keys=(b"cc",), extends=False, shared=2)
    d = build("d", b)
    await record(store, session, a)
    _same(await _continued(store, session, b"ca"), [False], "before")
    await record(store, session, c)
    _same(await _continued(store, session, b"ca"), [False], "after a turn that only shares tokens")
    await record(store, session, b)
    _same(await _continued(store, session, b"ca"), [True], "after a continuation")
    await record(store, session, build("e", a))
    _same(await _continued(store, session, b"ca"), [True], "after a second one")
    _same(await _continued(store, session, b"cb", b"cc"), [False, False], "of its children")
    await record(store, session, d)
    _same(await _continued(store, session, b"ca", b"cb", b"cc"), [True, True, False], "in the end")
    _same(await store.turns(session), [a.turn, c.turn, b.turn, build("e", a).turn, d.turn], "the turns themselves have not changed")


async def check_choices(store: Store) -> None:
    """One commit may bring several turns (n > 1), also one on top of another; all are there, in order."""
    session = _name("choices")
    a = build("a", keys=(b"c1",))
    b = build("b", keys=(b"c1", b"c2"), reply=(5,))
    c = build("c", a)
    life = (await store.begin(session, "call", [])).life
    await store.commit(session, life, "call", [a.entry, b.entry, c.entry])
    _same([turn.id for turn in await store.turns(session)], ["a", "b", "c"], "turns")
    _same(_ids(await store.find(session, [b"c1", b"c2"])), [["a", "b"], ["b"]], "turns under their keys")
    _same(await _continued(store, session, b"c1"), [True, False], "continued")
    _same((await store.prefix(session, "c")).ids, c.prefix, "prefix")


async def check_prefix(store: Store) -> None:
    """A prefix is rebuilt through the bases: whole ones, shared heads, branches, empty prompts and completions."""
    session = _name("prefix")
    a = build("a", None, (1, 2, 3), (4, 5))
    b = build("b", a, (6,), (7,))
    c = build("c", b, (8,), (9, 10))
    branch = build("d", a, (), (11,))
    cut = build("e", c, (12,), (13,), shared=2, extends=False)
    within = build("f", c, (14,), (), shared=4, extends=False)
    nothing = build("g", c, (15,), (16,), shared=0, extends=False)
    silent = build("h", c, (), ())
    after = build("i", silent, (17,), (18,))
    empty = build("j", None, (), ())
    on_cut = build("k", cut, (19,), (20,))
    every = (a, b, c, branch, cut, within, nothing, silent, after, empty, on_cut)
    await record(store, session, *every)
    for one in every:
        wanted = Prefix(one.prefix, one.turn.completion_tokens)
        _same(await store.prefix(session, one.turn.id), wanted, f"prefix of {one.turn.id}")
    async with _raises(KeyError, "prefix of a turn that is not there"):
        await store.prefix(session, "z")
    async with _raises(KeyError, "prefix in a session that is not there"):
        await store.prefix(_name("none"), "a")


async def check_tokens(store: Store) -> None:
    """Tokens are read by name, some or all, with or without log probabilities."""
    session = _name("tokens")
    a, b = build("a"), build("b", reply=())
    bare = Built(Entry(Turn(id="c", call="k", match="root"), Tokens(ids.pack([1]), b"")), b"")
    await record(store, session, a, b, bare)
    for names in ([], ["b"], ["c", "a"], ["a", "b", "c"]):
        wanted = {one.turn.id: one.entry.tokens for one in (a, b, bare) if one.turn.id in names}
        _same(await store.tokens(session, names), wanted, f"tokens of {names}")
    async with _raises(KeyError, "tokens of a turn that is not there"):
        await store.tokens(session, ["a", "z", "b"])
    async with _raises(KeyError, "tokens in a session that is not there"):
        await store.tokens(_name("none"), ["a"])


async def check_seal(store: Store) -> None:
    """A sealed session takes no more calls; open ones may still commit or settle."""
    session = _name("seal")
    _same(await store.seal(session), False, "seal of nothing")
    _same(await store.session(session), None, "sealing creates nothing")
    life = (await store.begin(session, "k1", [])).life
    await store.begin(session, "k2", [])
    _same(await store.seal(session), True, "seal")
    _same(await store.seal(session), True, "seal again")
    async with _raises(SessionSealedError, "begin in a sealed session"):
        await store.begin(session, "k3", [b"c"])
    _same(await _open(store, session), {"k1", "k2"}, "a refused call was not opened")
    await store.commit(session, life, "k1", [build("a", keys=(b"ca",)).entry])
    await store.settle(session, life, "k2", [Incident("x")])
    await store.note(session, [Incident("y")])
    info = await _info(store, session)
    _same((info.sealed, info.turns, info.open_calls), (True, 1, ()), "state")
    _same([incident.kind for incident in info.incidents], ["x", "y"], "incidents")
    _same(_ids(await store.find(session, [b"ca"])), [["a"]], "what a late call recorded")


async def check_delete(store: Store) -> None:
    """A deleted session is forgotten; a call of its former life writes nothing, even into one begun anew."""
    session = _name("delete")
    _same(await store.delete(session), False, "delete of nothing")
    old = await record(store, session, build("a", keys=(b"ca",)))
    await store.begin(session, "late", [])
    await store.seal(session)
    _same(await store.delete(session), True, "delete")
    _same(await store.delete(session), False, "delete again")
    for n in range(2):
        async with _raises(SessionGoneError, f"late commit {n}"):
            await store.commit(session, old, "late", [build("b", keys=(b"cb",)).entry], [Incident("late")])
        async with _raises(SessionGoneError, f"late settle {n}"):
            await store.settle(session, old, "late", [Incident("late")])
        if n == 0:
            _same(await store.session(session), None, "a late call brings nothing back")
            _same((await store.turns(session), await store.find(session, [b"ca", b"cb"])), ([], [[], []]), "what is left")
            begun = await store.begin(session, "k", [b"ca"])
            _true(begun.life != old, "a new life")
            _same(begun.hits, [[]], "it knows nothing of the old one")
    info = await _info(store, session)
    _same((info.sealed, info.turns, info.incidents), (False, 0, ()), "state")
    _same(await _open(store, session), {"k"}, "open calls")
    async with _raises(KeyError, "prefix of a deleted turn"):
        await store.prefix(session, "a")


async def check_incidents(store: Store) -> None:
    """Incidents come back as they were, in order, whichever way they came; a note creates its session."""
    session = _name("incidents")
    said = [Incident("store-error", "why", True, "k1", "t1", 1.5), Incident("x"), Incident("x"), Incident("naïve ☕", "\x00" * 300)]
    await store.note(session, said[:2])
    _same((await _info(store, session)).incidents, tuple(said[:2]), "after a note")
    _same(await _open(store, session), set(), "a note opens no call")
    life = (await store.begin(session, "k", [])).life
    await store.settle(session, life, "k", said[2:3])
    await store.begin(session, "k", [])
    await store.commit(session, life, "k", [build("a").entry], said[3:])
    await store.note(session, said)
    await store.note(session, [])
    _same((await _info(store, session)).incidents, (*said, *said), "in the end")
    empty = _name("empty")
    await store.note(empty, [])
    _same((await _info(store, empty)).turns, 0, "a session made by an empty note")


async def check_keys(store: Store) -> None:
    """An API key's hash stands for one session, the last it was bound to, whether that exists or not."""
    key, session = _name("key"), _name("bound")
    _same(await store.session_of_key(key), None, "a key nobody bound")
    await store.bind_key(key, session)
    await store.bind_key(key + "2", "naïve {}")
    _same(await store.session_of_key(key), session, "bound")
    _same(await store.session_of_key(key + "2"), "naïve {}", "another")
    _same(await store.session(session), None, "binding creates no session")
    await store.bind_key(key, session + "2")
    _same(await store.session_of_key(key), session + "2", "bound anew")


async def check_names(store: Store) -> None:
    """Sessions with odd names are as good as others, apart from each other, and listed by their names."""
    mark = secrets.token_hex(4)
    names = [form for odd in ODD_NAMES for form in (odd + mark, mark + odd)]
    for n, name in enumerate(names):
        await record(store, name, build(f"t{n}", keys=(b"c",)))
    for n, name in enumerate(names):
        _same(_ids(await store.find(name, [b"c"])), [[f"t{n}"]], f"what {name!r} holds")
    _same(sorted([info.id async for info in store.sessions() if mark in info.id]), sorted(names), "sessions listed")
    for name in names[::2]:
        await store.delete(name)
    _same(sorted([info.id async for info in store.sessions() if mark in info.id]), sorted(names[1::2]), "sessions left")
    for name in names:
        await store.delete(name)


async def check_sessions(store: Store) -> None:
    """Every session is listed once, in the state that `session` tells."""
    mark = _name("list")
    names = [f"{mark}-{n}" for n in range(60)]
    for n, name in enumerate(names):
        begun = await store.begin(name, "k", [])
        if n % 2:
            await store.commit(name, begun.life, "k", [build("a").entry], [Incident("x")])
        if n % 3 == 0:
            await store.seal(name)
    listed = [info async for info in store.sessions() if info.id.startswith(mark)]
    _same(sorted(info.id for info in listed), sorted(names), "sessions listed")
    for info in listed:
        _same(info, await store.session(info.id), "a listed session")
    for name in names:
        await store.delete(name)
    _same([info.id async for info in store.sessions() if info.id.startswith(mark)], [], "sessions after deleting them")


async def check_isolation(store: Store) -> None:
    """Sessions share nothing: not keys, not turns of the same name, not their end."""
    one, other = _name("one"), _name("other")
    a, b = build("t", keys=(b"c",)), build("t", tail=(5,), keys=(b"c", b"r"))
    await record(store, one, a)
    life = await record(store, other, b)
    _same((await store.turns(one), await store.turns(other)), ([a.turn], [b.turn]), "turns")
    _same([(await store.prefix(one, "t")).ids, (await store.prefix(other, "t")).ids], [a.prefix, b.prefix], "prefixes")
    _same(_ids(await store.find(one, [b"c", b"r"])), [["t"], []], "hits")
    async with _raises(SessionGoneError, "a commit with the life of another session"):
        await store.commit(one, life, "k", [build("u").entry])
    await store.delete(one)
    _same(await store.turns(other), [b.turn], "turns of the one that stays")


async def check_concurrency(store: Store) -> None:
    """Calls at once: one life, and every commit stands, all of them continuations of one turn."""
    session, many = _name("concurrent"), 25
    root = build("root", keys=(b"croot",))
    children = [build(f"t{n}", root, tail=(n,), keys=(b"csame", b"r%d" % n), call=f"k{n}") for n in range(many)]
    lives = {begun.life for begun in await asyncio.gather(*(store.begin(session, f"k{n}", []) for n in range(many)))}
    _same(len(lives), 1, "lives")
    life = lives.pop()
    await store.begin(session, "k", [])
    await store.commit(session, life, "k", [root.entry])
    await asyncio.gather(*(store.commit(session, life, c.turn.call, [c.entry], [Incident(c.turn.id)]) for c in children))
    names = sorted(child.turn.id for child in children)
    recorded = [turn.id for turn in await store.turns(session)]
    _same(sorted(recorded[1:]), names, "turns")
    found = await store.find(session, [b"csame", *(b"r%d" % n for n in range(many))])
    _same([hit.turn.id for hit in found[0]], recorded[1:], "turns under a shared key, in the order recorded")
    _same(_ids(found[1:]), [[f"t{n}"] for n in range(many)], "turns under keys of their own")
    _same(await _continued(store, session, b"croot"), [True], "continued")
    info = await _info(store, session)
    _same((info.turns, info.open_calls), (many + 1, ()), "state")
    _same(sorted(incident.kind for incident in info.incidents), names, "incidents")
    for child in children:
        _same((await store.prefix(session, child.turn.id)).ids, child.prefix, "prefix")


async def check_long_session(store: Store) -> None:
    """A long session over one growing history: its tokens are kept once, and all of it is found again."""
    session, last, built = _name("long"), None, []
    for n in range(LONG):
        last = build(f"t{n}", last, tail=range(n, n + 40), reply=range(n, n + 20), keys=(b"c%d" % n, b"r%d" % n), call=f"k{n}")
        built.append(last)
    await record(store, session, *built)
    turns = await store.turns(session)
    _same([turn.id for turn in turns], [one.turn.id for one in built], "turns in order")
    tokens = await store.tokens(session, [turn.id for turn in turns])
    stored = sum(len(own.delta) + len(own.completion) for own in tokens.values())
    _same(stored, len(built[-1].prefix), "bytes of ids kept for all turns, against those of the last prefix")
    for one in (built[0], built[LONG // 2], built[-1]):
        _same((await store.prefix(session, one.turn.id)).ids, one.prefix, f"prefix of {one.turn.id}")
    keys = [key for n in range(LONG - 1, -1, -1) for key in (b"c%d" % n, b"r%d" % n)]
    _same(_ids(await store.find(session, keys)), [[f"t{n}"] for n in range(LONG - 1, -1, -1) for _ in "cr"], "all keys")
    missing = [b"c-%d" % n for n in range(LONG)]
    begun = await store.begin(session, "k", [*missing, *keys])
    _same(_ids(begun.hits), [[]] * LONG + [[f"t{LONG - 1}"]] + [[]] * (2 * LONG - 1), "the deepest key")
    await store.note(session, [Incident(str(n)) for n in range(3 * LONG)])
    _same([incident.kind for incident in (await _info(store, session)).incidents], [str(n) for n in range(3 * LONG)], "incidents")


async def check_large_turn(store: Store) -> None:
    """A turn of a hundred thousand tokens is nothing special."""
    session = _name("large")
    one = build("a", tail=range(100_000), reply=range(30_000))
    two = build("b", one, tail=range(10))
    await record(store, session, one, two)
    _same((await store.prefix(session, "b")).ids == two.prefix, True, "prefix")
    _same((await store.tokens(session, ["a"]))["a"] == one.entry.tokens, True, "tokens")


async def check_replicas(store: Store, other: Store) -> None:
    """Two stores over one database: what one has written the other reads at once, and both may write."""
    session = _name("replicas")
    a = build("a", keys=(b"ca",))
    b, c = build("b", a, keys=(b"cb",), call="kb"), build("c", a, tail=(9,), keys=(b"cb",), call="kc")
    life = (await store.begin(session, "call", [])).life
    _same((await other.begin(session, "kb", [])).life, life, "the life, seen by the other")
    await other.commit(session, life, "call", [a.entry])
    _same(_ids((await store.begin(session, "kc", [b"ca"])).hits), [["a"]], "hits of what the other has written")
    await asyncio.gather(store.commit(session, life, "kb", [b.entry]), other.commit(session, life, "kc", [c.entry]))
    for reader in (store, other):
        _same({turn.id for turn in await reader.turns(session)}, {"a", "b", "c"}, "turns")
        _same((await reader.prefix(session, "c")).ids, c.prefix, "prefix")
        _same(await _continued(reader, session, b"ca"), [True], "continued")
    await store.bind_key(session, session)
    _same(await other.session_of_key(session), session, "a key bound by the other")
    await other.seal(session)
    async with _raises(SessionSealedError, "begin in a session that the other sealed"):
        await store.begin(session, "k", [])
    await other.delete(session)
    async with _raises(SessionGoneError, "commit into a session that the other deleted"):
        await store.commit(session, life, "k", [build("d").entry])


CHECKS: tuple[Callable[[Store], Awaitable[None]], ...] = (
    check_ping,
    check_begin,
    check_open_calls,
    check_round_trip,
    check_odd_values,
    check_binary,
    check_look_up,
    check_continued,
    check_choices,
    check_prefix,
    check_tokens,
    check_seal,
    check_delete,
    check_incidents,
    check_keys,
    check_names,
    check_sessions,
    check_isolation,
    check_concurrency,
    check_long_session,
    check_large_turn,
)
"""All checks of one store."""


def _name(what: str) -> str:
    return f"{what}-{secrets.token_hex(6)}"


def _true(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(f"not so: {what}")


def _same(got: object, wanted: object, what: str) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: {got!r}, wanted {wanted!r}")


@asynccontextmanager
async def _raises(kind: type[Exception], what: str) -> AsyncIterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what}: no {kind.__name__}")


def _ids(hits: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[hit.turn.id for hit in under] for under in hits]


async def _continued(store: Store, session: str, *keys: bytes) -> list[bool]:
    return [hit.continued for under in await store.find(session, keys) for hit in under]


async def _info(store: Store, session: str) -> Any:
    info = await store.session(session)
    _true(info is not None, f"session {session} is there")
    return info


async def _open(store: Store, session: str) -> set[str]:
    return {call.call for call in (await _info(store, session)).open_calls}

"""Checks of turns, lookup keys, hits, prefixes, tokens and contexts."""

from msgspec.structs import replace

from tests.store.conformance.support import EVERY_BYTE, Built, build, continued, ids_of, info_of, name_of, raises, record, same
from tokencache.core import ids
from tokencache.core.incidents import Incident
from tokencache.core.messages import Message, ToolCall
from tokencache.core.turn import Anchor, Prefix, Tokens, Turn
from tokencache.store.base import Entry, Store


async def check_round_trip(store: Store) -> None:
    """A turn is read with every field as it was written, and so are its tokens."""
    session = name_of("trip")
    first = build("t0")
    full = Turn(
        id="t1",
        call="k1",
        match="resplice",
        reason="context-edited",
        origin="t0",
        applied_rules=("args-json", "whitespace"),
        anchors=(Anchor("t0", 0, 5), Anchor("t0", 3, 4, 1, 1)),
        base="t0",
        shared=5,
        prompt_tokens=6,
        completion_tokens=1,
        prefix_hash=EVERY_BYTE[:16],
        completion_hash=EVERY_BYTE[-16:],
        logprobs_hash=EVERY_BYTE[16:32],
        served=Message("assistant", "naïve ☕\x00", "thought", (ToolCall("call_1", "bash", '{"a": 1.0}'),), None, "me", EVERY_BYTE, True),
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
        replaced={"temperature": None},
        logprob_kind="processed",
        experts="r/1",
        harness="codex",
        context_base="t0",
        context_shared=2,
    )
    entry = Entry(full, Tokens(ids.pack([9]), ids.pack([-1]), ids.pack_logprobs([-0.1])), (b"ck",))
    await record(store, session, first, Built(entry, b""))
    same(await store.turns(session), [first.turn, full], "turns")
    same(await store.tokens(session, ["t1", "t0"]), {"t0": first.entry.tokens, "t1": entry.tokens}, "tokens")
    hits = await store.find(session, [b"ck"])
    same([hit.turn for hit in hits[0]], [full], "the turn found")


async def check_unusual_values(store: Store) -> None:
    """A turn can contain every value of JSON: lone surrogates, large integers, any text."""
    session = name_of("unusual")
    sampling = {"seed": 2**80, "stop": ["\ud800", "\x00"], "x": [1e308, -(2**63), {"": [True, None]}], "": "\U0001f600"}
    unusual = Turn(id="t\r\n☕{}", call="k", match="root", served=Message("assistant", "\udfff" + "text " * 100), sampling=sampling)
    plain = Turn(id="", call="k", match="root", served=Message("assistant", ""))
    epoch = (await store.begin(session, "k", [])).epoch
    detail = "\ud800" + "x" * 5000
    entries = [Entry(unusual, Tokens(b"", b""), (b"c",)), Entry(plain, Tokens(b"", b""))]
    await store.commit(session, epoch, "k", entries, [Incident("unusual", detail)])
    same(await store.turns(session), [unusual, plain], "turns")
    same([hit.turn for hit in (await store.find(session, [b"c"]))[0]], [unusual], "the turn found")
    same((await info_of(store, session)).incidents, (Incident("unusual", detail),), "incidents")


async def check_binary(store: Store) -> None:
    """Ids, log probabilities and keys may contain any bytes."""
    session = name_of("binary")
    blobs = [EVERY_BYTE, EVERY_BYTE[::-1], b"\x00" * 4, b"\r\n+O", b"$-1\r\n:1\r", b"\xff" * 8, b"1 2 3 4 ", b"++--"]
    built = []
    for n, blob in enumerate(blobs):
        packed = blob[: len(blob) // 4 * 4]
        turn = Turn(id=f"t{n}", call="k", match="root", prompt_tokens=len(packed) // 4, completion_tokens=len(packed) // 4)
        built.append(Built(Entry(turn, Tokens(packed, packed[::-1], b"f" + blob), (b"c" + blob, b"r" + blob[:16])), packed + packed[::-1]))
    await record(store, session, *built)
    same(await store.tokens(session, [b.turn.id for b in built]), {b.turn.id: b.entry.tokens for b in built}, "tokens")
    for one in built:
        same((await store.prefix(session, one.turn.id)).ids, one.prefix, "prefix")
        for hits in await store.find(session, one.entry.keys):
            same([hit.turn.id for hit in hits], [one.turn.id], "the turn under a binary key")
    same(
        await store.find(session, [b"", b"c", b"=", b"#t0", b"H1", b"life", b"turns"]),
        [[]] * 7,
        "unknown keys like the store's own names",
    )


async def check_look_up(store: Store) -> None:
    """`begin` looks keys up in order and stops after the first known chain key; `find` looks up all."""
    session = name_of("look")
    a = build("a", keys=(b"ca", b"ra"))
    b = build("b", a, keys=(b"cb", b"rsame"))
    c = build("c", a, keys=(b"cb", b"rsame"))
    hidden = build("d", a)
    await record(store, session, a, b, c, hidden)
    keys = [b"cx", b"rsame", b"rx", b"cb", b"rsame", b"ca", b"ra"]
    begun = await store.begin(session, "k", keys)
    same(ids_of(begun.hits), [[], ["b", "c"], [], ["b", "c"], [], [], []], "hits up to the first known chain key")
    found = await store.find(session, keys)
    same(ids_of(found), [[], ["b", "c"], [], ["b", "c"], ["b", "c"], ["a"], ["a"]], "all hits")
    same(ids_of((await store.begin(session, "k", [b"ra", b"rsame", b"rx"])).hits), [["a"], ["b", "c"], []], "reply keys end nothing")
    same(ids_of((await store.begin(session, "k", [b"cx", b"cy"])).hits), [[], []], "unknown chain keys end nothing")
    same(ids_of((await store.begin(session, "k", [b"ca", b"ca"])).hits), [["a"], []], "a key twice")
    same(await store.find(session, []), [], "no keys")


async def check_continued(store: Store) -> None:
    """A hit reports whether another turn continues it. A turn that only shares tokens does not."""
    session = name_of("continued")
    a = build("a", keys=(b"ca",))
    b = build("b", a, keys=(b"cb",))
    c = build("c", a, keys=(b"cc",), extends=False, shared=2)
    d = build("d", b)
    await record(store, session, a)
    same(await continued(store, session, b"ca"), [False], "before")
    await record(store, session, c)
    same(await continued(store, session, b"ca"), [False], "after a turn that only shares tokens")
    await record(store, session, b)
    same(await continued(store, session, b"ca"), [True], "after a continuation")
    await record(store, session, build("e", a))
    same(await continued(store, session, b"ca"), [True], "after a second one")
    same(await continued(store, session, b"cb", b"cc"), [False, False], "of its children")
    await record(store, session, d)
    same(await continued(store, session, b"ca", b"cb", b"cc"), [True, True, False], "incidents in the end")
    same(await store.turns(session), [a.turn, c.turn, b.turn, build("e", a).turn, d.turn], "the turns themselves")


async def check_choices(store: Store) -> None:
    """One commit may record several turns (n > 1), also one that continues another. All are recorded in order."""
    session = name_of("choices")
    a = build("a", keys=(b"c1",))
    b = build("b", keys=(b"c1", b"c2"), reply=(5,))
    c = build("c", a)
    epoch = (await store.begin(session, "call", [])).epoch
    await store.commit(session, epoch, "call", [a.entry, b.entry, c.entry])
    same([turn.id for turn in await store.turns(session)], ["a", "b", "c"], "turns")
    same(ids_of(await store.find(session, [b"c1", b"c2"])), [["a", "b"], ["b"]], "turns under their keys")
    same(await continued(store, session, b"c1"), [True, False], "continued")
    same((await store.prefix(session, "c")).ids, c.prefix, "prefix")


async def check_prefix(store: Store) -> None:
    """A prefix is rebuilt from its bases: whole ones, parts, branches, empty prompts and completions."""
    session = name_of("prefix")
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
        same(await store.prefix(session, one.turn.id), wanted, f"prefix of {one.turn.id}")
    async with raises(KeyError, "prefix of a missing turn"):
        await store.prefix(session, "z")
    async with raises(KeyError, "prefix in a missing session"):
        await store.prefix(name_of("none"), "a")


async def check_contexts(store: Store) -> None:
    """Contexts are read by turn, some or all, with any bytes. A turn may have none."""
    session = name_of("contexts")
    a, b, c = build("a"), build("b"), build("c")
    kept = {"a": EVERY_BYTE * 500, "b": b"", "c": b"\x00"}
    await record(store, session, *(Built(replace(one.entry, context=kept[one.turn.id]), one.prefix) for one in (a, b, c)))
    for names in ([], ["b"], ["c", "a"], ["a", "b", "c"]):
        same(await store.contexts(session, names), {name: kept[name] for name in names}, f"contexts of {names}")
    same((await store.tokens(session, ["a"]))["a"], a.entry.tokens, "tokens of a turn with a context")
    async with raises(KeyError, "context of a missing turn"):
        await store.contexts(session, ["a", "z"])
    async with raises(KeyError, "context in a missing session"):
        await store.contexts(name_of("none"), ["a"])


async def check_tokens(store: Store) -> None:
    """Tokens are read by turn, some or all, with or without log probabilities."""
    session = name_of("tokens")
    a, b = build("a"), build("b", reply=())
    bare = Built(Entry(Turn(id="c", call="k", match="root"), Tokens(ids.pack([1]), b"")), b"")
    await record(store, session, a, b, bare)
    for names in ([], ["b"], ["c", "a"], ["a", "b", "c"]):
        wanted = {one.turn.id: one.entry.tokens for one in (a, b, bare) if one.turn.id in names}
        same(await store.tokens(session, names), wanted, f"tokens of {names}")
    async with raises(KeyError, "tokens of a missing turn"):
        await store.tokens(session, ["a", "z", "b"])
    async with raises(KeyError, "tokens in a missing session"):
        await store.tokens(name_of("none"), ["a"])

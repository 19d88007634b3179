"""Routed experts: written to a file that the turn refers to, never stored, and never sent to the client of a session."""

import asyncio
import contextlib
import json
import tracemalloc

import msgspec
import pytest

from tests.proxy.kit import EPISODES, HEADER, echo, proxied, user
from tests.support.plugin_engine import PluginEngine
from tests.support.plugin_engine.metadata import experts_file
from tokencache.batching import load_experts
from tokencache.core.experts import read_npy
from tokencache.dialects.chat.reply import PassthroughEncoder
from tokencache.engine.reply import Reply
from tokencache.proxy.routed_experts import LocalFiles, ObjectFiles, as_file, open_files
from tokencache.trajectories.values import Trajectory

SESSION = "r1:a@b+c=.."  # as odd as a session's name may be
ASK = [user("EPISODE:talk")]
LAYERS, CHOSEN = 3, 2


def engine():
    return PluginEngine(episodes=EPISODES, seed=7, routed_experts=(LAYERS, CHOSEN))


def files(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def rows(file):
    """How many rows a `.npy` file says that it has, and has."""
    assert file[:6] == b"\x93NUMPY"
    length = int.from_bytes(file[8:10], "little")
    said = file[10 : 10 + length].decode()
    assert (10 + length) % 64 == 0
    data = file[10 + length :]
    assert f"'shape': ({len(data) // (LAYERS * CHOSEN)}, {LAYERS}, {CHOSEN})" in said
    return len(data) // (LAYERS * CHOSEN)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_each_turn_refers_to_its_file(path, tmp_path):
    body = {"prompt": "hello"} if path == "/v1/completions" else {"messages": ASK}
    async with proxied(engine(), experts=str(tmp_path / "deep/root")) as rig:
        status, said = await rig.post(SESSION, path, model="sim", max_tokens=60, **body)
        assert status == 200
        assert not any(choice["routed_experts"] for choice in said.get("choices", ()))
        (turn,) = await rig.turns(SESSION)
        found = files(tmp_path / "deep/root")
        assert list(found) == [turn["experts"]] == [f"{SESSION}/{turn['call']}-0.npy"]
        assert rows(found[turn["experts"]]) == turn["prompt_tokens"] + turn["completion_tokens"] - 1
        exported = await rig.exported(SESSION)
        assert (exported["complete"], exported["sequences"][0]["turns"][0]["experts"]) == (True, turn["experts"])


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("shown", [{}, {"return_token_ids": True, "logprobs": True}], ids=["", "ids"])
async def test_the_client_receives_what_an_engine_without_the_flag_sends(kept, shown, tmp_path):
    async with proxied(engine(), **({"experts": str(tmp_path)} if kept else {})) as rig:
        _, said = await rig.post("s", messages=ASK, n=2, **shown)
        rig.engine.metadata.experts, rig.engine._calls = None, iter([50])
        _, plain = await rig.post("t", messages=ASK, n=2, **shown)
        assert [set(choice) for choice in said["choices"]] == [set(choice) for choice in plain["choices"]]
        assert all(choice["routed_experts"] is None for choice in said["choices"])
        assert all(bool(choice["token_ids"]) == bool(shown) for choice in said["choices"])
        turns = await rig.turns("s")
        assert len(turns) == 2
        assert sorted(files(tmp_path)) == sorted(turn["experts"] for turn in turns if kept)
        assert [bool(turn["experts"]) for turn in turns] == [kept, kept]
        await rig.check("s")


async def conversation(rig, turns, *, streamed=(), **more):
    """A session of several turns, each continuing the one before."""
    messages = [user("EPISODE:talk")]
    for number in range(turns):
        said = await rig.say("s", messages, **({"stream": True} if number in streamed else {}), **more)
        messages += [echo(said), user(f"go on with {number}")]
    return messages


async def sequences(rig):
    return msgspec.convert(await rig.exported(), Trajectory).sequences


def unequal(sequence, root):
    """The rows of a sequence that differ from those that the engine would report for all of it."""
    found, whole = load_experts(sequence, root), read_npy(experts_file(sequence.token_ids[:-1], LAYERS, CHOSEN))
    width = whole.width
    assert len(found) == len(whole)
    return [n for n in range(len(whole)) if found[n].tobytes() != whole.data[n * width : (n + 1) * width]]


@pytest.mark.parametrize("skips", [True, False], ids=["knows-the-start", "ignores-the-start"])
async def test_files_of_a_session_grow_with_its_tokens_and_join_to_the_whole(skips, tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        rig.engine.metadata.skips_experts = skips
        messages = await conversation(rig, 6)
        await rig.say("s", [*messages[:5], user("another way")])  # a branch
        await rig.check()
        main, branch = await sequences(rig)
        assert len(main.turns) == 6
        assert main.turns[-1].match == "continue"
        stored = {turn["turn"]: rows(files(tmp_path)[turn["experts"]]) for turn in await rig.turns()}
        own = {turn.turn: turn.prompt_tokens + turn.completion_tokens - 1 - turn.experts_start for turn in (*main.turns, *branch.turns)}
        assert stored == own
        assert sum(stored[turn.turn] for turn in main.turns) == main.tokens - 1  # each token's row is stored once
        assert stored[branch.turns[0].turn] < branch.tokens / 2
        assert unequal(main, tmp_path) == unequal(branch, str(tmp_path)) == []


async def test_a_sequence_that_is_cut_has_the_rows_that_remain(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        await conversation(rig, 3)
        (whole,) = await sequences(rig)
        end = whole.turns[1].completion[1]
        cut = await rig.get(f"/tokencache/v1/sessions/s/trajectories?max_length={end}&overlong=cut")
        (sequence,) = msgspec.convert(cut, Trajectory).sequences
        assert (sequence.tokens, sequence.overlong, len(sequence.experts)) == (end, "cut", 2)
        assert unequal(sequence, tmp_path) == []


async def test_wrong_rows_are_found(tmp_path):
    """The comparison above can fail: rows of another turn in a file's place."""
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        await conversation(rig, 2)
        (sequence,) = await sequences(rig)
        first, second = sequence.experts
        other = read_npy((tmp_path / first.path).read_bytes()).between(0, second.end - second.start)
        (tmp_path / second.path).write_bytes(other.as_npy())
        assert unequal(sequence, tmp_path)


async def test_after_a_streamed_turn_the_missing_rows_are_requested_too(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        messages = await conversation(rig, 2, streamed={1})
        (sequence,) = await sequences(rig)
        with pytest.raises(ValueError, match="only for its tokens from 0 to"):
            load_experts(sequence, tmp_path)
        await rig.say("s", messages)
        (sequence,) = await sequences(rig)
        assert [turn.experts != "" for turn in sequence.turns] == [True, False, True]
        assert sequence.experts[1].start == sequence.experts[0].end == sequence.turns[1].experts_start
        assert unequal(sequence, tmp_path) == []


async def test_an_edited_history_is_reported_from_its_first_token(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        messages = await conversation(rig, 2)
        await rig.say("s", [{"role": "system", "content": "Be brief."}, *messages])
        main, edited = await sequences(rig)
        assert edited.start == "resplice"
        assert edited.turns[0].experts_start == 0
        assert unequal(main, tmp_path) == unequal(edited, tmp_path) == []


async def test_a_harness_cannot_shorten_the_files(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        await conversation(rig, 2, routed_experts_prompt_start=1)
        (sequence,) = await sequences(rig)
        assert unequal(sequence, tmp_path) == []
        assert [request.get("routed_experts_prompt_start") for request in rig.engine.requests if "kv_transfer_params" in request][-1:] == [
            sequence.turns[1].experts_start
        ]


async def test_without_files_the_request_stays_as_it_is():
    async with proxied(engine()) as rig:
        await conversation(rig, 2)
        await rig.say("s", ASK, routed_experts_prompt_start=1)
        asked = [request.get("routed_experts_prompt_start") for request in rig.engine.requests]
        assert [one for one in asked if one is not None] == [1]


async def test_rows_that_cannot_be_placed_are_stored_as_they_are(tmp_path):
    """Text completions send the harness's own body: nothing says where these rows begin, and no sequence uses them."""
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        await rig.post("s", "/v1/completions", model="sim", prompt="hello you", max_tokens=8, routed_experts_prompt_start=2)
        (turn,), (sequence,) = await rig.turns(), await sequences(rig)
        assert (rows(files(tmp_path)[turn["experts"]]), turn["experts_start"]) == (
            turn["prompt_tokens"] + turn["completion_tokens"] - 3,
            -1,
        )
        assert sequence.experts == []


async def test_a_stream_has_no_routed_experts(tmp_path):
    """vLLM 0.32 gives them with whole replies only: a streamed turn refers to nothing, and that is no incident."""
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        await rig.say("s", ASK, stream=True)
        (turn,) = await rig.turns()
        assert (turn["experts"], files(tmp_path), (await rig.info())["incidents"]) == ("", {}, [])


async def test_a_failed_write_is_an_incident_and_has_no_other_effect(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        (tmp_path / "s").write_text("in the way")
        await rig.say("s", ASK)
        (turn,), info = await rig.turns(), await rig.info()
        assert turn["experts"] == ""
        assert [(incident["kind"], incident["hole"]) for incident in info["incidents"]] == [("experts-lost", False)]
        assert (await rig.check())["complete"]


async def test_files_are_removed_with_their_session(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        for session in ("s", "t"):
            await rig.say(session, ASK)
        async with rig.http.delete(f"{rig.url}/tokencache/v1/sessions/s") as answer:
            assert answer.status == 200
        (kept,) = await rig.turns("t")
        assert [path.name for path in tmp_path.iterdir()] == ["t"]
        assert list(files(tmp_path)) == [kept["experts"]]


async def test_a_call_of_a_deleted_session_leaves_no_file(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        rig.engine.token_delay = 0.001
        probed = len(rig.engine.requests)
        call = asyncio.create_task(rig.post("s", messages=ASK))
        await rig.engine.until(lambda: len(rig.engine.requests) > probed)
        async with rig.http.delete(f"{rig.url}/tokencache/v1/sessions/s") as answer:
            assert answer.status == 200
        assert (await call)[0] == 200
        assert files(tmp_path) == {}


async def test_an_object_store():
    url = "memory://tokencache-experts"
    async with proxied(engine(), experts=url) as rig:
        await rig.say("s", ASK)
        (turn,) = await rig.turns()
        store = open_files(url)
        assert isinstance(store, ObjectFiles)
        assert rows(store._files.cat_file(f"{store._root}/{turn['experts']}")) == turn["prompt_tokens"] + turn["completion_tokens"] - 1
        (sequence,) = await sequences(rig)
        assert unequal(sequence, url) == []
        async with rig.http.delete(f"{rig.url}/tokencache/v1/sessions/s") as answer:
            assert answer.status == 200
        assert not store._files.exists(f"{store._root}/{turn['experts']}")
        assert not store._files.find(store._root)


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    folder = LocalFiles(tmp_path)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with contextlib.suppress(OSError):
        folder.put("s/x.npy", bytearray(b"half"))
    assert files(tmp_path) == {}
    folder.remove("s/never-there")


async def test_an_unwritable_root_is_an_error_at_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        open_files(str(tmp_path / "file/below"))
    with pytest.raises(ValueError, match="nonsense"):
        open_files("nonsense://x")


@pytest.mark.parametrize(
    ("value", "left", "file"),
    [
        ('"k05VTVBZAA=="', '"=0"', b"\x93NUMPY\x00"),
        ("[[1,2]]", "[[1,2]]", b"[[1,2]]"),
        ('"aGVsbG8="', '"=0"', b'"aGVsbG8="'),
        ('"no base64"', '"=0"', b'"no base64"'),
        ("null", "null", None),
    ],
)
def test_the_value_that_is_cut_out(value, left, file):
    reply = Reply()
    body = '{"choices":[{"message":{"content":"\\"routed_experts\\":\\"x\\""},"routed_experts":%s,"index":0}]}'
    short = reply.without_experts((body % value).encode())
    assert short == (body % left).encode()
    reply.add(short)
    experts = reply.choices[0].experts
    assert (as_file(experts)[0] if experts else None) == file
    assert PassthroughEncoder({}).has_extras(short) == (value != "null")


def test_an_empty_value_does_not_replace_an_earlier_one():
    reply = Reply()
    for value in ("aGVsbG8=", ""):
        reply.add(reply.without_experts(b'{"choices":[{"message":{},"routed_experts":"%s","index":0}]}' % value.encode()))
    assert reply.choices[0].experts == b"aGVsbG8="


def test_of_a_stream_only_the_last_value_is_held():
    """An engine that reports them with each chunk: otherwise each chunk would copy a list of all that came before."""
    reply, size = Reply(), 100_000
    tracemalloc.start()
    try:
        for number in range(100):
            chunk = b'{"choices":[{"delta":{},"routed_experts":"%s","index":0}]}' % (b"%d" % number * size)
            reply.add(reply.without_experts(chunk))
            del chunk
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reply.choices[0].experts == b"99" * size
    assert held < 10 * size


def test_half_a_body_stays_unchanged():
    reply = Reply()
    assert reply.without_experts(b'{"routed_experts":"abc') == b'{"routed_experts":"abc'


async def test_without_a_session_the_client_receives_them(tmp_path):
    async with proxied(engine(), experts=str(tmp_path)) as rig:
        _, said = await rig.post(None, messages=ASK)
        assert said["choices"][0]["routed_experts"]
        assert HEADER not in json.dumps(said)
        assert files(tmp_path) == {}

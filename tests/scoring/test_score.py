"""`tokencache score`: the scores of all rows in the order of the input, also after a failure, an interruption, or a refusal."""

import asyncio
import json
import random

import msgspec
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.commands.test_commands import Shell, record
from tests.proxy.kit import proxied
from tests.scoring.kit import turn
from tokencache.cli import app
from tokencache.client import AsyncClient
from tokencache.scoring.journal import Journal, JournalError
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine
from tokencache.testing.faults import Fault, FaultKind
from tokencache.trajectories.digest import add_digest

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


async def score(*arguments, code=0):
    result = await asyncio.to_thread(CliRunner().invoke, app, ["score", *map(str, arguments)])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return " ".join(result.stderr.split())


@pytest.fixture
async def recorded(serve, tmp_path):
    """An engine, its URL, and a file of five rollouts that it sampled, each longer than the one before."""
    engine, url, recorder = await serve()
    rng = random.Random(1)
    rollouts = [await recorder.rollout(turn(rng.choices(range(300, 500), k=200 * n + 10)), turn([7, 8])) for n in range(5)]
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts))
    engine.completions.clear()
    return engine, url, path, rollouts


def rows_of(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def test_rows_have_what_was_recorded_and_what_was_recomputed(recorded, tmp_path):
    engine, url, path, rollouts = recorded
    to = tmp_path / "scores.jsonl"
    said = await score(path, "--engine", url, "--to", to)
    rows = rows_of(to)
    assert f"5 sequences in {to}" in said
    assert "bytes a token" in said
    for row, rollout in zip(rows, rollouts, strict=True):
        (sequence,) = rollout.sequences
        assert (row["session"], row["sequence"]) == (rollout.session, "q1")
        assert [row[name] for name in ("token_ids", "loss_mask", "logprobs")] == [
            sequence.token_ids, sequence.loss_mask, sequence.logprobs,
        ]  # fmt: skip
        assert row["score_model"] == "sim"
        assert row["score"][0] == 0.0
        assert [a for a, m in zip(row["score"], row["loss_mask"], strict=True) if m] == [
            b for b, m in zip(row["logprobs"], row["loss_mask"], strict=True) if m
        ]
    assert not to.with_name("scores.jsonl.scored").exists()
    (salt,) = {request["cache_salt"] for request in engine.completions}
    assert len(salt) == 32
    await score(path, "--engine", url, "--to", to, "--overwrite")
    assert len({request["cache_salt"] for request in engine.completions}) == 2


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
async def test_a_row_with_images_is_never_scored(recorded, tmp_path, ending):
    """The engine would compute values for their placeholders as text, and for all that follows."""
    engine, url, _, (first, second, *_) = recorded
    spans = [msgspec.structs.replace(one, marks=["media"]) for one in second.sequences[0].turns]
    seeing = msgspec.structs.replace(second, sequences=[msgspec.structs.replace(second.sequences[0], turns=spans)])
    path, once, twice = tmp_path / "mixed.jsonl", tmp_path / f"once{ending}", tmp_path / f"twice{ending}"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in (first, seeing)))
    said = await score(path, "--engine", url, "--to", once, code=1)
    assert "has media, whose ids cannot be scored" in said
    await score(once, "--engine", url, "--to", twice, "--name", "ref", code=1)
    assert [(bool(row["score"]), bool(row["score_ref"])) for row in rows_of(twice)] == [(True, True), (False, False)]
    assert rows_of(twice)[1]["score_ref_error"] == rows_of(twice)[1]["media_error"]
    assert second.sequences[0].token_ids not in [request["prompt"] for request in engine.completions]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
async def test_a_file_of_scores_is_scored_again_under_another_name(recorded, serve, tmp_path, ending):
    _, url, path, _ = recorded
    _, other, _ = await serve(weights="v2")
    once, twice = tmp_path / f"once{ending}", tmp_path / f"twice{ending}"
    await score(path, "--engine", url, "--to", once, "--name", "policy", "--top", 3)
    await score(once, "--engine", other, "--to", twice, "--name", "ref")
    for before, row in zip(rows_of(once), rows_of(twice), strict=True):
        assert {name: row[name] for name in before} == before
        assert len(row["score_policy"]) == len(row["score_ref"]) == len(row["token_ids"])
        assert row["score_policy"] != row["score_ref"]
        assert row["score_policy_top_ids"][0] == row["score_policy_top_logprobs"][0] == []
        for token, own, ids, values in zip(
            row["token_ids"], row["score_policy"], row["score_policy_top_ids"], row["score_policy_top_logprobs"], strict=True
        ):
            assert not ids or (len(ids) == 3 and dict(zip(ids, values, strict=True))[token] == pytest.approx(own, abs=1e-6))


async def test_parquet_has_lists_of_float32(recorded, tmp_path):
    _, url, path, _ = recorded
    to = tmp_path / "scores.parquet"
    await score(path, "--engine", url, "--to", to, "--top", 2)
    schema = pq.read_table(to).schema
    assert {name: str(schema.field(name).type) for name in ("token_ids", "logprobs", "score", "score_top_ids", "score_top_logprobs")} == {
        "token_ids": "list<element: int32>",
        "logprobs": "list<element: float>",
        "score": "list<element: float>",
        "score_top_ids": "list<element: list<element: int32>>",
        "score_top_logprobs": "list<element: list<element: float>>",
    }


async def test_a_row_that_is_refused_loses_no_other_and_is_tried_again(recorded, tmp_path):
    engine, url, path, rollouts = recorded
    to, longest = tmp_path / "scores.jsonl", len(rollouts[4].sequences[0].token_ids)
    said = await score(path, "--engine", url, "--to", to, "--max-tokens-at-once", longest - 1, code=1)
    assert f"{rollouts[4].session}/q1: {longest:,} tokens are more than --max-tokens-at-once" in said
    rows = rows_of(to)
    assert [row["score"] is None for row in rows] == [False] * 4 + [True]
    assert "--max-tokens-at-once" in rows[4]["score_error"]
    engine.completions.clear()
    said = await score(path, "--engine", url, "--to", to, "--resume")
    assert [len(request["prompt"]) for request in engine.completions] == [longest], "only the refused row is scored"
    assert "4 kept from an earlier run" in said
    assert [row["session"] for row in rows_of(to)] == [rollout.session for rollout in rollouts]
    assert all(row["score"] and "score_error" not in row for row in rows_of(to))
    assert not to.with_name("scores.jsonl.scored").exists()


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "gpu2:8000"])
async def test_a_url_that_no_engine_can_have_is_named(recorded, tmp_path, url):
    said = await score(recorded[2], "--engine", url, "--to", tmp_path / "scores.jsonl", code=1)
    assert f"'{url}' is not the base URL of an engine" in said


@pytest.mark.parametrize(
    ("proxy", "why"),
    [("socks5://gateway:1080", "Using SOCKS proxy, but the 'socksio' package is not installed"), ("gateway:port", "Invalid port: 'port'")],
)
async def test_a_web_proxy_that_httpx_cannot_use_is_named(recorded, tmp_path, monkeypatch, proxy, why):
    monkeypatch.setenv("ALL_PROXY", proxy)
    said = await score(recorded[2], "--engine", "http://gpu2:8000", "--to", tmp_path / "scores.jsonl", code=1)
    assert f"ALL_PROXY cannot be used: {why}" in said
    assert "(if http://gpu2:8000 is reached without it, unset the variable)" in said


async def test_a_run_that_lost_its_engine_is_resumed(recorded, tmp_path):
    engine, url, path, rollouts = recorded
    to, journal = tmp_path / "scores.jsonl", tmp_path / "scores.jsonl.scored"
    lost = len(rollouts[2].sequences[0].token_ids)
    engine.choose_fault = lambda route, body: Fault(FaultKind.CLOSE) if len(body.get("prompt", ())) == lost else None
    limit = ("--max-tokens-at-once", len(rollouts[4].sequences[0].token_ids))  # one row at a time, so that some are done
    said = await score(path, "--engine", url, "--to", to, *limit, code=1)
    assert "does not answer" in said
    assert f"{journal} holds what is done: --resume continues" in said
    assert not to.exists()
    done = len(journal.read_bytes().splitlines()) - 1
    assert 0 < done < 5
    with journal.open("ab") as torn:
        torn.write(b'{"key":"x","row":{"tok')
    assert "--resume continues it" in await score(path, "--engine", url, "--to", to, code=1), "no second run begins over it"
    assert "was written with top 0 instead of 1" in await score(path, "--engine", url, "--to", to, "--resume", "--top", 1, code=1)
    engine.choose_fault = None
    engine.completions.clear()
    assert f"{done} kept" in await score(path, "--engine", url, "--to", to, "--resume")
    assert len(engine.completions) == 5 - done
    assert [row["session"] for row in rows_of(to)] == [rollout.session for rollout in rollouts]
    assert all(row["score"] for row in rows_of(to))


async def test_weights_that_change_meanwhile_are_noticed(recorded, tmp_path):
    engine, url, path, _ = recorded
    engine.weights.label = "v1"

    def fault(route, body):
        engine.weights.label = "v2" if len(engine.completions) >= 3 else "v1"

    engine.choose_fault = fault
    to = tmp_path / "scores.jsonl"
    assert "changed from version 'v1' to 'v2'" in await score(path, "--engine", url, "--to", to, code=1)
    assert not to.exists()


async def test_sessions_of_a_proxy_and_never_the_proxy_itself(tmp_path):
    engine = SimulatedEngine(seed=7)
    engine.weights.loaded = "v1"
    async with proxied(engine) as rig:
        shell = Shell(rig)
        for name in ("run7-a", "run7-b", "other"):
            await record(rig, name, 1)
        to = tmp_path / "scores.jsonl"
        await shell("score", "--pattern", "run7-*", "--engine", rig.up, "--to", str(to))
        assert [row["session"] for row in rows_of(to)] == ["run7-a", "run7-b"]
        refused = await shell("score", "other", "--engine", rig.url, "--to", str(to), "--overwrite", code=1)
        assert "is a tokencache proxy" in refused.stderr
        assert (await rig.get("/tokencache/v1/sessions/other"))["turns"] == 2
        assert (await shell("audit", "--all", "--engine", rig.up, "--any-version")).exit_code == 0


class DeletesTheNext(MemoryStore):
    """A store from which another process deletes session `b` while `a` is read."""

    async def turns(self, session):
        if session == "a":
            await self.delete("b")
        return await super().turns(session)


async def test_a_session_that_is_deleted_since_it_was_listed_is_left_out(tmp_path):
    async with proxied(SimulatedEngine(seed=7), DeletesTheNext()) as rig:
        for name in ("a", "b", "c"):
            await record(rig, name, 1)
        to = tmp_path / "scores.jsonl"
        await Shell(rig)("score", "--all", "--engine", rig.up, "--to", str(to))
        assert [row["session"] for row in rows_of(to)] == ["a", "c"]
        assert "there is no session 'b'" in (await Shell(rig)("score", "b", "--engine", rig.up, "--to", f"{to}.gz", code=1)).stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "a.txt"], "must end with"),
        (["--to", "no/such/a.jsonl"], "there is no directory"),
        (["--to", "taken.jsonl"], "exists already"),
        (["--to", "a.jsonl", "--model", "other"], "serves sim: name the model"),
    ],
)
async def test_what_cannot_work_is_refused_before_anything_is_scored(recorded, tmp_path, monkeypatch, options, words):
    engine, url, path, _ = recorded
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.jsonl").write_text("")
    assert words in await score(path, "--engine", url, *options, code=1)
    assert engine.completions == []
    assert {file.name for file in tmp_path.iterdir()} == {"rollouts.jsonl", "taken.jsonl"}


async def test_a_file_that_holds_no_rollouts(recorded, tmp_path):
    _, url, _, _ = recorded
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}\n')
    assert "other.jsonl, number 1: neither a native rollout nor a row of scores" in await score(
        other, "--engine", url, "--to", tmp_path / "a.jsonl", code=1
    )


async def test_a_file_that_was_changed_and_one_without_sequences(recorded, tmp_path):
    engine, url, path, _ = recorded
    value = json.loads(path.read_bytes().splitlines()[0])
    add_digest(value)
    changed, empty = tmp_path / "changed.jsonl", tmp_path / "empty.jsonl"
    changed.write_text(json.dumps(value | {"session": "another"}) + "\n")
    empty.write_text("")
    to = tmp_path / "a.jsonl"
    assert "changed.jsonl, number 1 was changed after it was exported" in await score(changed, "--engine", url, "--to", to, code=1)
    assert "no sequence to score" in await score(empty, "--engine", url, "--to", to, code=1)
    journal = tmp_path / "a.jsonl.scored"
    journal.write_text("not JSON\n")
    assert "is no journal of scores" in await score(path, "--engine", url, "--to", to, "--resume", code=1)
    assert (journal.read_text(), engine.completions) == ("not JSON\n", [])
    assert not to.exists()


# --- edited messages ---

HINT = {"edits": [{"at": 0, "insert": [{"role": "user", "content": "Hint: try ü."}]}]}


@pytest.fixture
async def sessions(tmp_path):
    """A proxy with two sessions of three turns; returns its shell and a function that writes a file of edits."""
    engine = SimulatedEngine(seed=7, dev_mode=True)
    engine.weights.loaded = "v1"
    async with proxied(engine) as rig:
        for name in ("a", "b"):
            await record(rig, name, 2)
        engine.completions.clear()

        def write(*values):
            path = tmp_path / "edits.jsonl"
            path.write_text("\n".join(map(json.dumps, values)))
            return str(path)

        yield Shell(rig), write


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
async def test_turns_are_scored_after_edited_messages(sessions, tmp_path, ending):
    shell, write = sessions
    to = tmp_path / f"hinted{ending}"
    await shell("score", "a", "b", "--edit", write(HINT), "--top", "2", "--engine", shell.rig.up, "--to", str(to))
    rows = rows_of(to)
    assert [row["session"] for row in rows] == ["a"] * 3 + ["b"] * 3
    for row in rows:
        turns = {turn.turn: turn for turn in (await edited(shell.rig, row["session"], HINT["edits"], top=2)).turns}
        turn = turns[row["turn"]]
        start = len(turn.prompt_token_ids)
        assert (row["sequence"], row["edits"]) == (turn.sequence, [0])
        assert row["token_ids"] == turn.prompt_token_ids + turn.token_ids
        assert (sum(row["loss_mask"][:start]), row["loss_mask"][start:]) == (0, turn.loss_mask)
        assert row["logprobs"][start:] == pytest.approx(turn.logprobs)
        assert row["score"][start:] == pytest.approx(turn.score)
        assert row["score_top_ids"][start:] == turn.top_ids
        assert row["score"][start:] != pytest.approx(turn.logprobs)
    again = tmp_path / f"again{ending}"
    await score(to, "--engine", shell.rig.up, "--to", again, "--name", "ref")
    assert [row["score_ref"] == row["score"] for row in rows_of(again)] == [True] * 6


async def edited(rig, session, edits, **more):
    async with AsyncClient(rig.url) as client:
        return await client.session(session).score(edits, **more)


async def test_a_turn_that_is_refused_is_never_scored(sessions, tmp_path):
    shell, write = sessions
    to, again = tmp_path / "a.jsonl", tmp_path / "again.jsonl"
    reply = {"session": "a", "edits": [{"at": 1, "replace": [{"role": "user", "content": "x"}]}]}
    result = await shell("score", "a", "b", "--edit", write(HINT, reply), "--engine", shell.rig.up, "--to", str(to), code=1)
    assert "sampled-reply: an edit replaces a reply" in " ".join(result.stderr.split())
    rows = rows_of(to)
    assert [(row["session"], row["score"] is None) for row in rows] == [("a", False), ("a", True), ("a", True), *[("b", False)] * 3]
    assert rows[1]["token_ids"] == []
    assert rows[1]["edit_error"] == rows[1]["score_error"]
    scored = len(shell.rig.engine.completions)
    await score(to, "--engine", shell.rig.up, "--to", again, "--name", "ref", code=1)
    assert [row["score_ref"] is None for row in rows_of(again)] == [row["score"] is None for row in rows]
    assert len(shell.rig.engine.completions) == scored + 4


async def test_a_parquet_file_may_begin_with_a_turn_that_is_refused(sessions, tmp_path):
    shell, write = sessions
    to, (_, second, _) = tmp_path / "a.parquet", await shell.rig.store.turns("a")
    reply = {"session": "a", "edits": [{"at": 1, "replace": [{"role": "user", "content": "x"}]}], "turns": [second.id]}
    await shell("score", "a", "b", "--edit", write(HINT, reply), "--engine", shell.rig.up, "--to", str(to), code=1)
    assert [(row["session"], row["score"] is None) for row in rows_of(to)] == [("a", True), *[("b", False)] * 3]


async def test_a_turn_that_is_proven_later_is_scored_by_a_resumed_run(sessions, tmp_path):
    shell, write = sessions
    to, tokenizer = tmp_path / "a.jsonl", shell.rig.engine.tokenizer
    command = ("score", "a", "--edit", write(HINT), "--engine", shell.rig.up, "--to", str(to))
    ours, tokenizer.chat_template = tokenizer.chat_template, tokenizer.chat_template.replace("'<|im_end|>\\n' }}", "'!<|im_end|>\\n' }}", 1)
    assert "rendered-otherwise" in (await shell(*command, code=1)).stderr
    assert [row["score"] for row in rows_of(to)] == [None] * 3
    tokenizer.chat_template = ours
    await shell(*command, "--resume")
    assert all(row["score"] and "edit_error" not in row for row in rows_of(to))
    assert not to.with_name("a.jsonl.scored").exists()


async def test_an_engine_that_is_lost_leaves_a_journal_and_no_file(sessions, tmp_path):
    shell, write = sessions
    to, engine = tmp_path / "a.jsonl", shell.rig.engine
    command = ("score", "a", "b", "--engine", shell.rig.up, "--to", str(to), "--max-tokens-at-once", "2000", "--edit", write(HINT))
    engine.choose_fault = lambda route, body: Fault(FaultKind.CLOSE) if len(engine.completions) > 3 else None
    assert "--resume continues" in (await shell(*command, code=1)).stderr.replace("\n", " ")
    assert not to.exists()
    engine.choose_fault = None
    other = write({"edits": [{"insert": [{"role": "user", "content": "Other words."}]}]})
    assert "was written with edits" in (await shell(*command, "--resume", code=1)).stderr
    assert write(HINT) == other
    await shell(*command, "--resume")
    assert [row["session"] for row in rows_of(to)] == ["a"] * 3 + ["b"] * 3
    assert all(row["score"] for row in rows_of(to))


@pytest.mark.parametrize(
    ("values", "target", "words"),
    [
        ([HINT], "rollouts.jsonl", "has no messages to edit"),
        ([{"session": "b", **HINT}], "a", "session a: the file of edits has none for it"),
        ([HINT, HINT], "a", "number 2: all sessions has edits already"),
        ([{"edits": [{"at": "0"}]}], "a", "number 1: Expected `int | null`, got `str` - at `$.edits[0].at`"),
        ([{"edit": []}], "a", "number 1: Object contains unknown field `edit`"),
        ([{"edits": [{"at": 40, "insert": [{"role": "user", "content": "x"}]}]}], "a", "`edits[0].at` is 40, and no chosen turn"),
    ],
)
async def test_edits_that_cannot_be_applied_are_refused(sessions, tmp_path, values, target, words):
    shell, write = sessions
    result = await shell("score", target, "--edit", write(*values), "--engine", shell.rig.up, "--to", str(tmp_path / "a.jsonl"), code=1)
    assert words in " ".join(result.stderr.split())
    assert {file.name for file in tmp_path.iterdir()} == {"edits.jsonl"}
    assert shell.rig.engine.completions == []


def test_two_runs_do_not_write_one_journal(tmp_path):
    path, settings = tmp_path / "a.jsonl.scored", {"model": "sim"}
    with Journal(path, settings, resume=False) as first:
        first.append("k", {"score": [0.0]})
        for resume in (True, False):
            with pytest.raises(JournalError, match="written by another run"):
                Journal(path, settings, resume=resume)
    with Journal(path, settings, resume=True) as again:
        assert "k" in again
        assert json.loads(again.row("k")) == {"score": [0.0]}

"""Traces hold the recorded times, lengths and shared blocks of calls, and nothing of their content."""

import asyncio
import functools
import gzip
import hashlib
import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.core.forest import Forest, grow
from tests.core.settings import SOME
from tests.proxy.kit import proxied, user
from tests.support.work import counting
from tests.trajectories.rollouts import CREATED, ROLLOUTS, Talk, of_forest
from tokencache.cli import app
from tokencache.commands import files
from tokencache.commands.sink import FileError
from tokencache.core.media import PlacedMedia
from tokencache.trajectories.formats.registry import FORMATS, TRACES, TraceFormat
from tokencache.trajectories.formats.traces import Trace
from tokencache.trajectories.rollout import rollout
from tokencache.trajectories.values import Trajectory

SIZE = 16


def native(made):
    return msgspec.json.decode(msgspec.json.encode(FORMATS["native"].write(made)))


def trace_of(*rollouts, size=SIZE):
    trace = Trace(size)
    for made in rollouts:
        trace.add(msgspec.convert(native(made), Trajectory))
    return trace


def lines_of(name, *rollouts, size=SIZE):
    return list(TRACES[name].lines(trace_of(*rollouts, size=size)))


def common(left, right):
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@SOME
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_two_calls_share_the_ids_of_the_full_blocks_that_their_prompts_share(seed, size):
    rng = random.Random(seed)
    forests = [grow(rng) for _ in range(3)]
    for forest in forests:
        forest.turns = [msgspec.structs.replace(turn, created=float(n)) for n, turn in enumerate(forest.turns)]
    rows = lines_of("agentic-mooncake", *(of_forest(forest, f"s{n}") for n, forest in enumerate(forests)), size=size)[1:]
    prompts = [prompt for forest in forests for prompt, _, _ in forest.ground_truth]
    assert [row["input_length"] for row in rows] == [len(prompt) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        assert len(row["hash_ids"]) == -(-len(prompt) // size)
        for other, earlier in zip(rows, prompts, strict=True):
            whole = common(prompt, earlier) // size
            expected = len(row["hash_ids"]) if prompt == earlier else whole
            assert common(row["hash_ids"], other["hash_ids"]) == expected
            assert len({*row["hash_ids"]} & {*other["hash_ids"]}) == expected
    used = {one for row in rows for one in row["hash_ids"]}
    assert used == set(range(len(used)))


NAMES = frozenset(
    (
        *(
            "session",
            "id",
            "turn",
            "call",
            "parent",
            "origin",
            "root",
            "sources",
            "digest",
            "prefix_hash",
            "completion_hash",
            "logprobs_hash",
        ),
        *("model", "harness", "dialect", "sampling", "replaced", "content", "reasoning", "name", "arguments", "sha256", "detail"),
    )
)


def renamed(value, key=""):
    """The same calls with other tokens, texts and names."""
    if isinstance(value, dict):
        return {name: renamed(one, name if name not in {"sampling", "replaced"} else "") for name, one in value.items()}
    if isinstance(value, list):
        return [2**31 - 2 - one for one in value] if key == "token_ids" else [renamed(one, key) for one in value]
    return hashlib.sha256(value.encode()).hexdigest() if isinstance(value, str) and value and key in NAMES else value


def tells_content(form):
    """Whether the lines of a format change if only tokens, texts and names do."""
    written = []
    for change in (lambda one: one, renamed):
        trace = Trace(SIZE)
        for made in ROLLOUTS.values():
            trace.add(msgspec.convert(change(native(made)), Trajectory))
        written.append(list(form.lines(trace)))
    assert len(written[0]) >= len(ROLLOUTS) - 2  # all but `empty` and `lost`
    return written[0] != written[1]


def test_a_trace_tells_nothing_of_the_content():
    assert not any(map(tells_content, TRACES.values()))


@pytest.mark.parametrize("leak", ["model", "block"])
def test_the_check_of_content_can_fail(leak):
    def lines(trace):
        yield list(trace._models) if leak == "model" else [tokens.hex() for _, tokens, _ in trace._blocks]
        yield from TRACES["weka"].lines(trace)

    assert tells_content(TraceFormat("leaky", "a test", lines))


@pytest.mark.parametrize("name", TRACES)
def test_the_work_grows_with_the_turns_not_with_their_square(name):
    def session(turns):
        forest, parent = Forest(), None
        for n in range(turns):
            parent = forest.add([*range(2 * SIZE)], [n], parent, media=tuple(PlacedMedia("image", "", "", 33 * at, 9) for at in range(n)))
        return msgspec.convert(native(of_forest(forest, "s")), Trajectory)

    def write(trajectory):
        trace = Trace(SIZE)
        trace.add(trajectory)
        assert len(list(TRACES[name].lines(trace))) >= 1

    sessions = [session(turns) for turns in (20, 80)]
    with counting() as work:
        write(sessions[0])  # what is made only once
        few, many = [work.of(functools.partial(write, one)) for one in sessions]
    assert many < 5 * few


def edges(name):
    return [
        [(one["request_id"], one["relation"], one["delay_ms"]) for one in row["dependencies"]]
        for row in lines_of("agentic-mooncake", ROLLOUTS[name])[1:]
    ]


def test_calls_wait_for_the_replies_that_they_contain():
    assert edges("linear") == [[], [("0", "sequence", 500.0)], [("1", "sequence", 500.0)]]
    assert edges("thrown-away") == [[], [("0", "spawn", 500.0)], [("0", "sequence", 1500.0)], [("2", "sequence", 500.0)]]
    assert edges("respliced") == [[], [("0", "sequence", 500.0)], [("1", "spawn", 500.0)], [("2", "sequence", 500.0)]]
    assert edges("unrecognized") == [[], []]  # nothing shows that it contains the first reply


def delegating(answer):
    talk = Talk("delegating")
    main = talk.call([user("count")], calls=[("c1", "agent", "{}")])
    talk.call([user("a helper counts")], answer)
    talk.call([*talk.history(main), {"role": "tool", "tool_call_id": "c1", "content": answer}], "So be it.", after=main)
    return rollout(talk.records())


def test_a_call_waits_for_the_sub_agent_whose_answer_it_contains():
    rows = lines_of("agentic-mooncake", delegating("There are twelve lines in a.py."))[1:]
    assert [one["relation"] for one in rows[2]["dependencies"]] == ["sequence", "join"]
    assert [one["request_id"] for one in rows[2]["dependencies"]] == ["0", "1"]
    assert [row["not_before_ms"] for row in rows] == [0.0, 1000.0, 0.0]
    rows = lines_of("agentic-mooncake", delegating("Twelve."))[1:]  # too short to be evidence
    assert [one["relation"] for one in rows[2]["dependencies"]] == ["sequence"]


def test_times_and_lengths_are_those_of_the_record():
    made = ROLLOUTS["thrown-away"]
    spans = sorted((span.turn for sequence in made.sequences for span in sequence.turns), key=lambda turn: turn.created)
    rows = lines_of("agentic-mooncake", made)[1:]
    assert [(row["input_length"], row["output_length"], row["recorded_api_time_ms"]) for row in rows] == [
        (turn.prompt_tokens, turn.completion_tokens, turn.seconds * 1000) for turn in spans
    ]


def test_a_call_never_begins_before_the_one_whose_reply_it_contains():
    """The clocks of two replicas differ by an hour."""
    talk = Talk()
    first = talk.call([user("a")], "b")
    talk.call([*talk.history(first), user("c")], "d", after=first, created=CREATED - 3600)
    calls = trace_of(rollout(talk.records())).calls
    assert [(call.begun, [one.wait for one in call.after]) for call in calls] == [(CREATED, []), (CREATED, [0.0])]


def test_weka_has_the_longest_sequence_outside_and_each_other_one_as_a_sub_agent():
    (trace,) = lines_of("weka", ROLLOUTS["sub-agent"])
    assert [entry["type"] for entry in trace["requests"]] == ["n", "n", "subagent", "n"]  # a title, the question, its answer
    assert [len(entry["hash_ids"]) for entry in trace["requests"] if entry["type"] == "n"] == [
        entry["in"] // SIZE for entry in trace["requests"] if entry["type"] == "n"
    ]
    helper = trace["requests"][2]["requests"]
    assert [(one["t"], one.get("think_time"), one.get("input_types"), one["stop"]) for one in helper] == [
        (2.0, None, None, "tool_use"),
        (3.0, 0.5, ["tool_result"], "end_turn"),
    ]


def test_what_belongs_to_the_session_of_a_fork_is_not_written_again():
    forest = Forest()
    first = forest.add([1, 2, 3], [4], marks=("shared",), logprobs=[])
    forest.add([5], [6], first)
    (call,) = trace_of(of_forest(forest, "fork")).calls
    assert (call.prompt, call.completion, call.after) == (5, 1, ())


def pictured(**more):
    forest = Forest()
    forest.add(list(range(40)), [7], **more)
    return of_forest(forest, "pictured")


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ({}, {}, 3),
        ({"model": "a"}, {"model": "b"}, 0),
        ({"media": (PlacedMedia("image", "a" * 64, "", 20, 4),)}, {"media": (PlacedMedia("image", "a" * 64, "", 20, 4),)}, 3),
        ({"media": (PlacedMedia("image", "a" * 64, "", 20, 4),)}, {"media": (PlacedMedia("image", "b" * 64, "", 20, 4),)}, 1),
        ({"media": (PlacedMedia("image", "", "", 20, 4),)}, {"media": (PlacedMedia("image", "", "", 20, 4),)}, 1),
        ({"marks": ("media",)}, {"marks": ("media",)}, 0),
    ],
    ids=["equal", "models", "same-image", "other-image", "unknown-image", "unknown-places"],
)
def test_equal_tokens_are_no_equal_prefix_if_models_or_images_may_differ(left, right, shared):
    one, other = trace_of(pictured(**left), pictured(**right)).calls
    assert common(one.blocks, other.blocks) == len({*one.blocks} & {*other.blocks}) == shared


@pytest.mark.parametrize("name", TRACES)
def test_a_file_has_the_trace_of_all_its_rollouts(tmp_path, name):
    for ending, opened in ((".jsonl", open), (".jsonl.gz", gzip.open)):
        sink = files.create(str(tmp_path / f"t{ending}"), TRACES[name], overwrite=False, block_size=SIZE)
        for made in ROLLOUTS.values():
            sink.write(msgspec.json.encode(FORMATS["native"].write(made)))
        sink.finish()
        assert sink.rows == sum(len(sequence.turns) for made in ROLLOUTS.values() for sequence in made.sequences)
        with opened(tmp_path / f"t{ending}", "rt") as lines:
            assert [json.loads(line) for line in lines] == lines_of(name, *ROLLOUTS.values())


def test_an_interrupted_file_has_the_trace_of_what_was_fetched(tmp_path):
    sink = files.create(str(tmp_path / "t.jsonl"), TRACES["weka"], overwrite=False, block_size=SIZE)
    sink.write(msgspec.json.encode(FORMATS["native"].write(ROLLOUTS["linear"])))
    assert [json.loads(line) for line in sink.leave().open()] == lines_of("weka", ROLLOUTS["linear"])


def test_what_a_trace_cannot_be_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"must end with .jsonl or .jsonl.gz"):
        files.create(str(tmp_path / "t.parquet"), TRACES["weka"], overwrite=False)
    with pytest.raises(FileError, match=r"format trl has no blocks: --block-size is for agentic-mooncake and weka"):
        files.create(str(tmp_path / "t.jsonl"), FORMATS["trl"], overwrite=False, block_size=64)
    assert not list(tmp_path.iterdir())


def test_sessions_are_not_deleted_after_a_trace(tmp_path):
    result = CliRunner().invoke(app, ["export", "--all", "--format", "weka", "--to", str(tmp_path / "t.jsonl"), "--delete"])
    assert result.exit_code == 2
    assert "a trace does not hold the rollouts" in " ".join(result.output.replace("│", "").split())


async def test_export_and_convert_write_the_same_trace(tmp_path):
    async with proxied() as rig:
        for name in ("a", "b"):
            await rig.say(name, [user("EPISODE:talk")])
        for form in ("native", "agentic-mooncake"):
            command = ["export", "--all", "--format", form, "--to", str(tmp_path / f"{form}.jsonl"), "--proxy", rig.url]
            result = await asyncio.to_thread(CliRunner().invoke, app, command)
            assert result.exit_code == 0, result.output
    command = ["convert", str(tmp_path / "native.jsonl"), "--format", "agentic-mooncake", "--to", str(tmp_path / "converted.jsonl")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    exported = (tmp_path / "agentic-mooncake.jsonl").read_bytes()
    assert exported == (tmp_path / "converted.jsonl").read_bytes()
    header, first, second = map(json.loads, exported.splitlines())
    assert header["block_size"] == 64
    assert first["play_id"] != second["play_id"]
    assert first["hash_ids"] == second["hash_ids"]
    assert "talk" not in exported.decode()

"""The loaders of Dynamo's simulator (ai-dynamo-runtime 1.6.1) and of aiperf 0.13.0 read our traces, and find what the sessions had.

Run it in an environment with both, without their declared requirements: `make integrations`.
"""

import itertools
import json
import os
from collections import defaultdict
from types import SimpleNamespace

import msgspec
import pytest

from tests.support.material import require_package

require_package("aiperf")
require_package("dynamo")
os.environ["AIPERF_DATASET_WEKA_PARALLEL_WORKERS"] = "1"  # read once, when it is imported

from aiperf.common import random_generator
from aiperf.common.enums import TurnInputKind
from aiperf.dataset.generator.prompt import PromptGenerator
from aiperf.dataset.loader.weka_trace import WekaTraceLoader
from dynamo._core import run_mocker_trace_replay

from tests.trajectories.rollouts import ROLLOUTS
from tokencache.commands import files
from tokencache.trajectories.formats.registry import FORMATS, TRACES

SIZE = 16
APART = 100.0
"""Seconds between two sessions, so that each ends before the next one begins."""
MADE = {name: made for name, made in ROLLOUTS.items() if made.sequences}
TURNS = [
    sorted(((span.turn, sequence) for sequence in made.sequences for span in sequence.turns), key=lambda one: one[0].created)
    for made in MADE.values()
]
"""The turns of each session in the order in which they began, each with its sequence."""


@pytest.fixture
def trace(tmp_path, request):
    """A file with the trace of all sessions, one after the other."""
    path = tmp_path / "trace.jsonl"
    sink = files.create(str(path), TRACES[request.param], overwrite=False, block_size=SIZE)
    for n, made in enumerate(MADE.values()):
        native = msgspec.json.decode(msgspec.json.encode(FORMATS["native"].write(made)))
        for turn in itertools.chain.from_iterable(sequence["turns"] for sequence in native["sequences"]):
            turn["created"] += APART * n
        sink.write(msgspec.json.encode(native))
    sink.finish()
    return path


def prompt_of(turn, sequence):
    """A prompt, with other ids for each image: of one whose places are not known, no id stands for the same."""
    ids = list(sequence.token_ids)
    if "media" in turn.marks and not sequence.media:
        ids = [-1 - id(sequence) - at for at in range(len(ids))]
    for medium in sequence.media:
        ids[medium.start : medium.end] = [-1 - int(medium.sha256, 16)] * medium.length
    return ids[: turn.prompt_tokens]


def blocks_shared(prompt, others):
    """The number of full blocks at the beginning of a prompt that one of others has, too."""
    return max((sum(itertools.takewhile(bool, map(int.__eq__, prompt, other))) // SIZE for other in others), default=0)


def value(one):
    return one() if callable(one) else one


@pytest.mark.parametrize("trace", ["agentic-mooncake"], indirect=True)
def test_dynamo_replays_calls_waits_branches_and_shared_blocks(trace):
    engine = {"engine": {"block_size": SIZE, "num_gpu_blocks": 10_000}}
    report = run_mocker_trace_replay(
        [str(trace)],
        trace_format="agentic_mooncake",
        trace_block_size=SIZE,
        execution_model="any",
        capture_per_request=True,
        extra_engine_args=engine,
    )
    summary = value(report.summary)
    calls = {int(one["request_id"]): one for one in value(report.per_request)}
    flat = [one for session in TURNS for one in session]
    assert (summary["agentic_graph"]["play_count"], len(calls)) == (len(MADE), len(flat))

    numbers = {(n, turn.id): number for number, (n, turn) in enumerate((n, turn) for n, session in enumerate(TURNS) for turn, _ in session)}
    began = {number: turn.created for number, (turn, _) in enumerate(flat)}
    earlier = []
    for (n, name), number in numbers.items():
        turn, sequence = flat[number]
        call, prompt = calls[number], prompt_of(turn, sequence)
        assert (call["input_length"], call["output_length"]) == (turn.prompt_tokens, turn.completion_tokens)
        before = turn.parent or turn.origin
        if before is None:
            assert call["dispatched_at_ms"] == pytest.approx((n * APART + turn.created - began[numbers[n, "t0"]]) * 1000)
        else:
            (source, _) = flat[numbers[n, before]]
            wait = turn.created - source.created - source.seconds
            assert call["dispatched_at_ms"] - calls[numbers[n, before]]["terminal_time_ms"] == pytest.approx(wait * 1000, abs=0.01), name
        shared = blocks_shared(prompt, earlier)
        assert call["reused_input_tokens"] == min(shared, (len(prompt) - 1) // SIZE) * SIZE  # vLLM computes the last token of a prompt
        earlier.append(prompt)
    spawned = sum(sequence.parent is not None for made in MADE.values() for sequence in made.sequences)
    assert sum("parent_id" in call["agentic"] for call in calls.values()) == spawned


class Characters:
    """A tokenizer for aiperf: a token is a character."""

    resolved_name = "characters"
    bos_token_id = eos_token_id = block_separation_token_id = 0

    def encode(self, text, **_):
        return list(map(ord, text))

    def decode(self, tokens, **_):
        return "".join(map(chr, tokens))


def loaded(folder):
    """Conversations as aiperf makes them from a folder of traces."""
    random_generator.reset()
    random_generator.init(0)
    dataset = SimpleNamespace(entries=None, model_fields_set=set())
    settings = SimpleNamespace(get_default_dataset=lambda: dataset, tokenizer=None, get_model_names=lambda: ["any"], phases=[])
    prompts = PromptGenerator(tokenizer=Characters(), prompts=None, prefix_prompts=None)
    loader = WekaTraceLoader(filename=str(folder), run=SimpleNamespace(cfg=settings, random_seed=0), prompt_generator=prompts)
    assert loader.can_load(filename=str(folder))
    return loader.convert_to_conversations(loader.load_dataset())


@pytest.mark.parametrize("trace", ["weka"], indirect=True)
def test_aiperf_reads_calls_waits_branches_and_shared_blocks(trace, tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    for n, line in enumerate(trace.read_text().splitlines()):  # as `split -l 1 --additional-suffix .json` does
        (folder / f"{n:06}.json").write_text(line)
    conversations = defaultdict(list)
    for one in loaded(folder):
        conversations[int(one.session_id.partition(":")[0])].append(one)
    assert len(conversations) == len(MADE)

    for n, session in enumerate(TURNS):
        found = sorted(((turn, one) for one in conversations[n] for turn in one.turns), key=lambda one: one[0].timestamp)
        assert len(found) == len(session)
        by_id = {turn.id: turn for turn, _ in session}
        for (read, of), (turn, sequence) in zip(found, session, strict=True):
            assert read.timestamp == pytest.approx((turn.created - session[0][0].created) * 1000)
            assert read.api_time_ms == pytest.approx(turn.seconds * 1000)
            assert read.max_tokens == max(1, turn.completion_tokens)
            position = of.turns.index(read)
            if not position or read.reset_context:  # otherwise its messages are only what is new
                assert sum(len(message["content"]) for message in read.raw_messages) == turn.prompt_tokens
            if position:
                last = next(one for one, _ in session if one.created == session[0][0].created + of.turns[position - 1].timestamp / 1000)
                assert read.delay == pytest.approx((turn.created - last.created - last.seconds) * 1000)
            called = by_id.get(turn.parent or turn.origin)
            tools = bool(called and called.served.calls)
            assert (read.input_kind is TurnInputKind.TOOL_RESULT) == tools
            earlier = [prompt_of(*one) for one in session[: session.index((turn, sequence))]]
            assert read.theoretical_prefix_cache_hit_blocks == blocks_shared(prompt_of(turn, sequence), earlier)
            assert read.theoretical_prefix_cache_total_blocks == turn.prompt_tokens // SIZE
        children = {child for one in conversations[n] for branch in one.branches for child in branch.child_conversation_ids}
        assert children == {one.session_id for one in conversations[n] if one.parent_conversation_id is not None}


def test_aiperf_gives_equal_blocks_equal_tokens(tmp_path):
    """The beginning that a branch shares with its parent is the same text in both conversations."""
    trace = tmp_path / "one.json"
    sink = files.create(str(tmp_path / "one.jsonl"), TRACES["weka"], overwrite=False, block_size=SIZE)
    sink.write(msgspec.json.encode(FORMATS["native"].write(MADE["thrown-away"])))
    sink.finish()
    trace.write_bytes((tmp_path / "one.jsonl").read_bytes())
    main, branch = loaded(trace)
    first, other = ("".join(message["content"] for message in one.turns[at].raw_messages) for one, at in ((main, 1), (branch, 0)))
    whole = len(first) // SIZE * SIZE
    assert first[:whole] == other[:whole]
    assert json.loads(trace.read_text())["block_size"] == SIZE

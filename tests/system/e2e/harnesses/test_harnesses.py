"""Real harness programs do a job, directly on a real vLLM and through the proxy; the engine's own log is the reference."""

import json
from dataclasses import replace
from http import HTTPStatus

import aiohttp
import lineages
import pytest
import table
import tasks
from checks import assert_as_the_engine_says, assert_content, find_program, job_row, structure_row, write_table
from expected import EXPECTED
from lab import lab_engine, read_generations, run_harness, run_through_proxy
from namespace import remark
from programs import BUILT_IN, Step
from rig.exported import generations
from rig.server import MODEL
from structures import STRUCTURES

from tokencache.testing.tokenizer import build_tokenizer


@pytest.fixture(scope="module", autouse=True)
def written_table():
    yield
    write_table()


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def engine(servers, tmp_path_factory):
    return lab_engine(servers, tmp_path_factory)


def assert_job_done(run):
    """The result is right, too: the files exist and contain what they should."""
    assert_content(run)
    assert_files(run)


def assert_files(run):
    assert (run.work / "hello.txt").read_text(encoding="utf-8") == tasks.HELLO
    assert (run.work / "upper.txt").read_text(encoding="utf-8") == tasks.UPPER


def as_delivered(through, calls):
    """The recorded part of each call, which must be a prefix of the engine's log.

    Before an engine stops, it samples a few more tokens that are never delivered.
    """
    recorded = {prompt: ids for prompt, ids, _ in generations(through.exported)}
    assert recorded == {call.prompt: call.sampled[: len(recorded[call.prompt])] for call in calls}
    return list(recorded.items())


def came_back(body):
    """The text of the assistant's messages in a request of the Messages dialect; some are the harness's own."""
    recorded = [message["content"] for message in json.loads(body)["messages"] if message["role"] == "assistant"]
    blocks = [block for content in recorded for block in ([{"text": content}] if isinstance(content, str) else content)]
    return [words for block in blocks if (words := (block.get("text") or block.get("thinking") or "").strip())]


def interrupted(structure, through, calls, tokenizer):
    """The expected result of an interrupted run, from what the harness sent back: the calls as delivered, and the sequences.

    How much of the answer the harness had received and saved is a race.
    """
    turns = [turn for sequence in through.exported["sequences"] for turn in sequence["turns"]]
    left = any("aborted" in turn["marks"] for turn in turns)  # not if the answer was complete before the harness ended
    assert {incident["kind"] for incident in through.exported["incidents"]} == ({"client-gone"} if left else set())
    calls = lineages.read(as_delivered(through, calls), tokenizer.decode)
    first, second = calls
    said = tokenizer.decode(first.sampled)
    words = [words for words in came_back(through.run.calls[-1]["request_body"]) if words in said]
    if second.parent is not None:  # it disconnected right after an event, and has received everything that was recorded
        return calls, structure.all_received
    if not words:
        return calls, structure.none_received
    if ("plain", "interrupt-inside-token", 1) in through.sequences:  # the delivered text ends inside a token: a miss, with a reason
        return calls, [("root", "", 1), ("plain", "interrupt-inside-token", 1)]
    received = lineages.shared(first.prefix, second.prompt) - len(first.prompt)
    assert words[-1] in tokenizer.decode(first.sampled[:received])  # it is in the next prompt with the sampled tokens
    return calls, structure.sequences


async def test_the_engines_log_equals_what_it_returns_to_clients(engine):
    """What the engine logs of a call equals what it returns to a client that requests its ids."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "EPISODE:hermes go"}], "return_token_ids": True}
    before = len(await read_generations(engine))
    async with aiohttp.ClientSession() as http, http.post(f"{engine.url}/v1/chat/completions", json=body) as answer:
        said = await answer.json()
    recorded = (said["prompt_token_ids"], said["choices"][0]["token_ids"])
    assert (await read_generations(engine))[before:] == [recorded]


DIRECTLY = [name for name, expected in EXPECTED.items() if expected.directly and (name == "codex" or table.WRITTEN)]
"""One shows that the reference finds what breaks; the others are figures for the table, which do not depend on this project."""


@pytest.mark.parametrize("name", DIRECTLY)
async def test_directly_hardly_any_turn_extends_the_previous_one(engine, tokenizer, name, tmp_path):
    program = find_program(name)
    run = await run_harness(program, program.steps(tasks.prompts(name)), engine, tmp_path)
    assert_job_done(run)
    done, of = table.DIRECTLY[name] = lineages.contiguous(lineages.read(run.generations, tokenizer.decode))
    assert done < of / 2


@pytest.fixture
def _of_its_version(name, record_property):
    program = find_program(name)
    record_property("harness", f"{program.adapter.title} {program.version}")


@pytest.mark.usefixtures("_of_its_version")
@pytest.mark.parametrize("name", EXPECTED)
async def test_every_turn_extends_the_previous_one(engine, tokenizer, name, tmp_path, figures):
    program, expected = find_program(name), EXPECTED[name]
    through = await run_through_proxy(name, program, program.steps(tasks.prompts(name)), engine, tmp_path)
    assert_job_done(through.run)

    calls = lineages.read(through.run.generations, tokenizer.decode)
    note = f"{expected.note} {remark(through.run.ended)}".strip()
    found = (len(calls), lineages.contiguous(calls), through.sequences, through.forgiven)
    measured = table.Measured(program.version, *found, directly=table.DIRECTLY.get(name, ()), note=note)
    figures.append(measured.figures(name))
    assert_as_the_engine_says(through, calls, expected.sequences, program.adapter)
    assert lineages.rendered(calls) == expected.rendered
    table.FOUND[job_row(name)] = measured


@pytest.mark.parametrize("name", STRUCTURES)
async def test_every_call_is_in_the_right_sequence(engine, tokenizer, name, tmp_path, figures):
    structure = STRUCTURES[name]
    program = find_program(structure.harness)
    program = replace(program, environment=program.environment | structure.environment)
    steps = structure.steps(name)
    through = await run_through_proxy(name, program, steps, engine, tmp_path)
    assert_content(through.run)
    assert any(structure.sends in str(call["request_body"]) for call in through.run.calls)
    calls = lineages.read(through.run.generations, tokenizer.decode)
    found = (len(calls), lineages.contiguous(calls), through.sequences, through.forgiven)
    measured = table.Measured(program.version, *found, note=remark(through.run.ended))
    figures.append(measured.figures(name))
    sequences = structure.sequences
    if any(step.interrupt for step in steps):
        calls, sequences = interrupted(structure, through, calls, tokenizer)
    assert_as_the_engine_says(through, calls, sequences, program.adapter)
    table.FOUND[structure_row(structure)] = measured


async def test_codex_sends_what_is_new_over_a_websocket(engine, tokenizer, tmp_path, figures):
    """Its built-in provider prefers WebSocket: a warm-up first, then only the items that follow the last response."""
    program = replace(find_program("codex"), environment={"CODEX_API_KEY": "any"})
    steps = [Step([*BUILT_IN, *step.words]) for step in program.steps(tasks.prompts("codex"))]
    through = await run_through_proxy("codex_websocket", program, steps, engine, tmp_path)
    assert all(ended.returncode == 0 for ended in through.run.ended), through.run.output
    assert_files(through.run)
    assert not [call for call in through.run.calls if call["method"] == "POST"], "nothing was sent over HTTP"
    sockets = [call for call in through.run.calls if call["status"] == HTTPStatus.SWITCHING_PROTOCOLS]
    sent = [json.loads(line) for call in sockets for line in call["request_body"].splitlines()]
    asked = [message for message in sent if message.get("generate") is not False]
    continuing = [message for message in asked if message.get("previous_response_id")]
    figures.append(f"codex_websocket: {len(sockets)} connections, {len(sent)} messages, {len(continuing)} of {len(asked)} calls continue")
    assert len(continuing) > len(asked) / 2
    assert_as_the_engine_says(
        through, lineages.read(through.run.generations, tokenizer.decode), EXPECTED["codex"].sequences, program.adapter
    )

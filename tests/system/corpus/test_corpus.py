"""Replays every recorded session through the real proxy: it is recognised as when the real program ran. Spoiled replays fail."""

import base64
import copy
import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pairwise import some
from tests.system.corpus.format import read
from tests.system.corpus.replay import differences, replay
from tests.system.corpus.sanitise import image_in, strings_in
from tests.system.corpus.test_links import BESIDE, LINKS, SIDE_CALLS, dropped, links
from tokencache.batching.selection import main_line, no_side_calls
from tokencache.testing.parser import parse_reply

FILES = sorted(Path(__file__).parent.glob("*.jsonl"))
each = pytest.mark.parametrize("path", some(FILES, 12), ids=lambda path: path.stem)


def longest_lines():
    """For each dialect the file with the longest sequence, the smallest of several."""
    found = {}
    for path in FILES:
        recording = read(path)
        length = max(len(sequence["calls"]) for sequence in recording.header.expected["sequences"])
        rank = (-length, path.stat().st_size)
        found[recording.header.dialect] = min(found.get(recording.header.dialect, (rank, path)), (rank, path))
    return {dialect: path for dialect, (_, path) in found.items()}


LONGEST = longest_lines()
SMALLEST = min(LONGEST, key=lambda dialect: LONGEST[dialect].stat().st_size)
one_of_each_dialect = pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=name, marks=() if name == SMALLEST else pytest.mark.whole) for name, path in LONGEST.items()],
)


def of_each_dialect_first(paths):
    """Every file; all but the smallest of each dialect in the whole run only."""
    smallest = {read(path).header.dialect: path for path in sorted(paths, key=lambda path: path.stat().st_size, reverse=True)}.values()
    return pytest.mark.parametrize(
        "path", [pytest.param(path, id=path.stem, marks=() if path in smallest else pytest.mark.whole) for path in paths]
    )


@each
async def test_a_recorded_session_is_recognised_as_before(path):
    """`replay` compares the records with the engine's log; this compares matches, reasons, sequences and links."""
    recording = read(path)
    replayed = await replay(recording)
    assert not differences(recording, replayed)
    assert links(replayed) == ([LINKS[path.stem]] if path.stem in LINKS else [])
    assert dropped(replayed, main_line) == BESIDE.get(path.stem, [])
    assert dropped(replayed, no_side_calls) == SIDE_CALLS.get(path.stem, [])


@of_each_dialect_first(FILES)
async def test_rendered_again_no_prompt_contains_the_sampled_tokens(path):
    """The same session with an engine that renders everything itself: every turn of the model drifts."""
    recording = read(path)
    replayed = await replay(recording, honours_ids=False)
    follow_ups = [calls for sequence in recording.header.expected["sequences"] for calls in pairwise(sequence["calls"])]
    for before, after in follow_ups:
        prefix = replayed.prefixes[before]
        assert replayed.prompts[after][: len(prefix)] != prefix


def last_call(recording):
    """The last call of the longest sequence, and its body as text."""
    line = max(recording.header.expected["sequences"], key=lambda sequence: len(sequence["calls"]))["calls"]
    call = recording.calls[line[-1] - 1]
    return call, json.dumps(call.body, ensure_ascii=False)


async def noticed(recording, call, body):
    """The differences found when a call's body is changed."""
    changed = copy.deepcopy(recording)
    changed.calls[call.call - 1].body = json.loads(body)
    return [line for line in differences(changed, await replay(changed)) if line.startswith(f"call {call.call}: ")]


@one_of_each_dialect
async def test_a_changed_word_in_an_echoed_reply_is_noticed(path):
    recording = read(path)
    call, body = last_call(recording)
    texts = [(parse_reply("".join(before.said), tools=True).content or "").strip() for before in recording.calls]
    said = next(text for text in (json.dumps(text, ensure_ascii=False)[1:-1] for text in texts if len(text) > 8) if text in body)
    word = max(said.split(), key=len)
    assert await noticed(recording, call, body.replace(said, said.replace(word, word[::-1], 1)))


def tool_ids(call):
    return [value for _, value in call.served if "tool" in value]


@one_of_each_dialect
async def test_ids_of_two_calls_swapped_are_noticed(path):
    """The last reply's and an earlier one's: only the last reply is compared id by id with what was issued."""
    recording = read(path)
    line = max(recording.header.expected["sequences"], key=lambda sequence: len(sequence["calls"]))["calls"]
    replies = [(number, tool_ids(recording.calls[number - 1])) for number in line]
    (first, *_), last, after = next(
        (replies[0][1], ids[0], line[at + 1]) for at, (_, ids) in reversed(list(enumerate(replies[:-1]))) if at and ids
    )
    call = recording.calls[after - 1]
    body = json.dumps(call.body, ensure_ascii=False)
    assert first in body
    assert last in body
    assert await noticed(recording, call, body.replace(first, "\0").replace(last, first).replace("\0", last))


WITH_IMAGES = [path for path in FILES if "_images" in path.stem and "browser-use" not in path.stem]  # which sends no reply back
with_images = of_each_dialect_first(WITH_IMAGES)


def first_image(call):
    """The base64 text of the first image in a call."""
    text = next(text for text in strings_in(call.body) if image_in(text) is not None)
    return text.rpartition(",")[2]


def last_continued(recording):
    """The last call that continues another."""
    return next(call for call in reversed(recording.calls) if call.expected["match"] == "continue")


@pytest.mark.whole
@with_images
async def test_another_image_in_the_history_is_noticed(path):
    recording = read(path)
    call = last_continued(recording)
    image = first_image(call)
    size = base64.b64decode(image)[:24]  # signature, length and type of the first chunk, width and height
    other = base64.b64encode(size + b"other pixels").decode()
    (found,) = await noticed(recording, call, json.dumps(call.body).replace(image, other))
    assert "'match': 'resplice'" in found.partition("instead of")[0]
    assert "'reason': 'context-edited'" in found.partition("instead of")[0]


@with_images
async def test_the_same_image_under_another_type_is_not(path):
    """vLLM recognizes an image by its bytes, whatever the request calls it."""
    recording = read(path)
    call = last_continued(recording)
    body = json.dumps(call.body)
    assert "image/png" in body
    assert not await noticed(recording, call, body.replace("image/png", "image/webp"))

"""Every kind of template, shape and end of a reply: the tail is exact, or refused for the expected reason."""

import json
import random

import pytest

from tests.engine.template.shapes import SHAPES, TOOLS, Shape, ask
from tests.engine.template.table import DOC, EXCEPTIONS, expected, written
from tests.engine.template.template_lab import KINDS, Kind, Lab, behind_in_text, own_stop, qwen_vocabulary, sources, speech
from tests.support.material import require
from tests.support.pairwise import some
from tokencache.core import ids
from tokencache.core.splice import join, junction
from tokencache.engine.template.learned import LearnedTemplate, TailRefusedError
from tokencache.engine.template.tails import Tails

ENDINGS = ("its own stop", "cut", "another stop")


def lab_of(kind, shared, words=None):
    # DeepSeek's own template takes arguments as text only, which vLLM does not give it: see the test of that below.
    return Lab.of(kind, shared=shared, words=words, objects=not (shared and kind.name == "DeepSeek-V3"))


def ended(said: list[int], own: int, tail_begins: int, how: str, stops: set[int]) -> list[int] | None:
    """The reply's ids, ended in one of the three ways; `None` if there is no other stop id."""
    if how == "its own stop":
        return [*said, own]
    if how == "another stop":
        others = sorted(stops - {own, tail_begins})
        return [*said, others[0]] if others else None
    cut = said[: -max(1, len(said) // 3)]
    while cut and cut[-1] in stops:
        cut.pop()
    return cut


async def converse(kind: Kind, lab: Lab, shape: Shape, how: str, kwargs=None) -> tuple[str, str]:
    """Play a conversation turn by turn, each prompt spliced onto the turn before; return the way and boundary of the last splice."""
    stops = await lab.found_stops(kind.stops)
    tails, rng = Tails(LearnedTemplate(lab, stops)), random.Random(0)
    messages, tools = shape.messages, TOOLS if shape.tools else None
    replies = [i for i, message in enumerate(shape.history) if message["role"] == "assistant"]
    prompt = ids.pack(lab.words.encode(lab.text(messages[: replies[0]], tools, generation=True, **(kwargs or {}))))
    outcome = ("", "")
    for at, until in zip(replies, [*replies[1:], len(messages)], strict=True):
        wanted = ask(messages[:until], at + 1, until, tools=shape.tools, kwargs=kwargs)
        try:
            tail = await tails.tail(wanted)
        except TailRefusedError as why:
            outcome = (f"refused: {why}", "")
            try:
                prompt = ids.pack(lab.words.encode(lab.text(messages[:until], tools, generation=True, **(kwargs or {}))))
            except Exception:  # noqa: BLE001 - whatever a template raises
                return outcome  # the engine refuses this conversation, too
            continue
        said = lab.words.sampled(speech(kind, messages[at], lab.words.decode(ids.unpack(prompt))), rng)
        own = lab.words.id_of(own_stop(kind, messages[at]))
        reply = ended(said, own, ids.unpack(tail)[0], how, stops)
        if reply is None:
            return ("", "")
        prefix = prompt + ids.pack(reply)
        where = junction(ids.pack(reply), tail, stops)
        prompt = join(prefix, tail, where)

        assert lab.words.decode(said) == speech(kind, messages[at], lab.words.decode(ids.unpack(prefix)[: -len(reply)]))
        kept = prefix[: len(prefix) - where.drop * ids.ID_BYTES]
        assert prompt.startswith(kept)
        assert where.drop == (where.kind == "other-stop")
        behind = behind_in_text(lab, kind, messages[:until], at, tools, **(kwargs or {}))
        assert lab.words.decode(ids.unpack(tail)) == behind
        new = ids.unpack(prompt[len(kept) :])
        assert lab.words.decode(ids.unpack(tail)[:1] * where.skip + new) == behind
        real = lab.words.encode(lab.text(messages[:until], tools, generation=True, **(kwargs or {})))
        assert real[-len(ids.unpack(tail)) :] == ids.unpack(tail)
        outcome = (tails._shape(wanted).method, where.kind)
    return outcome


@pytest.mark.parametrize(("kind", "shared"), sources(KINDS.values()))
@pytest.mark.parametrize("name", SHAPES)
async def test_a_tail_is_exact_or_refused(kind, shared, name):
    lab = lab_of(kind, shared)
    way, _, met = expected(kind, name).partition(", ")
    for how in ENDINGS:
        kinds = {"its own stop": met or "shared-stop", "cut": "no-stop", "another stop": "other-stop"}
        found = await converse(kind, lab, SHAPES[name], how)
        if found == ("", ""):
            continue  # no other stop id is known
        assert found == (way, "" if way.startswith("refused") else kinds[how])


@pytest.mark.parametrize(("kind", "shared"), sources(KINDS.values()))
@pytest.mark.parametrize("thinking", [True, False])
async def test_thinking_on_or_off_makes_no_difference(kind, shared, thinking):
    lab = lab_of(kind, shared)
    for name in ("text with thinking → user", "thinking and call → result", "third question: text → user"):
        way = expected(kind, name).partition(", ")[0]
        found = await converse(kind, lab, SHAPES[name], "its own stop", {"enable_thinking": thinking})
        assert found[0] == way
        if found[0] == "small" and kind.name.startswith("Qwen3.5"):
            shown = lab.text(SHAPES[name].messages, TOOLS, generation=True, enable_thinking=thinking)
            assert shown.endswith("<think>\n" if thinking else "<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", some(["Qwen2.5", "Qwen3", "Qwen3-2507", "Qwen3.5 think", "Qwen3.5 nothink"], 2))
@pytest.mark.parametrize("shared", [False, True], ids=["stand-in", "real"])
async def test_with_the_tokens_of_qwen3(name, shared):
    kind = KINDS[name]
    words = require("../shared", qwen_vocabulary(kind.tokens))
    assert words.encode("Skinny  naïve café ☕.\n") != words.sampled("Skinny  naïve café ☕.\n", random.Random(0))
    for shape in SHAPES:
        found = await converse(kind, lab_of(kind, shared, words), SHAPES[shape], "its own stop")
        assert found[0] == expected(kind, shape).partition(", ")[0]


async def test_deepseeks_own_template_refuses_calls_in_vllm():
    kind = KINDS["DeepSeek-V3"]
    lab = Lab.of(kind, shared=True)
    for name, shape in SHAPES.items():
        found = await converse(kind, lab, shape, "its own stop")
        called = any("tool_calls" in message for message in shape.messages)
        assert found[0] == ("refused: template-refuses" if called else expected(kind, name))


async def test_reasoning_that_the_template_removes_is_kept():
    """`supply`: thinking of turns before the last query stays in the prefix; the tail is the same."""
    kind, shape = KINDS["Qwen3"], SHAPES["text with thinking → user"]
    lab = Lab.of(kind)
    asked = ask(shape.messages, 3, 4, tools=True)
    tail = ids.unpack(await Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops))).tail(asked))
    first = lab.text(shape.history[:2], TOOLS, generation=True)
    prompt = first + "<think>\nIs it?\n</think>\n\nIt is done." + lab.words.decode(tail)
    plain = lab.text(shape.messages, TOOLS, generation=True)
    assert prompt != plain
    assert prompt.replace("<think>\nIs it?\n</think>\n\n", "") == plain


def test_exceptions_name_known_kinds_and_shapes():
    assert list(EXCEPTIONS) == list(KINDS)
    assert all(set(named) <= set(SHAPES) for named in EXCEPTIONS.values())
    assert len({json.dumps(shape) for shape in SHAPES.values()}) == len(SHAPES)


async def test_the_document_has_the_same_tables():
    text = DOC.read_text("utf-8")
    assert text == await written(text), "run: python -m tests.engine.template.table"
    for kind in KINDS:
        assert kind.split(" ")[0] in text

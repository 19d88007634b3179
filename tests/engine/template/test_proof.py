"""Only proven tails are used, and the work grows with the new messages, not with the history."""

# ruff: noqa: RUF001 - DeepSeek's tokens are spelled with full-width bars

import asyncio
import logging

import msgspec
import pytest

from tests.engine.template.more_kinds import ALL_KINDS
from tests.engine.template.shapes import ask, parts, result, says, system, user
from tests.engine.template.template_lab import CHATML, KINDS, NO_ARGS, Lab, vocabulary
from tokencache.core import ids
from tokencache.core.splice import REPLACED, SHARED, junction
from tokencache.engine.template import learned
from tokencache.engine.template import tails as tails_module
from tokencache.engine.template.boundary import OTHER, Boundary, BoundaryUnknownError, reworded, stop_candidates
from tokencache.engine.template.learned import LearnedTemplate, TailRefusedError
from tokencache.engine.template.renderer import RenderError
from tokencache.engine.template.tails import Tails

HEAD = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>\n"
END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LAST_USER = (
    "{% set u = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set u.at = loop.index0 %}{% endif %}{% endfor %}"
)
PLAIN = HEAD + "{% for m in messages %}" + TURN + "{% endfor %}" + END

CALL = says(None, "bash")
QUESTION = [user("Q"), says("A.")], [user("More?")]
RESULT = [user("Q"), CALL], [result("1")]


def lab_with(template):
    return Lab(template, vocabulary(CHATML))


def tails_of(lab, *stops, **kwargs):
    return Tails(LearnedTemplate(lab, {lab.words.id_of(stop) for stop in stops or ("<|im_end|>",)}), **kwargs)


def asked(history, new, tools=True):
    return ask([*history, *new], len(history), len(history) + len(new), tools=tools)


def late(when):
    return PLAIN.replace("assistant\n", f"assistant\n{{{{ 'late' if {when} }}}}")


async def outcome(tails, history, new, tools=True):
    try:
        return (await tails.tail(asked(history, new, tools)), tails._shape(asked(history, new, tools)).method)[1]
    except TailRefusedError as why:
        return str(why)


REFUSED = {
    "tools stand before the last user's message": (
        LAST_USER + "{% for m in messages %}{% if loop.index0 == u.at %}" + HEAD + "{% endif %}",
        ("past-changes", "small"),
    ),
    "a hint stands in the last user's message": (
        LAST_USER + "{% for m in messages %}{{ 'HINT' if loop.index0 == u.at }}",
        ("past-changes", "small"),
    ),
    "the first line counts the messages": ("{{ messages | length }}\n{% for m in messages %}", ("past-changes", "past-changes")),
    "results are told in front": (
        "{% for m in messages %}{{ m.content if m.role == 'tool' }}{% endfor %}{% for m in messages %}",
        ("small", "new-messages-reach-back"),
    ),
    "replies are not shown": ("{% for m in messages if m.role != 'assistant' %}", ("reply-not-rendered", "reply-not-rendered")),
    "calls are not shown": ("{% for m in messages %}{% set m = {'role': m.role, 'content': m.content} %}", ("small", "small")),
    "small conversations are refused": (
        "{{ raise_exception('too small') if messages | length < 3 }}{% for m in messages %}",
        ("template-refuses", "template-refuses"),
    ),
    "conversations without a system message are refused": (
        "{{ raise_exception('no system') if messages[0].role != 'system' }}{% for m in messages %}",
        ("template-refuses", "template-refuses"),
    ),
    "a reply is repeated": ("{% for m in messages %}{{ m.content if m.role == 'assistant' }}", ("small", "small")),
    "replies are told in front": (
        "{% for m in messages %}{{ m.content if m.role == 'assistant' }}<|im_end|>{% endfor %}{% for m in messages %}",
        ("sentinel-lost", "past-changes"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_templates_that_cannot_be_spliced_are_refused_by_name(name, caplog):
    start, expected = REFUSED[name]
    caplog.set_level(logging.CRITICAL)
    tails = tails_of(lab_with(start + TURN + "{% endfor %}" + END))
    assert (await outcome(tails, *QUESTION), await outcome(tails, *RESULT)) == expected


async def test_a_later_system_message_that_moves_to_the_front_is_refused():
    front = "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}{% for m in messages if m.role != 'system' %}"
    lab = lab_with(front + TURN + "{% endfor %}" + END)
    tails = tails_of(lab)
    later = [system("Be kind."), user("More?")]
    for first in ([], [system()]):
        assert await outcome(tails, [*first, *QUESTION[0]], later) == "new-messages-reach-back"
        assert await outcome(tails, [*first, *QUESTION[0]], [user("More?")]) == "small"


async def test_a_developer_message_in_the_history_makes_a_separate_shape():
    """vLLM makes one system message of all only where a developer's is among them; before that the same shape was proven."""
    tails = tails_of(lab_with(PLAIN))
    later = [system("Be kind."), user("More?")]
    assert await outcome(tails, [system(), *QUESTION[0]], later) == "small"
    assert await outcome(tails, [{**system(), "role": "developer"}, *QUESTION[0]], later) == "new-messages-reach-back"
    assert await outcome(tails, [system(), *QUESTION[0]], later) == "small"


async def test_a_small_rendering_may_depend_on_earlier_messages():
    kind = KINDS["DeepSeek-V3"]
    lab = Lab.of(kind)
    tails = Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops)))
    second = [user("Q"), CALL, result("1"), says("", "look")]
    for _ in range(3):
        assert await outcome(tails, *RESULT) == "small"
        assert await outcome(tails, [*QUESTION[0], user("And?"), CALL], [result("1")]) == "small"
        assert await outcome(tails, second, [result("2")]) == "full"
    full = tails.template.renders["full"]
    assert await outcome(tails, second, [result("3")]) == "full"
    assert tails.template.renders["full"] == full + 1


async def test_a_tail_that_depends_on_the_words_of_the_reply_is_not_proven():
    tails = tails_of(lab_with(late("messages[1].content == 'Boom.'")))
    assert await outcome(tails, [user("Q"), says("Boom.")], [user("More?")]) == "tail-not-proven"
    assert await outcome(tails_of(tails.template.renderer), *QUESTION) == "small"


async def test_a_template_that_refuses_only_the_small_conversation_is_rendered_in_full():
    refuses = "{{ raise_exception('no history') if messages | length == 3 and messages[0].content == '.' }}"
    tails = tails_of(lab_with(refuses + PLAIN))
    assert await outcome(tails, *QUESTION) == "full"


async def test_a_template_that_shows_names_but_no_arguments_is_learned_per_name():
    names = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    names += "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    tails = tails_of(lab_with(names + "<|im_end|>\n{% endfor %}" + END))
    for name in ("bash", "look", "bash"):
        assert await outcome(tails, [user("Q"), says(None, name)], [result("1")]) == "small"
    assert await outcome(tails, [user("Q"), says(None, "look", "bash")], [result("1"), result("2", 1)]) == "small"


# --- cost ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in {"Qwen3", "gpt-oss"} else pytest.mark.whole) for name in KINDS if name != "DeepSeek-V3"],
)
async def test_cost_grows_with_the_new_messages_and_not_with_the_history(name):
    kind = KINDS[name]
    lab = Lab.of(kind)
    tails = Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops)))
    history, sizes = [system(), user("Q")], []
    for i in range(150):
        history.append(says("", "bash"))
        new = [result(f"{i}")] if i % 3 else [result(f"{i}"), user("And?")]
        before, full = len(lab.rendered), tails.template.renders["full"]
        await tails.tail(asked(history, new))
        sizes.append((tails.template.renders["full"] - full, lab.rendered[before:], len(new)))
        history += new
    first = [fulls for fulls, _, _ in sizes[:8]]
    assert set(first) <= {0, 4, 5, 6, 7}, "whole thrice, the beginning; twice more behind a reply, once more where calls share an id"
    trusted = [(rendered, new) for fulls, rendered, new in sizes[8:] if not fulls]
    assert all(rendered == [2 + new] for rendered, new in trusted)
    assert len(sizes[8:]) - len(trusted) <= 2 + 4, "every 64th of a shape is looked at again, and the first that is four times as long"


async def test_fifty_concurrent_calls_cause_one_proof():
    lab = lab_with(PLAIN)
    slow, rendered = lab.render, []

    async def render(*args, **kwargs):
        rendered.append(kwargs)
        await asyncio.sleep(0.001)
        return await slow(*args, **kwargs)

    lab.render = render
    tails = tails_of(lab)
    found = await asyncio.gather(*[tails.tail(asked([user(f"Q{i}"), says(f"A{i}")], [user(f"More {i}?")])) for i in range(50)])
    assert len(set(found)) == 50
    assert (tails.template.renders["small"], tails.template.renders["full"]) == (2 + 2 + 49, 4)
    assert len(rendered) == 57


async def test_fifty_concurrent_calls_cause_one_refusal(caplog):
    lab = lab_with(REFUSED["replies are not shown"][0] + TURN + "{% endfor %}" + END)
    slow = lab.render

    async def render(*args, **kwargs):
        await asyncio.sleep(0.001)
        return await slow(*args, **kwargs)

    lab.render = render
    tails = tails_of(lab)
    found = await asyncio.gather(*[outcome(tails, [user(f"Q{i}"), says("A")], [user("More?")]) for i in range(50)])
    assert set(found) == {"reply-not-rendered"}
    assert len(lab.rendered) == 2
    assert len(caplog.records) == 1


async def test_a_refused_shape_is_tried_again_only_every_eighth_time():
    lab = lab_with(REFUSED["a hint stands in the last user's message"][0] + TURN + "{% endfor %}" + END)
    tails = tails_of(lab)
    work = []
    for _ in range(25):
        before = len(lab.rendered)
        assert await outcome(tails, *QUESTION) == "past-changes"
        work.append(len(lab.rendered) > before)
    assert [i for i, worked in enumerate(work) if worked] == [0, 8, 16, 24]
    lab.template = PLAIN
    assert [await outcome(tails, *QUESTION) for _ in range(8)] == ["past-changes"] * 7 + ["small"]


async def test_an_unknown_boundary_is_tried_no_more_often():
    lab = lab_with(REFUSED["replies are not shown"][0] + TURN + "{% endfor %}" + END)
    tails = tails_of(lab)
    for _ in range(8):
        assert await outcome(tails, *QUESTION) == "reply-not-rendered"
    assert len(lab.rendered) == 2


async def test_after_a_temporary_error_the_next_call_tries_again():
    lab = lab_with(PLAIN)
    tails, well = tails_of(lab), lab.render

    async def gone(*args, **kwargs):
        raise RenderError("nobody there")

    for _ in range(3):
        lab.render = gone
        assert await outcome(tails, *QUESTION) == "render-error"
        lab.render = well
        assert await outcome(tails, *QUESTION) == "small"


async def test_the_number_of_shapes_and_boundaries_is_limited(monkeypatch):
    monkeypatch.setattr(learned, "MOST_BOUNDARIES", 5)
    monkeypatch.setattr(tails_module, "MOST_SHAPES", 5)
    tails = tails_of(lab_with(PLAIN))
    history, new = QUESTION
    for i in range(12):
        await tails.tail(ask([*history, *new], 2, 3, tools=True, kwargs={"today": i}))
    assert len(tails._shapes) == len(tails.template._boundaries) == 5


# --- drift ---------------------------------------------------------------------------------------------------------------


async def test_a_recheck_finds_that_a_trusted_shape_has_drifted(caplog):
    lab = lab_with(PLAIN)
    tails = tails_of(lab, recheck_every=4)
    assert [await outcome(tails, *QUESTION) for _ in range(5)] == ["small"] * 5
    lab.template = late("messages | length > 3")
    long = [system(), *QUESTION[0]], QUESTION[1]
    assert await outcome(tails, *long) == "context", "another shape: proven by itself"
    lab.template = late("messages[0].content != '.'")
    assert [await outcome(tails, *QUESTION) for _ in range(8)] == ["small"] * 7 + ["tail-not-proven"], "trusted twice as long"
    assert "proven again" in caplog.text
    assert await outcome(tails, *QUESTION) == "full"


async def test_a_recheck_also_compares_full_renderings():
    lab = lab_with(late("messages[0].content != '.'"))
    tails = tails_of(lab, recheck_every=4)
    assert [await outcome(tails, *QUESTION) for _ in range(5)] == ["full"] * 5
    lab.template = PLAIN
    assert [await outcome(tails, *QUESTION) for _ in range(9)] == ["full"] * 7 + ["tail-not-proven", "small"]


async def test_another_template_on_the_same_engine_is_learned_again():
    lab = lab_with(PLAIN)
    tails = tails_of(lab)
    await tails.tail(asked(*QUESTION))
    lab.template = PLAIN.replace("{{ m.content }}", "{{ m.content | reverse }}")
    assert await outcome(tails, *QUESTION) == "sentinel-lost"
    assert await outcome(tails, *QUESTION) == "small"


# --- stop ids ------------------------------------------------------------------------------------------------------------


async def test_a_stop_id_learned_later_makes_a_refused_boundary_known():
    kind = KINDS["Qwen3"]
    lab = Lab.of(kind)
    stops = set()
    tails = Tails(LearnedTemplate(lab, stops))
    assert [await outcome(tails, *QUESTION) for _ in range(3)] == ["stop-ids-unknown"] * 3
    assert lab.rendered == []
    stops.add(lab.words.id_of("<|endoftext|>"))
    assert [await outcome(tails, *QUESTION) for _ in range(3)] == ["no-stop-id-behind-the-reply"] * 3
    stops.add(lab.words.id_of("<|im_end|>"))
    assert await outcome(tails, *QUESTION) == "small"
    assert lab.words.decode(ids.unpack(await tails.tail(asked(*QUESTION)))).startswith("<|im_end|>\n<|im_start|>user")


async def test_another_stop_id_is_replaced_where_it_is_known():
    kind = KINDS["Qwen3"]
    lab = Lab.of(kind)
    end, text_end = lab.words.id_of("<|im_end|>"), lab.words.id_of("<|endoftext|>")
    tail = await Tails(LearnedTemplate(lab, {end, text_end})).tail(asked(*QUESTION))
    assert junction(ids.pack([5, end]), tail, {end, text_end}) == SHARED
    assert junction(ids.pack([5, text_end]), tail, {end, text_end}) == REPLACED


CANDIDATES = {
    "Qwen3": ["<|im_end|>", "<|im_start|>"],
    "GLM-4.5": ["<|user|>", "</tool_call>", "<|observation|>"],
    "DeepSeek-V3": ["<｜end▁of▁sentence｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>"],
    "Llama-3": ["<|eot_id|>"],
    "Llama-3.1": ["<|eot_id|>", "<|start_header_id|>"],
    "Nemotron-3": ["<|im_end|>", "<|im_start|>"],
    "gpt-oss": ["<|return|>", "<|end|>", "<|call|>", "<|start|>"],
}


@pytest.mark.parametrize("name", CANDIDATES)
async def test_candidates_contain_the_end_of_a_turn_and_the_opening_of_the_next(name):
    lab = Lab.of(KINDS[name])
    found = [lab.words.decode([token]) for token in (await stop_candidates(lab, "m", NO_ARGS)).possible]
    assert [token for token in found if token in KINDS[name].tokens] == CANDIDATES[name]
    assert len(found) <= 5


def test_a_missing_or_repeated_sentinel_gives_no_boundary():
    where = Boundary(ids.pack([1, 2]), ids.pack([3]), ids.pack([9]))
    assert where.after(ids.pack([0, 1, 2, 3, 9, 1, 2, 9])) == ids.pack([9, 1, 2, 9])
    assert where.until(ids.pack([0, 1, 2, 3, 9])) == ids.pack([0, 1, 2, 3])
    for rendered, why in (([0, 1, 2, 3, 9, 1, 2, 3], "sentinel-twice"), ([0, 1, 2, 9], "sentinel-lost")):
        with pytest.raises(BoundaryUnknownError, match=why):
            where.after(ids.pack(rendered))


# --- other words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (user("abcd"), f"ab{OTHER}cd"),
        ({"role": "user"}, OTHER),
        ({"role": "tool", "content": None}, OTHER),
        ({"role": "tool", "content": []}, OTHER),
        (parts(user(), "ab", "cd"), [{"type": "text", "text": f"a{OTHER}b"}, {"type": "text", "text": "cd"}]),
        ({"role": "user", "content": ["ab"]}, OTHER),
    ],
    ids=["text", "absent", "null", "empty", "parts", "bare-part"],  # OTHER is random, and xdist's workers must agree on names
)
def test_other_words_are_inserted_in_the_middle_so_that_beginnings_and_ends_stay(message, content):
    assert msgspec.json.decode(reworded(msgspec.json.encode(message))) == {**message, "content": content}


async def test_a_users_text_in_the_form_of_a_tool_result_can_be_spliced():
    """Qwen3 keeps the thinking before it; with other words it must stay what it is, or the past would seem to change."""
    for name in ("Qwen3", "Qwen3.5 think"):
        kind = KINDS[name]
        lab = Lab.of(kind)
        tails = Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops)))
        history = [user("Q"), says("A.", think="Hm.")]
        assert await outcome(tails, history, [user("<tool_response>\n1\n</tool_response>")]) == "small"


# --- contexts and switches -------------------------------------------------------------------------------------------------

SWITCHED = PLAIN.replace("assistant\n{% endif %}", "assistant\n{{ '<quiet>' if quiet.on else '<think>' }}{% endif %}")
BY_SYSTEM = "{% set quiet = namespace(on=messages[0].role == 'system' and '/no_think' in messages[0].content) %}" + SWITCHED
BY_ANYONE = (
    "{% set quiet = namespace(on=false) %}{% for m in messages if '/no_think' in (m.content or '') %}{% set quiet.on = true %}{% endfor %}"
    + SWITCHED
)


async def told(tails, history, new, session=""):
    """The text of a tail, asked for as the planner does: with what the reply was sampled behind."""
    lab = tails.template.renderer
    wanted = asked(history, new)
    opened = await lab.render("m", wanted.raw[: len(history) - 1], wanted.args, generation=True)
    tail = await tails.tail(msgspec.structs.replace(wanted, prefix=opened, reply_start=ids.count(opened), session=session))
    return lab.words.decode(ids.unpack(tail))


@pytest.mark.parametrize("template", [BY_SYSTEM, BY_ANYONE])
async def test_one_context_proves_nothing_for_another(template):
    tails = tails_of(lab_with(template))
    loud, quiet = [system("Be terse."), *QUESTION[0]], [system("Be terse. /no_think"), *QUESTION[0]]
    for _ in range(3):
        assert (await told(tails, loud, QUESTION[1])).endswith("assistant\n<think>")
        assert (await told(tails, quiet, QUESTION[1])).endswith("assistant\n<quiet>")
    full = tails.template.renders["full"]
    assert (await told(tails, quiet, QUESTION[1])).endswith("<quiet>")
    assert tails.template.renders["full"] == full, "its system message in front of a small conversation is enough"


async def test_a_further_context_costs_one_rendering_and_the_beginnings():
    tails = tails_of(lab_with(PLAIN))
    costs = []
    for n in range(3):
        before = tails.template.renders["full"]
        await told(tails, [system(f"You are agent {n}."), *QUESTION[0]], QUESTION[1])
        costs.append(tails.template.renders["full"] - before)
    assert costs == [4, 2, 2]


async def test_a_switch_in_the_middle_holds_from_then_on():
    tails = tails_of(lab_with(BY_ANYONE))
    history = list(QUESTION[0])
    for words, opener in (("More?", "<think>"), ("More? /no_think", "<quiet>"), ("And?", "<quiet>"), ("So?", "<quiet>")):
        for _ in range(2):
            assert (await told(tails, history, [user(words)])).endswith(opener), words
        history += [user(words), says("A.")]


async def test_a_switch_is_found_where_the_generation_prompt_opens_the_last_message():
    """A conversation may end with a message of the client's own; Nemotron Nano 2 writes it behind the generation prompt."""
    kind = ALL_KINDS["Nemotron Nano v2"]
    lab = Lab.of(kind)
    tails = Tails(LearnedTemplate(lab, await lab.found_stops(kind.stops)))
    for words, opener in (("Q", "<think>\n\n"), ("Q /no_think", "<think></think>")):
        tail = await told(tails, [system("Be brief."), user(words), says("A.")], [user("More?"), says("So")])
        assert tail.endswith(f"Assistant\n{opener}So"), words


async def test_without_the_prompt_of_the_reply_a_switch_in_the_middle_is_missed():
    """So the test above can fail: the comparison is what finds the switch."""
    tails = tails_of(lab_with(BY_ANYONE))
    await tails.tail(asked(*QUESTION))
    history = [*QUESTION[0], user("More? /no_think"), says("A.")]
    await tails.tail(asked([*QUESTION[0], user("More?"), says("A.")], [user("And?")]))
    tail = await tails.tail(asked(history, [user("And?")]))
    assert tails.template.renderer.words.decode(ids.unpack(tail)).endswith("<think>")


async def test_a_refusal_due_to_one_conversation_holds_for_it_alone():
    hint = "{% for m in messages if 'HINT' in (m.content or '') %}{{ messages[-1].content }}{% endfor %}"
    tails = tails_of(lab_with(hint + PLAIN))
    odd = [user("Q HINT"), says("A.")]
    for _ in range(3):
        with pytest.raises(TailRefusedError, match="new-messages-reach-back"):
            await told(tails, odd, [user("More?")], session="odd")
        assert await told(tails, *QUESTION, session="other")
    assert await outcome(tails, *QUESTION) == "small"


async def test_a_template_that_counts_messages_is_found_with_a_longer_history(caplog):
    counts = PLAIN.replace("assistant\n{% endif %}", "assistant\n{{ '<tired>' if messages | length > 17 }}{% endif %}")
    tails = tails_of(lab_with(counts))
    history, found = list(QUESTION[0]), []
    for _ in range(10):
        try:
            found.append((await told(tails, history, [user("More?")])).endswith("<tired>"))
        except TailRefusedError as why:
            found.append(str(why))
        history += [user("More?"), says("A.")]
    assert found == [*[False] * 8, "tail-not-proven", True], "the ninth history is more than four times as long as the second"
    assert "proven again" in caplog.text


async def test_results_for_a_call_id_that_is_used_twice_are_rendered_in_full():
    number = (
        "{% macro number(id) %}{% set found = namespace(n=0, at='') %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id == id and found.at == '' %}{% set found.at = found.n | string %}{% endif %}{% set found.n = found.n + 1 %}"
        "{% endfor %}{% endfor %}{{ found.at }}{% endmacro %}"
    )
    turn = TURN.replace("{{ m.content }}", "{{ number(m.tool_call_id) if m.tool_call_id }}{{ m.content }}")
    tails = tails_of(lab_with(number + "{% for m in messages %}" + turn + "{% endfor %}" + END))
    plain = tails_of(lab_with(PLAIN))
    history = [user("Q"), CALL, result("1"), says("", "look")]
    assert await outcome(tails, history, [result("2")]) == "full"
    assert await outcome(plain, history, [result("2")]) == "small", "this one shows no ids"

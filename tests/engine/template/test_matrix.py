"""Every kind of template, shape and context: outside of the model's replies each spliced prompt equals the full rendering."""

import pytest

from tests.engine.template import matrix as played
from tests.engine.template.matrix import LEAST_SPLICED, REFUSED, SYSTEMS, TALKS, allowed, matrix
from tests.engine.template.more_kinds import ALL_KINDS, EACH_KIND
from tests.engine.template.shapes import SHAPES
from tokencache.engine.template import tails


@pytest.mark.parametrize(
    "extent",
    [
        pytest.param({"once": True}, id="each shape"),
        pytest.param({"every": True}, id="every system prompt", marks=pytest.mark.whole),
    ],
)
@pytest.mark.parametrize("name", EACH_KIND)
async def test_each_spliced_prompt_equals_the_rendering_outside_of_the_replies(name, extent):
    figures = await matrix(ALL_KINDS[name], **extent)
    assert figures.wrong == []
    odd = {f"{shape}: {reason}": n for (shape, reason), n in figures.refused.items() if reason not in allowed(name, shape)}
    assert odd == {}, "refused, and not in the table"
    assert figures.spliced >= LEAST_SPLICED.get(name, 0.9) * (figures.spliced + figures.refused.total())
    assert figures.roots >= len(TALKS)


def test_the_matrix_has_the_documented_size():
    assert len(ALL_KINDS) >= 20
    assert len(TALKS) >= 20
    assert len(SYSTEMS) == 5
    assert max(len(talk.messages) for talk in TALKS.values()) > 16
    assert set(SHAPES) <= set(TALKS)
    assert all(name in ALL_KINDS for name in [*REFUSED, *LEAST_SPLICED] if name)
    assert all(shape in TALKS for shapes in REFUSED.values() for shape in shapes if shape)


# --- the judge can convict -------------------------------------------------------------------------------------------------

SWITCHED = {name: TALKS[name] for name in ("call → result", "long", "long work", "/no_think in the middle, undone", "/no_think with calls")}


@pytest.mark.parametrize(
    "name", ["Nemotron Super 1.5", *(pytest.param(name, marks=pytest.mark.whole) for name in ("Nemotron Nano v2", "SmolLM3"))]
)
async def test_without_the_check_of_the_generation_prompt_prompts_are_wrong(name, monkeypatch):
    """Shapes are trusted across contexts, and nothing is compared with the prompt that the last reply was sampled behind."""
    sound = await matrix(ALL_KINDS[name], talks=SWITCHED, every=True)
    assert sound.wrong == []
    unchecked(monkeypatch)
    shape_of = tails.shape_of
    monkeypatch.setattr(tails, "shape_of", lambda ask: (b"", *shape_of(ask)[1:]))
    figures = await matrix(ALL_KINDS[name], talks=SWITCHED, every=True)
    assert figures.spliced >= sound.spliced
    assert any("<think>" in why for why in figures.wrong)


async def test_a_switch_in_the_middle_needs_the_check_even_within_one_context(monkeypatch):
    sound = await matrix(ALL_KINDS["Nemotron Nano v2"], talks=SWITCHED, every=True)
    assert sound.wrong == []
    unchecked(monkeypatch)
    figures = await matrix(ALL_KINDS["Nemotron Nano v2"], talks=SWITCHED, every=True)
    assert figures.wrong
    assert all("/no_think" in why for why in figures.wrong)


def unchecked(monkeypatch):
    async def nothing(*_):
        return b""

    monkeypatch.setattr(tails.Tails, "_generation_prompt", nothing)


async def test_a_wrong_tail_is_found(monkeypatch):
    tail = tails.Tails.tail

    async def shortened(self, ask):
        return (await tail(self, ask))[:-4]

    monkeypatch.setattr(tails.Tails, "tail", shortened)
    figures = await matrix(ALL_KINDS["Qwen3"], talks={"text → user": TALKS["text → user"]})
    assert len(figures.wrong) == figures.spliced > 0


async def test_a_reply_with_other_ids_is_found(monkeypatch):
    judged = played.Judge._spans
    monkeypatch.setattr(played.Judge, "_spans", lambda self: [(place, start + 1, end) for place, start, end in judged(self)])
    figures = await matrix(ALL_KINDS["Qwen3"], talks={"text → user": TALKS["text → user"]})
    assert len(figures.wrong) == figures.spliced > 0

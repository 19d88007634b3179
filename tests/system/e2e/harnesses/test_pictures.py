"""Real harness programs read pictures, through the proxy and the simulated engine as a model that sees images."""

import shutil

import lineages
import pytest
import table
from checks import assert_as_the_engine_says, assert_content, find_program, write_table
from lab import CONTEXT, SimulatedServer, run_through_proxy
from namespace import remark
from pictures import FILES, PICTURES
from rig.server import MODEL

from tokencache.testing import SimulatedEngine


@pytest.fixture(scope="module", autouse=True)
def written_table():
    yield
    write_table()


def replies(engine, pictures, name):
    """Makes the engine say the run's turns: by the number of answers in the prompt, or in order for a harness that sends none back."""
    if not pictures.one_by_one:
        engine.replies.episodes = {name: pictures.turns}
        return
    turns = iter(pictures.turns)
    engine.replies.script = lambda request: [next(turns)] if "EPISODE:" in str(request.body["messages"]) else None


@pytest.mark.parametrize("name", PICTURES)
async def test_every_turn_with_images_extends_the_previous_one(name, tmp_path, figures):
    pictures = PICTURES[name]
    program = find_program(pictures.harness)
    if pictures.needs and not any(map(shutil.which, pictures.needs)):
        pytest.skip(f"needs one of {', '.join(pictures.needs)}")
    engine = SimulatedEngine(model=MODEL, max_model_len=CONTEXT, images="plugin", seed=5)
    replies(engine, pictures, name)
    async with engine.serve() as url:
        server, given = SimulatedServer(engine, url), FILES | pictures.files
        through = await run_through_proxy(name, program, pictures.steps(name), server, tmp_path, given=given.items())
    assert_content(through.run)
    calls = lineages.read(through.run.generations, engine.tokenizer.decode)
    measured = (len(calls), lineages.contiguous(calls), through.sequences, through.forgiven)
    table.ROWS[name] = table.Seen(pictures.title or program.adapter.title, program.version, program.dialect, pictures.note, *measured)
    figures.append(f"{name:<20} {len(calls):>2} calls: {table.sequences(through.sequences)} {remark(through.run.ended)}")
    assert_as_the_engine_says(through, calls, pictures.sequences, program.adapter)

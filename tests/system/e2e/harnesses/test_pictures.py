"""Real harness programs read pictures, through the proxy, on a real vLLM of a model for images; the engine's own log is the reference."""

import contextlib
import shutil

import lineages
import pytest
import table
from checks import assert_as_the_engine_says, assert_content, find_program, pictures_row, write_table
from lab import CONTEXT, SimulatedServer, run_through_proxy, seeing_engine
from namespace import remark
from pictures import FILES, PICTURES
from rig.server import MODEL

from tests.support.plugin_engine import PluginEngine
from tests.support.plugin_engine.images import build_image_tokenizer


@pytest.fixture(scope="module", autouse=True)
def written_table():
    yield
    write_table()


@contextlib.asynccontextmanager
async def simulated(turns):
    """The simulated engine, which says these turns in order."""
    waiting = iter(turns)
    engine = PluginEngine(model=MODEL, max_model_len=CONTEXT, images="plugin", seed=5)
    engine.replies.script = lambda request: [next(waiting)] if "EPISODE:" in str(request.body["messages"]) else None
    async with engine.serve() as url:
        yield SimulatedServer(engine, url)


@contextlib.asynccontextmanager
async def engine_of(pictures, servers, tmp_path_factory):
    """The engine that plays a run."""
    if not pictures.one_by_one:
        yield seeing_engine(servers, tmp_path_factory)
        return
    async with simulated(pictures.turns) as server:
        yield server


@pytest.mark.parametrize("name", PICTURES)
async def test_every_turn_with_images_extends_the_previous_one(name, servers, tmp_path, tmp_path_factory, figures):
    pictures = PICTURES[name]
    program = find_program(pictures.harness)
    if pictures.needs and not any(map(shutil.which, pictures.needs)):
        pytest.skip(f"needs one of {', '.join(pictures.needs)}")
    given = FILES | pictures.files
    async with engine_of(pictures, servers, tmp_path_factory) as server:
        through = await run_through_proxy(name, program, pictures.steps(name), server, tmp_path, given=given.items())
    assert_content(through.run)
    calls = lineages.read(through.run.generations, build_image_tokenizer().decode)
    found = (len(calls), lineages.contiguous(calls), through.sequences, through.forgiven)
    measured = table.Measured(program.version, *found, dialect=program.dialect, note=remark(through.run.ended))
    figures.append(measured.figures(name))
    assert_as_the_engine_says(through, calls, pictures.sequences, program.adapter)
    table.FOUND[pictures_row(pictures)] = measured

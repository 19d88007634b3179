"""What the tests of harnesses share: which programs run here, and what holds after every run.

`$TOKENCACHE_E2E_HARNESSES` names those that must run here (and fail if they are not installed); without it all that are installed run.
`$TOKENCACHE_E2E_WRITE_TABLE`: write docs/harnesses.md at the end of each module.
"""

import os
from collections import Counter

import lineages
import pytest
import table
from expected import EXPECTED, NOT_RUN
from pictures import PICTURES
from programs import PROGRAMS
from rig.exported import generations
from structures import STRUCTURES

WANTED = os.environ.get("TOKENCACHE_E2E_HARNESSES", "").split()


def find_program(name):
    """The program of this name; if it is missing, fails if it was requested, else skips the test and notes the reason for the table."""
    program = PROGRAMS[name]
    if WANTED and name not in WANTED:
        pytest.skip("not requested")
    if not program.installed:
        table.MISSING[program.adapter.title] = program.why_not()
        (pytest.fail if name in WANTED else pytest.skip)(program.why_not())
    return program


def write_table():
    """Writes the measurements so far, if that was requested."""
    if table.WRITTEN:
        rows = [*map(job_row, EXPECTED), *map(structure_row, STRUCTURES.values()), *map(pictures_row, PICTURES.values())]
        table.write(rows, table.MISSING | NOT_RUN)


def job_row(name):
    return table.Row("job", PROGRAMS[name].adapter.title, PROGRAMS[name].dialect)


def structure_row(structure):
    return table.Row("structures", PROGRAMS[structure.harness].adapter.title, structure.note)


def pictures_row(pictures):
    return table.Row("images", pictures.title or PROGRAMS[pictures.harness].adapter.title, pictures.note)


def assert_content(run):
    """Every request of the harness was answered, and it reported no error."""
    assert all(ended.returncode == 0 for ended in run.ended), run.output
    generating = [call for call in run.calls if call["method"] == "POST" and not call["left"]]
    assert {call["status"] for call in generating} == {200}


def assert_as_the_engine_says(through, calls, sequences, adapter):
    """The session is complete, has these sequences, and contains each call's ids as the engine logged them."""
    assert through.exported["complete"], through.exported["incidents"]
    assert sorted(through.sequences) == sorted(sequences)
    assert lineages.lines(calls) == sorted((turns for _, _, turns in sequences), reverse=True)
    recorded = [(prompt, ids) for prompt, ids, _ in generations(through.exported)]
    assert Counter(recorded) == Counter((call.prompt, call.sampled) for call in calls)
    assert set(through.forgiven) <= set(adapter.mutations.rules)

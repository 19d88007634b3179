"""The typed values hold what the native format holds."""

import json

import msgspec
import pytest

from tests.proxy.kit import TOOLS, proxied, results, user
from tokencache.client import Sequence, SessionState, Trajectory, TurnSpan

PARTS = {Trajectory: "trajectory", Sequence: "sequence", TurnSpan: "turn", SessionState: "state"}


@pytest.fixture
async def written():
    """The JSON of a trajectory, a sequence, a turn and a state, as the server writes it."""
    async with proxied() as rig:
        message = await rig.say("s", [user("EPISODE:demo")], tools=TOOLS)
        await rig.say("s", [user("EPISODE:demo"), message, *results(message)], tools=TOOLS)
        exported = await rig.get("/tokencache/v1/sessions/s/trajectories?text=true")
        (sequence,) = exported["sequences"]
        return {"trajectory": exported, "sequence": sequence, "turn": sequence["turns"][1], "state": await rig.info()}


@pytest.mark.parametrize("kind", PARTS)
def test_every_member_exists_in_the_format(written, kind):
    assert set(kind.__struct_fields__) <= set(written[PARTS[kind]])


@pytest.mark.parametrize("kind", PARTS)
def test_reading_changes_no_value(written, kind):
    whole = written[PARTS[kind]]
    back = json.loads(msgspec.json.encode(msgspec.convert(whole, kind)))
    assert contains(whole, back)


def contains(whole, part):
    """Whether `whole` has everything that `part` has. It may have more."""
    if isinstance(part, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(contains, whole, part))
    return part == whole


@pytest.mark.parametrize("kind", PARTS)
def test_members_of_a_newer_server_are_ignored(written, kind):
    whole = written[PARTS[kind]]
    assert msgspec.convert(whole | {"of_2030": [1]}, kind) == msgspec.convert(whole, kind)

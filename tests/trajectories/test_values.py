"""The typed values say what the native format says."""

import json

import msgspec
import pytest

from tests.proxy.kit import TOOLS, results, user
from tokencache.client import Sequence, SessionState, Trajectory, TurnSpan

PARTS = {Trajectory: "trajectory", Sequence: "sequence", TurnSpan: "turn", SessionState: "state"}


@pytest.fixture
async def written(rig):
    """What the server writes: of a trajectory, a sequence, a turn and a state."""
    message = await rig.say("s", [user("EPISODE:demo")], tools=TOOLS)
    await rig.say("s", [user("EPISODE:demo"), message, *results(message)], tools=TOOLS)
    exported = await rig.exported()
    (sequence,) = exported["sequences"]
    return {"trajectory": exported, "sequence": sequence, "turn": sequence["turns"][1], "state": await rig.info()}


@pytest.mark.parametrize("kind", PARTS)
def test_every_member_is_one_of_the_format(written, kind):
    assert set(kind.__struct_fields__) <= set(written[PARTS[kind]])


@pytest.mark.parametrize("kind", PARTS)
def test_nothing_is_changed_on_the_way(written, kind):
    whole = written[PARTS[kind]]
    back = json.loads(msgspec.json.encode(msgspec.convert(whole, kind)))
    assert contains(whole, back)


def contains(whole, part):
    """Whether all that `part` says is said by `whole`, which may say more."""
    if isinstance(part, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(contains, whole, part))
    return part == whole


@pytest.mark.parametrize("kind", PARTS)
def test_members_of_a_newer_server_are_passed_over(written, kind):
    whole = written[PARTS[kind]]
    assert msgspec.convert(whole | {"of_2030": [1]}, kind) == msgspec.convert(whole, kind)

"""The engine returns fewer choices than the harness requested: the harness gets them, and the session is not complete."""

import json

from tests.proxy.kit import user
from tokencache.testing import Fault

ASK = {"messages": [user("EPISODE:talk")]}


async def test_a_choice_that_is_missing_is_a_hole(rig):
    _, one = await rig.post(None, **ASK, return_token_ids=True, logprobs=True)
    rig.engine.faults.append(Fault.answer(200, json.dumps(one)))
    status, said = await rig.post("s", **ASK, n=2)
    assert (status, len(said["choices"])) == (200, 1)
    info = await rig.info()
    assert [(incident["kind"], incident["detail"]) for incident in info["incidents"]] == [("missing-choices", "1 of 2")]
    assert (info["complete"], info["turns"]) == (False, 1)

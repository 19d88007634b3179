"""Drift on a real vLLM: the reported sites are where its own chat completions would have used other tokens."""

import copy

import pytest
from rig.exported import get_json
from rig.harness import TOOLS

from tokencache.core.drift import Site, plain_rendering

TURNS = 4


@pytest.mark.parametrize("faithful", [False, True], ids=["forgetful", "faithful"])
async def test_reported_sites_are_where_a_direct_call_differs(proxied, faithful, figures):
    session = f"drift-{faithful}"
    harness = proxied.harness(session, tools=TOOLS, faithful=faithful).say("EPISODE:agent please")
    asked = []
    for _ in range(TURNS):
        asked.append(copy.deepcopy(harness.body()))
        await harness.turn()
    exported = await get_json(proxied.http, f"{proxied.url}/tokencache/v1/sessions/{session}/trajectories?drift=turns")
    (sequence,) = exported["sequences"]
    for turn, body in zip(sequence["turns"], asked, strict=True):
        direct = await proxied.post("/v1/chat/completions", {**body, "stream": False, "max_tokens": 1})
        sites = [Site(**{**site, "rendered": tuple(site["rendered"])}) for site in turn["drift"]["sites"]]
        assert plain_rendering(sequence["token_ids"][: turn["completion"][0]], sites) == direct["prompt_token_ids"]
    told = exported["figures"]["drift"]
    figures.append(f"drift, {'faithful' if faithful else 'forgetful'}: {told['drifted']} of {told['measured']} turns, {told['causes']}")
    assert (told["measured"], told["unmeasured"]) == (TURNS - 1, {})
    assert told["text_only_sequences"] > 1
    assert ("args-json" in told["causes"]) != faithful

"""Compares the proxy's export of a session with what the engine itself returned to the harness."""

from collections import Counter


async def get_json(http, url):
    async with http.get(url) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def trajectory(proxied, session):
    return await get_json(proxied.http, f"{proxied.url}/tokencache/v1/sessions/{session}/trajectories")


async def turns(proxied, session):
    found = await get_json(proxied.http, f"{proxied.url}/tokencache/v1/sessions/{session}/turns")
    return found["turns"]


def generations(exported):
    """Every generation of a trajectory as (prompt ids, completion ids, log probabilities), as often as it is trained."""
    found = []
    for sequence in exported["sequences"]:
        ids, mask, logprobs = sequence["token_ids"], sequence["loss_mask"], sequence["logprobs"]
        assert len(ids) == len(mask) == len(logprobs)
        covered = 0
        for turn in sequence["turns"]:
            (begin, start), (again, end) = turn["prompt"], turn["completion"]
            assert begin == covered
            assert start == again
            assert not any(mask[begin:start])
            assert not any(logprobs[begin:start])
            assert all(mask[start:end])
            found.append((tuple(ids[:start]), tuple(ids[start:end]), tuple(logprobs[start:end])))
            covered = end
        assert covered == len(ids)
    return found


def generations_of(replies):
    return [(tuple(reply.prompt), tuple(reply.ids), tuple(reply.logprobs)) for reply in replies]


def assert_exported(exported, replies, *, sequences=1):
    """The trajectory is complete and contains every generation that the engine returned once, token for token, float for float."""
    assert exported["complete"], exported["incidents"]
    assert exported["incidents"] == []
    assert all(reply.ids and reply.prompt and len(reply.ids) == len(reply.logprobs) for reply in replies)
    assert Counter(generations(exported)) == Counter(generations_of(replies))
    starts = [(sequence["start"], sequence["reason"]) for sequence in exported["sequences"]]
    assert len(starts) == sequences, starts

"""A request has two keys of the proxy in two headers: the registered one decides, so its owner cannot enter another session."""

import pytest

from tests.proxy.kit import CHAT, user

API = "/tokencache/v1"


@pytest.mark.parametrize(("session_key", "registered"), [("Authorization", "x-api-key"), ("x-api-key", "Authorization")])
async def test_a_registered_key_beats_a_session_key(rig, session_key, registered):
    async with rig.http.post(f"{rig.url}{API}/keys", json={"session": "mine"}) as answer:
        key = (await answer.json())["key"]
    headers = {session_key: "tcs-other", registered: key}
    headers["Authorization"] = f"Bearer {headers['Authorization']}"
    async with rig.http.post(rig.url + CHAT, json={"model": "sim", "messages": [user("EPISODE:talk")]}, headers=headers) as answer:
        assert answer.status == 200
    assert [info["session"] for info in (await rig.get(f"{API}/sessions"))["sessions"]] == ["mine"]

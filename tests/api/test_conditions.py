"""The conditions under which a proxy records: what changes them, and what they do not contain."""

import pytest

from tests.proxy.kit import EPISODES, proxied
from tokencache.config import Settings
from tokencache.testing import SimulatedEngine


async def conditions(rig):
    async with rig.http.get(f"{rig.url}/tokencache/v1/conditions") as answer:
        assert answer.status == 200
        return await answer.json()


async def test_versions_settings_adapters_and_engines():
    async with proxied(SimulatedEngine(episodes=EPISODES), history="follow") as rig:
        await rig.proxy.engine.model()
        found = await conditions(rig)
        ((engine,), (model,)) = found["engines"], found["engines"][0]["models"]
    assert found["settings"]["history"] == "follow"
    assert found["settings_digest"] != Settings().digest
    assert "claude-code" in found["adapters"]
    assert (engine["url"], model["model"], model["level"]) == (rig.proxy.upstream.url, "sim", "exact")
    assert len(model["rendering"]) == 32


async def test_another_template_has_another_rendering(monkeypatch):
    renderings = set()
    for template in ("", "{# other #}{{ messages[0].content }}<|im_end|>"):
        engine = SimulatedEngine(episodes=EPISODES)
        if template:
            monkeypatch.setattr(engine.tokenizer, "chat_template", template)  # all engines of this process share the tokenizer
        async with proxied(engine) as rig:
            await rig.proxy.engine.model()
            (found,) = (await conditions(rig))["engines"]
            renderings |= {model["rendering"] for model in found["models"]}
    assert len(renderings) == 2


@pytest.mark.parametrize("same", [{"port": 9}, {"admin_key": "k" * 20}, {"store": "redis://u:p@h/1"}, {"upstream": "http://h"}])
def test_keys_and_places_do_not_change_the_digest(same):
    assert Settings(**same).digest == Settings().digest


def test_what_is_shown_has_no_keys_and_no_passwords():
    secrets = {"upstream_key": "secret", "admin_key": "secret"}
    given = {"upstream": "http://u:secret@h", "store": "redis://:sec/ret@h:1/0", "kv": "off"} | secrets
    shown = Settings(**given).shown
    assert shown == {"upstream": "http://h", "store": "redis://h:1/0", "kv": "off"}
    several = {
        "upstream": "http://u:secret@a,http://v:secret@b",
        "store": "redis+sentinel://h:1,i:2/service?sentinel_password=se,cret",
    }
    assert Settings(**several).shown == {"upstream": "http://a,http://b", "store": "redis+sentinel://h:1,i:2/service"}

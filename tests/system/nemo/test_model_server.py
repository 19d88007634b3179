"""The Gym model server that ships with tokencache: how it names sessions, and that Gym finds it.

tests/system/e2e/test_nemo_gym.py runs it.
"""

import subprocess
import sys

import pytest
import yaml

from tests.support.material import require_package
from tokencache.integrations.nemo_gym import SEARCH_DIR
from tokencache.integrations.nemo_gym.rollout_session import session_of

FOLDER = SEARCH_DIR / "responses_api_models/tokencache_model"
CONFIG = FOLDER / "configs/tokencache_model.yaml"
FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
LATER = [*FIRST, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Go on"}]


@pytest.mark.parametrize(
    ("rollout_id", "cookie_sent", "name", "lost"),
    [
        ("7-2", False, "7-2", False),
        ("7-2", True, "7-2", False),
        (None, True, "cookie", False),
        (None, False, "cookie", True),
    ],
)
def test_the_session_of_a_call(rollout_id, cookie_sent, name, lost):
    session = session_of(rollout_id, "cookie", cookie_sent=cookie_sent)
    assert session.name == name
    assert session.loses(LATER) is lost
    assert not session.loses(FIRST)


def test_the_command_prints_the_folder_that_gym_searches():
    output = subprocess.run([sys.executable, "-m", "tokencache.integrations.nemo_gym"], check=True, capture_output=True, text=True)
    assert output.stdout.strip() == str(SEARCH_DIR)


def test_the_folder_has_what_gym_requires_of_a_server():
    ((kind, by_name),) = yaml.safe_load(CONFIG.read_text())["policy_model"].items()
    assert kind == FOLDER.parent.name
    assert (FOLDER / by_name[FOLDER.name]["entrypoint"]).is_file()
    assert (FOLDER / "requirements.txt").read_text() == "tokencache\n"


def test_gym_finds_it_and_accepts_its_settings(monkeypatch):
    registry = require_package("nemo_gym", "nemo_gym.model_registry")
    from tokencache.integrations.nemo_gym.model_server import TokencacheModelConfig

    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(SEARCH_DIR))
    found = registry.discover_models()["tokencache_model"]
    assert found.config_path == CONFIG
    settings = yaml.safe_load(CONFIG.read_text())["policy_model"]["responses_api_models"]["tokencache_model"]
    place = {"host": "127.0.0.1", "port": 1, "name": "policy_model"}
    read = TokencacheModelConfig.model_validate(settings | place)
    given = read.model_dump(include=set(settings))
    assert given == settings | {"base_url": [settings["base_url"]]}
    assert TokencacheModelConfig.model_validate({**place, "entrypoint": "app.py", "base_url": "u", "api_key": "k", "model": "m"})

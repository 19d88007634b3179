"""NeMo Gym's own servers, from the environment that `install_nemo_gym.sh` makes, and rollouts that its agents run.

`gym env start` would make an environment for each server; here every server is the same `python app.py` in its folder with the same two
variables (nemo-gym 0.7.0, `nemo_gym/cli/env.py`, `RunHelper.start`), all from one environment.

The task is Gym's `example_multi_step` with text that tokenizes in more than one way: the episode `gym` in `episodes.py`.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from rig.server import LIMIT_S, MODEL, REPOSITORY
from tests.ports import free_port
from tests.support.waiting import until
from tokencache.integrations.nemo_gym import SEARCH_DIR

RESOURCES, AGENT, POLICY = "synonyms", "agent", "policy_model"
SYNONYMS = ["Skinny", "Invisible"]
VALUES = [sum(map(ord, word)) for word in SYNONYMS]


def default_venv():
    """Where `install_nemo_gym.sh` installs Gym: `$TOKENCACHE_E2E_NEMO_GYM`, or `.venv-nemo-gym` in the repository."""
    return Path(os.environ.get("TOKENCACHE_E2E_NEMO_GYM") or REPOSITORY / ".venv-nemo-gym")


def _tool(name, argument, schema):
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument], "additionalProperties": False}
    return {"type": "function", "name": name, "description": name, "parameters": parameters, "strict": True}


TOOLS = [
    _tool("get_synonym_value", "synonym", {"type": "string"}),
    _tool("extract_synonym_values", "synonym_values", {"type": "array", "items": {"type": "integer"}}),
]


def task(rollout):
    """The body of a run request, as Gym's rollout collection sends it to an agent."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "EPISODE:gym please"}], "tools": TOOLS},
        "id": 0,
        "expected_synonyms": SYNONYMS,
        "expected_synonym_values": VALUES,
        "minefield_label": "Fat",
        "minefield_label_value": 0,
        "_ng_task_index": 7,
        "_ng_rollout_index": rollout,
    }


def model_server(name, base_url, **more):
    """The configuration of one of Gym's model servers, or of ours, as `policy_model`."""
    settings = {"base_url": base_url + "/v1", "api_key": "none", "model": MODEL, "uses_reasoning_parser": True}
    return {POLICY: {"responses_api_models": {name: settings | {"return_token_id_information": True} | more}}}


@dataclass
class Gym:
    """Gym's servers by name, each with its URL; `python` is the interpreter that they use."""

    urls: dict
    http: aiohttp.ClientSession
    python: Path

    async def rollout(self, number):
        """Lets the agent run the task; returns Gym's result, reward included."""
        async with self.http.post(f"{self.urls[AGENT]}/run", json=task(number)) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return json.loads(text)


@contextlib.asynccontextmanager
async def gym_servers(folder, servers, *, agent=True, environment=None, path=(), **settings):
    """Starts servers and stops them.

    Args:
        folder: an empty folder for logs and captures.
        servers: configurations of model servers, by name (`model_server`).
        agent: whether Gym's `simple_agent` and the task's resources server are started, too.
        environment: variables of the agent's process.
        path: folders that precede Gym's environment on `PYTHONPATH`.
        settings: members of Gym's global configuration.
    """
    venv = default_venv()
    instances = dict(servers)
    if agent:
        instances[RESOURCES] = {"resources_servers": {"example_multi_step": {"domain": "other"}}}
        refers = {
            "resources_server": {"type": "resources_servers", "name": RESOURCES},
            "model_server": {"type": "responses_api_models", "name": POLICY},
        }
        instances[AGENT] = {"responses_api_agents": {"simple_agent": refers}}
    urls, folders = {}, {}
    for name, by_type in instances.items():
        ((kind, by_name),) = by_type.items()
        ((implementation, config),) = by_name.items()
        config |= {"entrypoint": "app.py", "host": "127.0.0.1", "port": free_port()}
        urls[name] = f"http://127.0.0.1:{config['port']}"
        roots = (SEARCH_DIR, *venv.glob("lib/python*/site-packages"))
        folders[name] = next(root / kind / implementation for root in roots if (root / kind / implementation).is_dir())
    head = {"head_server": {"host": "127.0.0.1", "port": free_port()}, "dry_run": False}
    variables = os.environ | {
        "NEMO_GYM_CONFIG_DICT": json.dumps(head | {"model_call_capture_dir": str(folder / "calls")} | settings | instances),
        "NEMO_GYM_EXTRA_ROOTS": str(SEARCH_DIR),
        "PYTHONPATH": os.pathsep.join(map(str, [Path(__file__).parent / "gym_site", *path])),
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }
    python = venv / "bin/python"
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    with contextlib.ExitStack() as running:
        processes = {}
        for name, place in folders.items():
            own = {"NEMO_GYM_CONFIG_PATH": name} | ((environment or {}) if name == AGENT else {})
            processes[name] = running.enter_context(_process(python, place, variables | own, folder / f"{name}.log"))
        async with aiohttp.ClientSession(timeout=timeout) as http:
            await asyncio.gather(*(_up(http, urls[name], process, folder / f"{name}.log") for name, process in processes.items()))
            yield Gym(urls, http, python)


@contextlib.contextmanager
def _process(python, place, environment, log):
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(python), "app.py"], cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        for ask, timeout_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, ask)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
                break


async def _up(http, url, process, log):
    async def answers():
        if process.poll() is not None:
            raise RuntimeError(f"a Gym server exited with {process.returncode} while starting:\n{log.read_text(errors='replace')}")
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(url + "/") as answer:
                return answer.status < 500

    await until(answers, url)

"""`harbor run` of PyPI's harbor 0.25.0 with the agent and the plugin, on a simulated engine.

The environment is a folder of this machine (`harbor_local`), the agent Harbor's own Terminus-2, which needs tmux. Run it in an environment
with harbor (Python 3.12 or later): `make integrations`.
"""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.material import needs, require_package

require_package("harbor")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # Harbor's LiteLLM fetches its prices otherwise

from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.trajectories import Trajectory as AtifTrajectory
from harbor.models.trial.result import TrialResult

from tests.integrations.kit import truth
from tests.proxy.kit import proxied, user
from tests.support.waiting import PATIENCE
from tokencache.client import AsyncClient
from tokencache.integrations.harbor import TokencacheAgent, TokencachePlugin, rollout_details
from tokencache.testing import SimulatedEngine

REPOSITORY = Path(__file__).parents[2]
pytestmark = [needs("tmux", shutil.which("tmux")), pytest.mark.ran_with(trainer="harbor")]

THOUGHT = "<think>\nHm.\n</think>\n\n"
WRITE = '{"analysis": "naïve",  "plan": "write it", "commands": [{"keystrokes": "echo 42 > answer.txt\\n", "duration": 0.1}]}'
DONE = '{"analysis": "It is there ☕.", "plan": "", "commands": [], "task_complete": true}'
TESTS = """if [ "$(cat answer.txt)" = 42 ]; then r=1; else r=0; fi
echo '{"reward": '$r', "style": 0.5}' > $(dirname $0)/../logs/verifier/reward.json
"""


def write_task(folder: Path, name: str) -> None:
    task = folder / name
    for path, text in {
        "instruction.md": "Write 42 into answer.txt.",
        "task.toml": f'schema_version = "1.4"\n[task]\nname = "local/{name}"\n',
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": TESTS,
    }.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)


def script(request):
    """The policy: writes the file, then says twice that it is done, as Terminus-2 asks for a confirmation."""
    return [THOUGHT, DONE if any(message["role"] == "assistant" for message in request.body["messages"]) else WRITE]


async def harbor(folder, url, *more):
    """Run `harbor run` on the tasks in a folder; returns its output."""
    integration = "tokencache.integrations.harbor"
    command = [
        *(
            str(Path(sys.executable).with_name("harbor")),
            "run",
            "-p",
            str(folder / "tasks"),
            "-o",
            str(folder / "jobs"),
            "--job-name",
            "job",
        ),
        *("-m", "openai/sim", "-e", "tests.integrations.harbor_local:LocalEnvironment", "-k", "2", "-n", "2", "-q", "-y"),
        *("-a", f"{integration}:TokencacheAgent", "--ak", "agent=terminus-2", "--ak", f"url={url}"),
        *("--ak", 'sampling={"temperature": 0.5}', "--ak", "record_terminal_session=false", "--ak", "max_turns=6"),
        *("--plugin", f"{integration}:TokencachePlugin", "--pk", f"url={url}", *more),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HARBOR_TELEMETRY": "0"}
    running = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await running.communicate()
    assert running.returncode == 0, out.decode()
    return out.decode()


async def test_a_job(tmp_path):
    """Two attempts of a task: each trial is a session with the verifier's reward, and its folder has the ids that the engine used."""
    write_task(tmp_path / "tasks", "answer")
    engine = SimulatedEngine(seed=7)
    engine.replies.script = script
    async with proxied(engine) as rig, AsyncClient(rig.url) as client:
        printed = await harbor(tmp_path, rig.url)
        sessions = await client.sessions()
        group = json.loads((tmp_path / "jobs" / "job" / "result.json").read_text())["id"][:8] + "-local/answer"
        trials = [path for path in (tmp_path / "jobs" / "job").iterdir() if path.is_dir()]
        assert len(trials) == len(sessions) == 2, printed
        for trial in trials:
            result = TrialResult.model_validate_json((trial / "result.json").read_text())
            assert result.exception_info is None, printed
            trajectory = await client.session(str(result.id)).trajectory()
            assert (trajectory.reward, trajectory.reward_components) == (1.0, {"reward": 1.0, "style": 0.5})
            assert (trajectory.state, trajectory.complete, trajectory.group) == ("finished", True, group)
            assert trajectory.metadata["harbor"]["trial"] == result.trial_name
            (sequence,) = trajectory.sequences
            assert {turn.sampling["temperature"] for turn in sequence.turns} == {0.5}

            document = AtifTrajectory.model_validate_json((trial / "tokencache" / "trajectory-1.json").read_text())
            turns = [step.metrics for step in document.steps if step.metrics and step.metrics.logprobs]
            ids = [turn.prompt_token_ids + turn.completion_token_ids for turn in turns]
            assert ids == [sequence.token_ids[: turn.completion[1]] for turn in sequence.turns]
            assert len(ids) >= 2
            (detail,) = result.agent_result.rollout_details
            assert detail["completion_token_ids"] == [turn.completion_token_ids for turn in turns]
            assert detail["prompt_token_ids"] == [turn.prompt_token_ids for turn in turns]
            assert detail["logprobs"] == [turn.logprobs for turn in turns]
            assert result.agent_result.metadata["tokencache"] == {"session": str(result.id), "complete": True}
            assert result.agent_result.n_output_tokens  # Terminus-2's own figures are still there
            assert json.loads((trial / "tokencache" / "session.json").read_text())["reward"] == 1.0
        assert set(map(tuple, ids)) <= set(truth(rig.engine))
        async for delivery in client.follow("trainer", group_size=2, rewarded=True, timeout=PATIENCE):
            assert (delivery.group, [one.reward for one in delivery.trajectories]) == (group, [1.0, 1.0])
            break


ROOT, V1 = "http://proxy:8100/s/abc", "http://proxy:8100/s/abc/v1"


@pytest.mark.parametrize(
    ("agent", "model", "variables"),
    [
        ("claude-code", "anthropic/sim", {"ANTHROPIC_BASE_URL": ROOT, "ANTHROPIC_API_KEY": "tck-1"}),
        ("codex", "openai/sim", {"OPENAI_BASE_URL": V1, "OPENAI_API_KEY": "tck-1"}),
        ("gemini-cli", "gemini/sim", {"GOOGLE_GEMINI_BASE_URL": ROOT, "GEMINI_API_KEY": "tck-1"}),
        ("hermes", "openai/sim", {"OPENAI_BASE_URL": V1, "OPENAI_API_KEY": "tck-1"}),
        ("mini-swe-agent", "openai/sim", {"OPENAI_BASE_URL": V1, "OPENAI_API_KEY": "tck-1"}),
    ],
)
def test_agents_get_the_url_and_the_key_of_their_session(tmp_path, agent, model, variables):
    """The client of each API appends another path to the base URL."""
    for agent_url, base_url in ((None, V1), ("http://proxy:8100", "http://public/s/abc/v1")):
        wrapper = TokencacheAgent(tmp_path, model, agent=agent, url="http://127.0.0.1:1", agent_url=agent_url)
        env = wrapper._create(SimpleNamespace(id="abc", key="tck-1", base_url=base_url)).model_connection.env
        assert {name: env[name] for name in variables} == variables


def test_an_agent_without_a_base_url_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not support"):
        TokencacheAgent(tmp_path, "openai/sim", agent="cline-cli", url=ROOT)._create(SimpleNamespace(id="abc", key="tck-1", base_url=V1))


class Hanging:
    """An agent that never returns, and fills the context only afterwards."""

    async def run(self, *_):
        await asyncio.Event().wait()

    def populate_context_post_run(self, context):
        context.n_output_tokens = 3


async def test_an_agent_that_is_cancelled_still_has_its_token_ids(tmp_path):
    context = AgentContext()
    async with proxied() as rig:
        wrapper = TokencacheAgent(tmp_path, "openai/sim", agent="terminus-2", url=rig.url)
        wrapper.context_id, wrapper._agent = "t1", Hanging()
        await rig.say("t1", [user("EPISODE:demo")])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wrapper.run("task", None, context), 0.05)
        assert context.is_empty()  # or Harbor would not call what follows
        wrapper.populate_context_post_run(context)
        (turn,) = rig.ground_truth("t1")
    (detail,) = context.rollout_details
    assert (detail["prompt_token_ids"], detail["completion_token_ids"]) == ([turn.prompt_ids], [turn.completion_ids])
    assert (context.n_output_tokens, context.metadata["tokencache"]) == (3, {"session": "t1", "complete": True})


async def test_token_ids_that_cannot_be_fetched_are_reported_in_the_result(tmp_path, caplog):
    context = AgentContext(n_output_tokens=1)
    wrapper = TokencacheAgent(tmp_path, "openai/sim", agent="terminus-2", url="http://127.0.0.1:9")
    wrapper.context_id = "t1"
    await wrapper._recorded(asyncio.sleep(0), context)
    assert "no answer" in context.metadata["tokencache"]["error"]
    assert "result.json gets no token ids" in caplog.text


def ended(folder, **result):
    """The event of a trial that has ended."""
    config = SimpleNamespace(trials_dir=folder)
    outcome = SimpleNamespace(**{"verifier_result": None, "exception_info": None, **result})
    return SimpleNamespace(trial_id="t1", trial_name="trial", task_name="local/answer", config=config, result=outcome)


async def test_a_proxy_that_cannot_be_reached_is_an_error_and_the_trial_goes_on(tmp_path, caplog):
    plugin = TokencachePlugin(url="http://127.0.0.1:9")
    await plugin.on_trial_ended(ended(tmp_path))
    await plugin.on_job_end(None)
    assert "1 trials could not be finished at the proxy: trial" in caplog.text


async def test_a_trial_without_a_session_is_ignored(tmp_path, caplog):
    async with proxied() as rig:
        plugin = TokencachePlugin(url=rig.url, run="r")
        await plugin.on_trial_ended(ended(tmp_path))
        await plugin.on_job_end(None)
    assert not [record for record in caplog.records if record.name.startswith("tokencache.integrations")]
    assert not list(tmp_path.iterdir())


async def test_the_reward_of_a_trial(tmp_path, caplog):
    """The verifier's `reward`, or its only one. Several others are components, and a warning says so."""
    given = {"a": {"reward": 0.5, "style": 1}, "b": {"correct": 1}, "c": {"x": 1, "y": 2}, "d": None}
    found = {}
    async with proxied() as rig, AsyncClient(rig.url) as client:
        for name, rewards in given.items():
            await client.create("t1", exist_ok=True)
            verified = None if rewards is None else SimpleNamespace(rewards=rewards)
            await TokencachePlugin(url=rig.url, run="r").on_trial_ended(ended(tmp_path, verifier_result=verified))
            state = await client.session("t1").state()
            found[name] = (state.reward, state.reward_components)
            await client.session("t1").delete()
    assert found == {
        "a": (0.5, {"reward": 0.5, "style": 1.0}),
        "b": (1.0, {"correct": 1.0}),
        "c": (None, {"x": 1.0, "y": 2.0}),
        "d": (None, {}),
    }
    assert caplog.text.count("Choose one: --plugin-kwarg reward=NAME") == 1


@pytest.mark.parametrize(
    ("exception", "reward", "outcome"),
    [
        ("AgentTimeoutError", None, "timeout"),
        ("AgentTimeoutError", 1.0, "ok"),
        ("ContextWindowExceededError", None, "budget"),
        ("SandboxBuildFailedError", None, "sandbox"),
        ("ApiOverloadedError", 0.0, "engine"),
        ("NonZeroAgentExitCodeError", 0.0, "harness"),
        ("RewardFileNotFoundError", None, "verifier"),
        ("CancelledError", None, "canceled"),
    ],
)
async def test_a_trial_that_failed_is_a_failed_session_unless_harbor_counts_its_reward(tmp_path, exception, reward, outcome):
    async with proxied() as rig, AsyncClient(rig.url) as client:
        await rig.say("t1", [user("EPISODE:demo")])
        failure = SimpleNamespace(exception_type=exception, exception_message="it broke")
        verified = None if reward is None else SimpleNamespace(rewards={"reward": reward})
        await TokencachePlugin(url=rig.url, run="r").on_trial_ended(ended(tmp_path, verifier_result=verified, exception_info=failure))
        state = await client.session("t1").state()
    assert (state.outcome, state.reward, state.metadata["harbor"]["exception"]) == (outcome, reward, exception)
    assert state.outcome_detail == ("" if outcome == "ok" else f"{exception}: it broke")


@pytest.mark.parametrize("rewards", [{"reward": float("nan")}, {"reward": 1.0, "style": float("inf")}])
async def test_a_score_that_is_no_finite_number_is_a_failure_of_the_verifier(tmp_path, rewards):
    async with proxied() as rig, AsyncClient(rig.url) as client:
        await rig.say("t1", [user("EPISODE:demo")])
        await TokencachePlugin(url=rig.url, run="r").on_trial_ended(ended(tmp_path, verifier_result=SimpleNamespace(rewards=rewards)))
        state = await client.session("t1").state()
    assert (state.outcome, state.reward, state.state, state.group) == ("verifier", None, "finished", "r-local/answer")
    assert "its reward was refused" in state.outcome_detail


async def test_a_trial_that_its_deadline_ended_keeps_that_outcome(tmp_path):
    async with proxied() as rig, AsyncClient(rig.url) as client:
        await rig.say("t1", [user("EPISODE:demo")])
        await client.session("t1").finish(failed="timeout", detail="the deadline passed")
        failure = SimpleNamespace(exception_type="NonZeroAgentExitCodeError", exception_message="it broke")
        plugin = TokencachePlugin(url=rig.url, run="r")
        await plugin.on_trial_ended(ended(tmp_path, exception_info=failure))
        state = await client.session("t1").state()
    assert (state.outcome, state.group) == ("timeout", "r-local/answer")


def test_rollout_details_have_the_trained_turns_of_the_main_conversation_first():
    def step(turn, logprobs):
        ids = {"prompt_token_ids": [1], "completion_token_ids": [2], **({"logprobs": logprobs} if logprobs else {})}
        return {"metrics": ids, "extra": {"turn": turn}}

    title, main, untrained, seeing = (
        {"trajectory_id": "s", "steps": [{"message": "hi"}, *steps], "extra": {"media": []}}
        for steps in ([step("a", [-1.0])], [step("b", [-1.0]), step("c", [-2.0])], [step("d", None)], [step("e", [-1.0])] * 3)
    )
    seeing["extra"]["media"] = [{"modality": "image"}]  # Harbor's class has no place for it
    details = rollout_details([title, main, untrained, seeing])
    assert [detail["extra"]["turn"] for detail in details] == [["b", "c"], ["a"]]
    assert all(set(detail) <= set(RolloutDetail.__annotations__) for detail in details)

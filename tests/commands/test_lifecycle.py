"""The commands that make and change sessions, against a proxy with the simulated engine."""

import asyncio
import json

import pytest

from tests.commands.test_commands import Shell, record
from tests.proxy.kit import proxied, user
from tokencache.client import AsyncClient
from tokencache.commands.rewards import RewardFileError, RewardValues, read_reward
from tokencache.core.session import Budget


@pytest.fixture
async def shell():
    async with proxied() as rig:
        yield Shell(rig)


async def state(shell, name):
    return await shell.rig.get(f"/tokencache/v1/sessions/{name}")


async def test_create_prints_what_a_harness_needs(shell):
    made = json.loads(
        (await shell("create", "r1", "--group", "task", "--tag", "a", "--tag", "b", "--metadata", '{"seed": 1}', "--json")).stdout
    )
    assert (made["session"], made["base_url"]) == ("r1", f"{shell.rig.url}/s/r1/v1")
    assert made["key"].startswith("tck-")
    found = await state(shell, "r1")
    assert (found["group"], found["tags"], found["metadata"], found["state"]) == ("task", ["a", "b"], {"seed": 1}, "open")
    printed = (await shell("create", "--harness", "claude-code")).stdout
    assert "session   claude-code-" in printed
    assert "key       tck-" in printed


async def test_create_for_a_harness_with_files(shell, tmp_path):
    assert "--config-dir" in (await shell("create", "r1", "--harness", "codex", code=1)).stderr
    await shell("create", "r1", "--harness", "codex", "--config-dir", str(tmp_path / "r1"))
    assert "/s/r1/h/codex/v1" in (tmp_path / "r1" / "config.toml").read_text()


async def test_a_session_is_not_created_twice(shell):
    made = await shell("create", "r1", "--sampling", '{"temperature": 0.5}')
    assert "tokencache: sampling: temperature is 0.5, and the engine's log probabilities are raw" in made.stderr
    assert "r1" in (await shell("create", "r1", code=1)).stderr
    await shell("create", "r1", "--exist-ok")
    assert "sampling" in (await shell("create", "r1", "--exist-ok", "--sampling", '{"temperature": 1}', code=1)).stderr


@pytest.mark.parametrize("option", ["--metadata", "--sampling", "--budget", "--models"])
async def test_an_option_that_is_no_object(shell, option):
    assert f"{option}: expected a JSON object" in (await shell("create", "r1", option, "[1]", code=2)).stderr


async def test_the_life_of_a_session(shell):
    await record(shell.rig, "a")
    assert "finish" in (await shell("seal", "a", code=1)).stderr, "the error says what to do"
    assert (await shell("finish", "a", "--reward", "0.5")).stdout == "a finished\n"
    assert (await shell("finish", "a")).stdout == "a finished\n", "again, which changes nothing"
    assert (await shell("seal", "a")).stdout == "a sealed\n"
    assert (await shell("reward", "a", "0.75")).stdout == "a rewarded\n"
    await shell("label", "a", "--group", "g", "--tag", "t", "--metadata", '{"n": 1}')
    found = await state(shell, "a")
    assert (found["state"], found["reward"], found["group"], found["tags"], found["metadata"]) == ("sealed", 0.75, "g", ["t"], {"n": 1})
    await shell("label", "a", "--group", "", "--tag", "")
    found = await state(shell, "a")
    assert (found["group"], found["tags"], found["metadata"]) == ("", [], {"n": 1})


async def test_finish_says_what_failed(shell):
    await record(shell.rig, "a")
    assert "needs `failed`" in (await shell("finish", "a", "--detail", "no disk", code=1)).stderr
    assert "not 'No'" in (await shell("finish", "a", "--failed", "No", code=1)).stderr
    await shell("finish", "a", "--failed", "sandbox", "--detail", "no disk", "--reward", "0")
    found = await state(shell, "a")
    assert (found["outcome"], found["outcome_detail"], found["valid"], found["reward"]) == ("sandbox", "no disk", False, 0.0)
    assert "cannot become 'ok'" in (await shell("finish", "a", "--failed", "ok", code=1)).stderr


async def test_finish_ends_what_a_crashed_run_left(shell):
    for name, tag in (("a", "run:1"), ("b", "run:1"), ("c", "run:2"), ("d", "run:1")):
        await shell("create", name, "--tag", tag)
    await shell("finish", "d", "--reward", "1")
    assert "give a SESSION or --tag" in (await shell("finish", code=2)).stderr
    done = await shell("finish", "--tag", "run:1", "--failed", "canceled", "--detail", "the run crashed")
    assert sorted(done.stdout.splitlines()) == ["a finished", "b finished"]
    found = {name: await state(shell, name) for name in "abcd"}
    assert [one["state"] for one in found.values()] == ["finished", "finished", "open", "finished"]
    assert found["a"]["outcome_detail"] == "the run crashed"
    assert found["d"]["reward"] == 1.0


async def test_a_failed_session_is_seen_and_left_out(shell, tmp_path):
    for name in ("a", "b"):
        await record(shell.rig, name)
    assert "outcome" not in (await shell("sessions")).stdout
    await shell("finish", "a", "--failed", "sandbox", "--detail", "no disk")
    listed = (await shell("sessions")).stdout
    assert "sandbox" in listed
    assert "2 sessions, 1 failed" in listed
    shown = (await shell("show", "a")).stdout
    assert "FAILED: sandbox" in shown
    assert "sandbox: no disk" in shown
    for form in ("native", "verifiers"):
        everything = await shell("export", "--all", "--format", form, "--to", str(tmp_path / f"{form}.jsonl"))
        assert "1 FAILED: no trainer learns from them (see `tokencache sessions`): a" in everything.stderr
        valid = await shell("export", "--all", "--format", form, "--to", str(tmp_path / f"{form}-valid.jsonl"), "--valid-only")
        assert "1 incomplete or failed, and left out: a" in valid.stderr
        assert len((tmp_path / f"{form}-valid.jsonl").read_text().splitlines()) == 1


async def test_every_setting_of_a_session_is_an_option(shell):
    await shell("create", "r1", "--models", '{"gpt-*": "m"}', "--tenant", "t", "--budget", '{"calls": 3}', "--history", "follow")
    settings = (await shell.rig.store.session("r1")).settings
    assert (settings.models, settings.tenant, settings.budget, settings.history) == ({"gpt-*": "m"}, "t", Budget(calls=3), "follow")
    assert "budget" in (await shell("create", "r2", "--budget", '{"calls": -1}', code=1)).stderr


async def test_create_takes_a_deadline_and_a_limit_of_silence(shell):
    await shell("create", "r1", "--deadline", "4000000000", "--silent-for", "600")
    settings = (await shell.rig.store.session("r1")).settings
    assert (settings.deadline, settings.silent_for) == (4e9, 600.0)
    assert "is in the past" in (await shell("create", "r2", "--deadline", "5", code=1)).stderr


async def test_force_seals_a_session_that_runs_and_says_so(shell):
    await record(shell.rig, "a")
    await shell("seal", "a", "--force")
    found = await state(shell, "a")
    assert (found["state"], found["complete"]) == ("sealed", False)


async def test_several_sessions_one_of_which_does_not_exist(shell):
    for name in ("a", "b"):
        await record(shell.rig, name, 1)
    result = await shell("finish", "a", "nope", "b", "--json", code=1)
    assert json.loads(result.stdout)[0] == {"session": "a", "done": "finished"}
    assert "there is no session 'nope'" in json.loads(result.stdout)[1]["error"]
    assert json.loads(result.stdout)[2] == {"session": "b", "done": "finished"}
    assert "there is no session 'nope'" in result.stderr


async def test_nothing_is_deleted_without_a_yes(shell):
    await record(shell.rig, "a", 1)
    assert "add --yes" in (await shell("delete", "a", code=1)).stderr
    assert (await state(shell, "a"))["turns"] == 2
    assert (await shell("delete", "a", "--yes")).stdout == "a deleted\n"
    assert "there is no session 'a'" in (await shell("show", "a", code=1)).stderr


async def test_a_deleted_session_can_be_made_usable_again(shell):
    await record(shell.rig, "a", 1)
    await shell("delete", "a", "--yes")
    status, said = await shell.rig.post("a", messages=[user("hi")])
    assert (status, "`tokencache delete a --reuse`" in said["error"]["message"]) == (409, True)
    await shell("delete", "a", "--yes", "--reuse")
    assert (await shell.rig.post("a", messages=[user("hi")]))[0] == 200


@pytest.mark.parametrize("command", [("reward", "a", "nan"), ("finish", "a", "--reward", "inf"), ("create", "b", "--deadline", "nan")])
async def test_a_number_is_finite(shell, command):
    await record(shell.rig, "a", 1)
    assert "is not a finite number" in (await shell(*command, code=2)).stderr


async def test_a_reward_of_a_turn_from_a_file(shell, tmp_path):
    await record(shell.rig, "a")
    turn = (await shell.rig.exported("a"))["sequences"][0]["turns"][0]["turn"]
    path = tmp_path / "reward.json"
    path.write_text(json.dumps({"reward": 1, "components": {"tests": 0.5}, "turns": {turn: 0.25}}))
    await shell("reward", "a", "--reward-file", str(path))
    found = await shell.rig.exported("a")
    assert (found["reward"], found["reward_components"], found["sequences"][0]["turns"][0]["reward"]) == (1, {"tests": 0.5}, 0.25)
    path.write_text('{"turns": {"nope": 1}}')
    assert "nope" in (await shell("reward", "a", "--reward-file", str(path), code=1)).stderr
    assert "NUMBER or --reward-file" in (await shell("reward", "a", code=2)).stderr


@pytest.mark.parametrize(
    ("ending", "code", "reward", "outcome"),
    [
        ("sys.exit(0)", 0, None, "ok"),
        ("sys.exit(7)", 7, None, "harness"),
        ("sys.exit(7)", 7, "0.5", "ok"),
        ("sys.exit(7)", 7, "{", "harness"),
        ("os.kill(os.getpid(), 9)", 137, None, "harness"),
    ],
)
async def test_run_finishes_a_harness_that_failed_as_failed_unless_it_has_a_reward(  # noqa: PLR0917 - one for each fact
    shell, machine, ending, code, reward, outcome
):
    await record(shell.rig, "r1")
    given = []
    if reward is not None:
        ending = f"open('reward', 'w').write({reward!r}); {ending}"
        given = ["--reward-file", "reward"]
    machine.install("agent", then=ending)
    run = ("run", "langgraph", "--session", "r1", "--proxy", shell.rig.url, "--finish", *given, "--", "agent")
    done = await asyncio.to_thread(machine.tokencache, *run)
    assert done.returncode == code, done.stderr
    found = await state(shell, "r1")
    assert (found["state"], found["outcome"], found["reward"]) == ("finished", outcome, 0.5 if reward == "0.5" else None)
    assert found["outcome_detail"] == ("" if outcome == "ok" else f"the harness ended with exit code {code}")


async def test_the_reward_of_an_earlier_run_is_not_that_of_this_one(shell, machine):
    """Else a rollout that broke before it wrote its reward would be trained with another one."""
    machine.install("agent", then="sys.exit(7) if os.path.exists('reward') else open('reward', 'w').write('1.0')")
    for name in ("r1", "r2"):
        await record(shell.rig, name)
        run = ("run", "langgraph", "--session", name, "--proxy", shell.rig.url, "--finish", "--reward-file", "reward", "--", "agent")
        done = await asyncio.to_thread(machine.tokencache, *run)
    assert "reward is from before the run" in done.stderr
    found = [await state(shell, name) for name in ("r1", "r2")]
    assert [(one["reward"], one["outcome"]) for one in found] == [(1.0, "ok"), (None, "harness")]


@pytest.mark.parametrize("before", [{"failed": "sandbox", "detail": "no disk"}, {"reward": 1.0}])
async def test_what_the_harness_said_of_its_end_stays(shell, machine, before):
    await record(shell.rig, "r1")
    async with AsyncClient(shell.rig.url) as client:
        await client.session("r1").finish(**before)
    machine.install("agent")
    run = ("run", "langgraph", "--session", "r1", "--proxy", shell.rig.url, "--finish", "--", "agent")
    assert (await asyncio.to_thread(machine.tokencache, *run)).returncode == 7
    found = await state(shell, "r1")
    assert (found["outcome"], found["reward"]) == (before.get("failed", "ok"), before.get("reward"))


@pytest.mark.parametrize(
    ("text", "reward"),
    [("0.5", RewardValues(0.5)), ("1\n", RewardValues(1.0)), ('{"components": {"a": 1}}', RewardValues(components={"a": 1.0}))],
)
def test_reward_files(tmp_path, text, reward):
    (tmp_path / "r").write_text(text)
    assert read_reward(tmp_path / "r") == reward


@pytest.mark.parametrize("text", ["", "NaN", "1e999", '"1"', '{"rewards": 1}', "[1]", '{"reward": true}'])
def test_files_that_hold_no_reward(tmp_path, text):
    (tmp_path / "r").write_text(text)
    with pytest.raises(RewardFileError, match="expected a number"):
        read_reward(tmp_path / "r")


def test_a_reward_file_that_is_missing(tmp_path):
    with pytest.raises(RewardFileError, match="No such file"):
        read_reward(tmp_path / "r")

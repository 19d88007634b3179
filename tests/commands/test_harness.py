"""`tokencache run`, `env` and `harnesses`, as a user types them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.adapters.kit import COMMAND, SHIPPED, listing
from tests.support.pairwise import some
from tokencache.cli import app
from tokencache.commands.harness import quoted

PATH = os.environ["PATH"]


def invoke(*args, **env):
    return CliRunner().invoke(app, args, env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1", **env})


# --- run ---


def test_run_starts_the_harness_pointed_at_the_proxy(machine, proxy):
    machine.install("codex")
    (machine.home / ".codex").mkdir()
    (machine.home / ".codex/config.toml").write_text("# mine\n")
    done = machine.tokencache(
        "run", "codex", "--session", "r1", "--proxy", proxy, "--", "exec", "--json", "fix it",
        stdin="hello", TOKENCACHE_ADMIN_KEY="secret", MINE="1",
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (7, "said\n", "complained\n")
    started = machine.started
    assert started["argv"] == ["exec", "--json", "fix it"]
    assert started["stdin"] == "hello"
    assert started["cwd"] == str(machine.work)
    assert started["env"]["TOKENCACHE_API_KEY"] == "tcs-r1"
    assert started["env"]["MINE"] == "1"
    assert "TOKENCACHE_ADMIN_KEY" not in started["env"]
    assert f'base_url = "{proxy}/s/r1/h/codex/v1"' in started["files"]["config.toml"]
    assert 'model = "Org/one"' in started["files"]["config.toml"]
    assert "model_context_window = 40960" in started["files"]["config.toml"]
    assert not Path(started["env"]["CODEX_HOME"]).exists()
    assert sorted(str(path.relative_to(machine.home)) for path in machine.home.rglob("*")) == [".codex", ".codex/config.toml"]
    assert (machine.home / ".codex/config.toml").read_text() == "# mine\n"
    assert list(machine.work.iterdir()) == []


@pytest.mark.whole
def test_run_keeps_the_directory_that_was_named_and_comes_back_to_it(machine, proxy):
    machine.install("codex", then="open(os.environ['CODEX_HOME'] + '/history', 'a').write('x')")
    for session in ("r1", "r2"):
        done = machine.tokencache("run", "codex", "--session", session, "--proxy", proxy, "--config-dir", "kept")
        assert done.returncode == 0, done.stderr
    kept = machine.work / "kept"
    assert machine.started["env"]["CODEX_HOME"] == str(kept)
    assert (kept / "history").read_text() == "xx"
    assert f"{proxy}/s/r2/h/codex" in (kept / "config.toml").read_text()
    assert (kept.stat().st_mode & 0o777, (kept / "config.toml").stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.whole
def test_run_does_not_write_into_a_directory_of_the_users(machine, proxy):
    machine.install("codex")
    (machine.home / ".codex").mkdir()
    (machine.home / ".codex/config.toml").write_text("# mine\n")
    done = machine.tokencache("run", "codex", "--session", "r1", "--proxy", proxy, "--config-dir", str(machine.home / ".codex"))
    assert done.returncode == 1
    assert "was not made by tokencache" in done.stderr
    assert not machine.told.exists()
    assert {path.name: path.read_text() for path in (machine.home / ".codex").iterdir()} == {"config.toml": "# mine\n"}


def test_run_makes_a_session_and_prints_its_name(machine, proxy):
    machine.install("claude", then="sys.exit(0)")
    runs = [machine.tokencache("run", "claude-code", "--proxy", proxy) for _ in range(2)]
    named = [re.fullmatch(r"tokencache: session (claude-code-[0-9a-f]{12})\ncomplained\n", done.stderr)[1] for done in runs]
    assert named[0] != named[1]
    assert machine.started["env"]["ANTHROPIC_BASE_URL"] == f"{proxy}/s/{named[1]}/h/claude-code"
    assert machine.started["env"]["ANTHROPIC_AUTH_TOKEN"] == f"tcs-{named[1]}"


@pytest.mark.whole
def test_run_puts_the_programs_own_first_arguments_first(machine, proxy):
    machine.install("pi")
    machine.tokencache("run", "pi", "--session", "s", "--proxy", proxy, "--", "-p", "--model", "x")
    assert machine.started["argv"] == ["--provider", "tokencache", "--model", "Org/one", "-p", "--model", "x"]


@pytest.mark.whole
def test_run_of_ones_own_script(machine, proxy):
    machine.install("agent")
    done = machine.tokencache("run", "langgraph", "--session", "s", "--proxy", proxy, "--key", "tck-1", "--", "agent", "--fast")
    assert done.returncode == 7
    assert machine.started["argv"] == ["--fast"]
    assert machine.started["env"]["OPENAI_API_BASE"] == f"{proxy}/s/s/h/langgraph/v1"
    assert (machine.started["env"]["OPENAI_API_KEY"], machine.started["env"]["OPENAI_MODEL"]) == ("tck-1", "Org/one")


@pytest.mark.whole
def test_run_with_an_adapter_of_ones_own(machine, proxy, tmp_path):
    machine.install("mine")
    own = tmp_path / "own"
    own.mkdir()
    (own / "mine.toml").write_text(
        'title = "Mine"\ndialects = ["chat"]\ninstall = "make mine"\nprogram = ["mine", "{model}"]\n[env]\nBASE = "{url}/v1"\n'
    )
    done = machine.tokencache("run", "mine", "--session", "s", "--proxy", proxy, TOKENCACHE_ADAPTERS=str(own))
    assert (done.returncode, machine.started["argv"], machine.started["env"]["BASE"]) == (7, ["Org/one"], f"{proxy}/s/s/h/mine/v1")
    (own / "mine.toml").write_text("title = 1")
    done = machine.tokencache("run", "mine", "--session", "s", "--proxy", proxy, "--adapters", str(own))
    assert done.returncode == 1
    assert str(own / "mine.toml") in done.stderr


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        ("codex", r"codex is not on the PATH; install Codex CLI with: npm install -g @openai/codex"),
        ("langgraph", r"no-such-program is not on the PATH\n"),
    ],
)
def test_run_of_a_program_that_is_not_installed(machine, harness, said):
    """Told at once: no proxy is asked for this."""
    done = machine.tokencache("run", harness, "--session", "s", "--proxy", "http://127.0.0.1:1", "--", "no-such-program")
    assert done.returncode == 127
    assert re.search(said, done.stderr)


@pytest.mark.whole
def test_run_of_a_library_without_a_program(machine):
    done = machine.tokencache("run", "pydantic-ai", "--session", "s")
    assert done.returncode == 1
    assert "tokencache run pydantic-ai -- python agent.py" in done.stderr


@pytest.mark.whole
def test_run_of_a_program_that_cannot_be_started(machine, proxy):
    broken = machine.bin / "codex"
    broken.write_bytes(b"\x00\x01no program")
    broken.chmod(0o755)
    done = machine.tokencache("run", "codex", "--session", "s", "--proxy", proxy)
    assert done.returncode == 1
    assert "codex cannot be started" in done.stderr


@pytest.mark.whole
def test_run_of_a_harness_that_is_killed(machine, proxy):
    machine.install("codex", then="os.kill(os.getpid(), 9)")
    assert machine.tokencache("run", "codex", "--session", "s", "--proxy", proxy).returncode == 128 + 9


def started(machine, proxy, number, code):
    """Start a harness that waits for a signal and ends with `code`; returns our process, once the harness is ready."""
    pipe = machine.work / "ready"
    os.mkfifo(pipe)
    wait = f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])\nopen({str(pipe)!r}, 'w').close()\nsignal.sigwait([{int(number)}])"
    machine.install("codex", then=f"import signal\n{wait}\nsys.exit({code})")
    ours = subprocess.Popen([*COMMAND, "run", "codex", "--session", "s", "--proxy", proxy], env=machine.env, stdin=subprocess.DEVNULL)
    pipe.read_text()
    return ours


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.whole)])
def test_run_passes_on_the_word_to_stop_and_cleans_up(machine, proxy, number):
    ours = started(machine, proxy, number, 5)
    ours.send_signal(number)
    assert ours.wait(30) == 5
    assert not Path(machine.started["env"]["CODEX_HOME"]).exists()


def test_run_leaves_ctrl_c_to_the_harness(machine, proxy):
    """A terminal sends it to both: we wait for what the harness makes of it."""
    ours = started(machine, proxy, signal.SIGTERM, 6)
    ours.send_signal(signal.SIGINT)
    ours.send_signal(signal.SIGTERM)
    assert ours.wait(30) == 6


# --- which model ---


def test_the_key_is_shown_to_the_proxy_when_it_is_asked():
    with listing({"id": "m"}) as (url, asked):
        shown = invoke("env", "openai", "--session", "s", "--proxy", url + "/", "--key", "tck-7")
    assert (shown.exit_code, asked[0]) == (0, ("/s/s/v1/models", "Bearer tck-7"))
    assert "export OPENAI_MODEL='m'\n" in shown.stdout


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (({"id": "a"}, {"id": "b"}), "serves a, b: name one with --model"),
        (({"id": "a", "root": "/w"}, {"id": "b", "root": "/lora"}), "serves a, b: name one with --model"),
        (({"id": "a", "root": "/w"}, {"id": "b"}), "serves a, b: name one with --model"),
        ((), "serves none"),
    ],
)
def test_which_of_several_models(served, said):
    with listing(*served) as (url, _):
        done = invoke("env", "openai", "--session", "s", "--proxy", url)
        assert done.exit_code == 1
        assert said in done.stderr
        assert "OPENAI_MODEL='b'" in invoke("env", "openai", "--session", "s", "--proxy", url, "--model", "b").stdout


def test_one_model_under_several_names():
    """As vLLM lists the names of `--served-model-name`."""
    with listing(*({"id": name, "root": "/w", "parent": None, "max_model_len": 8000} for name in "ab")) as (url, _):
        shown = invoke("env", "codex", "--session", "s", "--proxy", url)
        assert shown.exit_code == 0, shown.stderr
        assert "model_context_window = 8000" in shown.stdout
        assert 'model = "a"' in shown.stdout
        assert 'model = "b"' in invoke("env", "codex", "--session", "s", "--proxy", url, "--model", "b").stdout


def test_the_context_of_a_model_that_was_named():
    with listing({"id": "a", "max_model_len": 1000}, {"id": "b", "max_model_len": 8000}) as (url, _):
        shown = invoke("env", "codex", "--session", "s", "--proxy", url, "--model", "b").stdout
        assert "model_context_window = 8000" in shown
        shown = invoke("env", "codex", "--session", "s", "--proxy", url, "--model", "alias").stdout
        assert "model_context_window = 131072" in shown


def test_a_proxy_that_does_not_answer():
    done = invoke("env", "openai", "--session", "s", "--proxy", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "is `tokencache serve` running there" in done.stderr
    assert "OPENAI_MODEL='m'" in invoke("env", "openai", "--session", "s", "--proxy", "http://127.0.0.1:1", "--model", "m").stdout


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": "unknown API key"}', "answered 401: .*unknown API key"),
        (404, b'{"detail":"Not Found"}', "does not list its models. Name the model with --model NAME"),
        (200, b"<html>", "cannot read the served models"),
        (200, b"[]", "cannot read the served models"),
    ],
)
def test_a_proxy_that_answers_otherwise(status, body, said):
    with listing(status=status, body=body) as (url, _):
        done = invoke("env", "openai", "--session", "s", "--proxy", url)
    assert done.exit_code == 1
    assert re.search(said, done.stderr)


@pytest.mark.parametrize("model", [[], ["--model", "m"]])
@pytest.mark.parametrize("command", ["env", "run"])
def test_the_address_of_an_engine_is_not_that_of_a_proxy(command, model):
    """Also if the model is given: the harness's own requests would all be 404."""
    with listing({"id": "m"}, sessions=False) as (url, _):
        done = invoke(command, "openai", "--session", "s", "--proxy", url, *model, *(["--", sys.executable] if command == "run" else []))
    assert done.exit_code == 1
    assert f"{url} is not a tokencache proxy: it answers {url}/v1/models, but to {url}/s/s/v1/models it answers 404" in done.stderr
    assert "Name the address of `tokencache serve`" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nope"], "no adapter 'nope'"),
        (["openai", "--proxy", "nowhere"], "'nowhere' is not the base URL"),
        (["openai", "--proxy", "http://p:8100/v1"], "'http://p:8100/v1' is not the base URL of a tokencache proxy"),
        (["openai", "--session", "a/b"], "'a/b' is not a valid session name"),
        (["openai", "--adapters", "nowhere"], "nowhere: no such directory"),
    ],
)
@pytest.mark.parametrize("command", ["env", "run"])
def test_errors_are_one_line(command, args, said):
    done = invoke(command, *args, *(["--", sys.executable] if command == "run" else []))
    assert done.exit_code == 1
    assert said in done.stderr
    assert "Traceback" not in done.output


# --- env ---

AWKWARD = """it's "a" $HOME `b` \\ $(c) #d;ü"""


@pytest.mark.parametrize("name", some(SHIPPED, 4))
def test_env_is_what_a_shell_takes_in(name, tmp_path):
    """Really sourced, by a POSIX shell: every variable arrives, what must go is gone, nothing else happens."""
    directory = tmp_path / "it's a dir"
    shown = invoke(
        "env", name, "--session", "s", "--proxy", "http://127.0.0.1:1", "--model", AWKWARD, "--key", AWKWARD, "--config-dir", str(directory)
    )
    assert shown.exit_code == 0, shown.stderr
    script = tmp_path / "env.sh"
    script.write_text(shown.stdout, encoding="utf-8")
    adapter = SHIPPED[name]
    before = {"PATH": PATH, **dict.fromkeys(adapter.unset, "mine")}
    code = "import json, os; print(json.dumps(dict(os.environ), ensure_ascii=True))"
    sourced = subprocess.run(
        ["sh", "-euc", '. "$1"; exec "$2" -c "$3"', "sh", str(script), sys.executable, code],
        env=before, capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert sourced.stderr == ""
    got = json.loads(sourced.stdout)
    values = {"url": f"http://127.0.0.1:1/s/s/h/{name}", "key": AWKWARD, "model": AWKWARD, "config_dir": str(directory), "session": "s"}
    numbers = {"context": "131072", "max_output": "32000"}
    wanted = {
        variable: re.sub(r"\{([a-z_]+)\}", lambda m: {**values, **numbers}[m[1]], text) for variable, text in adapter.variables.items()
    }
    assert {variable: got.get(variable) for variable in wanted} == wanted
    assert not set(adapter.unset) & set(got)
    for file in adapter.files:
        assert (directory / file.path).is_file()
        assert f"# wrote {directory / file.path}" in shown.stdout


def test_env_without_a_directory_prints_the_content_of_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = invoke("env", "codex", "--session", "s", "--proxy", "http://127.0.0.1:1", "--model", "m")
    lines = shown.stdout.splitlines()
    assert "export TOKENCACHE_API_KEY='tcs-s'" in lines
    assert "#   export CODEX_HOME='DIR'" in lines
    assert "#   in DIR/config.toml:" in lines
    assert '#     base_url = "http://127.0.0.1:1/s/s/h/codex/v1"' in lines
    assert "# Start it with: codex" in lines
    assert all(line.startswith(("#", "export ", "unset ")) for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_env_of_a_library_shows_the_line_of_code():
    shown = invoke("env", "langgraph", "--session", "s", "--proxy", "http://127.0.0.1:1", "--model", "m").stdout
    assert '# In your code: model = ChatOpenAI(model=os.environ["OPENAI_MODEL"])' in shown


def test_env_prints_the_session_that_it_made():
    shown = invoke("env", "openai", "--proxy", "http://127.0.0.1:1", "--model", "m")
    named = re.search(r"session (openai-\w+)", shown.stderr)[1]
    assert f"/s/{named}/h/openai/v1'" in shown.stdout


@settings(max_examples=40)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(str.isprintable) | st.sampled_from(["'", '"', "$X", "`id`", "\\"])
)
def test_any_value_survives_the_shell(value):
    shown = subprocess.run(["sh", "-c", f'X={quoted(value)}; printf %s "$X"'], capture_output=True, check=True)
    assert shown.stdout.decode() == value


def test_env_as_json():
    shown = json.loads(invoke("env", "codex", "--session", "s", "--proxy", "http://127.0.0.1:1", "--model", "m", "--json").stdout)
    assert (shown["session"], shown["harness"], shown["argv"][0]) == ("s", "codex", "codex")
    assert shown["env"]["CODEX_HOME"]
    assert any("/s/s/h/codex/v1" in text for text in shown["files"].values())


# --- harnesses, help ---


def test_harnesses_lists_them_all(tmp_path):
    (tmp_path / "mine.toml").write_text('title = "Mine, all mine"\ndialects = ["chat", "responses"]\ninstall = "x"\ntested = ["1", "2"]\n')
    shown = invoke("harnesses", "--adapters", str(tmp_path))
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == sorted({*SHIPPED, "mine"})
    (tested,) = SHIPPED["claude-code"].tested
    assert any(re.fullmatch(rf"claude-code +messages +{re.escape(tested)} +Claude Code", line) for line in lines)
    assert any(re.fullmatch(r"mine +chat responses +1 2 +Mine, all mine", line) for line in lines)


def test_harnesses_as_json():
    listed = json.loads(invoke("harnesses", "--json").stdout)
    assert sorted(one["name"] for one in listed) == sorted(SHIPPED)
    codex = next(one for one in listed if one["name"] == "codex")
    assert (codex["dialects"], codex["program"]) == (["responses"], ["codex"])


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("run", 'tokencache run claude-code --session r17 -- -p "fix the tests"'),
        ("env", 'eval "$(tokencache env codex --session r17 --config-dir ./r17)"'),
        ("harnesses", "tokencache harnesses --adapters ./my-adapters"),
    ],
)
def test_help_teaches_by_an_example(command, example):
    assert example in invoke(command, "--help", COLUMNS="80").stdout

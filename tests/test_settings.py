"""Settings: each one is an option, an environment variable and a key of a configuration file, and `--help` explains it."""

import contextlib
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from typer.testing import CliRunner

import tokencache
from tests.support.waiting import PATIENCE
from tokencache import cli
from tokencache.config import NAMES, PREFIX, Settings, SettingsError, option_of
from tokencache.server.listener import bind

ROOT = Path(__file__).parents[1]
FIELDS = Settings.model_fields
OWN = {
    "host": "::1",
    "public_url": "https://rl.example/proxy",
    "upstream": "http://a:1,http://b:2",
    "rules_off": "tool-ids,cd-prefix",
    "derender": "http://gpu:8000",
    "session_from": "header:X-Session-ID,body:a.b",
    "session_header": "X-Rollout",
    "affinity_headers": "X-A,X-B",
    "not_trainable": "judge,small",
    "model_aliases": {"claude-*": "qwen3"},
    "sampling": {"temperature": 1.0, "top_p": 0.5},
    "store": "redis://user:secret@host:6379/1",
    "engine": "nemo-rl",
}
"""Values of settings that check what is in them."""


def value_of(name):
    """A value that is right, and is not the default."""
    field = FIELDS[name]
    if get_origin(field.annotation) is Literal:
        return next(choice for choice in get_args(field.annotation) if choice != field.default)
    if isinstance(field.default, bool):
        return not field.default
    return OWN.get(name, field.default + 1 if isinstance(field.default, (int, float)) else "/some/text")


def text_of(value):
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)


def in_toml(value):
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {json.dumps(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


def first_of_each_type():
    """Parameters: each setting; in the usual run one of each type, and those with checks of their own."""
    first = {repr(field.annotation): name for name, field in reversed(FIELDS.items())}.values()
    return [pytest.param(name, marks=() if name in first or name in OWN else pytest.mark.whole) for name in FIELDS]


@pytest.fixture
def serve(monkeypatch):
    """Run `tokencache serve` up to the settings with which it would start."""
    taken = []

    async def run(settings):
        taken.append(settings)

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(cli, "supervise", run)
    monkeypatch.setattr(cli.logs, "set_up", lambda *_args, **_named: None)
    monkeypatch.setattr(cli, "quieten", lambda: None)

    def started(*arguments, **environment):
        told = CliRunner().invoke(cli.app, ["serve", *arguments], env=environment)
        assert told.exit_code == 0, told.output
        return taken.pop()

    return started


@pytest.mark.parametrize("name", first_of_each_type())
def test_a_setting_can_be_given_in_three_ways(name, serve, tmp_path):
    value, variable = value_of(name), PREFIX + name.upper()
    file = tmp_path / "tokencache.toml"
    file.write_text(f"{name} = {in_toml(value)}\n")
    besides = ["--store", "redis://host"] if name == "workers" else []
    option = [option_of(name)] if value is True else [option_of(name), text_of(value)]

    wanted = getattr(Settings(**{name: value, "store": "redis://host"} if name == "workers" else {name: value}), name)
    assert wanted != FIELDS[name].default
    assert getattr(serve(*option, *besides), name) == wanted
    assert getattr(serve(*besides, **{variable: text_of(value)}), name) == wanted
    assert getattr(serve("--config", str(file), *besides), name) == wanted


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(serve, tmp_path):
    file = tmp_path / "tokencache.toml"
    file.write_text('port = 1\nmax-calls = 2\nhold = 3\nallow_open = true\nupstream = ["http://a", "http://b"]\n')
    settings = serve("--port", "7", "--no-allow-open", TOKENCACHE_CONFIG=str(file), TOKENCACHE_PORT="8", TOKENCACHE_MAX_CALLS="9")
    assert (settings.port, settings.max_calls, settings.hold, settings.allow_open) == (7, 9, 3.0, False)
    assert settings.upstream == "http://a,http://b"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if NAMES in field.metadata])
def test_the_option_of_a_list_may_be_repeated(name, serve):
    first, second = OWN[name].split(",")
    assert getattr(serve(option_of(name), first, option_of(name), second), name) == OWN[name]


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("prot = 1", r"'prot' in .* is not a setting. Did you mean 'port'\?"),
        ("max_call = 1", "Did you mean 'max_calls'?"),
        ("port: 1", "cannot be read as TOML"),
        ('port = "x"', "port in .*tokencache.toml: Input should be a valid integer"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file, words, tmp_path):
    (tmp_path / "tokencache.toml").write_text(file)
    with pytest.raises(SettingsError, match=words):
        Settings.load({}, tmp_path / "tokencache.toml")


def test_a_wrong_value_is_named_as_it_was_given(monkeypatch):
    monkeypatch.setenv("TOKENCACHE_HOLD", "long")
    told = CliRunner().invoke(cli.app, ["serve", "--require", "all", "--sampling", "{", "--admin-key", "secret-of-mine"])
    assert told.exit_code == 2
    assert "--require: Input should be 'processed', 'exact', 'record' or 'relay'" in told.output
    assert "--sampling: write a JSON object" in told.output
    assert "TOKENCACHE_HOLD: Input should be a valid number" in told.output
    assert "secret-of-mine" not in told.output


@pytest.mark.parametrize(
    ("host", "upstream", "own"),
    [
        ("127.0.0.1", "http://127.0.0.1:8100", True),
        ("127.0.0.1", "http://gpu:8100,http://localhost:8100/v1", True),
        ("localhost", "http://[::1]:8100", True),
        ("127.0.0.1", "http://127.0.0.2:8100", False),
        ("127.0.0.1", "http://[::1]:8100", False),
        ("0.0.0.0", "http://127.0.0.2:8100", True),  # noqa: S104 - only compared
        ("::", "http://[::1]:8100", True),
        ("10.0.0.5", "http://10.0.0.5:8100", True),
        ("10.0.0.5", "http://127.0.0.1:8100", False),
        ("127.0.0.1", "http://gpu:8100", False),
        ("127.0.0.1", "http://127.0.0.1:8000", False),
        ("127.0.0.1", "http://127.0.0.1", False),
    ],
)
def test_the_proxy_is_not_its_own_engine(host, upstream, own):
    """It would send each request to itself, without end."""
    with pytest.raises(ValueError, match="is the address of this proxy") if own else contextlib.nullcontext():
        Settings(host=host, allow_open=True, upstream=upstream)


def test_the_newline_at_the_end_of_a_key_is_dropped(serve):
    settings = serve(TOKENCACHE_ADMIN_KEY=f"{'a' * 32}\n", TOKENCACHE_UPSTREAM_KEY=" b\r\n")
    assert (settings.admin_key, settings.upstream_key) == ("a" * 32, "b")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--upstream", "http://gpu:99999", "write base URLs"),
        ("--upstream", "http://[::1", "write base URLs"),
        ("--derender", "gpu:8000", "write base URLs"),
        ("--session-header", "X Session", "'X Session' is not the name of a header"),
        ("--session-from", "header:X-Session ID", "'X-Session ID' is not the name of a header"),
        ("--affinity-headers", "X-A,X B", "'X B' is not the name of a header"),
        ("--upstream-key", "a\nb", "a line break"),
    ],
)
def test_a_value_that_no_request_could_use_is_refused_at_the_start(option, value, words):
    told = CliRunner().invoke(cli.app, ["serve", option, value], env={"COLUMNS": "200"})
    assert told.exit_code == 2
    assert f"{option}: " in told.output
    assert words in told.output


def test_an_empty_session_header_is_the_default(serve):
    assert serve(TOKENCACHE_SESSION_HEADER="").session_header == "X-Tokencache-Session"


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid port 0 \(--host, --port\): "):
        bind("no.such.host.invalid", 0)


def test_a_misspelled_variable_is_named(serve, caplog):
    serve(TOKENCACHE_MAX_CALL="3", TOKENCACHE_UPSTREAM_URL="http://a", TOKENCACHE_PROXY="http://b", TOKENCACHE_SERVICE_PORT="8100")
    assert [record.args for record in caplog.records] == [
        ("TOKENCACHE_MAX_CALL", "TOKENCACHE_MAX_CALLS"),
        ("TOKENCACHE_UPSTREAM_URL", "TOKENCACHE_UPSTREAM"),
    ]


def help_of(*command):
    told = CliRunner().invoke(cli.app, [*command, "--help"], env={"COLUMNS": "80"})
    assert told.exit_code == 0
    return told.output


COMMANDS = re.findall(r"^  (\w+)  ", help_of().partition("Commands:")[2], re.MULTILINE)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_fits_80_columns(command):
    text = help_of(*command)
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.partition("Commands:")[2]


def test_help_explains_every_setting():
    text = help_of("serve")
    words = " ".join(text.split())
    basic, _, advanced = text.partition("Advanced options:")
    for name, field in FIELDS.items():
        assert re.search(rf"^  {option_of(name)}\b", text, re.MULTILINE)
        assert field.description[0].isupper() or field.description.startswith("auto")
        assert field.description.endswith(".")
        assert " ".join(field.description.split()) in words
    assert "Basic options:" in basic
    assert "--upstream URL" in basic
    assert "--linger SECONDS" in advanced


def test_the_version():
    assert tokencache.__version__ == version("tokencache")
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"tokencache {version('tokencache')}\n"


def test_a_shell_can_complete():
    def shell(**environment):
        code = "import sys; sys.argv[0] = 'tokencache'; from tokencache.cli import main; main()"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False).stdout

    assert "complete -o default -F _tokencache_completion tokencache" in shell(_TOKENCACHE_COMPLETE="source_bash")
    choices = shell(_TOKENCACHE_COMPLETE="complete_bash", COMP_WORDS="tokencache serve --require ", COMP_CWORD="3")
    assert choices.split() == ["processed", "exact", "record", "relay"]

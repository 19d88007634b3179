"""Defines and checks the fields of an adapter file.

The proxy reads which harness rules apply, and `tokencache run` how to start the harness. An unknown name is an error that names the field,
because a misspelt rule would split rollouts without a visible cause.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec

from tokencache.core.rules import RULES
from tokencache.dialects.registry import dialect_names

PLACEHOLDERS = frozenset({"url", "key", "model", "session", "config_dir", "context", "max_output"})
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
"""A placeholder, `{name}`. Braces around anything else (JSON, `{env:KEY}`) are text."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOCATION = re.compile(r"(header|body):\S+")


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration file of the harness: `path` is relative to its directory; strings in `content` are templates.

    Raises:
        ValueError: the path leaves the directory, or a template has an unknown placeholder.
    """

    path: str
    format: Literal["json", "toml", "yaml"]
    content: dict[str, Any]

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if not path.name or path.is_absolute() or ".." in path.parts:
            raise ValueError(f"path: {self.path!r} is not a path within the configuration directory")
        for text in _strings(self.content):
            _check_template("content", text)


class HarnessIds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the harness sends its own ids: `header:NAME` or `body:PATH`. They are for grouping and statistics, never to identify a rollout.

    `session` locates the id of its conversation, `agent` the id of a sub-agent.

    Raises:
        ValueError: a location has another form.
    """

    session: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        for location in (*self.session, *self.agent):
            if not _LOCATION.fullmatch(location):
                raise ValueError(f"{location!r} is neither header:NAME nor body:PATH")


class Mutations(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the harness changes its history: `rules` names the rules of `core.rules` that it needs.

    Raises:
        ValueError: a rule is unknown or named twice.
    """

    rules: tuple[str, ...] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.rules if rule not in RULES]:
            raise ValueError(f"rules: unknown: {', '.join(unknown)}; known are {', '.join(sorted(RULES))}")
        if len(set(self.rules)) < len(self.rules):
            raise ValueError("rules: a rule is named twice")


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One harness (`docs/adapters.md`). The strings of `program`, `env`, `quiet` and of file contents are templates.

    Attributes:
        name: the name of the file.
        title: the name to show. Required.
        dialects: its wire formats: `chat`, `messages`, `responses`, `gemini`. The adapter sets up the first. Required.
        install: the command that installs it, shown if the program is missing. Required.
        tested: the versions that were tested.
        program: the command line, to which the user's arguments are appended; empty for a library.
        user_agent: a regular expression for the User-Agent of requests that do not name their harness; leave it out unless it is specific.
        code: lines for the user's program, if variables are not enough.
        notes: how to run it without a terminal, and what to know. `unsupported`: what does not work, and why.
        unset: variables of the user that would lead it to another server.
        env: variables that lead it to the proxy: base URL, key, each role a model can have, its configuration directory.
        quiet: variables that switch off telemetry, updates and tours.
        files: files in its configuration directory: `path`, `format` (`json`, `toml`, `yaml`), `content` as data.
        wire: where its own ids are, as `header:NAME` or `body:PATH`: `session`, `agent` (of a sub-agent), `notes`.
        mutations: `rules` that it needs (if none, those of an unknown harness); `notes`: how it changes its history.

    Raises:
        ValueError: a field is wrong; the message begins with its name.
    """

    name: str
    title: str
    dialects: tuple[str, ...]
    install: str
    tested: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    user_agent: str = ""
    code: str = ""
    notes: str = ""
    unsupported: str = ""
    unset: tuple[str, ...] = ()
    env: dict[str, str] = {}
    quiet: dict[str, str] = {}
    files: tuple[File, ...] = ()
    wire: HarnessIds = HarnessIds()
    mutations: Mutations = Mutations()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r}: the name of the file may contain a-z, 0-9 and -, because it is a part of URLs")
        if not self.dialects:
            raise ValueError("dialects: name at least one")
        if unknown := [name for name in self.dialects if name not in dialect_names()]:
            raise ValueError(f"dialects: there is no dialect {unknown[0]!r}; there are {', '.join(dialect_names())}")
        try:
            re.compile(self.user_agent)
        except re.error as error:
            raise ValueError(f"user_agent: {self.user_agent!r} is not a regular expression: {error}") from None
        self._check_environment()
        for text in self.program:
            _check_template("program", text)
        paths = [file.path for file in self.files]
        if len(set(paths)) < len(paths):
            raise ValueError("files: a path is named twice")

    def _check_environment(self) -> None:
        for field, names in (("env", self.env), ("quiet", self.quiet), ("unset", self.unset)):
            for name in names:
                if not _VARIABLE.fullmatch(name):
                    raise ValueError(f"{field}: {name!r} is not the name of a variable")
        every = [*self.env, *self.quiet, *self.unset]
        if twice := {name for name in every if every.count(name) > 1}:
            raise ValueError(f"env, quiet, unset: {min(twice)} is in more than one")
        for field, table in (("env", self.env), ("quiet", self.quiet)):
            for name, text in table.items():
                _check_template(f"{field}.{name}", text)

    @property
    def variables(self) -> dict[str, str]:
        """The templates of all variables to set."""
        return {**self.env, **self.quiet}


def _check_template(field: str, text: str) -> None:
    if unknown := [name for name in PLACEHOLDER.findall(text) if name not in PLACEHOLDERS]:
        raise ValueError(f"{field}: unknown placeholder {{{unknown[0]}}} in {text!r}; known are {', '.join(sorted(PLACEHOLDERS))}")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in nested data, including keys."""
    match value:
        case str():
            yield value
        case dict():
            for name, member in value.items():
                yield name
                yield from _strings(member)
        case list():
            for member in value:
                yield from _strings(member)

"""Provides what a harness needs to use a session: a base URL, an API key, headers, or the environment of its process.

A program with an OpenAI client needs `base_url` and `key`. A program that sends plain HTTP needs `base_url` and `headers`. A harness
with an adapter needs the environment (and files) of `launch`, as `tokencache env` and `tokencache run` use them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from tokencache.adapters import files
from tokencache.adapters.launch import Launch, prepare
from tokencache.adapters.load import AdapterError
from tokencache.adapters.schema import Adapter
from tokencache.session_url import session_key, session_url

_NOWHERE = Path("{config_dir}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """How to send calls to one session.

    A dataclass, so that `repr` can leave out the key.

    Attributes:
        id: the name of the session.
        key: the API key. The proxy finds the session by this key alone.
        key_id: the id of the registered key; `""` if the key was not registered.
        base_url: the URL for OpenAI clients. It ends with `/v1`. That of a new session begins with the proxy's `--public-url`, if it has
            one; any other with the URL of the client.
        launch: how to start the harness; `None` if no harness was named. `launch.argv` is the program with its first arguments,
            `launch.environment(os.environ)` the whole environment of its process.
    """

    id: str
    key: str = dataclasses.field(repr=False)
    base_url: str
    launch: Launch | None = dataclasses.field(default=None, repr=False)
    key_id: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers to send with each call."""
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def env(self) -> dict[str, str]:
        """The environment variables to set for the harness; empty if no harness was named."""
        return dict(self.launch.env) if self.launch is not None else {}


def access_to(url: str, session: str, key: str | None = None, key_id: str = "") -> Access:
    """Return the access to a session. Without a registered key, the key is the one that contains the session's name, `tcs-NAME`."""
    return Access(id=session, key=key or session_key(session), base_url=f"{session_url(url, session)}/v1", key_id=key_id)


def check_directory(adapter: Adapter, config_dir: Path | None) -> None:
    """Check that a harness can use the proxy if no configuration directory is given.

    Raises:
        AdapterError: no directory is given, and the harness reads the URL of the proxy only from a file.
    """
    if config_dir is None and adapter.files and not any("{url}" in text for text in adapter.variables.values()):
        raise AdapterError(
            f"{adapter.title} reads the URL of the proxy from a configuration file: name a directory for it (config_dir=…, --config-dir)"
        )


def launch_of(adapter: Adapter, url: str, access: Access, model: str, context: int, config_dir: Path | None) -> Launch:  # noqa: PLR0917
    """Prepare a harness for a session, and write its configuration files if a directory is given.

    Without a directory, variables that name it are left out, as `tokencache env` does.

    Raises:
        AdapterError: the directory has other content, or cannot be written.
    """
    place = _NOWHERE if config_dir is None else config_dir.absolute()
    launch = prepare(adapter, url, access.id, access.key, model, place, context=context)
    if config_dir is not None:
        files.write(place, launch.files)
        return launch
    kept = {name: value for name, value in launch.env.items() if "{config_dir}" not in adapter.variables[name]}
    return msgspec.structs.replace(launch, env=kept, files={})


def members_of(given: Any) -> dict[str, Any]:
    """Return the members of a dataclass, to make one of another class with more members."""
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}

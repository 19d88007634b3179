"""How a harness gets into a session: what a trainer gives it instead of the engine's address.

A program with an OpenAI client needs `base_url` and `key`; one that speaks plain HTTP, `base_url` and `headers`; a harness
that there is an adapter for, the environment (and files) of `launch`, the same that `tokencache env` and `tokencache run` use.
"""

import dataclasses
from pathlib import Path

import msgspec

from tokencache.adapters import files
from tokencache.adapters.launch import Launch, prepare
from tokencache.adapters.load import AdapterError
from tokencache.adapters.schema import Adapter
from tokencache.session_url import session_key, session_url

_NOWHERE = Path("{config_dir}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """The way into one session.

    A dataclass, so that the key can be kept out of what is printed.

    Attributes:
        id: the session's name.
        key: the API key to send; it names the session by itself.
        key_id: the id under which the key was registered, `""` if it was not.
        base_url: the URL for OpenAI-type clients; ends in `/v1`.
        launch: how the harness is started, `None` where none was named: `launch.argv` is the program with its first arguments,
            `launch.environment(os.environ)` the whole environment of its process.
    """

    id: str
    key: str = dataclasses.field(repr=False)
    base_url: str
    launch: Launch | None = dataclasses.field(default=None, repr=False)
    key_id: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers for a client that is given headers."""
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def env(self) -> dict[str, str]:
        """The environment variables to set for the harness; empty where none was named."""
        return dict(self.launch.env) if self.launch is not None else {}


def access_to(url: str, session: str, key: str | None = None, key_id: str = "") -> Access:
    """Return the way into a session; without a registered key it is the key that names the session by itself."""
    return Access(id=session, key=key or session_key(session), base_url=f"{session_url(url, session)}/v1", key_id=key_id)


def check_directory(adapter: Adapter, config_dir: Path | None) -> None:
    """Check that a harness can be pointed at the proxy without a directory of its own, where none is named.

    Raises:
        AdapterError: it finds the proxy in a file only.
    """
    if config_dir is None and adapter.files and not any("{url}" in text for text in adapter.variables.values()):
        raise AdapterError(f"{adapter.title} finds the proxy in a file of its own: name a directory for it (config_dir=…)")


def launch_of(adapter: Adapter, url: str, access: Access, model: str, context: int, config_dir: Path | None) -> Launch:  # noqa: PLR0917
    """Fill an adapter in for a session, and write the harness's files if a directory is named.

    Without one, the variables that would name it are left out, as `tokencache env` does.

    Raises:
        AdapterError: the directory holds something else, or cannot be written.
    """
    place = _NOWHERE if config_dir is None else config_dir.absolute()
    launch = prepare(adapter, url, access.id, access.key, model, place, context=context)
    if config_dir is not None:
        files.write(place, launch.files)
        return launch
    kept = {name: value for name, value in launch.env.items() if "{config_dir}" not in adapter.variables[name]}
    return msgspec.structs.replace(launch, env=kept, files={})

"""The command `tokencache media`: writes the images and other media of sessions to files, one file for each content."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tokencache.client import AsyncClient, AsyncSession, ClientError
from tokencache.commands.completion import SESSIONS
from tokencache.commands.console import PROXY_URL, TIMEOUT, AdminKeyOption, ProxyOption, failed, plural, size
from tokencache.commands.sink import write_whole
from tokencache.core.media import StoredMedium, file_name


async def write_media(session: AsyncSession, folder: Path) -> tuple[int, int]:
    """Write the stored media of a session to a folder. A file that is there is not fetched again: its name is its digest.

    Returns:
        The number of media of the session, and of their bytes.

    Raises:
        ClientError: the proxy failed, or it has no such session.
        OSError: the folder cannot be written to.
    """
    stored = await session.media()
    for medium, path in _missing(stored, folder):
        write_whole(path, await session.medium(medium.sha256))
    return len(stored), sum(medium.bytes for medium in stored)


def _missing(stored: Sequence[StoredMedium], folder: Path) -> list[tuple[StoredMedium, Path]]:
    """Make the folder, and return the media that it does not have, with their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [(medium, folder / file_name(medium.sha256, medium.media_type)) for medium in stored]
    return [(medium, path) for medium, path in paths if not path.exists()]


def export_media(
    sessions: Annotated[list[str], SESSIONS],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files. It is made if it does not exist.")],
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Write the images and other media of sessions to files.

    A file has the SHA-256 of its content as its name, as exports refer to it:
    DIR/SHA256.png. Sessions may share a folder. A file that exists is not
    fetched again.

    tokencache media r17 --out media
    """
    try:
        total, length = asyncio.run(_write_all(sessions, out, proxy, admin_key))
    except (ClientError, OSError) as error:
        raise failed(error) from None
    typer.echo(f"{plural(total, 'file')} of {plural(len(sessions), 'session')}, {size(length)}, in {out}")


async def _write_all(sessions: Sequence[str], out: Path, proxy: str, admin_key: str | None) -> tuple[int, int]:
    async with AsyncClient(proxy, admin_key, timeout=TIMEOUT) as client:
        written = [await write_media(client.session(name), out) for name in sessions]
    return sum(count for count, _ in written), sum(length for _, length in written)

"""Reads files beside trajectories, from a directory or from an object store."""

from pathlib import Path

from tokencache.errors import extra_missing


def read_file(root: str | Path, path: str) -> bytes:
    """Read a file.

    Args:
        root: a directory, or a URL that fsspec knows, which needs the extra `experts`.
        path: the path of the file below it, with `/`.

    Raises:
        ValueError: `root` is a URL, and the extra is missing.
        OSError: the file cannot be read.
    """
    if "://" not in str(root):
        return (Path(root) / path).read_bytes()
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - needs the extra `experts`
    except ModuleNotFoundError as why:
        raise ValueError(extra_missing(str(root), "experts", why.name)) from why
    files, folder = url_to_fs(str(root))
    return bytes(files.cat_file(f"{folder}/{path}"))

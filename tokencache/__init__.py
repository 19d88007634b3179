"""tokencache: exact tokens for agents that only speak text."""

from importlib import metadata

try:
    __version__ = metadata.version(__name__)
except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "unknown"

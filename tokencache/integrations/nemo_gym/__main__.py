"""Prints the folder for Gym's `--search-dir`."""

from tokencache.integrations.nemo_gym import SEARCH_DIR

print(SEARCH_DIR)  # noqa: T201 - the command's output

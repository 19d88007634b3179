"""Prints the folder that Gym's `--search-dir` must name."""

from tokencache.integrations.nemo_gym import SEARCH_DIR

print(SEARCH_DIR)  # noqa: T201 - the command's output

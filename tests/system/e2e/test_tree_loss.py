"""Runs the tests of the prefix forest that need torch, in an environment that has it."""

import subprocess

from rig.server import REPOSITORY


def test_the_loss_of_a_forest_is_that_of_its_rows(python):
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "tests/batching/test_tree_loss.py"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout

"""Runs the tests of the prefix forest that need torch, in an environment that has it."""

import os
import subprocess

from rig.server import LIMIT_S, REPOSITORY


def test_the_loss_of_a_forest_is_that_of_its_rows(trainer_python):
    command = [str(trainer_python), "-m", "pytest", "-p", "no:cacheprovider", "tests/batching/test_tree_loss.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # the matrices are tiny
    ran = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout

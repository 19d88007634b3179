"""The example in the documentation runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "grpo_loop.py"


@pytest.mark.whole
def test_it_runs():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    steps = re.findall(r"^step (\d): 12 rollouts, reward (0\.\d+), loss ([+-]\d\.\d+)$", done.stdout, re.MULTILINE)
    assert [step for step, _, _ in steps] == ["0", "1"]
    assert all(float(loss) for _, _, loss in steps)

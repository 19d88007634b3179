"""The programs on the page about batches run, in order, on a group of rollouts."""

import importlib.util
import re
import textwrap

from tests.batching.made import shape
from tests.docs.reference import DOCS
from tests.support.material import needs

PAGE = (DOCS / "batching.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
GROUP = ("linear", "thrown-away", "sub-agent", "respliced")


def test_every_block_runs(capsys):
    trajectories = [shape(name, group="g", reward=float(n)) for n, name in enumerate(GROUP)]
    names = {"trajectories": trajectories}
    for block in BLOCKS:
        if "import torch" not in block:
            exec(block, names)  # noqa: S102
    printed = capsys.readouterr().out
    shown = re.findall(r"(?:^ {4}.*\n)+", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL), re.MULTILINE)
    assert shown
    for output in shown:
        assert textwrap.dedent(output) in printed


@needs("torch", importlib.util.find_spec("torch"))
def test_the_block_with_torch_runs():
    trajectories = [shape(name, group="g", reward=float(n)) for n, name in enumerate(GROUP)]
    names = {"trajectories": trajectories}
    for block in BLOCKS:
        exec(block, names)  # noqa: S102
    assert len(names["target"]) == sum(names["forest"].loss_mask)

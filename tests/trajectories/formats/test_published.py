"""The code of verl, SkyRL and TRL, as published on PyPI, reads our exports.

Installing them needs torch, Ray and gigabytes. These tests need only their wheels:

    pip download --no-deps --dest consumers verl==0.9.1 skyrl==0.3.0 trl==1.16.0
    TOKENCACHE_CONSUMERS=consumers pytest tests/trajectories/formats/test_published.py

The classes and functions that read a rollout are extracted from their modules and run with numpy, pydantic and logging. Without the wheels
these tests are skipped; `test_verl`, `test_skyrl` and `test_trl` check copies of the same fields. To test another version, use its wheel:
added and removed fields make a test fail.
"""

import ast
import logging
import os
import textwrap
import typing
import zipfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pydantic
import pytest

from tests.support.material import needs
from tests.support.syntax import parse
from tests.trajectories.images import of_talk, seeing
from tests.trajectories.rollouts import ROLLOUTS
from tokencache.core.outcome import Outcome
from tokencache.core.session import Reward
from tokencache.trajectories.formats.skyrl import skyrl
from tokencache.trajectories.formats.trl import trl
from tokencache.trajectories.formats.verl import verl

WHEELS = os.environ.get("TOKENCACHE_CONSUMERS")
pytestmark = needs("wheels of trainers", WHEELS)
FAILED = msgspec.structs.replace(ROLLOUTS["linear"], outcome=Outcome("sandbox", "no disk"), reward=Reward(1.0))
SHAPES = {**ROLLOUTS, "failed": FAILED}


@pytest.fixture(autouse=True)
def _of_its_version(request, record_property):
    package = request.function.__name__.split("_")[1]
    (wheel,) = Path(WHEELS).glob(f"{package}-*.whl")
    record_property("trainer", " ".join(wheel.name.split("-")[:2]))


def source(package, path):
    (wheel,) = Path(WHEELS).glob(f"{package}-*.whl")
    return zipfile.ZipFile(wheel).read(path).decode()


def cut_out(package, path, *names, **needs):
    """Extract classes and functions from a module by name."""
    tree = parse(source(package, path))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert [node.name for node in tree.body] == list(names)
    space = {name: getattr(typing, name) for name in typing.__all__} | {"__name__": package, **needs}
    exec(compile(tree, path, "exec", dont_inherit=True), space)  # noqa: S102
    return [space[name] for name in names]


@pytest.mark.parametrize("shape", SHAPES)
def test_verl(shape):
    names = ("AgentLoopMetrics", "AgentLoopOutput")
    _, output = cut_out("verl", "verl/experimental/agent_loop/agent_loop.py", *names, BaseModel=pydantic.BaseModel)
    for row in verl(SHAPES[shape])["outputs"]:
        assert set(row) <= set(output.model_fields)
        made = output(**row)
        assert made.model_dump(include=set(row) - {"metrics"}) == {name: row[name] for name in row if name != "metrics"}
        assert made.metrics.generate_sequences == row["metrics"]["generate_sequences"]


def test_verl_takes_images_beside_a_row():
    """What `tokencache.integrations.verl` adds. verl checks neither the names nor the kinds inside."""
    _, output = cut_out(
        "verl", "verl/experimental/agent_loop/agent_loop.py", "AgentLoopMetrics", "AgentLoopOutput", BaseModel=pydantic.BaseModel
    )
    (row, _) = verl(of_talk(seeing()))["outputs"]
    images = [object(), object()]
    assert output(**row, multi_modal_data={"images": images}).multi_modal_data["images"] == images
    reader = source("verl", "verl/experimental/agent_loop/agent_loop.py")
    assert 'images = multi_modal_data.get("images")' in reader


SKYRL = ("skyrl", "skyrl/train/utils/trainer_utils.py", "validate_generator_output", "_validate_step_wise_fields")


def skyrl_validator():
    return cut_out(*SKYRL, np=np, logger=logging.getLogger("skyrl"), GeneratorOutput=dict)[0]


@pytest.mark.parametrize("shape", [shape for shape, made in SHAPES.items() if made.sequences])
def test_skyrl(shape):
    batch = skyrl(SHAPES[shape])["generator_output"]
    (fields,) = cut_out("skyrl", "skyrl/train/generators/base.py", "GeneratorOutput", TrajectoryID=str, torch=SimpleNamespace(Tensor=list))
    assert set(batch) - set(fields.__annotations__) == {"tokencache"}
    rows = len(batch["response_ids"])
    filled = {**batch, "rewards": [1.0] * rows, "trajectory_ids": ["a_0"] * rows}
    skyrl_validator()(rows, filled)
    skyrl_validator()(1, filled, step_wise=True)


def test_skyrl_does_not_train_without_rewards():
    batch = skyrl(ROLLOUTS["linear"])["generator_output"]
    with pytest.raises(TypeError):
        skyrl_validator()(1, batch)


def test_trl():
    """`_generate` cannot run without a trainer, so the names that it reads are taken from its source."""
    text = source("trl", "trl/trainer/grpo_trainer.py")
    method = next(node for node in ast.walk(parse(text)) if getattr(node, "name", None) == "_generate")
    asked = textwrap.dedent(ast.get_source_segment(text, method))
    required = next(
        ast.literal_eval(node.value)
        for node in ast.walk(method)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "required_keys"
    )
    (row,) = trl(ROLLOUTS["linear"])["rows"]
    assert required <= set(row)
    assert "extra_fields.pop('env_mask', None)" in ast.unparse(method)
    assert "model tokens (1) vs external tokens (0)" in asked

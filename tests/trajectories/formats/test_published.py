"""The code of verl, SkyRL, TRL, miles, slime and prime-rl, as published, reads our exports.

Installing them needs torch, Ray and gigabytes. These tests need only their wheels:

    pip download --no-deps --dest consumers verl==0.9.1 skyrl==0.3.0 trl==1.16.0 miles-rl==0.0.2
    TOKENCACHE_CONSUMERS=consumers pytest tests/trajectories/formats/test_published.py

slime and prime-rl are not on PyPI (its package `slime` is another project): `consumers/slime` and `consumers/prime-rl` are their
repositories, at `CHECKOUTS`. prime-rl reads traces with the classes of verifiers, so its tests run where that is installed.

The classes and functions that read a rollout are extracted from their modules and run with numpy, pydantic and logging. Without the wheels
these tests are skipped; `test_verl`, `test_skyrl`, `test_trl` and `test_slime` check copies of the same fields. To test another version,
use its wheel: added and removed fields make a test fail.
"""

import ast
import asyncio
import dataclasses
import enum
import json
import logging
import os
import statistics
import textwrap
import typing
import zipfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pydantic
import pytest

from tests.support.material import needs, require, require_package
from tests.support.syntax import parse
from tests.trajectories.images import of_talk, seeing
from tests.trajectories.rollouts import ROLLOUTS
from tokencache.core.outcome import Outcome
from tokencache.core.session import Reward
from tokencache.trajectories.formats.registry import FORMATS, write

WHEELS = os.environ.get("TOKENCACHE_CONSUMERS")
pytestmark = needs("wheels of trainers", WHEELS)
FAILED = msgspec.structs.replace(ROLLOUTS["linear"], outcome=Outcome("sandbox", "no disk"), reward=Reward(1.0))
SHAPES = {**ROLLOUTS, "failed": FAILED}
RUNS = {name: made for name, made in SHAPES.items() if made.sequences}
CHECKOUTS = {"slime": "THUDM/slime at 0d234f3e", "prime-rl": "PrimeIntellect-ai/prime-rl at 559b4477"}


def exported(form, made):
    """A rollout in a format as it is exported: of one that is not valid, nothing is trained."""
    return json.loads(write(made, FORMATS[form]))


@pytest.fixture(autouse=True)
def _of_its_version(request, record_property):
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    trainer = parameters.get("trainer", request.function.__name__.split("_")[1])
    for wheel in Path(WHEELS).glob(f"{trainer}*.whl"):  # of others there is a checkout
        record_property("trainer", " ".join(wheel.name.split("-")[:2]))


def source(package, path):
    if package in CHECKOUTS:
        checkout = Path(WHEELS, package, path)
        return require(f"{package} in the folder of the wheels", checkout if checkout.is_file() else None).read_text()
    (wheel,) = Path(WHEELS).glob(f"{package}-*.whl")
    return zipfile.ZipFile(wheel).read(path).decode()


def cut_out(package, path, *names, **needs):
    """Extract classes, functions and methods from a module by name."""
    tree = parse(source(package, path))
    tree.body = [node for node in ast.walk(tree) if getattr(node, "name", None) in names]
    assert [node.name for node in tree.body] == list(names)
    space = {name: getattr(typing, name) for name in typing.__all__} | {"__name__": package, **needs}
    exec(compile(tree, path, "exec", dont_inherit=True), space)  # noqa: S102
    return [space[name] for name in names]


@pytest.mark.parametrize("shape", SHAPES)
def test_verl(shape):
    names = ("AgentLoopMetrics", "AgentLoopOutput")
    _, output = cut_out("verl", "verl/experimental/agent_loop/agent_loop.py", *names, BaseModel=pydantic.BaseModel)
    for row in exported("verl", SHAPES[shape])["outputs"]:
        assert set(row) <= set(output.model_fields)
        made = output(**row)
        assert not any(made.response_mask) or SHAPES[shape].valid
        assert made.model_dump(include=set(row) - {"metrics"}) == {name: row[name] for name in row if name != "metrics"}
        assert made.metrics.generate_sequences == row["metrics"]["generate_sequences"]


def test_verl_takes_images_beside_a_row():
    """What `tokencache.integrations.verl` adds. verl checks neither the names nor the kinds inside."""
    _, output = cut_out(
        "verl", "verl/experimental/agent_loop/agent_loop.py", "AgentLoopMetrics", "AgentLoopOutput", BaseModel=pydantic.BaseModel
    )
    (row, _) = exported("verl", of_talk(seeing()))["outputs"]
    images = [object(), object()]
    assert output(**row, multi_modal_data={"images": images}).multi_modal_data["images"] == images
    reader = source("verl", "verl/experimental/agent_loop/agent_loop.py")
    assert 'images = multi_modal_data.get("images")' in reader


SKYRL = ("skyrl", "skyrl/train/utils/trainer_utils.py", "validate_generator_output", "_validate_step_wise_fields")


def skyrl_validator():
    return cut_out(*SKYRL, np=np, logger=logging.getLogger("skyrl"), GeneratorOutput=dict)[0]


@pytest.mark.parametrize("shape", RUNS)
def test_skyrl(shape):
    batch = exported("skyrl", SHAPES[shape])["generator_output"]
    (fields,) = cut_out("skyrl", "skyrl/train/generators/base.py", "GeneratorOutput", TrajectoryID=str, torch=SimpleNamespace(Tensor=list))
    assert set(batch) - set(fields.__annotations__) == {"tokencache"}
    rows = len(batch["response_ids"])
    assert RUNS[shape].valid or not any(map(any, batch["loss_masks"]))
    filled = {**batch, "rewards": [1.0] * rows, "trajectory_ids": ["a_0"] * rows}
    skyrl_validator()(rows, filled)
    skyrl_validator()(1, filled, step_wise=True)


def test_skyrl_does_not_train_without_rewards():
    batch = exported("skyrl", ROLLOUTS["linear"])["generator_output"]
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
    (row,) = exported("trl", ROLLOUTS["linear"])["rows"]
    assert required <= set(row)
    assert "extra_fields.pop('env_mask', None)" in ast.unparse(method)
    assert "model tokens (1) vs external tokens (0)" in asked


def ended(*outcomes):
    """A group: the rewards 0.0, 1.0, 2.0 …, each with an outcome."""
    return [
        msgspec.structs.replace(ROLLOUTS["linear"], session=f"s{n}", outcome=Outcome(outcome), reward=Reward(float(n)))
        for n, outcome in enumerate(outcomes)
    ]


GROUP = ended("ok", "sandbox", "ok", "own-word")


def sample_class(trainer):
    names = {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "Enum": enum.Enum, "numpy": np}
    return cut_out(*TRAINERS[trainer], "Sample", **names)[0]


TRAINERS = {"miles": ("miles_rl", "miles/utils/types.py"), "slime": ("slime", "slime/utils/types.py")}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_slime_and_miles(trainer):
    sample = sample_class(trainer)
    for made in SHAPES.values():
        for row in exported(trainer, made)["samples"]:
            assert set(row) <= set(sample.__dataclass_fields__)  # another name would become an attribute that nobody reads
            read = sample.from_dict(row)
            assert read.remove_sample is not made.valid
            assert {name: read.to_dict()[name] for name in row} == row
            if trainer == "miles":
                read.validate()


def of_the_valid(_args, samples):
    """Their hook for rewards (`--custom-reward-post-process-path`): their own mean counts samples that are removed, too."""
    mean = statistics.fmean(one.reward for one in samples if not one.remove_sample)
    return [one.reward for one in samples], [0.0 if one.remove_sample else one.reward - mean for one in samples]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_slime_and_miles_train_nothing_of_a_failed_rollout(trainer):
    sample = sample_class(trainer)
    package, _ = TRAINERS[trainer]
    (convert,) = cut_out(package, f"{trainer}/ray/rollout.py", "_convert_samples_to_train_data", Sample=sample)
    samples = [sample.from_dict(row) for made in GROUP for row in exported(trainer, made)["samples"]]
    for one in samples:
        one.teacher_log_probs = one.mopd_teacher_log_probs = None  # slime sets them where it has teachers
    manager = SimpleNamespace(
        args=SimpleNamespace(use_dynamic_global_batch_size=False),
        custom_convert_samples_to_train_data_func=None,
        _post_process_rewards=lambda samples: of_the_valid(None, samples),
    )
    batch = convert(manager, samples)
    assert [one.reward for one in samples] == [0.0, None, 2.0, None]  # None: no reward that a mean could count
    assert [any(mask) for mask in batch["loss_masks"]] == [True, False, True, False]
    assert batch["rewards"] == [-1.0, 0.0, 1.0, 0.0]


def traces():
    wire = require_package("verifiers", "verifiers.v1.trace").WireTrace
    return [wire.model_validate(exported("prime-rl", made)) for made in GROUP]


def test_prime_rl_gives_advantages_to_the_valid_traces_alone():
    group = traces()
    (taken,) = cut_out("prime-rl", "src/prime_rl/orchestrator/algo/base.py", "iter_trainable_traces", vf=SimpleNamespace(Episode=object))
    given = {}
    (score,) = cut_out(
        "prime-rl",
        "src/prime_rl/orchestrator/algo/grpo.py",
        "score_group",
        vf=SimpleNamespace(Episode=object),
        torch=SimpleNamespace(tensor=np.array, float32=np.float32),
        iter_trainable_traces=taken,
        assign_advantages=lambda trace, advantage: given.update({trace.id: advantage}),
    )
    asyncio.run(score(SimpleNamespace(length_penalty=None), [SimpleNamespace(traces=group)]))
    assert given == {"s0": -1.0, "s2": 1.0}

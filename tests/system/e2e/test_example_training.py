"""Runs the examples that train a tiny Qwen3 and a tiny Qwen3-VL, as a reader would, and checks the figures that they write."""

import json
import os

import pytest
from rig.examples import run_example
from rig.server import default_venv


def test_only_exact_tokens_have_the_recorded_log_probabilities(trainer_python, tmp_path, figures):
    file = tmp_path / "figures.json"
    output = run_example(trainer_python, "examples/train_tiny_qwen3/train.py", "--json", file)
    found = json.loads(file.read_text())
    assert found["complete"]
    assert found["rollouts"] == found["sequences"] == 12

    exact, text = found["exact"], found["retokenized"]
    figures.append(f"trained on the proxy's tokens: max |difference| {exact['max_difference']:.1e} over {exact['tokens']} tokens")
    figures.append(f"on tokens made from text: {text['found']} of {text['tokens']} found again, max {text['max_difference']:.1e}")
    assert exact["tokens"] == exact["found"] == text["tokens"] > 1000
    assert exact["differ"] == 0
    assert exact["max_difference"] < 1e-3
    assert text["found"] < text["tokens"]
    assert text["differ"] > text["found"] / 10
    assert text["max_difference"] > 0.1

    first, *_, last = found["steps"]
    assert first["ratio"] == pytest.approx(1, abs=1e-3)
    assert first["moved"] > 0
    assert last["loss"] < first["loss"]
    for one in (exact, text):
        assert f"{one['max_difference']:.1e}" in output


def test_a_row_with_images_has_the_recorded_log_probabilities(trainer_python, tmp_path, figures):
    """Expanded ids and the images in order are enough, on a stock vLLM."""
    file = tmp_path / "figures.json"
    env = os.environ | {"PYTHONPATH": str(default_venv().absolute() / "torchvision")}
    run_example(trainer_python, "examples/train_tiny_qwen3/train_images.py", "--json", file, env=env)
    found = json.loads(file.read_text())
    figures.append(f"with images: max |difference| {found['max_difference']:.1e} over {found['tokens']} tokens, {found['images']} images")
    assert found["complete"]
    assert found["sequences"] == 4, "every turn continues the one before"
    assert found["images"] == 12
    assert found["tokens"] > 100
    assert found["max_difference"] < 1e-4
    assert found["other_images"] > 0.1
    first, *_, last = found["steps"]
    assert first["ratio"] == pytest.approx(1, abs=1e-4)
    assert last["loss"] < first["loss"]

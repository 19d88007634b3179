"""The pages show the examples as they are, and a missing framework is an error that says what to install."""

import importlib
import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SHOWN = {
    "README": "guessing.py",
    "trl": "trl_grpo.py",
    "verl": "verl_agent_loop.yaml",
    "skyrl": "skyrl_experiment.py",
    "verifiers": "guessing_verifiers.py",
}


@pytest.mark.parametrize("page", SHOWN)
def test_the_page_shows_the_example(page):
    text = (REPOSITORY / "docs" / "integrations" / f"{page}.md").read_text(encoding="utf-8")
    example = (REPOSITORY / "examples" / "integrations" / SHOWN[page]).read_text(encoding="utf-8")
    flat = "\n".join(line.removeprefix("    ") for line in text.splitlines())
    assert example in (flat if page == "verl" else text)


@pytest.mark.parametrize("framework", ["verl", "skyrl", "verifiers", "harbor"])
def test_a_missing_framework_is_a_clear_error(framework):
    if importlib.util.find_spec(framework):
        pytest.skip(f"{framework} is installed")
    with pytest.raises(ModuleNotFoundError, match=rf"tokencache\.integrations\.{framework} runs inside .*pip install"):
        importlib.import_module(f"tokencache.integrations.{framework}")

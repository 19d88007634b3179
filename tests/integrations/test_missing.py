"""A missing framework is an error that says what to install."""

import importlib
import importlib.util

import pytest


@pytest.mark.parametrize("framework", ["verl", "skyrl", "verifiers", "harbor", "openenv"])
def test_a_missing_framework_is_a_clear_error(framework):
    if importlib.util.find_spec(framework):
        pytest.skip(f"{framework} is installed")
    with pytest.raises(ModuleNotFoundError, match=rf"tokencache\.integrations\.{framework} runs inside .*pip install"):
        importlib.import_module(f"tokencache.integrations.{framework}")

"""The simulated engine with what the plugin `tokencache_vllm` and a model for images add to it.

`engine`    the engine, and its chat completions
`images`    prompts with images
`prefixes`  prompts by hash
"""

from tests.support.plugin_engine.engine import PluginEngine

__all__ = ["PluginEngine"]

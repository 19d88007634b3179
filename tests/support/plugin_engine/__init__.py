"""The simulated engine with what the plugin `tokencache_vllm`, a model for images and engines for RL add to it.

`engine`    the engine, and its completions
`images`    prompts with images
`prefixes`  prompts by hash
`metadata`  weight versions and routed experts of replies
"""

from tests.support.plugin_engine.engine import PluginEngine

__all__ = ["PluginEngine"]

"""`tokencache demo`: the same agent, directly and through the proxy, and what a trainer would get either way."""

from tokencache.demo.run import run_demo

__all__ = ["run_demo"]

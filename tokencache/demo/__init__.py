"""`tokencache demo`: runs the same agent with and without the proxy, and shows what a trainer gets in each case."""

from tokencache.demo.run import run_demo

__all__ = ["run_demo"]

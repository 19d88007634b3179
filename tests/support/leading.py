"""Lets a proxy's connections lead to another engine."""

from tokencache.engine.upstream import Upstream


async def lead_to(upstream: Upstream, url: str) -> None:
    """Close the connections of an upstream, and open the next ones to this URL."""
    await upstream.close()
    upstream.__init__(url)  # type: ignore[misc]
    await upstream.open()

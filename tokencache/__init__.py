"""tokencache: exact tokens for agents that only speak text."""

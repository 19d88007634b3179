"""The bench: what does the proxy cost a call? `python -m bench`; see README.md."""

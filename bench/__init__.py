"""The bench measures what the proxy costs per call: `python -m bench`; see README.md."""

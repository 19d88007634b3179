"""Integrations: parts of tokencache that run inside another framework's process and import that framework.

No other package imports them, so a framework is needed only by those who use its integration.
"""

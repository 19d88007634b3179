"""Integrations: parts of tokencache that run inside another framework's process and import that framework.

Nothing else in this package imports them, so a framework is needed only where its integration is used.
"""

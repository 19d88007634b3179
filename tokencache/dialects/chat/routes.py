"""The engine's routes for chat completions, and those that share their error shape."""

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
ROUTES = frozenset({CHAT, COMPLETIONS, TOKENIZE})

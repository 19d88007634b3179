"""Defines the rules: every difference that an echo may have from the reply that was served.

A harness may change a reply before it sends it back. These rules decide whether the echo is still the model's turn; similarity never does.
If no rule explains a difference, the echo is not recognized. `Rule` documents the fields of a rule. There are three kinds:

`canonical`  the same content in other bytes, or a part of it. Applies to all harnesses (`core.messages`, `core.verdict`).
`harness`    a value changed, or a part is missing. Applies only where the session's adapter names the rule, and only if the echo is
             exactly what the rule's function computes from the served value. A rule that requires what only one reply can have also
             applies where the harness is unknown (`Rule.without_adapter`).
`dialect`    a codec leaves out a part of the request that no engine should see.

Metrics count each rule that was needed. Every rule can be switched off (`Leniency.off`).

`base`            what a rule is, the table of all rules, and which apply in a session
`apply`           applies harness rules, and finds the rules that explain a changed call
`truncated_json`  completes truncated JSON as some harnesses do

To add a harness rule, add a `Rule` with its function to `harness.py`, and a row to `tests/core/test_rules.py`. Other packages add rules
with `register`.
"""

from tokencache.core.rules.apply import Rules, expected_rewritings, explain_call, rewritings, understood_calls
from tokencache.core.rules.base import RULES, STRICT, Leniency, Part, Rule, ToolNames, function_names, register
from tokencache.core.rules.canonical import CANONICAL, DIALECT
from tokencache.core.rules.harness import HARNESS

__all__ = [
    "RULES",
    "STRICT",
    "Leniency",
    "Part",
    "Rule",
    "Rules",
    "ToolNames",
    "expected_rewritings",
    "explain_call",
    "function_names",
    "register",
    "rewritings",
    "understood_calls",
]

for _rule in (*CANONICAL, *HARNESS, *DIALECT):
    register(_rule)

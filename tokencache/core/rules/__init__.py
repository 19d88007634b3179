"""Rules: every difference that a reply may have when a harness sends it back.

A harness does not send back what it was served. Whether what came back is still the model's turn is decided by this list, never by
likeness: a difference that no rule explains is a miss. `Rule` says what a rule carries; there are three kinds:

`canonical`  the same content in other bytes, or less of it. Applies to all harnesses (`core.messages`, `core.verdict`).
`harness`    a value changed. Applies only where the session's adapter names the rule, and only if the echo is exactly what the rule's
             function makes of the served value.
`dialect`    a codec leaves out a part of the request that no engine should see.

Every rule is counted when it was needed, and can be switched off (`Leniency.off`).

To add a harness rule: one `Rule` in `harness.py`, with its function, and a row in `tests/core/test_rules.py`. A rule from another
package is added with `register`.
"""

from tokencache.core.rules.apply import Rules, expected_rewritings, explain_call, rewritings
from tokencache.core.rules.base import RULES, STRICT, Leniency, Part, Rule, register
from tokencache.core.rules.canonical import CANONICAL, DIALECT
from tokencache.core.rules.harness import HARNESS

__all__ = ["RULES", "STRICT", "Leniency", "Part", "Rule", "Rules", "expected_rewritings", "explain_call", "register", "rewritings"]

for _rule in (*CANONICAL, *HARNESS, *DIALECT):
    register(_rule)

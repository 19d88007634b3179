"""Makes each call once, although clients retry: retries join the call that they repeat, or receive its recorded reply.

==============  ================================================================================
`fingerprint`   recognises that a request may be a retry
`in_flight`     serves each call once: joins duplicates, and lets orphaned generations finish
`replay`        sends a recorded reply again, and decides which retries receive one
==============  ================================================================================
"""

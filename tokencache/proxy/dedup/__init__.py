"""Deduplicates retries of clients: a retry joins the call that it repeats, or receives its recorded reply.

==============  ================================================================================
`fingerprint`   recognizes requests that may be retries
`in_flight`     serves each call once: joins duplicates, and lets orphaned generations finish
`replay`        sends a recorded reply again, and decides which retries receive one
`lost_calls`    closes the calls of replicas that are gone
==============  ================================================================================
"""

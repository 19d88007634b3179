"""Request deduplication: retries and in-flight duplicates of a call share one reply."""

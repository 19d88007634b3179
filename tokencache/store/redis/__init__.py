"""The Redis store: sessions that all replicas of the proxy share, and that outlive them.

=============  =====================================================================================================
`url`          what a store's URL says: a server, Sentinels, a cluster
`connecting`   connections to them
`asking`       operations in their time: again where that does no harm, not at all while nothing answers
`room`         may new sessions begin?
`lua`          what the scripts share; `lua_writing`, `lua_reading`: the scripts
`fields`       keys and fields, and what is packed in them
`store`        the store
=============  =====================================================================================================

A session is *one* hash, so that it expires, is evicted, moves between cluster nodes and is deleted as one: a session
that lost a part of itself would match wrongly, a session that is gone is only a miss. Its fields:

===========================================  =========================================================================
`life` `created` `used` `sealed`             which life of the session this is; times; `1` if sealed
`turns` `incidents`                          how many there are; they are numbered from 1, in the order recorded
`begun` `sampled`                            how many calls began; how many tokens were sampled in its turns
`open`                                       the open calls, one behind the other
`noted`                                      the names of the last notes, so that each is noted once
`#<turn id>`                                 the turn's number
`H<n>`                                       the turn's record, behind `+` if another turn continues it, else `-`
`T<n>`                                       base, lengths, delta and completion ids, raw
`L<n>`                                       log probabilities; read by export only; absent if there are none
`M<n>`                                       the context: messages, deflated; read by export only; absent if there is none
`=<key>`                                     the numbers of the turns found under that key
`I<n>`                                       an incident
`D<name>`                                    a document
===========================================  =========================================================================

A session's key is `<prefix>:{<session>}`; a deleted one leaves a tombstone there, the string `gone`, that turns late calls
away for a while. Beside the sessions stand

===========================================  =========================================================================
`<prefix>:key:<hash>`                        what an API key stands for
`<prefix>:alive:{replicas}:<replica>`        that a replica of the proxy lives
`<prefix>:engines`                           a hash: engines that were added, drained or removed while the proxy ran
`<prefix>:schema` `<prefix>:secret`          the version of all this; the deployment's secret. These three stay for ever
===========================================  =========================================================================

Everything else has a time to live that use renews. The sessions are listed by `SCAN`, not from a registry: nothing to write on the way of
a call, nothing that can say something else than the sessions themselves; the price is paid by who lists. In a Redis Cluster a session
lies in the slot of its name, and no command or script touches two slots.

Every operation but the listing is one script or command, one round trip (two the first time that a server sees a script), and
writes all or nothing. What does not answer
in time or at all is a `StoreError`.

Measured (Redis 6.2.14, `MEMORY USAGE … SAMPLES 0`, 200 turns of 200 new prompt and 200 completion tokens, 800 characters
of text each way, float32 log probabilities, two keys): 10.3 bytes per token, of which 4 are the id, 2 its share of log
probabilities and 1.2 the messages. `pytest tests/store/test_redis_size.py -s` measures it again.
"""

from tokencache.store.redis.store import RedisStore

__all__ = ["RedisStore"]

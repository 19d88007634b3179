"""The Redis store: sessions that all replicas of the proxy share and that outlive them.

=============  =====================================================================================================
`url`          reads the store's URL: a server, Sentinels or a cluster
`connections`  connects to it; `shared` is the connection that all calls share
`retries`      sends operations within a time limit, and retries where that is safe; `timeouts` limits the time
`answers`      checks the form of each answer
`capacity`     decides whether new sessions may begin
`scripts`      the Lua scripts of sessions; `queue_scripts` those of the queue, and its keys
`fields`       names of keys and fields, and what they contain
`forks`        shares turns between a session and its forks
`store`        the store itself
=============  =====================================================================================================

A session is *one* hash, so that it expires, is evicted, moves between cluster nodes and is deleted as a whole. A session that lost a part
would match wrongly; a session that is gone is only a miss. Its fields:

===========================================  =========================================================================
`life` `created` `used` `sealed`             id of this epoch of the session; times; `1` if sealed
`finished`                                   when its owner finished it
`failed` `outcome`                           kind of the outcome that was given with that; the outcome
`settings` `digest`                          what holds for its calls, and 16 bytes that identify it; absent if nothing is set
`group` `metadata` `tags`                    labels, each as a `LabelChanges` with that member
`rewards` `R<n>`                             how many rewards were set; the newest ones, numbered from 1
`turns` `incidents`                          how many there are; they are numbered from 1, in the order recorded
`newest`                                     number of the turn whose call began last, and when that was
`begun` `sampled` `call_ms`                  number of calls that began; tokens sampled in its turns; milliseconds of its calls
`engine`                                     the engine that the last turn used; absent once the session is finished
`open`                                       the open calls, concatenated
`noted`                                      ids of the last additions of incidents, so that a repeated addition has no effect
`#<turn id>`                                 the turn's number
`H<n>`                                       the turn's record, after `+` if another turn continues it, else after `-`
`T<n>`                                       base, lengths, delta and completion ids, raw
`L<n>`                                       log probabilities; only export reads them; absent if there are none
`M<n>`                                       the context: messages, deflated; only export reads it; absent if there is none
`shared` `fork`                             `1` if it has forks, and if it is one: shared turns have references (`forks`)
`=<key>`                                     numbers of the turns found under that key
`I<n>`                                       an incident
`D<name>`                                    a document
`P<sha256>`                                  the bytes of an image or another medium
`media` `media_bytes`                        a line of JSON for each of them, in the order stored; the sum of their lengths
===========================================  =========================================================================

The key of a session is `<prefix>:{<session>}`. A deleted session leaves a tombstone there for a while, the string `gone`, which refuses
late calls. Other keys:

===========================================  =========================================================================
`<prefix>:key:<hash>`                        binding of an API key
`<prefix>:forks`                            by fork: its name, its epoch, and the references that its turns may have
`<prefix>:{<session>}:<epoch>`              a session that was deleted and has forks
`<prefix>:{<session>}:<epoch>:deleted`       shows for a while that this epoch was deleted, not lost
`<prefix>:alive:{replicas}:<replica>`        heartbeat of a replica
`<prefix>:queue:{queue}` and two more        the queue of finished sessions (`queue_scripts`)
`<prefix>:demands`                           a hash: consumer → what it asked of the queue last
`<prefix>:watched`                           a sorted set: sessions with a deadline or a limit of silence, by when to look at them
`<prefix>:engines`                           a hash: engines that were added, drained or removed while the proxy ran
`<prefix>:weights`                           a hash: what trainers announced about the weights of the engines, and its revision
`<prefix>:schema` `<prefix>:secret`          version of this form; secret of the deployment. These and the queue never expire
===========================================  =========================================================================

Everything else has a time to live that use renews. Sessions are listed by `SCAN`, not from a registry. So calls write nothing extra and no
registry can disagree with the sessions. The states of 250 sessions are read in one round trip (10,000 sessions: 0.8 s). In a Redis Cluster
a session is in the slot of its name, and no command or script touches two slots.

Every operation except listing and a forced seal is one script or command and one round trip (two when a server sees a script for the first
time), and writes everything or nothing. An operation that gets no reply in time raises `StoreError`.

Measured (Redis 6.2.14, `MEMORY USAGE … SAMPLES 0`, 200 turns of 200 new prompt and 200 completion tokens, 800 characters of text each way,
float32 log probabilities, two keys): 9.7 bytes for each token, of which 3 are its id, 2 its share of log probabilities and 1.2 the
messages. `pytest tests/store/test_redis_size.py -s` measures it again.
"""

from tokencache.store.redis.store import RedisStore

__all__ = ["RedisStore"]

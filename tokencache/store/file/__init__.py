"""The file store: sessions in one SQLite file, which all proxies of one machine may share and which outlives them.

=============  =====================================================================================================
`worker`       runs operations in a thread, several in one transaction
`disk`         keeps room on the disk, so that sessions can be finished and deleted when it is full
`schema`       the tables
`operations`   makes methods of functions on a database; they run in a worker's thread
`queue`        the queue of finished sessions
`clock`        the clock that all processes share that use the file
`store`        the store itself
=============  =====================================================================================================

What survives what: an operation that has returned is on the disk (`synchronous=FULL`, write-ahead log). It survives the death of the
proxy, of the machine's system, and of its power, if the disk keeps what it confirms. An operation that was cut off left nothing.

Records, tokens and contexts are encoded as in Redis (`store.encoding`). The file must be on a local disk: SQLite's write-ahead log needs
memory that all processes share, which network file systems do not have.
"""

from tokencache.store.file.store import FileStore

__all__ = ["FileStore"]

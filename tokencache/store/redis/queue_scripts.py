"""The Lua scripts of the queue and of watched sessions. As in `scripts`, each is one round trip and writes everything or nothing.

Three keys in one slot hold the queue. They do not expire: an entry leaves the queue when its delivery is removed or its session is gone.

===========================================  =========================================================================
`<prefix>:queue:{queue}`                     a hash: session → its entry
`<prefix>:queue:{queue}:deliveries`          a hash: id of a delivery → its sessions, each after its length in 5 digits
`<prefix>:queue:{queue}:removed`             a sorted set: what was removed in the last hour, by time:
                                             `d` and a delivery's id, or `s`, an epoch, a space and the session
===========================================  =========================================================================

An entry is: end of the lease (17 bytes, Unix time), attempts (6 digits), lengths of delivery, consumer and epoch (5 digits each), delivery,
consumer, epoch, time of the offer (17 bytes).
"""

from tokencache.store.redis.scripts import of_parts

QUEUE = """
local entries, deliveries, removed = KEYS[1], KEYS[2], KEYS[3]

local function now()
  local t = redis.call('TIME')
  return t[1] + t[2] / 1000000
end

local function entry_of(session)
  local value = redis.call('HGET', entries, session)
  if not value then return nil end
  local delivery, consumer = tonumber(string.sub(value, 24, 28)), tonumber(string.sub(value, 29, 33))
  local epoch = tonumber(string.sub(value, 34, 38))
  local at = 39 + delivery + consumer
  return {
    ends = tonumber(string.sub(value, 1, 17)), attempt = tonumber(string.sub(value, 18, 23)),
    delivery = string.sub(value, 39, 38 + delivery), consumer = string.sub(value, 39 + delivery, at - 1),
    epoch = string.sub(value, at, at + epoch - 1), offered = string.sub(value, at + epoch),
  }
end

local function write(session, entry)
  local head = string.format('%017.6f%06d%05d%05d%05d', entry.ends, entry.attempt, #entry.delivery, #entry.consumer, #entry.epoch)
  redis.call('HSET', entries, session, head .. entry.delivery .. entry.consumer .. entry.epoch .. entry.offered)
end

-- The sessions of a delivery that still belong to it, with their entries; nil if there is no such delivery.
local function delivered(delivery)
  local packed = redis.call('HGET', deliveries, delivery)
  if not packed then return nil end
  local found, at = {}, 1
  while at <= #packed do
    local stop = at + 4 + tonumber(string.sub(packed, at, at + 4))
    local session = string.sub(packed, at + 5, stop)
    local entry = entry_of(session)
    if entry and entry.delivery == delivery then found[session] = entry end
    at = stop + 1
  end
  return found
end
"""

OFFER = of_parts(QUEUE)("""
-- ARGV: session, epoch, time of the offer (17 bytes)
local entry = entry_of(ARGV[1])
if entry and entry.epoch == ARGV[2] or redis.call('ZSCORE', removed, 's' .. ARGV[2] .. ' ' .. ARGV[1]) then return 0 end
write(ARGV[1], {ends = 0, attempt = 0, delivery = '', consumer = '', epoch = ARGV[2], offered = ARGV[3]})
return 1
""")

READ_QUEUE = of_parts(QUEUE)("""
-- Returns the time and all entries.
return {string.format('%.6f', now()), redis.call('HGETALL', entries)}
""")

LEASE = of_parts(QUEUE)("""
-- ARGV: 1 if this was sent before and the reply was lost, delivery, consumer, seconds, sessions
local delivery, time, found, packed = ARGV[2], now(), {}, {}
local mine = redis.call('HGET', deliveries, delivery)
for i = 5, #ARGV do
  local entry = entry_of(ARGV[i])
  if not entry or entry.ends > time and entry.delivery ~= delivery then return 0 end
  found[i], packed[i - 4] = entry, string.format('%05d', #ARGV[i]) .. ARGV[i]
end
packed = table.concat(packed)
if ARGV[1] == '1' and mine == packed then return 1 end
redis.call('HSET', deliveries, delivery, packed)
for i = 5, #ARGV do
  local entry = found[i]
  if entry.delivery ~= delivery then redis.call('HDEL', deliveries, entry.delivery) end
  entry.ends, entry.attempt, entry.delivery, entry.consumer = time + tonumber(ARGV[4]), entry.attempt + 1, delivery, ARGV[3]
  write(ARGV[i], entry)
end
return 1
""")

EXTEND = of_parts(QUEUE)("""
-- ARGV: delivery, seconds
local found = delivered(ARGV[1])
if not found then return 0 end
local ends = now() + tonumber(ARGV[2])
for session, entry in pairs(found) do
  entry.ends = ends
  write(session, entry)
end
return 1
""")

RELEASE = of_parts(QUEUE)("""
-- ARGV: delivery, 1 if this was sent before and the reply was lost
local found = delivered(ARGV[1])
if not found then return tonumber(ARGV[2]) end
for session, entry in pairs(found) do
  entry.ends, entry.delivery, entry.consumer = 0, '', ''
  write(session, entry)
end
redis.call('HDEL', deliveries, ARGV[1])
return 1
""")

REMOVED, REPEATED, EXPIRED = 1, 2, 3
"""Replies of REMOVE."""

REMOVE = of_parts(QUEUE, f"local REMOVED, REPEATED, EXPIRED = {REMOVED}, {REPEATED}, {EXPIRED}\n")("""
-- ARGV: delivery, 1 if this was sent before and the reply was lost, seconds for which a removal is remembered
local found = delivered(ARGV[1])
if not found then
  if not redis.call('ZSCORE', removed, 'd' .. ARGV[1]) then return EXPIRED end
  return ARGV[2] == '1' and REMOVED or REPEATED
end
local time = now()
redis.call('HDEL', deliveries, ARGV[1])
redis.call('ZADD', removed, time, 'd' .. ARGV[1])
for session, entry in pairs(found) do
  redis.call('HDEL', entries, session)
  redis.call('ZADD', removed, time, 's' .. entry.epoch .. ' ' .. session)
end
redis.call('ZREMRANGEBYSCORE', removed, '-inf', time - tonumber(ARGV[3]))
return REMOVED
""")

WITHDRAW = of_parts(QUEUE)("""
-- ARGV: session, epoch
local entry = entry_of(ARGV[1])
if entry and entry.epoch == ARGV[2] then redis.call('HDEL', entries, ARGV[1]) end
return 1
""")

WATCHED = """
-- A sorted set: watched sessions by the time from which on they are overdue.
local function now()
  local t = redis.call('TIME')
  return t[1] + t[2] / 1000000
end
"""

WATCH = of_parts(WATCHED)("""
-- ARGV: session, seconds
redis.call('ZADD', KEYS[1], string.format('%.6f', now() + tonumber(ARGV[2])), ARGV[1])
return 1
""")

OVERDUE = of_parts(WATCHED)("""
-- ARGV: the most to return. Returns the time and the sessions.
local time = string.format('%.6f', now())
return {time, redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', time, 'LIMIT', 0, ARGV[1])}
""")

UNWATCH = of_parts(WATCHED)("""
-- ARGV: session
local due = redis.call('ZSCORE', KEYS[1], ARGV[1])
if due and tonumber(due) <= now() then redis.call('ZREM', KEYS[1], ARGV[1]) end
return 1
""")

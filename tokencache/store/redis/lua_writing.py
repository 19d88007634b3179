"""The scripts that write: how calls begin and end, what is noted, how sessions end, what a deployment shares."""

from tokencache.store.redis.lua import INCIDENTS, LOOK_UP, OPEN_CALLS, SESSION_KEY

SEALED, DELETED, FULL = 0, 1, 2
"""What BEGIN answers in place of a life when it opens nothing."""

BEGIN = (
    SESSION_KEY
    + OPEN_CALLS
    + LOOK_UP
    + f"local SEALED, DELETED, FULL = {SEALED}, {DELETED}, {FULL}\n"
    + """
-- ARGV: ttl, life for a new session, 1 if there is no room for new ones, which twin may be joined (n none,
-- l one whose asker has left, a any), imprint, replica, call, lengths of keys, keys
if gone then return DELETED end
local time, name, asked = now(), ARGV[7], ARGV[5]
local state = redis.call('HMGET', session, 'sealed', 'open', 'begun', 'sampled', 'created')
local open, begun, created = state[2] or '', tonumber(state[3] or 0), state[5]
if state[1] then return SEALED end
if not life then
  if ARGV[3] == '1' then return FULL end
  life, created = ARGV[2], time
  redis.call('HSET', session, 'life', life, 'created', time)
end
local mine = first(open, named(name))
local at, twin
if asked ~= '' and ARGV[4] ~= 'n' and not mine then
  at, twin = first(open, function(call) return call.asked == asked and call.flags < 4 and (ARGV[4] == 'a' or call.flags % 2 == 1) end)
end
local found = ''
if twin then
  open = flagged(open, at, 2 + twin.flags % 2)
  found = string.sub(open, at, twin.stop)
  redis.call('HSET', session, 'open', open)
else
  if not mine then begun = begun + 1 end
  local head = string.format('%s0%05d%05d%05d', time, #asked, #ARGV[6], #name)
  redis.call('HSET', session, 'used', time, 'begun', begun, 'open', without(open, name) .. head .. asked .. ARGV[6] .. name)
end
redis.call('PEXPIRE', session, ARGV[1])
return look_up({life, begun, tonumber(state[4] or 0), created, found}, 8, true)
"""
)

LINGER = (
    SESSION_KEY
    + OPEN_CALLS
    + """
-- ARGV: ttl, call. Returns 1 if the call was wanted since the last time.
local open = not gone and redis.call('HGET', session, 'open') or ''
local at, call = first(open, named(ARGV[2]))
if not at then return 0 end
local wanted = call.flags % 4 >= 2
redis.call('HSET', session, 'open', flagged(open, at, call.flags >= 4 and 5 or 1))
redis.call('PEXPIRE', session, ARGV[1])
return wanted and 1 or 0
"""
)

WANT = (
    SESSION_KEY
    + OPEN_CALLS
    + """
-- ARGV: ttl, call, which flag is set: 2 it is wanted, 4 it was given up
local open = not gone and redis.call('HGET', session, 'open') or ''
local at, call = first(open, named(ARGV[2]))
if not at then return 0 end
local flag = tonumber(ARGV[3])
if call.flags % (2 * flag) < flag then redis.call('HSET', session, 'open', flagged(open, at, call.flags + flag)) end
redis.call('PEXPIRE', session, ARGV[1])
return 1
"""
)

COMMIT = (
    SESSION_KEY
    + OPEN_CALLS
    + INCIDENTS
    + """
-- ARGV: ttl, life, call, 1 if this was sent before and nobody knows what became of it, number of sampled tokens, number of entries,
-- per entry (field of the turn, field of its parent or '', head, ids, log probabilities, context, number of keys, keys),
-- number of documents, per document (field, data), incidents
if life ~= ARGV[2] then return 0 end
local open = redis.call('HGET', session, 'open') or ''
if ARGV[4] == '1' and not first(open, named(ARGV[3])) then return 1 end
local at = 7
for _ = 1, tonumber(ARGV[6]) do
  local n = redis.call('HGET', session, ARGV[at]) or redis.call('HINCRBY', session, 'turns', 1)
  redis.call('HSET', session, ARGV[at], n, 'H' .. n, '-' .. ARGV[at + 2], 'T' .. n, ARGV[at + 3])
  if ARGV[at + 4] ~= '' then redis.call('HSET', session, 'L' .. n, ARGV[at + 4]) end
  if ARGV[at + 5] ~= '' then redis.call('HSET', session, 'M' .. n, ARGV[at + 5]) end
  local parent = ARGV[at + 1] ~= '' and redis.call('HGET', session, ARGV[at + 1])
  if parent then
    redis.call('HSET', session, 'H' .. parent, '+' .. string.sub(redis.call('HGET', session, 'H' .. parent), 2))
  end
  local count = tonumber(ARGV[at + 6])
  for key = at + 7, at + 6 + count do
    local numbers = redis.call('HGET', session, ARGV[key])
    redis.call('HSET', session, ARGV[key], numbers and (numbers .. ' ' .. n) or n)
  end
  at = at + 7 + count
end
for _ = 1, tonumber(ARGV[at]) do
  redis.call('HSET', session, ARGV[at + 1], ARGV[at + 2])
  at = at + 2
end
redis.call('HSET', session, 'used', now(), 'open', without(open, ARGV[3]))
if ARGV[5] ~= '0' then redis.call('HINCRBY', session, 'sampled', ARGV[5]) end
add_incidents(at + 1)
redis.call('PEXPIRE', session, ARGV[1])
return 1
"""
)

NOTE = (
    SESSION_KEY
    + INCIDENTS
    + """
-- ARGV: ttl, life for a new session, 1 if this was sent before and nobody knows what became of it, name of
-- the note (8 bytes; the last 16 are kept, so that one is noted once), incidents
if gone then return 0 end
local noted = redis.call('HGET', session, 'noted') or ''
if ARGV[3] == '1' then
  for at = 1, #noted, 8 do
    if string.sub(noted, at, at + 7) == ARGV[4] then return 1 end
  end
end
if not life then
  local time = now()
  redis.call('HSET', session, 'life', ARGV[2], 'created', time, 'used', time)
end
redis.call('HSET', session, 'noted', string.sub(noted .. ARGV[4], -128))
add_incidents(5)
redis.call('PEXPIRE', session, ARGV[1])
return 1
"""
)

SEAL = (
    SESSION_KEY
    + """
-- ARGV: ttl
if not life then return 0 end
redis.call('HSET', session, 'sealed', '1')
redis.call('PEXPIRE', session, ARGV[1])
return 1
"""
)

DELETE = (
    SESSION_KEY
    + """
-- ARGV: how long the tombstone stands; 0: the name may be used again at once
if life or ARGV[1] == '0' then redis.call('UNLINK', session) end
if not life then return 0 end
if ARGV[1] ~= '0' then redis.call('SET', session, 'gone', 'PX', ARGV[1]) end
return 1
"""
)

LIFT = (
    SESSION_KEY
    + """
if gone then redis.call('UNLINK', session) end
return 1
"""
)

FORGET = (
    SESSION_KEY
    + """
-- ARGV: field of the document
if gone then return 0 end
return redis.call('HDEL', session, ARGV[1])
"""
)

KEEP = """
-- ARGV: value. Returns what is kept under the key: that value, if nothing was.
local held = redis.call('GET', KEYS[1])
if held then return held end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""

SCHEMA = """
-- ARGV: our version, for a database that names none. Writes what is there again: to a server that takes no writes nobody is connected.
local held = redis.call('GET', KEYS[1]) or ARGV[1]
redis.call('SET', KEYS[1], held)
return held
"""

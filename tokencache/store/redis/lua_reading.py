"""The scripts that only read a session. Of one that was deleted there is nothing to read."""

from tokencache.store.redis.lua import LOOK_UP, READ_ALL, SESSION_KEY

FIND = (
    SESSION_KEY
    + LOOK_UP
    + """
if gone then return {} end
-- ARGV: lengths of keys, keys
return look_up({}, 1, false)
"""
)

PREFIX = (
    SESSION_KEY
    + """
if gone then return {} end
-- ARGV: field of the turn. Returns its ids and those of all its bases.
local line, field = {}, ARGV[1]
for _ = 1, tonumber(redis.call('HGET', session, 'turns') or 0) do
  local n = redis.call('HGET', session, field)
  if not n then break end
  local packed = redis.call('HGET', session, 'T' .. n)
  line[#line + 1] = packed
  local named = string.byte(packed, 1) + 256 * string.byte(packed, 2)
  if named == 0 then break end
  field = '#' .. string.sub(packed, 19, 18 + named)
end
return line
"""
)

SESSION = (
    SESSION_KEY
    + READ_ALL
    + """
if gone then return {} end
local state = redis.call('HMGET', session, 'created', 'used', 'sealed', 'turns', 'open')
if not state[1] then return {} end
return read_all(state, 'I', tonumber(redis.call('HGET', session, 'incidents') or 0))
"""
)

TURNS = (
    SESSION_KEY
    + READ_ALL
    + """
if gone then return {} end
return read_all({}, 'H', tonumber(redis.call('HGET', session, 'turns') or 0))
"""
)

TOKENS = (
    SESSION_KEY
    + """
if gone then return {} end
-- ARGV: fields of turns. Returns ids and log probabilities of each; stops at the first that is not there.
local found = {}
for _, field in ipairs(ARGV) do
  local n = redis.call('HGET', session, field)
  if not n then break end
  local held = redis.call('HMGET', session, 'T' .. n, 'L' .. n)
  found[#found + 1] = held[1]
  found[#found + 1] = held[2] or ''
end
return found
"""
)

CONTEXTS = (
    SESSION_KEY
    + """
if gone then return {} end
-- ARGV: fields of turns. Returns the context of each; stops at the first that is not there.
local found = {}
for _, field in ipairs(ARGV) do
  local n = redis.call('HGET', session, field)
  if not n then break end
  found[#found + 1] = redis.call('HGET', session, 'M' .. n) or ''
end
return found
"""
)

DOCUMENTS = (
    SESSION_KEY
    + """
-- ARGV: fields of documents
if gone then return {} end
return redis.call('HMGET', session, unpack(ARGV))
"""
)

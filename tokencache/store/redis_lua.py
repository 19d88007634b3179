"""The scripts that run inside Redis: each is one round trip, and nothing comes between its reads and its writes.

They know fields and bytes, not what is in them: packing is `packing`'s. The only number they read out of packed bytes
is the length of the base's name at the head of a turn's ids, to walk from a turn to its base.

A script's first write is one that Redis refuses when it is out of memory, before anything was written: so a script is
done wholly or not at all. The fields are described in `redis`.
"""

_COMMON = """
local session = KEYS[1]

local function now()
  local t = redis.call('TIME')
  return string.format('%010d.%06d', t[1], t[2])
end

-- Open calls stand in one field, one behind the other: since (17 bytes), length of the name (5 digits), name.
local function call_at(calls, at)
  local stop = at + 21 + tonumber(string.sub(calls, at + 17, at + 21))
  return string.sub(calls, at + 22, stop), stop
end

local function is_open(calls, call)
  local at = 1
  while at <= #calls do
    local name, stop = call_at(calls, at)
    if name == call then return true end
    at = stop + 1
  end
  return false
end

local function without(calls, call)
  local kept, at = {}, 1
  while at <= #calls do
    local name, stop = call_at(calls, at)
    if name ~= call then kept[#kept + 1] = string.sub(calls, at, stop) end
    at = stop + 1
  end
  return table.concat(kept)
end

local function live(life)
  local held = redis.call('HGET', session, 'life')
  if held then return held end
  local time = now()
  redis.call('HSET', session, 'life', life, 'created', time, 'used', time)
  return life
end

local function add_incidents(from)
  for i = from, #ARGV do
    redis.call('HSET', session, 'I' .. redis.call('HINCRBY', session, 'incidents', 1), ARGV[i])
  end
end

-- Appends (position, head) to found for every turn under the wanted keys: ARGV[from] holds their lengths, two bytes each,
-- the next argument the keys, one behind the other. Ends behind the first known chain key if told.
local function look_up(found, from, early)
  local lengths, keys, at = ARGV[from], ARGV[from + 1], 1
  for i = 1, #lengths, 2 do
    local low, high = string.byte(lengths, i, i + 1)
    local key = string.sub(keys, at, at + low + 256 * high - 1)
    at = at + #key
    local numbers = redis.call('HGET', session, '=' .. key)
    if numbers then
      for n in string.gmatch(numbers, '%d+') do
        found[#found + 1] = (i - 1) / 2
        found[#found + 1] = redis.call('HGET', session, 'H' .. n)
      end
      if early and string.sub(key, 1, 1) == 'c' then break end
    end
  end
  return found
end

-- Appends the fields letter1..letterN to list, some at a time: a Lua call takes only so many arguments.
local function read_all(list, letter, count)
  for first = 1, count, 500 do
    local names = {}
    for n = first, math.min(first + 499, count) do names[#names + 1] = letter .. n end
    for _, value in ipairs(redis.call('HMGET', session, unpack(names))) do list[#list + 1] = value end
  end
  return list
end
"""

BEGIN = (
    _COMMON
    + """
-- ARGV: ttl, life for a new session, call, lengths of keys, keys
if redis.call('HGET', session, 'sealed') then return 0 end
local life, time = live(ARGV[2]), now()
local calls = without(redis.call('HGET', session, 'calls') or '', ARGV[3])
redis.call('HSET', session, 'used', time, 'calls', calls .. time .. string.format('%05d', #ARGV[3]) .. ARGV[3])
redis.call('PEXPIRE', session, ARGV[1])
return look_up({life}, 4, true)
"""
)

FIND = (
    _COMMON
    + """
-- ARGV: lengths of keys, keys
return look_up({}, 1, false)
"""
)

PREFIX = (
    _COMMON
    + """
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

COMMIT = (
    _COMMON
    + """
-- ARGV: ttl, life, call, 1 if this was sent before and nobody knows what became of it, number of entries,
-- per entry (field of the turn, field of its parent or '', head, ids, log probabilities, context, number of keys, keys),
-- number of documents, per document (field, data), incidents
if redis.call('HGET', session, 'life') ~= ARGV[2] then return 0 end
local calls = redis.call('HGET', session, 'calls') or ''
if ARGV[4] == '1' and not is_open(calls, ARGV[3]) then return 1 end
local at = 6
for _ = 1, tonumber(ARGV[5]) do
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
redis.call('HSET', session, 'used', now(), 'calls', without(calls, ARGV[3]))
add_incidents(at + 1)
redis.call('PEXPIRE', session, ARGV[1])
return 1
"""
)

NOTE = (
    _COMMON
    + """
-- ARGV: ttl, life for a new session, incidents
live(ARGV[2])
add_incidents(3)
redis.call('PEXPIRE', session, ARGV[1])
return 1
"""
)

SESSION = (
    _COMMON
    + """
local state = redis.call('HMGET', session, 'created', 'used', 'sealed', 'turns', 'calls')
if not state[1] then return {} end
return read_all(state, 'I', tonumber(redis.call('HGET', session, 'incidents') or 0))
"""
)

TURNS = (
    _COMMON
    + """
return read_all({}, 'H', tonumber(redis.call('HGET', session, 'turns') or 0))
"""
)

TOKENS = (
    _COMMON
    + """
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
    _COMMON
    + """
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

SEAL = (
    _COMMON
    + """
-- ARGV: ttl
if not redis.call('HGET', session, 'life') then return 0 end
redis.call('HSET', session, 'sealed', '1')
redis.call('PEXPIRE', session, ARGV[1])
return 1
"""
)

"""What the scripts that run inside Redis share. Each is one round trip, and nothing comes between its reads and its writes.

They know fields and bytes, not what is in them: packing is `packing`'s and `fields`'. The only numbers they read out of packed bytes
are the length of the base's name at the head of a turn's ids, to walk from a turn to its base, and the heads of open calls.

A script's first write is one that Redis refuses when it is out of memory, before anything was written: so a script is
done wholly or not at all. (A deletion begins with one that is never refused: it must work where memory is short.) The fields
are described in `tokencache.store.redis`. No script reads which server it runs in: Redis from 6.2 on and Valkey run the same ones.
"""

SESSION_KEY = """
local session = KEYS[1]

-- A tombstone stands under its session's key: what two keys hold cannot be asked for while their slot moves between nodes (TRYAGAIN).
-- It is a string, so that listing hashes passes it by.
local life, gone = redis.pcall('HGET', session, 'life'), false
if type(life) == 'table' then
  if redis.pcall('GET', session) ~= 'gone' then return redis.error_reply(life.err) end
  life, gone = false, true
end

local function now()
  local t = redis.call('TIME')
  return string.format('%010d.%06d', t[1], t[2])
end
"""

OPEN_CALLS = """
-- Open calls stand in one field, one behind the other: since (17 bytes), flags (1 digit: 1 its asker has left, 2 it is wanted, 4 given up),
-- lengths of imprint, replica and name (5 digits each), imprint, replica, name.
local function call_at(open, at)
  local asked = tonumber(string.sub(open, at + 18, at + 22))
  local length = tonumber(string.sub(open, at + 28, at + 32))
  local stop = at + 32 + asked + tonumber(string.sub(open, at + 23, at + 27)) + length
  local flags = tonumber(string.sub(open, at + 17, at + 17))
  return {name = string.sub(open, stop - length + 1, stop), asked = string.sub(open, at + 33, at + 32 + asked), flags = flags, stop = stop}
end

-- Where in open the first call stands that fits, and that call.
local function first(open, fits)
  local at = 1
  while at <= #open do
    local call = call_at(open, at)
    if fits(call) then return at, call end
    at = call.stop + 1
  end
end

local function named(name)
  return function(call) return call.name == name end
end

local function without(open, name)
  local at, call = first(open, named(name))
  if not at then return open end
  return string.sub(open, 1, at - 1) .. string.sub(open, call.stop + 1)
end

local function flagged(open, at, flags)
  return string.sub(open, 1, at + 16) .. flags .. string.sub(open, at + 18)
end
"""

INCIDENTS = """
local function add_incidents(from)
  for i = from, #ARGV do
    redis.call('HSET', session, 'I' .. redis.call('HINCRBY', session, 'incidents', 1), ARGV[i])
  end
end
"""

LOOK_UP = """
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
"""

READ_ALL = """
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

"""The Lua scripts that run inside Redis. Each is one round trip, and nothing runs between its reads and its writes.

Scripts read and write fields without decoding them; `encoding` and `fields` define the bytes. They decode only two things: the length of
the base's name at the head of a turn's ids, to find the turn's base, and the heads of open calls.

The first write of a script is one that Redis refuses when it is out of memory. So a script is executed completely or not at all. A deletion
starts with a write that is never refused, because it must work when memory is short. `tokencache.store.redis` describes the fields. The
scripts do not depend on the server's version: they run on Redis 6.2 or newer and on Valkey.
"""

from collections.abc import Callable


def of_parts(*parts: str) -> Callable[[str], str]:
    """Return a function that makes a script: parts that several scripts share, and its own text."""
    return lambda own: "".join((*parts, own))


def _naming_its_call(argument: int, script: str) -> str:
    """Make a script answer with the name of its call, which is `ARGV[argument]`, and its answer.

    It runs over a connection on which answers are matched by their order (`shared`). The name shows that this one is the call's.
    """
    return f"""
local function run()
{script}
end
local answer = run()
if type(answer) == 'table' and answer.err then return answer end
return {{ARGV[{argument}], answer}}
"""


# Parts that several scripts share.

SESSION_KEY = """
local session = KEYS[1]

-- A tombstone has the key of its session: two keys cannot be read while their slot moves between nodes (TRYAGAIN).
-- It is a string, so listing hashes skips it.
local epoch, gone = redis.pcall('HGET', session, 'life'), false
if type(epoch) == 'table' then
  if redis.pcall('GET', session) ~= 'gone' then return redis.error_reply(epoch.err) end
  epoch, gone = false, true
end

local function now()
  local t = redis.call('TIME')
  return string.format('%010d.%06d', t[1], t[2])
end
"""

DELETED_EPOCH = """
-- The key that is there for a while after an epoch was deleted, in the slot of its session. While this slot moves between nodes, it cannot
-- be read or written (pcall): then the epoch is taken for a lost one.
local function deleted(epoch)
  return session .. ':' .. epoch .. ':deleted'
end
"""

OPEN_CALLS = """
-- One field holds all open calls, concatenated: since (17 bytes), flags (1 digit: 1 orphaned, 2 wanted, 4 given up),
-- lengths of fingerprint, replica and name (5 digits each), fingerprint, replica, name.
local function call_at(open, at)
  local fingerprint = tonumber(string.sub(open, at + 18, at + 22))
  local length = tonumber(string.sub(open, at + 28, at + 32))
  local stop = at + 32 + fingerprint + tonumber(string.sub(open, at + 23, at + 27)) + length
  local flags = tonumber(string.sub(open, at + 17, at + 17))
  local bytes = string.sub(open, at + 33, at + 32 + fingerprint)
  return {name = string.sub(open, stop - length + 1, stop), fingerprint = bytes, flags = flags, stop = stop}
end

-- Position of the first call that fits, and that call.
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
-- An addition of incidents that may be sent again has a name of 8 bytes. The last 16 are kept, so that it is done once.
local function is_noted(name)
  local names = redis.call('HGET', session, 'noted') or ''
  for at = 1, #names, 8 do
    if string.sub(names, at, at + 7) == name then return true end
  end
  return false
end

local function note(name)
  redis.call('HSET', session, 'noted', string.sub((redis.call('HGET', session, 'noted') or '') .. name, -128))
end

local function add_incidents(from)
  for i = from, #ARGV do
    redis.call('HSET', session, 'I' .. redis.call('HINCRBY', session, 'incidents', 1), ARGV[i])
  end
end
"""

LOOK_UP = """
-- Appends (position, head) to found for every turn under the given keys. ARGV[from] holds their lengths, two bytes each,
-- the next argument the keys, concatenated. With early it ends after the first known chain key.
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
-- Appends the fields letter1..letterN to list, 500 at a time: the number of arguments of a Lua call is limited.
local function read_all(list, letter, count)
  for first = 1, count, 500 do
    local names = {}
    for n = first, math.min(first + 499, count) do names[#names + 1] = letter .. n end
    for _, value in ipairs(redis.call('HMGET', session, unpack(names))) do list[#list + 1] = value end
  end
  return list
end
"""

# Scripts that write.

SEALED, DELETED, FULL, FINISHED = 0, 1, 2, 3
"""Replies of BEGIN when it opens nothing."""

BEGIN = _naming_its_call(
    7,
    SESSION_KEY
    + OPEN_CALLS
    + LOOK_UP
    + f"local SEALED, DELETED, FULL, FINISHED = {SEALED}, {DELETED}, {FULL}, {FINISHED}\n"
    + """
-- ARGV: ttl, epoch of a new session, 1 if new sessions are refused, which open call with the same fingerprint may be joined (n none,
-- l an orphaned one, a any), fingerprint, replica, call, digest of the settings, lengths of keys, keys
-- If the session has other settings, it returns only these.
if gone then return DELETED end
local time, name, fingerprint = now(), ARGV[7], ARGV[5]
local state = redis.call('HMGET', session, 'sealed', 'open', 'begun', 'sampled', 'created', 'finished', 'digest', 'engine')
local open, begun, created = state[2] or '', tonumber(state[3] or 0), state[5]
if state[1] then return SEALED end
if state[6] then return FINISHED end
if not epoch and ARGV[3] == '1' then return FULL end
if (state[7] or '') ~= ARGV[8] then return {redis.call('HGET', session, 'settings') or ''} end
if not epoch then
  epoch, created = ARGV[2], time
  redis.call('HSET', session, 'life', epoch, 'created', time)
end
local mine = first(open, named(name))
local at, joined
if fingerprint ~= '' and ARGV[4] ~= 'n' and not mine then
  at, joined = first(open, function(call)
    return call.fingerprint == fingerprint and call.flags < 4 and (ARGV[4] == 'a' or call.flags % 2 == 1)
  end)
end
local found = ''
if joined then
  open = flagged(open, at, 2 + joined.flags % 2)
  found = string.sub(open, at, joined.stop)
  redis.call('HSET', session, 'open', open)
else
  if not mine then begun = begun + 1 end
  local head = string.format('%s0%05d%05d%05d', time, #fingerprint, #ARGV[6], #name)
  redis.call('HSET', session, 'used', time, 'begun', begun, 'open', without(open, name) .. head .. fingerprint .. ARGV[6] .. name)
end
redis.call('PEXPIRE', session, ARGV[1])
local age = string.format('%.6f', tonumber(time) - tonumber(created))
return look_up({epoch, begun, tonumber(state[4] or 0), age, found, state[8] or ''}, 9, true)
""",
)

MARK_ORPHANED = of_parts(SESSION_KEY, OPEN_CALLS)("""
-- ARGV: ttl, call, 1 if this was sent before and the reply was lost. Returns 1 if the call was marked as wanted since the last time.
-- If the lost attempt marked it, it also cleared the flag. Then this is unknown and 1 is returned, so that no wanted reply is cancelled.
local open = not gone and redis.call('HGET', session, 'open') or ''
local at, call = first(open, named(ARGV[2]))
if not at then return 0 end
local wanted = call.flags % 4 >= 2 or ARGV[3] == '1' and call.flags % 2 == 1
redis.call('HSET', session, 'open', flagged(open, at, call.flags >= 4 and 5 or 1))
redis.call('PEXPIRE', session, ARGV[1])
return wanted and 1 or 0
""")

MARK_WANTED = of_parts(SESSION_KEY, OPEN_CALLS)("""
-- ARGV: ttl, call, flag to set: 2 wanted, 4 given up
local open = not gone and redis.call('HGET', session, 'open') or ''
local at, call = first(open, named(ARGV[2]))
if not at then return 0 end
local flag = tonumber(ARGV[3])
if call.flags % (2 * flag) < flag then redis.call('HSET', session, 'open', flagged(open, at, call.flags + flag)) end
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

LOST, ENDED, TURN_LOST, WAS_DELETED = 0, 1, 2, 3
"""Replies of COMMIT."""

COMMIT = _naming_its_call(
    3,
    SESSION_KEY
    + DELETED_EPOCH
    + OPEN_CALLS
    + INCIDENTS
    + """
-- ARGV: ttl, epoch, call, 1 if this was sent before and the reply was lost, name of the addition if there are no entries, number of
-- sampled tokens, milliseconds that the call took, the session's new engine or '', number of turns to which the entries refer, the fields
-- of these turns, number of entries,
-- per entry (field of the turn, field of its parent or '', head, when its call began, ids, log probabilities, context, number of keys,
-- keys),
-- number of documents, per document (field, data), incidents
-- Returns 0 if the epoch has ended, 3 if it was deleted, 2 if a turn is missing (a server that took over may lack it), else 1.
if epoch ~= ARGV[2] then return redis.pcall('GET', deleted(ARGV[2])) == '1' and 3 or 0 end
local open, at = redis.call('HGET', session, 'open') or '', 10 + tonumber(ARGV[9])
for n = 10, at - 1 do
  if not redis.call('HGET', session, ARGV[n]) then return 2 end
end
local entries = tonumber(ARGV[at])
at = at + 1
if ARGV[4] == '1' then
  local done
  if entries > 0 then done = redis.call('HGET', session, ARGV[at]) ~= false else done = is_noted(ARGV[5]) end
  if done then return 1 end
end
local newest = redis.call('HGET', session, 'newest') or '0 0'
for _ = 1, entries do
  local n = redis.call('HGET', session, ARGV[at]) or redis.call('HINCRBY', session, 'turns', 1)
  redis.call('HSET', session, ARGV[at], n, 'H' .. n, '-' .. ARGV[at + 2], 'T' .. n, ARGV[at + 4])
  if tonumber(ARGV[at + 3]) >= tonumber(string.match(newest, ' (.+)')) then newest = n .. ' ' .. ARGV[at + 3] end
  if ARGV[at + 5] ~= '' then redis.call('HSET', session, 'L' .. n, ARGV[at + 5]) end
  if ARGV[at + 6] ~= '' then redis.call('HSET', session, 'M' .. n, ARGV[at + 6]) end
  local parent = ARGV[at + 1] ~= '' and redis.call('HGET', session, ARGV[at + 1])
  if parent then
    redis.call('HSET', session, 'H' .. parent, '+' .. string.sub(redis.call('HGET', session, 'H' .. parent), 2))
  end
  local count = tonumber(ARGV[at + 7])
  for key = at + 8, at + 7 + count do
    local numbers = redis.call('HGET', session, ARGV[key])
    redis.call('HSET', session, ARGV[key], numbers and (numbers .. ' ' .. n) or n)
  end
  at = at + 8 + count
end
if entries > 0 then redis.call('HSET', session, 'newest', newest) end
for _ = 1, tonumber(ARGV[at]) do
  redis.call('HSET', session, ARGV[at + 1], ARGV[at + 2])
  at = at + 2
end
redis.call('HSET', session, 'used', now(), 'open', without(open, ARGV[3]))
if ARGV[6] ~= '0' then redis.call('HINCRBY', session, 'sampled', ARGV[6]) end
if ARGV[7] ~= '0' then redis.call('HINCRBY', session, 'call_ms', ARGV[7]) end
if ARGV[8] ~= '' then
  local ended = redis.call('HMGET', session, 'finished', 'sealed')
  if not (ended[1] or ended[2]) then redis.call('HSET', session, 'engine', ARGV[8]) end
end
if entries == 0 and #ARGV > at then note(ARGV[5]) end
add_incidents(at + 1)
redis.call('PEXPIRE', session, ARGV[1])
return 1
""",
)

ADD_INCIDENTS = of_parts(SESSION_KEY, INCIDENTS)("""
-- ARGV: ttl, epoch of a new session, 1 if this was sent before and the reply was lost, name of this addition, incidents
if gone then return 0 end
if ARGV[3] == '1' and is_noted(ARGV[4]) then return 1 end
if not epoch then
  local time = now()
  redis.call('HSET', session, 'life', ARGV[2], 'created', time, 'used', time)
end
note(ARGV[4])
add_incidents(5)
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

CREATED, JOINED, EXISTS = 0, 1, 2
"""Replies of DEFINE, besides FULL of BEGIN, which has the number 3."""
NO_CAPACITY = 3

DEFINE = of_parts(SESSION_KEY, f"local CREATED, JOINED, EXISTS, NO_CAPACITY = {CREATED}, {JOINED}, {EXISTS}, {NO_CAPACITY}\n")("""
-- ARGV: ttl, epoch of a new session, 1 if new sessions are refused, what to do if it exists (n refuse, j join, a join and adopt
-- settings), digest of the settings, settings, labels (field, value)
-- If the session has other settings, it returns these in a list.
if epoch == ARGV[2] then return CREATED end
local result = JOINED
if epoch then
  if ARGV[4] == 'n' then return EXISTS end
  local own = redis.call('HGET', session, 'digest') or ''
  if ARGV[5] ~= '' and own ~= ARGV[5] then
    if own ~= '' or ARGV[4] ~= 'a' then return {redis.call('HGET', session, 'settings') or ''} end
    redis.call('HSET', session, 'digest', ARGV[5], 'settings', ARGV[6])
  end
else
  if ARGV[3] == '1' then return NO_CAPACITY end
  if gone then
    redis.call('SET', session, 'gone', 'PX', ARGV[1]) -- refused if memory is short
    redis.call('UNLINK', session)
  end
  local time = now()
  redis.call('HSET', session, 'life', ARGV[2], 'created', time, 'used', time)
  if ARGV[5] ~= '' then redis.call('HSET', session, 'digest', ARGV[5], 'settings', ARGV[6]) end
  result = CREATED
end
for at = 7, #ARGV, 2 do redis.call('HSET', session, ARGV[at], ARGV[at + 1]) end
redis.call('PEXPIRE', session, ARGV[1])
return result
""")

SET_LABELS = of_parts(SESSION_KEY)("""
-- ARGV: ttl, labels (field, value)
if not epoch then return 0 end
for at = 2, #ARGV, 2 do redis.call('HSET', session, ARGV[at], ARGV[at + 1]) end
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

ADD_REWARD = of_parts(SESSION_KEY)("""
-- ARGV: ttl, 1 if this was sent before and the reply was lost, how many are kept, reward
if not epoch then return 0 end
local count, kept = tonumber(redis.call('HGET', session, 'rewards') or 0), tonumber(ARGV[3])
if ARGV[2] == '1' then
  for n = math.max(1, count - kept + 1), count do
    if redis.call('HGET', session, 'R' .. n) == ARGV[4] then return 1 end
  end
end
redis.call('HSET', session, 'rewards', count + 1, 'R' .. (count + 1), ARGV[4])
redis.call('HDEL', session, 'R' .. (count + 1 - kept))
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

FINISH = of_parts(SESSION_KEY)("""
-- ARGV: ttl, kind of the outcome or '', outcome
-- Returns 0 if there is no session, 1 if it is done, else 'outcome' and the kind of the stored one, '' if the session is sealed without.
if not epoch then return 0 end
local state = redis.call('HMGET', session, 'finished', 'failed', 'sealed')
if ARGV[2] ~= '' and (state[2] and state[2] ~= ARGV[2] or not state[2] and state[3]) then return {'outcome', state[2] or ''} end
redis.call('HSET', session, 'finished', state[1] or now())
redis.call('HDEL', session, 'engine')
if ARGV[2] ~= '' and not state[2] then redis.call('HSET', session, 'failed', ARGV[2], 'outcome', ARGV[3]) end
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

SEAL = of_parts(SESSION_KEY, OPEN_CALLS, INCIDENTS)("""
-- ARGV: ttl, what may be cut off ('1 ' if the session is finished, else '0 ', and the number of open calls), incident that reports it
-- Returns 0 if there is no session, 1 if it is sealed, else what would be cut off.
if not epoch then return 0 end
local state = redis.call('HMGET', session, 'sealed', 'finished', 'open')
if state[1] then return 1 end
local calls, nothing = 0, '1 0'
first(state[3] or '', function() calls = calls + 1 end)
local cut = (state[2] and '1 ' or '0 ') .. calls
if cut ~= nothing and cut ~= ARGV[2] then return cut end
redis.call('HSET', session, 'sealed', '1')
redis.call('HDEL', session, 'engine')
if cut ~= nothing then add_incidents(3) end
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

DELETE = of_parts(SESSION_KEY, DELETED_EPOCH)("""
-- ARGV: how long the tombstone lasts, 1 if the name may be used again at once, how long what forks share is kept
-- Returns 0 if there is no session, its epoch if it is a fork or has forks, else 1.
local forks = epoch and redis.call('HMGET', session, 'shared', 'fork') or {}
local noted = epoch and redis.pcall('SET', deleted(epoch), '1', 'PX', ARGV[1]).ok -- not while the slot moves or memory is short
if forks[1] then
  local kept = session .. ':' .. epoch -- in the same slot: the name of the session is the hash tag of both
  redis.call('RENAME', session, kept)
  redis.call('PEXPIRE', kept, ARGV[3])
elseif noted or ARGV[2] == '1' then
  redis.call('UNLINK', session)
elseif epoch then
  redis.call('PEXPIRE', session, ARGV[1]) -- never refused, and then SET is not
end
if not epoch then return 0 end
-- In place of the session: while its slot moves to another node, a script cannot write a key that is not there.
if ARGV[2] == '0' then redis.call('SET', session, 'gone', 'PX', ARGV[1]) end
if not noted then redis.pcall('SET', deleted(epoch), '1', 'PX', ARGV[1]) end
return (forks[1] or forks[2]) and epoch or 1
""")

DELETE_DOCUMENT = of_parts(SESSION_KEY)("""
-- ARGV: field of the document
if gone then return 0 end
return redis.call('HDEL', session, ARGV[1])
""")

OVER_LIMIT, STORED, NO_SESSION = 0, 1, 2
"""Replies of PUT_MEDIA."""

PUT_MEDIA = of_parts(SESSION_KEY, f"local OVER_LIMIT, STORED, NO_SESSION = {OVER_LIMIT}, {STORED}, {NO_SESSION}\n")("""
-- ARGV: ttl, epoch, field of the medium, its line in the list, its bytes, how many bytes all media of the session may take
if epoch ~= ARGV[2] then return NO_SESSION end
local stored = redis.call('HMGET', session, 'media', 'media_bytes')
local list = stored[1] or ''
if not string.find(list, string.sub(ARGV[3], 2), 1, true) then
  local total = tonumber(stored[2] or 0) + #ARGV[5]
  if total > tonumber(ARGV[6]) then return OVER_LIMIT end
  redis.call('HSET', session, ARGV[3], ARGV[5], 'media', list .. ARGV[4], 'media_bytes', total)
end
redis.call('PEXPIRE', session, ARGV[1])
return STORED
""")

SHARE = of_parts(SESSION_KEY)("""
-- ARGV: how long the session is kept, its epoch, fields of the turns that a fork shares
-- Returns for each turn the reference that it is itself, or '', then each key that finds some of them, with their places in ARGV.
-- Returns the places of fewer turns if one does not exist, and nothing if the epoch has ended.
if epoch ~= ARGV[2] then return {} end
local found, places = {}, {}
for i = 3, #ARGV do
  local n = redis.call('HGET', session, ARGV[i])
  if not n then return found end
  local ids = redis.call('HGET', session, 'T' .. n)
  places[n] = i - 2
  found[#found + 1] = string.sub(ids, 1, 2) == '\\255\\255' and ids or ''
end
for _, name in ipairs(redis.call('HKEYS', session)) do
  if string.sub(name, 1, 1) == '=' then
    local kept = {}
    for n in string.gmatch(redis.call('HGET', session, name), '%d+') do kept[#kept + 1] = places[n] end
    if #kept > 0 then
      found[#found + 1] = name
      found[#found + 1] = table.concat(kept, ' ')
    end
  end
end
redis.call('HSET', session, 'shared', '1')
redis.call('PEXPIRE', session, ARGV[1])
return found
""")

JOIN_SHARED = of_parts(SESSION_KEY)("""
-- ARGV: ttl, epoch, number of calls, of sampled tokens and of turns, per turn (field, field of its parent or '', head, reference), keys
-- (field, places of turns)
-- Returns 0 if the epoch has ended, else 1.
if epoch ~= ARGV[2] then return 0 end
local count = tonumber(ARGV[5])
if redis.call('HGET', session, 'fork') then return 1 end -- sent before, and the reply was lost
local numbers = {}
for i = 1, count do
  local at = 4 * i + 2
  local n = redis.call('HINCRBY', session, 'turns', 1)
  numbers[i] = n
  redis.call('HSET', session, ARGV[at], n, 'H' .. n, '-' .. ARGV[at + 2], 'T' .. n, ARGV[at + 3], 'M' .. n, ARGV[at + 3], 'fork', '1')
  local parent = ARGV[at + 1] ~= '' and redis.call('HGET', session, ARGV[at + 1])
  if parent then
    redis.call('HSET', session, 'H' .. parent, '+' .. string.sub(redis.call('HGET', session, 'H' .. parent), 2))
  end
end
redis.call('HINCRBY', session, 'begun', ARGV[3])
redis.call('HINCRBY', session, 'sampled', ARGV[4])
for at = 4 * count + 6, #ARGV, 2 do
  local found = {}
  for place in string.gmatch(ARGV[at + 1], '%d+') do found[#found + 1] = numbers[tonumber(place)] end
  redis.call('HSET', session, ARGV[at], table.concat(found, ' '))
end
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

KEEP_SHARED = of_parts(SESSION_KEY)("""
-- ARGV: how long the session is kept, its epoch
if epoch ~= ARGV[2] then return 0 end
redis.call('PEXPIRE', session, ARGV[1])
return 1
""")

SET_ONCE = """
-- ARGV: value. Sets the key to it if the key is not set. Returns the value of the key.
local value = redis.call('GET', KEYS[1])
if value then return value end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""

REPLACE_WEIGHTS = """
-- ARGV: revision, state. Stores the state if the stored revision is the one before. Returns whether it is stored now.
local stored = redis.call('HMGET', KEYS[1], 'revision', 'state')
if tonumber(ARGV[1]) == tonumber(stored[1] or 0) + 1 then
  redis.call('HSET', KEYS[1], 'revision', ARGV[1], 'state', ARGV[2])
  return 1
end
return stored[2] == ARGV[2] and 1 or 0
"""

CHECK_SCHEMA = """
-- ARGV: version for a database that has none. Writes the present value again: a server that refuses writes must be noticed.
local value = redis.call('GET', KEYS[1]) or ARGV[1]
redis.call('SET', KEYS[1], value)
return value
"""

# Scripts that only read. A deleted session is empty.

FIND = of_parts(SESSION_KEY, LOOK_UP)("""
if gone then return {} end
-- ARGV: lengths of keys, keys
return look_up({}, 1, false)
""")

PREFIX = of_parts(SESSION_KEY)("""
if gone then return {} end
-- ARGV: field of the turn. Returns its ids and those of all its bases; if one is in another session, its reference and its field are last.
local line, field = {}, ARGV[1]
for _ = 1, tonumber(redis.call('HGET', session, 'turns') or 0) do
  local n = redis.call('HGET', session, field)
  if not n then break end
  local packed = redis.call('HGET', session, 'T' .. n)
  line[#line + 1] = packed
  local named = string.byte(packed, 1) + 256 * string.byte(packed, 2)
  if named == 0 then break end
  if named == 65535 then line[#line + 1] = field break end
  field = '#' .. string.sub(packed, 19, 18 + named)
end
return line
""")

SESSION = of_parts(SESSION_KEY, READ_ALL)("""
-- Returns the fields, the newest reward, the last turn's record, the outcome, the milliseconds of calls, the engine, the newest turn's
-- record if that is another, and the incidents.
if not epoch then return {} end
local state = redis.call('HMGET', session, 'life', 'created', 'used', 'sealed', 'finished', 'turns', 'open', 'settings', 'group',
  'metadata', 'tags', 'rewards', 'sampled', 'incidents')
state[15] = state[12] and redis.call('HGET', session, 'R' .. state[12])
state[16] = state[6] and redis.call('HGET', session, 'H' .. state[6])
state[17] = redis.call('HGET', session, 'outcome')
state[18] = redis.call('HGET', session, 'call_ms')
state[19] = redis.call('HGET', session, 'engine')
local newest = string.match(redis.call('HGET', session, 'newest') or '', '^%d+')
state[20] = newest and newest ~= state[6] and redis.call('HGET', session, 'H' .. newest) or false
return read_all(state, 'I', tonumber(state[14] or 0))
""")

SETTINGS = of_parts(SESSION_KEY)("""
-- Returns nothing if there is no session, else its settings.
if not epoch then return {} end
return {redis.call('HGET', session, 'settings') or ''}
""")

REWARDS = of_parts(SESSION_KEY)("""
-- ARGV: how many are kept
if not epoch then return {} end
local found, count = {}, tonumber(redis.call('HGET', session, 'rewards') or 0)
for n = math.max(1, count - tonumber(ARGV[1]) + 1), count do found[#found + 1] = redis.call('HGET', session, 'R' .. n) end
return found
""")

TURNS = of_parts(SESSION_KEY, READ_ALL)("""
if gone then return {} end
return read_all({}, 'H', tonumber(redis.call('HGET', session, 'turns') or 0))
""")

TOKENS = of_parts(SESSION_KEY)("""
if gone then return {} end
-- ARGV: fields of turns. Returns ids and log probabilities of each; stops at the first that does not exist.
local found = {}
for _, field in ipairs(ARGV) do
  local n = redis.call('HGET', session, field)
  if not n then break end
  local value = redis.call('HMGET', session, 'T' .. n, 'L' .. n)
  found[#found + 1] = value[1]
  found[#found + 1] = value[2] or ''
end
return found
""")

CONTEXTS = of_parts(SESSION_KEY)("""
if gone then return {} end
-- ARGV: fields of turns. Returns the context of each; stops at the first that does not exist.
local found = {}
for _, field in ipairs(ARGV) do
  local n = redis.call('HGET', session, field)
  if not n then break end
  found[#found + 1] = redis.call('HGET', session, 'M' .. n) or ''
end
return found
""")

DOCUMENTS = of_parts(SESSION_KEY)("""
-- ARGV: fields of documents. They are read 500 at a time: the number of arguments of a Lua call is limited.
if gone then return {} end
local found = {}
for first = 1, #ARGV, 500 do
  local values = redis.call('HMGET', session, unpack(ARGV, first, math.min(first + 499, #ARGV)))
  for _, value in ipairs(values) do found[#found + 1] = value end
end
return found
""")

MEDIA = of_parts(SESSION_KEY)("""
-- ARGV: field of a medium, or nothing. Returns the list of media, and the bytes of that medium.
if gone then return {} end
local list = redis.call('HGET', session, 'media')
if not list then return {} end
return {list, ARGV[1] and redis.call('HGET', session, ARGV[1])}
""")

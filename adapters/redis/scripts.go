package redis

import (
	"errors"
	"fmt"
	"strings"

	goredis "github.com/redis/go-redis/v9"

	"github.com/windlass-dev/windlass/engine"
)

// The scripts. Numbers that grow are of the server's time, so that they do not go backwards when a failover forgets the last
// ones; they stay below 2^53, up to which Lua counts exactly.

// now returns the time in microseconds, and after a number that is greater than it.
const luaTime = `
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local function after(last)
  return string.format('%.0f', math.max(tonumber(last or '0') + 1, now))
end
`

// fenced refuses what a former owner asks for.
const luaFenced = `
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED this partition has another owner')
end
`

var (
	// KEYS owner, class, requests. ARGV class, member, request, channel, wake.
	enqueueScript = goredis.NewScript(luaTime + `
local seq = after(redis.call('HGET', KEYS[1], 'seq'))
redis.call('HSET', KEYS[1], 'seq', seq)
redis.call('ZADD', KEYS[2], seq, ARGV[2])
redis.call('HSET', KEYS[3], ARGV[1] .. ARGV[2], ARGV[3])
if redis.call('HDEL', KEYS[1], 'idle:' .. ARGV[1]) == 1 then
  redis.call('PUBLISH', ARGV[4], ARGV[5])
end
return seq
`)
	// KEYS owner, class, requests. ARGV epoch, class, sequence, count. Returns sequence, member and request of each.
	fetchScript = goredis.NewScript(luaFenced + `
local found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])
if #found == 0 then
  redis.call('HSET', KEYS[1], 'idle:' .. ARGV[2], 1)
  return {}
end
local fields = {}
for i = 1, #found, 2 do
  fields[#fields + 1] = ARGV[2] .. found[i]
end
local requests = redis.call('HMGET', KEYS[3], unpack(fields))
redis.call('HSET', KEYS[1], 'given:' .. ARGV[2], string.format('%.0f', tonumber(found[#found])))
local out = {}
for i = 1, #fields do
  out[3 * i - 2] = string.format('%.0f', tonumber(found[2 * i]))
  out[3 * i - 1] = found[2 * i - 1]
  out[3 * i] = requests[i] or ''
end
return out
`)
	// KEYS owner, class, requests. ARGV epoch, class, then sequence and member of each.
	ackScript = goredis.NewScript(luaFenced + `
for i = 3, #ARGV, 2 do
  local seq = redis.call('ZSCORE', KEYS[2], ARGV[i + 1])
  if seq and string.format('%.0f', tonumber(seq)) == ARGV[i] then
    redis.call('ZREM', KEYS[2], ARGV[i + 1])
    redis.call('HDEL', KEYS[3], ARGV[2] .. ARGV[i + 1])
  end
end
return 1
`)
	// KEYS owner, states. ARGV epoch, key, record or nothing.
	saveScript = goredis.NewScript(luaFenced + `
if ARGV[3] == '' then
  return redis.call('HDEL', KEYS[2], ARGV[2])
end
return redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
`)
	// KEYS owner. ARGV epoch seen, holder, floor, channel. Returns the new epoch, or nothing if it is not the one that was seen.
	claimScript = goredis.NewScript(luaTime + `
local epoch = redis.call('HGET', KEYS[1], 'epoch') or '0'
if epoch ~= ARGV[1] then
  return ''
end
local next = after(math.max(tonumber(epoch), tonumber(ARGV[3])))
redis.call('HSET', KEYS[1], 'epoch', next, 'holder', ARGV[2])
redis.call('PUBLISH', ARGV[4], 'members')
return next
`)
	// KEYS members, member. ARGV id, what it says, milliseconds, channel.
	announceScript = goredis.NewScript(luaTime + `
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))) do
  redis.call('ZREM', KEYS[1], dead)
  redis.call('HDEL', KEYS[2], dead)
end
local was = redis.call('HGET', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[3] * 1000), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if was ~= ARGV[2] then
  redis.call('PUBLISH', ARGV[4], 'members')
end
return 1
`)
	// KEYS members, member. ARGV id, channel.
	withdrawScript = goredis.NewScript(`
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[2], 'members')
return 1
`)
	// KEYS members, member. Returns what each that lives says.
	livingScript = goredis.NewScript(luaTime + `
local ids = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now), '+inf')
if #ids == 0 then
  return {}
end
return redis.call('HMGET', KEYS[2], unpack(ids))
`)
	// KEYS lease. ARGV holder, milliseconds. Returns whether it has the lease, and the epoch.
	acquireScript = goredis.NewScript(luaTime + `
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'until')
local free = not held[1] or held[1] == '' or tonumber(held[3]) <= now
if held[1] ~= ARGV[1] and not free then
  return {'0', held[2]}
end
local epoch = held[2]
if held[1] ~= ARGV[1] then
  epoch = after(epoch)
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', epoch, 'until', string.format('%.0f', now + ARGV[2] * 1000))
return {'1', epoch}
`)
	// KEYS lease. ARGV holder.
	releaseScript = goredis.NewScript(`
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'holder', '')
end
return 1
`)
	// KEYS store, last. ARGV key, value, revision or nothing, channel. Returns the revision, or nothing if it is another one.
	putScript = goredis.NewScript(luaTime + `
local was = redis.call('HGET', KEYS[1], ARGV[1])
local revision = was and string.match(was, '^%d+') or ''
if revision ~= ARGV[3] then
  return ''
end
local next = after(redis.call('GET', KEYS[2]))
redis.call('SET', KEYS[2], next)
redis.call('HSET', KEYS[1], ARGV[1], next .. '\n' .. ARGV[2])
redis.call('PUBLISH', ARGV[4], next .. '\n' .. #ARGV[1] .. '\n' .. ARGV[1] .. 'P' .. ARGV[2])
return next
`)
	// KEYS store, last. ARGV key, revision or nothing, channel. Returns 0 if it is another one.
	deleteScript = goredis.NewScript(luaTime + `
local was = redis.call('HGET', KEYS[1], ARGV[1])
if not was then
  return 1
end
if ARGV[2] ~= '' and string.match(was, '^%d+') ~= ARGV[2] then
  return 0
end
local next = after(redis.call('GET', KEYS[2]))
redis.call('SET', KEYS[2], next)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('PUBLISH', ARGV[3], next .. '\n' .. #ARGV[1] .. '\n' .. ARGV[1] .. 'D')
return 1
`)
)

// understood joins what an error of the server means to the engine with the error itself.
func understood(err error) error {
	switch {
	case err == nil:
		return nil
	case goredis.HasErrorPrefix(err, "FENCED"):
		return fmt.Errorf("%w: %w", engine.ErrConflict, err)
	case goredis.HasErrorPrefix(err, "OOM"):
		return fmt.Errorf("%w: give it more memory (maxmemory): nothing that waits is dropped for it", err)
	case errors.Is(err, goredis.Nil):
		return fmt.Errorf("%w: %w", engine.ErrNotFound, err)
	case strings.HasPrefix(err.Error(), "NOPERM"):
		return fmt.Errorf("%w: see the documentation for the commands and keys that are needed", err)
	default:
		return err
	}
}

package redis

import goredis "github.com/redis/go-redis/v9"

// OwnersScripts are those that only the owner of a partition may run, with arguments behind the epoch.
func OwnersScripts() map[*goredis.Script][]any {
	return map[*goredis.Script][]any{fetchScript: {"h", 0, 10}, ackScript: {"h", "1", "k"}, saveScript: {"k", "record"}}
}

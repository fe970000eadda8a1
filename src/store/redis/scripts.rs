//! The scripts, one for each change, and the keys that they use.
//!
//! Guarantees: a script that changes a record first compares its epoch, and a script of the owner
//! the owner too. Only what takes back a claim whose answer was lost compares the owner alone.
//! Times are the server's, in microseconds.
//!
//! Not here: the meaning of a record's fields (`operations`).

use std::sync::LazyLock;

use redis::Script;

/// Builds a script; every script begins with these lines.
macro_rules! script {
    ($($part:expr),* $(,)?) => {
        LazyLock::new(|| {
            Script::new(concat!(
                "local t = redis.call('TIME')\n",
                "local now = t[1] * 1000000 + t[2]\n",
                "local function whole(x) return string.format('%.0f', x) end\n",
                $($part),*
            ))
        })
    };
}

/// Whether a lease is over. One that ends later than its full length from now is over too: the
/// clock was set back (R22).
macro_rules! over {
    () => {
        "local function over(ends, length)\n\
           ends, length = tonumber(ends or 0), tonumber(length or 0)\n\
           return ends <= now or ends > now + length\n\
         end\n"
    };
}

/// Returns 0 unless the record KEYS[1] is IN_PROGRESS with the epoch ARGV[1] and the owner ARGV[2].
/// The epoch is empty where the answer to a claim was lost; the owner's token is new for each
/// claim, so it suffices.
macro_rules! fence {
    () => {
        "local f = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'state')\n\
         if (ARGV[1] ~= '' and f[1] ~= ARGV[1]) or f[2] ~= ARGV[2] or f[3] ~= 'IN_PROGRESS' then return 0 end\n"
    };
}

/// KEYS: forgotten. ARGV: how far clocks of clients may be ahead. A stored value is never lowered.
pub(super) static SKEW: LazyLock<Script> = script!(
    "local skew = redis.call('HGET', KEYS[1], 'skew')\n",
    "if not skew or tonumber(skew) < tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'skew', ARGV[1]) end\n",
    "return 0\n",
);

/// KEYS: record, forgotten. Returns now, the first outcome, the shortest life of metadata that
/// counts, up to when records with a shorter one were forgotten, the largest skew, and the fields
/// of the record.
pub(super) static FIND: LazyLock<Script> = script!(
    "local g = redis.call('HMGET', KEYS[2], 'first', 'metadata', 'below', 'skew')\n",
    "return {whole(now), g[1], g[2], g[3], g[4], redis.call('HGETALL', KEYS[1])}\n",
);

/// KEYS: record, body. ARGV: epoch. Returns the body's fields; none where its time is over, even if
/// Redis has not removed it yet.
pub(super) static BODY: LazyLock<Script> = script!(
    "local r = redis.call('HMGET', KEYS[1], 'epoch', 'body_until')\n",
    "if r[1] ~= ARGV[1] or not r[2] or tonumber(r[2]) <= now then return {} end\n",
    "return redis.call('HGETALL', KEYS[2])\n",
);

/// KEYS: record, body, running, unknown, epoch. ARGV: basis, epoch seen, name, length of the lease,
/// then fields and values. Returns the new epoch, or nothing where the basis does not hold.
pub(super) static CLAIM: LazyLock<Script> = script!(
    over!(),
    "local r = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'mode', 'lease_until', 'lease_length', 'expires', 'created',\n",
    "  'outcome')\n",
    "local basis, created = ARGV[1], whole(now)\n",
    "if basis == 'new' then\n",
    "  if r[1] then return false end\n",
    "else\n",
    "  if r[1] ~= ARGV[2] then return false end\n",
    "  if r[8] == false then created = r[7] end\n",
    "  local expired = r[6] and tonumber(r[6]) < now\n",
    "  local holds = false\n",
    "  if basis == 'take_over' then\n",
    "    holds = (r[2] == 'IN_PROGRESS' and over(r[4], r[5])) or (r[2] == 'UNKNOWN_REQUIRES_RECOVERY' and r[3] == 'edge')\n",
    "  elseif basis == 'reclaim' then\n",
    "    holds = r[2] == 'FAILED_RETRYABLE' and not expired\n",
    "  elseif basis == 'anew' then\n",
    "    holds = expired\n",
    "  end\n",
    "  if not holds then return false end\n",
    "end\n",
    // This is the first write. A full server refuses it, so nothing is half written.
    "local epoch = redis.call('INCR', KEYS[5])\n",
    "redis.call('DEL', KEYS[1], KEYS[2])\n",
    "redis.call('HSET', KEYS[1], 'epoch', epoch, 'created', created, 'lease_until', whole(now + ARGV[4]), 'lease_length', ARGV[4],\n",
    "  unpack(ARGV, 5))\n",
    "redis.call('ZADD', KEYS[3], created, ARGV[3])\n",
    "redis.call('ZREM', KEYS[4], ARGV[3])\n",
    "return epoch\n",
);

/// KEYS: record. ARGV: epoch, owner, length of the lease.
pub(super) static HEARTBEAT: LazyLock<Script> = script!(
    fence!(),
    "redis.call('HSET', KEYS[1], 'lease_until', whole(now + ARGV[3]), 'lease_length', ARGV[3])\n",
    "return 1\n",
);

/// KEYS: record, body, running, unknown, forgotten. ARGV: epoch, owner, name, state, life of the
/// answer, of the metadata and of the body (each empty where there is none), the number of
/// arguments that are fields and values of the record, these, and those of the body.
pub(super) static FINISH: LazyLock<Script> = script!(
    fence!(),
    "local ttl, metadata, body_ttl, parts = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])\n",
    "redis.call('HDEL', KEYS[1], 'owner', 'lease_until', 'lease_length')\n",
    "redis.call('HSET', KEYS[1], 'state', ARGV[4])\n",
    "redis.call('ZREM', KEYS[3], ARGV[3])\n",
    "if parts > 0 then redis.call('HSET', KEYS[1], unpack(ARGV, 9, 8 + parts)) end\n",
    "if ttl == '' then\n",
    "  redis.call('ZADD', KEYS[4], whole(now), ARGV[3])\n",
    "  return 1\n",
    "end\n",
    "redis.call('HSET', KEYS[1], 'outcome', whole(now), 'expires', whole(now + ttl))\n",
    "redis.call('PEXPIRE', KEYS[1], whole(math.max(math.ceil(metadata / 1000), 1)))\n",
    "if body_ttl ~= '' then\n",
    "  redis.call('HSET', KEYS[1], 'body_until', whole(now + body_ttl))\n",
    "  redis.call('HSET', KEYS[2], 'epoch', ARGV[1], unpack(ARGV, 9 + parts))\n",
    "  redis.call('PEXPIRE', KEYS[2], whole(math.max(math.ceil(body_ttl / 1000), 1)))\n",
    "end\n",
    // What `find` needs to know which records may be forgotten: `first` is the time of the first
    // outcome, `metadata` the shortest life that still counts, `used` when that was last given.
    // When the last record with that life is gone, the shortest of the later ones (`next`) takes
    // its place, and `below` keeps up to when records were forgotten.
    "metadata = tonumber(metadata)\n",
    "redis.call('HSETNX', KEYS[5], 'first', whole(now))\n",
    "local g = redis.call('HMGET', KEYS[5], 'metadata', 'used', 'next', 'below')\n",
    "local shortest, used = tonumber(g[1] or metadata), tonumber(g[2] or now)\n",
    "if metadata > shortest then\n",
    "  metadata = math.min(metadata, tonumber(g[3] or metadata))\n",
    "  if now < used + shortest then\n",
    "    redis.call('HSET', KEYS[5], 'next', whole(metadata))\n",
    "    return 1\n",
    "  end\n",
    "  redis.call('HSET', KEYS[5], 'below', whole(math.max(used, tonumber(g[4] or 0))))\n",
    "end\n",
    "redis.call('HSET', KEYS[5], 'metadata', whole(metadata), 'used', whole(now))\n",
    "redis.call('HDEL', KEYS[5], 'next')\n",
    "return 1\n",
);

/// KEYS: record, body, running. ARGV: epoch, owner, name.
pub(super) static RELEASE: LazyLock<Script> =
    script!(fence!(), "redis.call('DEL', KEYS[1], KEYS[2])\n", "redis.call('ZREM', KEYS[3], ARGV[3])\n", "return 1\n",);

/// KEYS: record, running, unknown, epoch. ARGV: epoch seen, name.
pub(super) static MARK_UNKNOWN: LazyLock<Script> = script!(
    over!(),
    "local r = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'mode', 'lease_until', 'lease_length')\n",
    "if r[1] ~= ARGV[1] or r[2] ~= 'IN_PROGRESS' or r[3] ~= 'edge' or not over(r[4], r[5]) then return 0 end\n",
    "redis.call('HSET', KEYS[1], 'epoch', redis.call('INCR', KEYS[4]), 'state', 'UNKNOWN_REQUIRES_RECOVERY')\n",
    "redis.call('HDEL', KEYS[1], 'owner', 'lease_until', 'lease_length')\n",
    "redis.call('ZREM', KEYS[2], ARGV[2])\n",
    "redis.call('ZADD', KEYS[3], whole(now), ARGV[2])\n",
    "return 1\n",
);

/// KEYS: running, unknown. Returns how many run, since when the oldest one, how many are unknown,
/// and now.
pub(super) static STATS: LazyLock<Script> = script!(
    "local oldest = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')\n",
    "return {redis.call('ZCARD', KEYS[1]), oldest[2] or false, redis.call('ZCARD', KEYS[2]), whole(now)}\n",
);

// The shards of a key, and the grouping of a batch by shards.
#pragma once

#include <cstdint>
#include <vector>

namespace ctr {

constexpr int kShards = 256;          // shards of a table; each has a lock of its own
constexpr int kLogicalShards = 4096;  // an owner has consecutive logical shards
// How many consecutive logical shards one shard of a table holds.
constexpr int kLogicalInShard = kLogicalShards / kShards;

// The finaliser of MurmurHash3: a bijection of 64 bits whose every output bit depends on every
// input bit.
inline uint64_t Mix64(int64_t key) {
  uint64_t h = static_cast<uint64_t>(key);
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  h ^= h >> 33;
  return h;
}

inline int ShardOf(uint64_t mixed) { return static_cast<int>(mixed >> 56); }
inline int LogicalShardOf(uint64_t mixed) { return static_cast<int>(mixed >> 52); }

// The positions of a batch's keys, grouped by shard, in the order of the input within a shard.
// For shard s: for (i = starts[s]; i < starts[s + 1]; ++i) keys[At(i)].
struct ShardGroups {
  std::vector<int32_t> order;   // empty if the keys came grouped by shard
  std::vector<int64_t> starts;  // [kShards + 1]

  int64_t At(int64_t i) const { return order.empty() ? i : order[i]; }
};

// Sorts the keys by shard, with a counting sort. n must fit in 31 bits.
inline ShardGroups GroupByShard(const int64_t* keys, int64_t n) {
  ShardGroups groups;
  groups.starts.assign(kShards + 1, 0);
  std::vector<uint8_t> shards(n);
  bool grouped = true;
  uint8_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t shard = static_cast<uint8_t>(ShardOf(Mix64(keys[i])));
    shards[i] = shard;
    ++groups.starts[shard + 1];
    grouped &= shard >= last;
    last = shard;
  }
  for (int s = 0; s < kShards; ++s) groups.starts[s + 1] += groups.starts[s];
  if (grouped) return groups;
  groups.order.resize(n);
  int64_t next[kShards];
  for (int s = 0; s < kShards; ++s) next[s] = groups.starts[s];
  for (int64_t i = 0; i < n; ++i) groups.order[next[shards[i]]++] = static_cast<int32_t>(i);
  return groups;
}

}  // namespace ctr

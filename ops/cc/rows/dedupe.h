// Distinct keys of a batch, grouped by logical shard, with the sums of their occurrences.
//
// Occurrences are partitioned by shard, then each shard is deduplicated on its own with a table that fits the L1 cache.
// The result does not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

class Dedupe {
 public:
  // Finds the distinct keys. shows, clicks: [n], or [1] for all. Returns their number u.
  int64_t Find(const int64_t* keys, int64_t n, const float* shows, int64_t shows_n, const float* clicks,
               int64_t clicks_n, const ParallelFor& parallel_for, int threads);

  // Writes what the last Find found: unique keys by shard, by first occurrence within; inverse [n];
  // sums of shows and clicks [u]; starts [u + 1] and order [n]: the occurrences of unique j are
  // order[starts[j]:starts[j + 1]], ascending.
  void Write(int64_t* unique, int32_t* inverse, float* shows, float* clicks, int32_t* starts, int32_t* order,
             const ParallelFor& parallel_for);

 private:
  struct Occurrence {
    uint64_t mixed;  // Mix64(key), a bijection: equal where the keys are
    int32_t position;
    int32_t unique;  // within its shard
  };
  struct Unique {
    uint64_t mixed;
    float show, click;
    int32_t count;
  };

  std::vector<int32_t> cursor_;          // [blocks, kShards], where a block's next occurrence of a shard goes
  std::vector<Occurrence> occurrences_;  // [n] by shard, then position
  std::vector<Unique> uniques_;          // those of shard s from shard_begin_[s] on
  std::vector<int32_t> shard_begin_;     // [kShards + 1] occurrences before a shard
  std::vector<int32_t> unique_begin_;    // [kShards + 1] distinct keys before a shard
};

}  // namespace ctr

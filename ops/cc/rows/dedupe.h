// Finds the distinct keys of a batch, grouped by logical shard, and sums their occurrences.
//
// Occurrences are partitioned by the 256 shards of a table. Each part is then deduplicated on its
// own, with a hash table that fits the L1 cache. The result does not depend on the number of
// threads.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

class Dedupe {
 public:
  // One batch of n occurrences.
  struct Batch {
    const int64_t* keys = nullptr;  // [n]
    int64_t n = 0;
    const float* shows = nullptr;  // [n], or [1] for all
    int64_t shows_n = 0;
    const float* clicks = nullptr;  // [n], or [1] for all; if fields > 0, one for each sample
    int64_t clicks_n = 0;
    int64_t fields = 0;  // F
    const int32_t* segments =
        nullptr;  // [n] sample * F + field; null: occurrence i is in sample i / F
  };

  // Finds the distinct keys and writes order [n]. Returns the number u of the keys, or -1 if the
  // sample of a segment is not in [0, clicks_n).
  int64_t Find(const Batch& batch, const ParallelFor& parallel_for, int threads, int32_t* order);

  // Writes the rest of what the last Find found: unique keys, ordered by logical shard, then by
  // first occurrence; inverse [n], for each occurrence the place of its key in unique; the sums of
  // shows and clicks [u]; starts [u + 1]: the occurrences of unique j are order[starts[j]:starts[j
  // + 1]], ascending.
  void Write(int64_t* unique, int32_t* inverse, float* shows, float* clicks, int32_t* starts,
             const ParallelFor& parallel_for);

 private:
  struct Occurrence {
    uint64_t mixed;  // Mix64(key), a bijection: equal if the keys are equal
    int32_t position;
    int32_t unique;  // within its shard
  };
  struct Unique {
    uint64_t mixed;
    float show, click;
    int32_t count;
  };

  // Sorts the u distinct keys of a shard by logical shard; moved [u] says where each went.
  static void SortByLogicalShard(Unique* uniques, int32_t u, std::vector<int32_t>* moved);

  int64_t blocks_ = 1;             // of occurrences, by position
  std::vector<uint8_t> shard_of_;  // [n], by position
  std::vector<int32_t>
      cursor_;  // [blocks, kShards], where a block's next occurrence in a shard goes
  std::vector<Occurrence> occurrences_;  // [n] by shard, then position
  std::vector<Unique> uniques_;          // shard s has its own from shard_begin_[s] on
  std::vector<int32_t> shard_begin_;     // [kShards + 1] occurrences before a shard
  std::vector<int32_t> unique_begin_;    // [kShards + 1] distinct keys before a shard
};

}  // namespace ctr

#include "ops/cc/rows/dedupe.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "ops/cc/lifecycle/hash.h"

namespace ctr {
namespace {

constexpr int64_t kBlock = 4096;  // fewer occurrences than this are not worth another thread

// Undoes Mix64: returns the key.
int64_t Unmix64(uint64_t h) {
  h ^= h >> 33;
  h *= 0x9cb4b2f8129337dbULL;
  h ^= h >> 33;
  h *= 0x4f74430c22a54005ULL;
  h ^= h >> 33;
  return static_cast<int64_t>(h);
}

}  // namespace

// A stable counting sort. After it, each owner's keys are contiguous.
void Dedupe::SortByLogicalShard(Unique* uniques, int32_t u, std::vector<int32_t>* moved) {
  static thread_local std::vector<Unique> unsorted;
  const auto part = [](const Unique& unique) {
    return LogicalShardOf(unique.mixed) % kLogicalInShard;
  };
  int32_t next[kLogicalInShard + 1] = {};
  for (int32_t k = 0; k < u; ++k) ++next[part(uniques[k]) + 1];
  for (int p = 0; p < kLogicalInShard; ++p) next[p + 1] += next[p];
  unsorted.assign(uniques, uniques + u);
  moved->resize(u);
  for (int32_t k = 0; k < u; ++k) {
    const int32_t to = (*moved)[k] = next[part(unsorted[k])]++;
    uniques[to] = unsorted[k];
  }
}

int64_t Dedupe::Find(const Batch& batch, const ParallelFor& parallel_for, int threads,
                     int32_t* order) {
  const int64_t n = batch.n;
  const int64_t* const keys = batch.keys;
  blocks_ = std::max<int64_t>(1, std::min<int64_t>(threads, n / kBlock));
  const int64_t blocks = blocks_;
  const auto block_begin = [=](int64_t b) { return n * b / blocks; };
  shard_of_.resize(n);
  occurrences_.resize(n);
  uniques_.resize(n);
  cursor_.assign(blocks * kShards, 0);
  parallel_for(blocks, 2 * n / blocks, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      int32_t count[kShards] = {};
      for (int64_t i = block_begin(b); i < block_begin(b + 1); ++i) {
        const int shard = ShardOf(Mix64(keys[i]));
        shard_of_[i] = static_cast<uint8_t>(shard);
        ++count[shard];
      }
      std::copy(count, count + kShards, &cursor_[b * kShards]);
    }
  });
  shard_begin_.assign(kShards + 1, 0);
  int32_t running = 0;
  for (int s = 0; s < kShards; ++s) {
    shard_begin_[s] = running;
    for (int64_t b = 0; b < blocks; ++b)
      running += std::exchange(cursor_[b * kShards + s], running);
  }
  shard_begin_[kShards] = running;
  Occurrence* const occurrences = occurrences_.data();
  parallel_for(blocks, 3 * n / blocks, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      int32_t* cursor = &cursor_[b * kShards];
      for (int64_t i = block_begin(b); i < block_begin(b + 1); ++i) {
        Occurrence& o = occurrences[cursor[shard_of_[i]]++];
        o.mixed = Mix64(keys[i]);
        o.position = static_cast<int32_t>(i);
      }
    }
  });
  const bool all_shows = batch.shows_n == 1, all_clicks = batch.fields == 0 && batch.clicks_n == 1;
  const uint32_t fields = std::max<uint32_t>(1, batch.fields);
  std::atomic<bool> good(true);
  unique_begin_.assign(kShards + 1, 0);
  parallel_for(kShards, 8 * n / kShards, [&](int64_t first, int64_t last) {
    static thread_local std::vector<int32_t> table;  // unique + 1; 0: empty
    static thread_local std::vector<int32_t> moved;  // where SortByLogicalShard put a unique
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = shard_begin_[s], end = shard_begin_[s + 1];
      uint64_t slots = 16;
      while (static_cast<int64_t>(slots) < 2 * (end - begin)) slots *= 2;
      table.assign(slots, 0);
      int32_t* const entries = table.data();
      Unique* uniques = uniques_.data() + begin;
      int32_t u = 0;
      for (int64_t i = begin; i < end; ++i) {
        Occurrence& o = occurrences[i];
        uint32_t of_clicks = all_clicks ? 0 : o.position;
        if (batch.fields > 0) {
          of_clicks = static_cast<uint32_t>(
                          batch.segments == nullptr ? o.position : batch.segments[o.position]) /
                      fields;
          if (of_clicks >= batch.clicks_n) {  // a negative segment too
            good = false;
            return;
          }
        }
        uint64_t p = o.mixed & (slots - 1);
        while (entries[p] != 0 && uniques[entries[p] - 1].mixed != o.mixed)
          p = (p + 1) & (slots - 1);
        if (entries[p] == 0) {
          uniques[u] = {o.mixed, 0.0f, 0.0f, 0};
          entries[p] = ++u;
        }
        o.unique = entries[p] - 1;
        Unique& unique = uniques[o.unique];
        unique.show += batch.shows[all_shows ? 0 : o.position];
        unique.click += batch.clicks[of_clicks];
        ++unique.count;
      }
      unique_begin_[s + 1] = u;
      SortByLogicalShard(uniques, u, &moved);
      table.resize(std::max<size_t>(table.size(), u));
      int32_t* const next = table.data();
      int32_t at = static_cast<int32_t>(begin);
      for (int32_t k = 0; k < u; ++k) {
        next[k] = at;
        at += uniques[k].count;
      }
      for (int64_t i = begin; i < end; ++i) {
        Occurrence& o = occurrences[i];
        o.unique = moved[o.unique];
        order[next[o.unique]++] = o.position;
      }
    }
  });
  if (!good) return -1;
  for (int s = 0; s < kShards; ++s) unique_begin_[s + 1] += unique_begin_[s];
  return unique_begin_[kShards];
}

void Dedupe::Write(int64_t* unique, int32_t* inverse, float* shows, float* clicks, int32_t* starts,
                   const ParallelFor& parallel_for) {
  const int64_t n = static_cast<int64_t>(occurrences_.size());
  const Occurrence* const occurrences = occurrences_.data();
  starts[0] = 0;
  parallel_for(kShards, n / kShards, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const Unique* from = uniques_.data() + shard_begin_[s];
      int32_t at = shard_begin_[s];
      for (int32_t j = unique_begin_[s]; j < unique_begin_[s + 1]; ++j, ++from) {
        unique[j] = Unmix64(from->mixed);
        shows[j] = from->show;
        clicks[j] = from->click;
        at += from->count;
        starts[j + 1] = at;
      }
    }
  });
  // Split by position, so that no two threads write to one cache line. A shard's occurrences are in
  // the order of positions, so those of a block are neighbours.
  parallel_for(blocks_, 2 * n / blocks_, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      int32_t next[kShards];
      const int32_t* begin = b == 0 ? shard_begin_.data()
                                    : &cursor_[(b - 1) * kShards];  // where the block before ended
      std::copy(begin, begin + kShards, next);
      for (int64_t i = n * b / blocks_; i < n * (b + 1) / blocks_; ++i) {
        const int shard = shard_of_[i];
        inverse[i] = unique_begin_[shard] + occurrences[next[shard]++].unique;
      }
    }
  });
}

}  // namespace ctr

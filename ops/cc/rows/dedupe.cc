#include "ops/cc/rows/dedupe.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "ops/cc/lifecycle/hash.h"

namespace ctr {
namespace {

constexpr int64_t kBlock = 4096;  // fewer occurrences than this are not worth another thread

// The key of Mix64(key).
int64_t Unmix64(uint64_t h) {
  h ^= h >> 33;
  h *= 0x9cb4b2f8129337dbULL;
  h ^= h >> 33;
  h *= 0x4f74430c22a54005ULL;
  h ^= h >> 33;
  return static_cast<int64_t>(h);
}

}  // namespace

int64_t Dedupe::Find(const Batch& batch, const ParallelFor& parallel_for, int threads) {
  const int64_t n = batch.n;
  const int64_t* const keys = batch.keys;
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(threads, n / kBlock));
  const auto block_begin = [=](int64_t b) { return n * b / blocks; };
  occurrences_.resize(n);
  uniques_.resize(n);
  cursor_.assign(blocks * kShards, 0);
  parallel_for(blocks, 2 * n / blocks, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      int32_t count[kShards] = {};
      for (int64_t i = block_begin(b); i < block_begin(b + 1); ++i) {
        ++count[ShardOf(Mix64(keys[i]))];
      }
      std::copy(count, count + kShards, &cursor_[b * kShards]);
    }
  });
  shard_begin_.assign(kShards + 1, 0);
  int32_t running = 0;
  for (int s = 0; s < kShards; ++s) {
    shard_begin_[s] = running;
    for (int64_t b = 0; b < blocks; ++b) running += std::exchange(cursor_[b * kShards + s], running);
  }
  shard_begin_[kShards] = running;
  Occurrence* const occurrences = occurrences_.data();
  const bool all_shows = batch.shows_n == 1, all_clicks = batch.fields == 0 && batch.clicks_n == 1;
  std::atomic<bool> good(true);
  parallel_for(blocks, 3 * n / blocks, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      int32_t* cursor = &cursor_[b * kShards];
      int64_t sample = 0, sample_end = 0;  // the current sample, and the segment where the next one begins
      for (int64_t i = block_begin(b); i < block_begin(b + 1); ++i) {
        int64_t of_clicks = all_clicks ? 0 : i;
        if (batch.fields > 0) {
          const int64_t segment = batch.segments == nullptr ? i : batch.segments[i];
          if (segment < sample_end - batch.fields || segment >= sample_end) {
            sample = segment / batch.fields;
            sample_end = (sample + 1) * batch.fields;
          }
          if (segment < 0 || sample >= batch.clicks_n) {
            good = false;
            return;
          }
          of_clicks = sample;
        }
        const uint64_t mixed = Mix64(keys[i]);
        Occurrence& o = occurrences[cursor[ShardOf(mixed)]++];
        o.mixed = mixed;
        o.position = static_cast<int32_t>(i);
        o.show = batch.shows[all_shows ? 0 : i];
        o.click = batch.clicks[of_clicks];
      }
    }
  });
  if (!good) return -1;
  unique_begin_.assign(kShards + 1, 0);
  parallel_for(kShards, 8 * n / kShards, [&](int64_t first, int64_t last) {
    static thread_local std::vector<int32_t> table;  // unique + 1; 0: empty
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
        uint64_t p = o.mixed & (slots - 1);
        while (entries[p] != 0 && uniques[entries[p] - 1].mixed != o.mixed) p = (p + 1) & (slots - 1);
        if (entries[p] == 0) {
          uniques[u] = {o.mixed, 0.0f, 0.0f, 0};
          entries[p] = ++u;
        }
        o.unique = entries[p] - 1;
        Unique& unique = uniques[o.unique];
        unique.show += o.show;
        unique.click += o.click;
        ++unique.count;
      }
      unique_begin_[s + 1] = u;
    }
  });
  for (int s = 0; s < kShards; ++s) unique_begin_[s + 1] += unique_begin_[s];
  return unique_begin_[kShards];
}

void Dedupe::Write(int64_t* unique, int32_t* inverse, float* shows, float* clicks, int32_t* starts, int32_t* order,
                   const ParallelFor& parallel_for) {
  const int64_t n = static_cast<int64_t>(occurrences_.size());
  const Occurrence* const occurrences = occurrences_.data();
  starts[0] = 0;
  parallel_for(kShards, 5 * n / kShards, [&](int64_t first, int64_t last) {
    static thread_local std::vector<int32_t> next;
    for (int64_t s = first; s < last; ++s) {
      const int32_t base = unique_begin_[s], u = unique_begin_[s + 1] - base;
      next.resize(u);
      int32_t* const cursor = next.data();
      int32_t at = shard_begin_[s];
      for (int32_t k = 0; k < u; ++k) {
        const Unique& from = uniques_[shard_begin_[s] + k];
        unique[base + k] = Unmix64(from.mixed);
        shows[base + k] = from.show;
        clicks[base + k] = from.click;
        cursor[k] = at;
        at += from.count;
        starts[base + k + 1] = at;
      }
      const int32_t end = shard_begin_[s + 1];
      for (int32_t i = shard_begin_[s]; i < end; ++i) {
        const Occurrence& o = occurrences[i];
        inverse[o.position] = base + o.unique;
        order[cursor[o.unique]++] = o.position;
      }
    }
  });
}

}  // namespace ctr

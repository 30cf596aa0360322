// The feature table: everything the lifecycle keeps of a feature, found by key.
//
// Ids: a feature's id is `shard << 32 | local`. Growth moves index entries only, so that ids and
// addresses hold until the next eviction. An eviction gives memory back: where a shard then needs
// less than two thirds of its chunks, its features move together, and ids change. Who keeps an id
// checks the key that it finds there.
//
// Memory: 40 bytes a feature (and the payload), in chunks, and an index entry of 8 bytes at a load
// of 0.71 to 0.8, so 50 to 52 bytes a feature. Growth by an eighth of a power of two copies one
// shard's index and stops nobody but that shard's users.
//
// Locks: each shard has one, which guards all of the shard; a thread holds at most one of them
// (Absorb: then the same shard's of the other table), and a batched verb takes each once. A batched
// verb is therefore atomic for each shard, not over shards.
//
// Batches: keys come in any order and may repeat; results stand in input order. A verb that fails
// has changed nothing.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/hash.h"
#include "ops/cc/lifecycle/memory.h"
#include "ops/cc/lifecycle/parallel.h"
#include "ops/cc/lifecycle/policy.h"
#include "ops/cc/lifecycle/status.h"

namespace ctr {

// Shows and clicks of one occurrence are at most this, so that no sum of them becomes infinite.
constexpr double kMaxCount = 9007199254740992.0;  // 2^53

struct Feature {
  int64_t key;  // negative: the place is free
  double show;
  double click;
  double delta_score;  // gained since it was last written by a delta or base
  uint16_t unseen_days;
  uint16_t age_days;
  uint16_t slot;
  uint8_t admitted;
  uint8_t marks;  // the table's own
};
static_assert(sizeof(Feature) == 40, "the memory bound counts on it");

// What a save writes; the first two are remembered until they are committed.
enum class Kind { kDelta = 0, kBase = 1, kAll = 2 };

// Where a feature stands when only the best are kept: compared from the first digit on, the greater
// is the better. [0]: recency; [1..4]: score or show, [5..8]: the key, so that no two features are
// equal.
constexpr int kRankDigits = 9;
constexpr int kRankBins = 1 << 16;
using Rank = std::array<uint16_t, kRankDigits>;

// Columns of features, in one order. An import takes them as an export gave them.
struct FeatureColumns {
  std::vector<int64_t> key;
  std::vector<double> show, click, delta_score;
  std::vector<uint16_t> unseen_days, age_days, slot;
  std::vector<uint8_t> admitted;

  void Append(const Feature& feature);
};

// Columns that a lookup fills, [n] each; what is null is not wanted. Absent features read 0.
struct LookupResult {
  double *show = nullptr, *click = nullptr, *delta_score = nullptr;
  int32_t *unseen_days = nullptr, *age_days = nullptr, *slot = nullptr;
  bool *admitted = nullptr, *exists = nullptr;
};

// InvalidArgument naming argument `keys`, the index and the value of the first key that is
// negative.
Status CheckKeys(const int64_t* keys, int64_t n);
// InvalidArgument naming argument, index and value of the first occurrence that is not finite, is
// negative or beyond kMaxCount, or has more clicks than shows while it has shows. (A click that
// arrives late is show 0, click 1.)
Status CheckCounts(const double* shows, const double* clicks, int64_t n);
Status CheckCounts(const float* shows, const float* clicks, int64_t n);

class FeatureTable {
 public:
  // One of kShards parts. `mutex` guards everything else of the shard; every method needs it held.
  class alignas(64) Shard {
   public:
    mutable std::mutex mutex;

    // The local id of a key, -1 where it is absent. mixed = Mix64(key).
    int64_t Find(int64_t key, uint64_t mixed) const {
      if (index_entries_ == 0) return -1;
      const uint64_t* index = Index();
      for (uint64_t p = Home(mixed);; p = Next(p)) {
        const uint64_t entry = index[p];
        if (entry == 0) return -1;
        if (static_cast<uint32_t>(entry >> 32) != static_cast<uint32_t>(mixed)) continue;
        const int64_t local = static_cast<uint32_t>(entry) - 1;
        if (At(local)->key == key) return local;
      }
    }

    // Creates a feature with zero sums and a zero payload where the key is absent; slot < 0: the
    // key's own. May grow the index, never moves a feature.
    int64_t FindOrCreate(int64_t key, uint64_t mixed, int slot, bool* created);

    // Both are valid until the next eviction of the shard. local: of a feature that exists.
    Feature* At(int64_t local) const {
      return reinterpret_cast<Feature*>(chunks_[local >> kChunkBits] +
                                        (local & (kChunkFeatures - 1)) * stride_);
    }
    char* Payload(int64_t local) const {
      return reinterpret_cast<char*>(At(local)) + sizeof(Feature);
    }

    // Begin to fetch what Find(key, mixed) reads first, and, some keys later, the feature that it
    // will find, unless another key has the same tag (one in 2^32 / size).
    void PrefetchIndex(uint64_t mixed) const {
      if (index_entries_ != 0) __builtin_prefetch(Index() + Home(mixed));
    }
    // Returns that feature's local id, -1 where the key is absent.
    int64_t PrefetchFeature(uint64_t mixed) const {
      if (index_entries_ == 0) return -1;
      const uint64_t* index = Index();
      for (uint64_t p = Home(mixed);; p = Next(p)) {
        const uint64_t entry = index[p];
        if (entry == 0) return -1;
        if (static_cast<uint32_t>(entry >> 32) != static_cast<uint32_t>(mixed)) continue;
        const int64_t local = static_cast<uint32_t>(entry) - 1;
        const char* feature = reinterpret_cast<const char*>(At(local));
        __builtin_prefetch(feature, 1);
        __builtin_prefetch(feature + stride_ - 1, 1);
        return local;
      }
    }

    // Forgets a feature that exists; its id becomes free. Does not call on_erase.
    void Erase(int64_t local);
    // Moves the features together where that frees over a third of the chunks, and gives these
    // back. Ids and addresses change then.
    void Compact();

    int64_t size() const { return size_; }
    // Local ids are in [0, end()); those with At(local)->key < 0 are free.
    int64_t end() const { return end_; }

   private:
    friend class FeatureTable;
    static constexpr int kChunkBits = 7;
    static constexpr int64_t kChunkFeatures = 1 << kChunkBits;
    struct Selected {
      int64_t key;
      double written;  // delta_score at the selection, which a commit subtracts; NaN once committed
    };

    uint64_t* Index() const { return reinterpret_cast<uint64_t*>(index_.data()); }
    // Ascends with the tag, so that growth, which has the tag alone, walks both indices in order.
    static uint64_t Home(uint32_t tag, uint64_t entries) { return tag * entries >> 32; }
    uint64_t Home(uint64_t mixed) const {
      return Home(static_cast<uint32_t>(mixed), index_entries_);
    }
    uint64_t Next(uint64_t place) const { return place + 1 == index_entries_ ? 0 : place + 1; }
    // How far `place` lies behind `home`, around the end.
    uint64_t Distance(uint64_t home, uint64_t place) const {
      return place >= home ? place - home : place + index_entries_ - home;
    }
    void GrowIndex();
    void ResizeIndex(uint64_t entries);  // takes over the entries of now
    Selected* FindSelected(
        Kind kind, int64_t key);  // null where the key is not of the selection or was committed

    std::shared_ptr<ChunkArena> arena_;        // one for all shards
    std::shared_ptr<BlockArena> index_arena_;  // one for all shards
    int64_t stride_ = 0;                       // bytes from one feature to the next
    std::vector<char*> chunks_;                // of kChunkFeatures each
    Block index_;  // entries: tag (low half of the mixed key) << 32 | local + 1; 0: empty
    uint64_t index_entries_ = 0;  // 8 to 15 * 2^k; 0: no index yet
    int64_t size_ = 0;
    int64_t end_ = 0;
    int64_t free_ = -1;  // first free id below end_; the next one is ~key of its feature
    std::vector<Selected> selected_[2];  // by Kind; ascending keys
  };

  // payload_bytes: kept beside each feature for others; zero when a feature is created.
  explicit FeatureTable(Policy policy, int64_t payload_bytes = 0);

  const Policy& policy() const { return policy_; }
  int64_t payload_bytes() const { return payload_bytes_; }
  Shard& shard(int s) { return shards_[s]; }

  // Called with the shard's lock held for each feature that is about to be erased by Evict,
  // EvictBelow and Clear. Set it before the table is used.
  std::function<void(int shard, char* payload)> on_erase;
  // Called with the shard's lock held once Evict or EvictBelow has erased features of the shard.
  // Set it before the table is used.
  std::function<void(int shard)> on_evicted;

  // Adds an occurrence's (or several's, summed) show and click to a feature under its shard's lock.
  // Returns whether that admitted it, for the first time.
  bool Observe(Feature* feature, double show, double click) const {
    const Rules& rules = policy_.For(feature->slot);
    feature->show += show;
    feature->click += click;
    feature->delta_score += rules.Score(show, click);
    if (policy_.empty_push_is_seen || show > 0 || click > 0) feature->unseen_days = 0;
    if (feature->admitted || !policy_.Admits(rules, feature->key, feature->show, feature->click))
      return false;
    feature->admitted = 1;
    return true;
  }

  // Sums a key's occurrences, then observes it once; creates what is absent. slots: [n] or null,
  // then the key's own; counts for new features only. admitted [n]: after the push.
  Status Observe(const int64_t* keys, const double* shows, const double* clicks,
                 const int64_t* slots, int64_t n, const ParallelFor& parallel_for, bool* admitted);
  // Creates nothing; absent features are not admitted.
  Status Admitted(const int64_t* keys, int64_t n, const ParallelFor& parallel_for, bool* admitted);
  Status Lookup(const int64_t* keys, int64_t n, const ParallelFor& parallel_for,
                const LookupResult& result);

  // The day end, in this order.
  void Decay(const ParallelFor& parallel_for);
  // Deletes by the policy's tests. Returns the keys.
  std::vector<int64_t> Evict(const ParallelFor& parallel_for);
  void Age(const ParallelFor& parallel_for);

  // Keeping the best `policy.capacity` features: radix selection over their ranks, 16 bits a round.
  // Counts the features whose rank starts with `prefix` (fewer than kRankDigits digits) by their
  // next digit; the counts of several tables add up, which is how several processes find one cut.
  // [kRankBins]
  std::vector<int64_t> RankHistogram(const std::vector<uint16_t>& prefix,
                                     const ParallelFor& parallel_for);
  // The shortest prefix such that exactly `policy.capacity` features stand at or above it; empty:
  // no more are held.
  std::vector<uint16_t> CapacityCut(const ParallelFor& parallel_for);
  // Deletes the features whose rank is below the cut. Returns the keys.
  std::vector<int64_t> EvictBelow(const std::vector<uint16_t>& cut,
                                  const ParallelFor& parallel_for);

  // The keys that a save of this kind writes, by shard, then key. Delta and base remember them with
  // their delta_score of now, in place of the kind's last selection.
  std::vector<int64_t> Select(Kind kind, const ParallelFor& parallel_for);
  // After the save: takes what was written from delta_score, so that a gain since the selection
  // survives. Features that were erased since are passed over. InvalidArgument where a key is not
  // of the selection, or was committed before. Of kind all nothing is reset.
  Status Commit(Kind kind, const int64_t* keys, int64_t n, const ParallelFor& parallel_for);

  int64_t Size() const;
  // What the table allocated: features, index, selections.
  int64_t Bytes() const;

  // Appends at most `limit` features of a shard from place `begin` on. Returns the place to go on
  // from, -1 at the end.
  int64_t Export(int shard, int64_t begin, int64_t limit, FeatureColumns* columns) const;
  // Adds features. DataLoss naming column, index and value where one cannot be a feature's or a key
  // exists already.
  Status Import(const FeatureColumns& columns);
  // Takes the features of another table, whose content is undefined afterwards; replace: in place
  // of this one's and its selections. DataLoss where a key is in both. Neither table may have a
  // payload, nor the other one other users.
  Status Absorb(FeatureTable* other, bool replace, const ParallelFor& parallel_for);
  // Erases all features and selections.
  void Clear(const ParallelFor& parallel_for);

 private:
  Rank RankOf(const Feature& feature) const;
  template <typename Visit>
  void ForEachShard(const ParallelFor& parallel_for, const Visit& visit);
  template <typename Visit>
  static void ForEachFeature(const Shard& shard, const Visit& visit);
  template <typename Doomed>
  std::vector<int64_t> EraseIf(const Doomed& doomed, const ParallelFor& parallel_for);

  const Policy policy_;
  const int64_t payload_bytes_;
  std::vector<Shard> shards_;
};

}  // namespace ctr

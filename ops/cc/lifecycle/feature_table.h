// The feature table: maps a key to everything that the lifecycle knows of the key's feature.
//
// Ids: a feature's id is `shard << 32 | local`. Growth moves only index entries, so ids and
// addresses stay valid until the next eviction. An eviction gives memory back: if a shard then
// needs less than two thirds of its chunks, its features move together, and their ids change. So
// whoever keeps an id must check the key that it finds there.
//
// Memory: 40 bytes for a feature (plus the payload), in chunks; and an index entry of 8 bytes, of
// which 71 to 80 % are in use. So 50 to 52 bytes for a feature. An index grows by an eighth of a
// power of two; meanwhile only users of its shard wait.
//
// Locks: each shard has a lock, which guards all of the shard. A thread holds at most one of these
// locks, and a batched verb takes each lock once. So a batched verb is atomic within each shard,
// but not over shards.
//
// Batches: keys come in any order and may repeat; results are in the order of the input. A verb
// that fails has changed nothing.
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
  double delta_score;  // the score gained since the last delta or base that wrote the feature
  uint16_t unseen_days;
  uint16_t age_days;
  uint16_t slot;
  uint8_t admitted;
  uint8_t marks;  // used only by the table and its shards
};
static_assert(sizeof(Feature) == 40, "the memory bound counts on it");

// The kinds of exports. The table remembers what it selected for the first two until their commit.
enum class Kind { kDelta = 0, kBase = 1, kAll = 2 };

// Who asks which features have changed: checkpoints write these alone, deltas look at no others.
enum class Reader { kCheckpoint = 0, kDelta = 1 };

// The rank of a feature when only the best are kept. Ranks are compared from the first digit on;
// the greater is the better. [0]: recency; [1..4]: score or show; [5..8]: the key, so that no two
// ranks are equal.
constexpr int kRankDigits = 9;
constexpr int kRankBins = 1 << 16;
using Rank = std::array<uint16_t, kRankDigits>;

// Columns of features, all in the same order. An export fills them, and an import reads them.
struct FeatureColumns {
  std::vector<int64_t> key;
  std::vector<double> show, click, delta_score;
  std::vector<uint16_t> unseen_days, age_days, slot;
  std::vector<uint8_t> admitted;

  void Append(const Feature& feature);
};

// Columns [n] that a lookup fills, unless they are null; 0 for an absent feature.
struct LookupResult {
  double *show = nullptr, *click = nullptr, *delta_score = nullptr;
  int32_t *unseen_days = nullptr, *age_days = nullptr, *slot = nullptr;
  bool *admitted = nullptr, *exists = nullptr;
};

// InvalidArgument if a key is negative; names the argument `keys`, the key's index and its value.
Status CheckKeys(const int64_t* keys, int64_t n);
// InvalidArgument if an occurrence is not finite, is negative or beyond kMaxCount, or has more
// clicks than shows although it has shows. (A click that arrives late is show 0, click 1.) The
// message names argument, index and value.
Status CheckCounts(const double* shows, const double* clicks, int64_t n);
Status CheckCounts(const float* shows, const float* clicks, int64_t n);

class FeatureTable {
 public:
  // One of kShards parts of the table. `mutex` guards everything else in the shard; hold it to call
  // any method.
  class alignas(64) Shard {
   public:
    mutable std::mutex mutex;

    // Returns the local id of a key, -1 if it is absent. mixed = Mix64(key).
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

    // As Find, but creates an absent feature, with zero sums and a zero payload. slot: of a feature
    // that is created; < 0: the key's own. It may grow the index, but never moves a feature.
    int64_t FindOrCreate(int64_t key, uint64_t mixed, int slot, bool* created);

    // The addresses of a feature that exists, valid until the next eviction of the shard.
    Feature* At(int64_t local) const {
      return reinterpret_cast<Feature*>(chunks_[local >> kChunkBits] +
                                        (local & (kChunkFeatures - 1)) * stride_);
    }
    char* Payload(int64_t local) const {
      return reinterpret_cast<char*>(At(local)) + sizeof(Feature);
    }

    // Call this some keys before PrefetchFeature: begins to fetch what that, and Find, read first.
    void PrefetchIndex(uint64_t mixed) const {
      if (index_entries_ != 0) __builtin_prefetch(Index() + Home(mixed));
    }
    // Begins to fetch the feature that Find will find. Returns its local id, -1 if the key is
    // absent; of another key if that has the same tag (a chance of size / 2^32).
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

    // Notes that a feature, or its payload, has another value than the readers have seen. Whoever
    // changes one calls it.
    void NoteChange(int64_t local) {
      NoteChange(local, Reader::kCheckpoint);
      NoteChange(local, Reader::kDelta);
    }
    void NoteChange(int64_t local, Reader reader) {
      Changes& changes = changes_[static_cast<int>(reader)];
      if (changes.unknown || At(local)->marks & ChangedMark(reader)) return;
      if (changes.locals.size() * 2 >= static_cast<size_t>(size_)) return ForgetChanges(reader);
      At(local)->marks |= ChangedMark(reader);
      changes.locals.push_back(static_cast<uint32_t>(local));
    }

    // Deletes a feature that exists; its id becomes free. Does not call on_erase.
    void Erase(int64_t local);
    // If that frees over a third of the chunks, moves the features together and gives these chunks
    // back; ids and addresses then change.
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

    // Which features have changed since a reader began anew.
    struct Changes {
      std::vector<uint32_t> locals;  // their ids, each once
      bool unknown = true;           // too many changed, or an erasure moved ids
    };

    static constexpr uint8_t ChangedMark(Reader reader) { return 8 << static_cast<int>(reader); }
    // From now on, which features have changed is not known.
    void ForgetChanges(Reader reader);
    void ForgetChanges();
    // From now on it is known.
    void BeginChanges(Reader reader);
    // Keeps a selection until its commit, unless kind is all. Returns its keys, ascending, each
    // once.
    std::vector<int64_t> Remember(Kind kind, std::vector<Selected> selected);

    uint64_t* Index() const { return reinterpret_cast<uint64_t*>(index_.data()); }
    // It ascends with the tag, so that growth, which knows only tags, walks both indices in order.
    static uint64_t Home(uint32_t tag, uint64_t entries) { return tag * entries >> 32; }
    uint64_t Home(uint64_t mixed) const {
      return Home(static_cast<uint32_t>(mixed), index_entries_);
    }
    uint64_t Next(uint64_t place) const { return place + 1 == index_entries_ ? 0 : place + 1; }
    // How far `place` is behind `home`, going round at the end.
    uint64_t Distance(uint64_t home, uint64_t place) const {
      return place >= home ? place - home : place + index_entries_ - home;
    }
    void GrowIndex();
    void ResizeIndex(uint64_t entries);  // keeps the entries that are in the index
    Selected* FindSelected(Kind kind,
                           int64_t key);  // null if the key was not selected, or was committed

    std::shared_ptr<ChunkArena> arena_;        // one for all shards
    std::shared_ptr<BlockArena> index_arena_;  // one for all shards
    int64_t stride_ = 0;                       // bytes from one feature to the next
    std::vector<char*> chunks_;                // kChunkFeatures features each
    Block index_;  // entries: tag (low half of the mixed key) << 32 | local + 1; 0: empty
    uint64_t index_entries_ = 0;  // 8 to 15 * 2^k; 0: no index yet
    int64_t size_ = 0;
    int64_t end_ = 0;
    int64_t free_ = -1;  // first free id below end_; ~key of its feature is the next free id
    std::vector<Selected> selected_[2];  // by Kind; ascending keys
    Changes changes_[2];                 // by Reader
  };

  // payload_bytes: room beside each feature for the row store; its bytes are 0 in a new feature.
  explicit FeatureTable(Policy policy, int64_t payload_bytes = 0);

  const Policy& policy() const { return policy_; }
  int64_t payload_bytes() const { return payload_bytes_; }
  Shard& shard(int s) { return shards_[s]; }

  // Called for each feature that Evict, EvictBelow or Clear is about to erase, with the shard's
  // lock held. Set it before the table is used.
  std::function<void(int shard, char* payload)> on_erase;
  // Called once Evict or EvictBelow has erased features of a shard, with its lock held. Set it
  // before the table is used.
  std::function<void(int shard)> on_evicted;

  // Adds the show and click of one occurrence, or the sums over several, to a feature; call it with
  // the lock of the feature's shard held. Returns whether this admitted the feature.
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

  // Sums the occurrences of each key, then observes it once; creates absent features. slots: [n],
  // the slots of features that are created; null: the keys' own. admitted [n]: as it is afterwards.
  Status Observe(const int64_t* keys, const double* shows, const double* clicks,
                 const int64_t* slots, int64_t n, const ParallelFor& parallel_for, bool* admitted);
  // These create nothing; absent features are not admitted, and read 0.
  Status Admitted(const int64_t* keys, int64_t n, const ParallelFor& parallel_for, bool* admitted);
  Status Lookup(const int64_t* keys, int64_t n, const ParallelFor& parallel_for,
                const LookupResult& result);

  // The day end, in this order.
  void Decay(const ParallelFor& parallel_for);
  // Deletes the features that the policy's tests choose. Returns their keys.
  std::vector<int64_t> Evict(const ParallelFor& parallel_for);
  void Age(const ParallelFor& parallel_for);

  // The next three keep the best `policy.capacity` features, by radix selection over ranks, 16 bits
  // in each round. Counts the features whose rank starts with `prefix` (fewer than kRankDigits
  // digits), for each next digit, [kRankBins]. Counts of several tables may be added: so several
  // processes find one cut.
  std::vector<int64_t> RankHistogram(const std::vector<uint16_t>& prefix,
                                     const ParallelFor& parallel_for);
  // Returns the shortest prefix that exactly `policy.capacity` features rank at or above; empty if
  // the table has no more features than that.
  std::vector<uint16_t> CapacityCut(const ParallelFor& parallel_for);
  // Deletes the features whose rank is below the cut. Returns their keys.
  std::vector<int64_t> EvictBelow(const std::vector<uint16_t>& cut,
                                  const ParallelFor& parallel_for);

  // Returns the keys of the features that belong in an export of this kind, by shard, then key. For
  // a delta or base, the table remembers them with the delta_score that each has now, and forgets
  // its last selection of this kind.
  std::vector<int64_t> Select(Kind kind, const ParallelFor& parallel_for);
  // As Select, but looks only at the features of some keys; absent ones are skipped.
  Status SelectAmong(Kind kind, const int64_t* keys, int64_t n, const ParallelFor& parallel_for,
                     std::vector<int64_t>* selected);
  // Marks selected features as written, once their export is complete: subtracts from delta_score
  // what it was at the selection, so that what was gained since remains. Features that were erased
  // since are skipped. InvalidArgument if a key was not selected, or was committed before. For kind
  // all it changes nothing.
  Status Commit(Kind kind, const int64_t* keys, int64_t n, const ParallelFor& parallel_for);

  int64_t Size() const;
  // How many bytes the table has allocated: for features, index and selections.
  int64_t Bytes() const;

  // Appends at most `limit` features of a shard to `columns`, from place `begin` on; with
  // `changed`, only those that CountChanges counts. Returns the place to begin at the next time, -1
  // at the end.
  int64_t Export(int shard, int64_t begin, int64_t limit, bool changed,
                 FeatureColumns* columns) const;

  // The table notes which features change, for checkpoints that write only these. Returns how many
  // have changed since the last KeepChanges; -1 if that is not known: there was none, a feature was
  // erased, all features were decayed or aged, or about half of a shard's features changed.
  int64_t CountChanges() const;
  // Begins to note changes anew; the features are now as a checkpoint has them.
  void KeepChanges();
  // Sets `keys` to those of the features that have changed since the last call, for deltas. Returns
  // false where CountChanges would return -1 of them.
  bool TakeChanges(std::vector<int64_t>* keys);

  // Adds features. DataLoss if a value is impossible or a key exists already; it names column,
  // index and value.
  Status Import(const FeatureColumns& columns);
  // Erases all features and selections.
  void Clear(const ParallelFor& parallel_for);

 private:
  Rank RankOf(const Feature& feature) const;
  bool Belongs(Kind kind, const Feature& feature) const;  // in an export of this kind
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

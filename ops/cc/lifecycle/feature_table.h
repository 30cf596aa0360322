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
// Disk: the row store can move features, with all they have, to files of its own (row_store.h).
// Such a feature is cold: 16 bytes and its index entry stay. What the days change of it meanwhile
// is made up for when it is read; on which day it will be evicted is known when it goes. A verb
// that changes a cold feature brings it back first.
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
#include "ops/cc/lifecycle/places.h"
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

// What stays in memory of a feature that lies on disk.
struct ColdFeature {
  enum Flag : uint8_t { kAdmitted = 1, kHasFactors = 2, kGained = 4, kForeseen = 8 };

  int64_t key;    // negative: the place is free
  int32_t place;  // the row store's own
  uint16_t due;   // after so many decays, Evict deletes it; reads it first if not kForeseen
  uint8_t marks;  // as Feature's
  uint8_t flags;
};
static_assert(sizeof(ColdFeature) == 16, "the memory bound counts on it");

// A cold feature, by its number in the shard, and the caller's own index.
struct ColdRef {
  int64_t cold;
  int64_t index;
};

// How often a shard's features were decayed and aged.
struct Days {
  int32_t decays = 0, ages = 0;
};

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

    // Returns the local id of a key, -1 if it is absent, ~1 - c if it is the cold feature number c.
    // mixed = Mix64(key).
    int64_t Find(int64_t key, uint64_t mixed) const {
      if (index_entries_ == 0) return -1;
      const uint64_t* index = Index();
      for (uint64_t p = Home(mixed);; p = Next(p)) {
        const uint64_t entry = index[p];
        if (entry == 0) return -1;
        if (static_cast<uint32_t>(entry >> 32) != static_cast<uint32_t>(mixed)) continue;
        const uint32_t at = static_cast<uint32_t>(entry);
        if (at & kCold) {
          const int64_t cold = at & ~kCold;
          if (ColdAt(cold)->key == key) return ~1 - cold;
        } else if (At(at - 1)->key == key) {
          return at - 1;
        }
      }
    }
    // Whether Find's result is a cold feature, and its number.
    static bool IsCold(int64_t found) { return found < -1; }
    static int64_t ColdOf(int64_t found) { return ~1 - found; }

    // As Find, but creates an absent feature, with zero sums and a zero payload. slot: of a feature
    // that is created; < 0: the key's own. It may grow the index, but never moves a feature.
    int64_t FindOrCreate(int64_t key, uint64_t mixed, int slot, bool* created);

    // The addresses of a feature that exists, valid until the next eviction of the shard.
    Feature* At(int64_t local) const { return reinterpret_cast<Feature*>(hot_.At(local)); }
    char* Payload(int64_t local) const { return hot_.At(local) + sizeof(Feature); }
    ColdFeature* ColdAt(int64_t cold) const {
      return reinterpret_cast<ColdFeature*>(cold_.At(cold));
    }

    // Call this some keys before PrefetchFeature: begins to fetch what that, and Find, read first.
    void PrefetchIndex(uint64_t mixed) const {
      if (index_entries_ != 0) __builtin_prefetch(Index() + Home(mixed));
    }
    // Begins to fetch the feature that Find will find. Returns what Find will return; that of
    // another key if that has the same tag (a chance of size / 2^32).
    int64_t PrefetchFeature(uint64_t mixed) const {
      if (index_entries_ == 0) return -1;
      const uint64_t* index = Index();
      for (uint64_t p = Home(mixed);; p = Next(p)) {
        const uint64_t entry = index[p];
        if (entry == 0) return -1;
        if (static_cast<uint32_t>(entry >> 32) != static_cast<uint32_t>(mixed)) continue;
        const uint32_t at = static_cast<uint32_t>(entry);
        if (at & kCold) {
          __builtin_prefetch(ColdAt(at & ~kCold));
          return ~1 - static_cast<int64_t>(at & ~kCold);
        }
        const char* feature = hot_.At(at - 1);
        __builtin_prefetch(feature, 1);
        __builtin_prefetch(feature + hot_.bytes() - 1, 1);
        return at - 1;
      }
    }

    // Notes that a feature, or its payload, has another value than the readers have seen. Whoever
    // changes one calls it.
    void NoteChange(int64_t local) {
      Feature* const feature = At(local);
      NoteChange(feature->key, &feature->marks, Reader::kCheckpoint);
      NoteChange(feature->key, &feature->marks, Reader::kDelta);
    }

    // Deletes a feature that exists; its id becomes free. Does not call on_erase.
    void Erase(int64_t local);
    // If that frees over a third of the chunks, or any with `all`, moves features together and
    // gives these chunks back; ids and addresses then change.
    void Compact(bool all);

    // Keeps of a feature only what `cold` says, and the key. Its id becomes free.
    void MakeCold(int64_t local, const ColdFeature& cold);
    // Gives a cold feature memory again, with these bytes of feature and payload. Returns its id.
    int64_t MakeHot(int64_t cold, const char* bytes);

    int64_t size() const { return hot_.size() + cold_.size(); }
    // Local ids are in [0, end()); those with At(local)->key < 0 are free.
    int64_t end() const { return hot_.end(); }
    const Places& cold() const { return cold_; }
    Days days() const { return days_; }

   private:
    friend class FeatureTable;
    static constexpr uint32_t kCold = uint32_t{1} << 31;  // in an entry of the index
    struct Selected {
      int64_t key;
      double written;  // delta_score at the selection, which a commit subtracts; NaN once committed
    };

    // Which features have changed since a reader began anew.
    struct Changes {
      std::vector<int64_t> keys;  // each once
      bool unknown = true;        // too many changed, or one was deleted
    };

    static constexpr uint8_t ChangedMark(Reader reader) { return 8 << static_cast<int>(reader); }
    // The marks of a feature that Find has found.
    uint8_t* MarksOf(int64_t found) const {
      return IsCold(found) ? &ColdAt(ColdOf(found))->marks : &At(found)->marks;
    }
    void NoteChange(int64_t key, uint8_t* marks, Reader reader) {
      Changes& changes = changes_[static_cast<int>(reader)];
      if (changes.unknown || *marks & ChangedMark(reader)) return;
      if (changes.keys.size() * 2 >= static_cast<size_t>(size())) return ForgetChanges(reader);
      *marks |= ChangedMark(reader);
      changes.keys.push_back(key);
    }
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
    // The place of the entry of a key in the index, whose low half is `at`.
    uint64_t PlaceOf(int64_t key, uint32_t at) const;
    void SetIndex(int64_t key, uint32_t from, uint32_t to) {
      const uint64_t p = PlaceOf(key, from);
      Index()[p] = Index()[p] >> 32 << 32 | to;
    }
    void RemoveFromIndex(int64_t key, uint32_t at);
    void EraseCold(int64_t cold);
    Selected* FindSelected(Kind kind,
                           int64_t key);  // null if the key was not selected, or was committed

    std::shared_ptr<BlockArena> index_arena_;  // one for all shards
    Places hot_;                               // Features, each with its payload
    Places cold_;                              // ColdFeatures
    Days days_;
    // Entries: tag (low half of the mixed key) << 32 | local + 1, or kCold | cold; 0: empty.
    Block index_;
    uint64_t index_entries_ = 0;         // 8 to 15 * 2^k; 0: no index yet
    std::vector<Selected> selected_[2];  // by Kind; ascending keys
    int64_t uncommitted_[2] = {0, 0};    // by Kind: how many of these were not committed yet
    Changes changes_[2];                 // by Reader
    std::vector<int64_t> exported_;      // the keys of the present Export, if some are cold
  };

  // payload_bytes: room beside each feature for the row store; its bytes are 0 in a new feature.
  explicit FeatureTable(Policy policy, int64_t payload_bytes = 0);

  const Policy& policy() const { return policy_; }
  int64_t payload_bytes() const { return payload_bytes_; }
  int64_t feature_bytes() const { return shards_[0].hot_.bytes(); }  // with the payload
  Shard& shard(int s) { return shards_[s]; }

  // Called for each feature that Evict, EvictBelow or Clear is about to erase, with the shard's
  // lock held. Set it before the table is used.
  std::function<void(int shard, char* payload)> on_erase;
  // Called once Evict or EvictBelow has erased features of a shard, with its lock held. Set it
  // before the table is used.
  std::function<void(int shard)> on_evicted;
  // The next four are the row store's, for cold features; they want the shard's lock. Reads some,
  // as they would be had they been in memory since.
  std::function<Status(int shard, std::vector<ColdRef> refs,
                       const std::function<void(const ColdRef&, const Feature&)>& visit)>
      read_cold;
  // Brings some back to memory; the same may be named twice.
  std::function<Status(int shard, const std::vector<ColdRef>& refs)> make_hot;
  // Takes the shard back to what it may have in memory.
  std::function<Status(int shard)> make_cold;
  // Called for each that is about to be erased.
  std::function<void(const ColdFeature& cold)> on_erase_cold;
  // Calls make_hot for those of a shard's keys that are cold.
  Status MakeKeysHot(int shard, const ShardGroups& groups, const int64_t* keys);
  // Makes up for the days that passed since a feature was written.
  void PassDays(const Shard& shard, Days written, Feature* feature) const;
  // Sets `cold->due`, and its flags but for kHasFactors.
  void Foresee(const Shard& shard, const Feature& feature, ColdFeature* cold) const;
  // The first error of reading cold features, also in a verb that returns none; then use the table
  // no more, unless it is cleared.
  Status error() const;

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

  // Deletes the features of these keys; absent ones are skipped.
  void Erase(const int64_t* keys, int64_t n);

  int64_t Size() const;
  int64_t AdmittedSize(const ParallelFor& parallel_for);
  // How many bytes the table has allocated: for features, index and selections; and what of it is
  // for features that are not cold.
  int64_t Bytes() const;
  int64_t HotBytes() const { return hot_arena_->Bytes(); }

  // Appends at most `limit` features of a shard to `columns`, from place `begin` on; with
  // `changed`, only those that CountChanges counts. Returns the place to begin at the next time, -1
  // at the end.
  int64_t Export(int shard, int64_t begin, int64_t limit, bool changed, FeatureColumns* columns);

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
  bool FailsTests(const Feature& feature) const;  // those of an eviction
  // Deletes the doomed features. by_due: `doomed` is FailsTests, so that cold features need not be
  // read.
  template <typename Doomed>
  std::vector<int64_t> EraseIf(const Doomed& doomed, bool by_due, const ParallelFor& parallel_for);
  // Calls visit(cold, feature) for the cold features of a shard for which wanted(cold) is true.
  template <typename Wanted, typename Visit>
  void ReadCold(int shard, const Wanted& wanted, const Visit& visit);
  void EraseHot(int shard, int64_t local);  // and the row
  void EraseCold(int shard, int64_t cold);
  void Note(const Status& status);  // of reading cold features

  const Policy policy_;
  const int64_t payload_bytes_;
  std::shared_ptr<ChunkArena> hot_arena_, cold_arena_;
  std::vector<Shard> shards_;
  mutable std::mutex error_mutex_;  // guards error_; a leaf
  Status error_;
};

}  // namespace ctr

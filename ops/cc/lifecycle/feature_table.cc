#include "ops/cc/lifecycle/feature_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace ctr {
namespace {

constexpr uint8_t kBatchMark = 4;   // already met in this batch; never set between batches
constexpr uint64_t kMinIndex = 64;  // entries
constexpr uint16_t kMaxDays = 65535;

// How many keys before its use an index entry, or a feature, is prefetched.
constexpr int64_t kIndexAhead = 24;
constexpr int64_t kFeatureAhead = 12;
constexpr int64_t kRing = 32;  // more than kIndexAhead

// Returns the mark of a feature that is selected for a save of this kind; 0 for kind all.
constexpr uint8_t SelectedMark(Kind kind) {
  return kind == Kind::kAll ? 0 : 1 << static_cast<int>(kind);
}

// Returns the next size of an index. It grows by an eighth of the power of two below, so that a
// feature takes at most 11.25 bytes of the index; with doubling it would take up to 20.
uint64_t LargerIndex(uint64_t entries) {
  if (entries == 0) return kMinIndex;
  uint64_t power = kMinIndex;
  while (2 * power <= entries) power *= 2;
  return entries + power / 8;
}

// Returns whether an index with so many entries is too small for so many features.
bool IsFull(int64_t features, uint64_t entries) {
  return features * 5 > static_cast<int64_t>(entries) * 4;
}

std::string At(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

std::string Text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

// Calls visit(position, key, mixed, local) for keys [begin, end) of the groups. All are of one
// shard, whose lock is held. `local` is the id of the key's feature, or -1 if it was absent when
// the key was prefetched; an earlier visit may have created it since.
template <typename Visit>
void ForEachKey(const FeatureTable::Shard& shard, const ShardGroups& groups, int64_t begin,
                int64_t end, const int64_t* keys, const Visit& visit) {
  struct Ahead {
    int64_t position, key;
    uint64_t mixed;
    int64_t local;
  } ahead[kRing];
  const auto fetch_index = [&](int64_t i) {
    Ahead& one = ahead[i % kRing];
    one.position = groups.At(i);
    one.key = keys[one.position];
    one.mixed = Mix64(one.key);
    shard.PrefetchIndex(one.mixed);
  };
  const auto fetch_feature = [&](int64_t i) {
    Ahead& one = ahead[i % kRing];
    one.local = shard.PrefetchFeature(one.mixed);
  };
  for (int64_t i = begin; i < std::min(end, begin + kIndexAhead); ++i) fetch_index(i);
  for (int64_t i = begin; i < std::min(end, begin + kFeatureAhead); ++i) fetch_feature(i);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kIndexAhead < end) fetch_index(i + kIndexAhead);
    if (i + kFeatureAhead < end) fetch_feature(i + kFeatureAhead);
    const Ahead& one = ahead[i % kRing];
    const bool sure = one.local < 0 || shard.At(one.local)->key == one.key;
    visit(one.position, one.key, one.mixed, sure ? one.local : shard.Find(one.key, one.mixed));
  }
}

// Estimates for the scheduler how many nanoseconds one shard's share of n keys takes.
int64_t KeysCost(int64_t n) { return 100 + n / kShards * 60; }

}  // namespace

void FeatureColumns::Append(const Feature& feature) {
  key.push_back(feature.key);
  show.push_back(feature.show);
  click.push_back(feature.click);
  delta_score.push_back(feature.delta_score);
  unseen_days.push_back(feature.unseen_days);
  age_days.push_back(feature.age_days);
  slot.push_back(feature.slot);
  admitted.push_back(feature.admitted);
}

Status CheckKeys(const int64_t* keys, int64_t n) {
  int64_t all = 0;
  for (int64_t i = 0; i < n; ++i) all |= keys[i];
  if (all >= 0) return Status();
  const int64_t i = std::find_if(keys, keys + n, [](int64_t key) { return key < 0; }) - keys;
  return Status::InvalidArgument(At("keys", i) + ": found " + std::to_string(keys[i]) +
                                 "; wanted a key >= 0");
}

template <typename T>
static Status CheckCountsOf(const T* shows, const T* clicks, int64_t n) {
  const auto is_count = [](T x) {
    return x >= 0 && x <= static_cast<T>(kMaxCount);
  };  // false for NaN
  bool good = true;
  for (int64_t i = 0; i < n; ++i) {
    good &= is_count(shows[i]) & is_count(clicks[i]) & ((clicks[i] <= shows[i]) | (shows[i] == 0));
  }
  if (good) return Status();
  for (int64_t i = 0; i < n; ++i) {
    for (const auto& [name, value] :
         {std::make_pair("shows", shows[i]), std::make_pair("clicks", clicks[i])}) {
      if (is_count(value)) continue;
      return Status::InvalidArgument(At(name, i) + ": found " + Text(value) +
                                     "; wanted a number in [0, 2^53]");
    }
    if (clicks[i] > shows[i] && shows[i] != 0) {
      return Status::InvalidArgument(At("clicks", i) + ": found " + Text(clicks[i]) +
                                     "; wanted at most " + At("shows", i) + " = " + Text(shows[i]));
    }
  }
  return Status();
}

Status CheckCounts(const double* shows, const double* clicks, int64_t n) {
  return CheckCountsOf(shows, clicks, n);
}
Status CheckCounts(const float* shows, const float* clicks, int64_t n) {
  return CheckCountsOf(shows, clicks, n);
}

// One shard.

int64_t FeatureTable::Shard::FindOrCreate(int64_t key, uint64_t mixed, int slot, bool* created) {
  const int64_t found = Find(key, mixed);
  *created = found < 0;
  if (found >= 0) return found;
  if (IsFull(size_ + 1, index_entries_)) GrowIndex();
  int64_t local = free_;
  if (local >= 0) {
    free_ = ~At(local)->key;
    if (free_ == std::numeric_limits<int64_t>::max()) free_ = -1;
  } else {
    local = end_++;
    if ((local >> kChunkBits) == static_cast<int64_t>(chunks_.size()))
      chunks_.push_back(arena_->Allocate());
  }
  Feature* feature = At(local);
  std::memset(static_cast<void*>(feature), 0, stride_);
  feature->key = key;
  feature->slot = static_cast<uint16_t>(slot < 0 ? SlotOf(key) : slot);
  uint64_t* index = Index();
  uint64_t p = Home(mixed);
  while (index[p] != 0) p = Next(p);
  index[p] = mixed << 32 | static_cast<uint64_t>(local + 1);
  ++size_;
  return local;
}

void FeatureTable::Shard::GrowIndex() { ResizeIndex(LargerIndex(index_entries_)); }

void FeatureTable::Shard::ResizeIndex(uint64_t entries) {
  Block resized(entries * sizeof(uint64_t), index_arena_);
  uint64_t* to = reinterpret_cast<uint64_t*>(resized.data());
  const uint64_t* from = Index();
  for (uint64_t i = 0; i < index_entries_; ++i) {
    if (from[i] == 0) continue;
    uint64_t p = Home(static_cast<uint32_t>(from[i] >> 32), entries);
    while (to[p] != 0) p = p + 1 == entries ? 0 : p + 1;
    to[p] = from[i];
  }
  index_ = std::move(resized);
  index_entries_ = entries;
}

void FeatureTable::Shard::Compact() {
  const size_t needed = static_cast<size_t>((size_ + kChunkFeatures - 1) / kChunkFeatures);
  if ((chunks_.size() - needed) * 3 <= chunks_.size()) return;
  std::vector<int64_t> moved(end_);  // the new local id of each feature, by its old one
  int64_t to = 0;
  for (int64_t from = 0; from < end_; ++from) {
    if (At(from)->key < 0) continue;
    if (to != from) std::memcpy(static_cast<void*>(At(to)), At(from), stride_);
    moved[from] = to++;
  }
  uint64_t* index = Index();
  for (uint64_t i = 0; i < index_entries_; ++i) {
    if (index[i] == 0) continue;
    const uint64_t local = static_cast<uint64_t>(moved[static_cast<uint32_t>(index[i]) - 1]);
    index[i] = index[i] >> 32 << 32 | (local + 1);
  }
  uint64_t entries = kMinIndex;
  while (IsFull(size_, entries)) entries = LargerIndex(entries);
  ResizeIndex(entries);
  for (size_t i = needed; i < chunks_.size(); ++i) arena_->Release(chunks_[i]);
  chunks_.resize(needed);
  chunks_.shrink_to_fit();
  end_ = size_;
  free_ = -1;
}

void FeatureTable::Shard::ForgetChanges(Reader reader) {
  Changes& changes = changes_[static_cast<int>(reader)];
  for (const uint32_t local : changes.locals) At(local)->marks &= ~ChangedMark(reader);
  changes = Changes();
}

void FeatureTable::Shard::ForgetChanges() {
  ForgetChanges(Reader::kCheckpoint);
  ForgetChanges(Reader::kDelta);
}

void FeatureTable::Shard::BeginChanges(Reader reader) {
  ForgetChanges(reader);
  changes_[static_cast<int>(reader)].unknown = false;
}

std::vector<int64_t> FeatureTable::Shard::Remember(Kind kind, std::vector<Selected> selected) {
  std::sort(selected.begin(), selected.end(),
            [](const Selected& a, const Selected& b) { return a.key < b.key; });
  selected.erase(std::unique(selected.begin(), selected.end(),
                             [](const Selected& a, const Selected& b) { return a.key == b.key; }),
                 selected.end());
  std::vector<int64_t> keys;
  keys.reserve(selected.size());
  for (const Selected& entry : selected) keys.push_back(entry.key);
  if (kind == Kind::kAll) return keys;
  selected.shrink_to_fit();
  selected_[static_cast<int>(kind)] = std::move(selected);
  return keys;
}

void FeatureTable::Shard::Erase(int64_t local) {
  ForgetChanges();
  Feature* feature = At(local);
  const uint64_t mixed = Mix64(feature->key);
  uint64_t* index = Index();
  const uint64_t entry = mixed << 32 | static_cast<uint64_t>(local + 1);
  uint64_t hole = Home(mixed);
  while (index[hole] != entry) hole = Next(hole);
  // Closes the gap: moves entries back that lie behind it because its place was taken.
  for (uint64_t p = Next(hole); index[p] != 0; p = Next(p)) {
    const uint64_t home = Home(static_cast<uint32_t>(index[p] >> 32), index_entries_);
    if (Distance(home, p) < Distance(hole, p)) continue;
    index[hole] = index[p];
    hole = p;
  }
  index[hole] = 0;
  feature->key = free_ < 0 ? std::numeric_limits<int64_t>::min() : ~free_;
  free_ = local;
  --size_;
}

FeatureTable::Shard::Selected* FeatureTable::Shard::FindSelected(Kind kind, int64_t key) {
  auto& selected = selected_[static_cast<int>(kind)];
  const auto it =
      std::lower_bound(selected.begin(), selected.end(), key,
                       [](const Selected& s, int64_t wanted) { return s.key < wanted; });
  return it == selected.end() || it->key != key || std::isnan(it->written) ? nullptr : &*it;
}

// The table.

FeatureTable::FeatureTable(Policy policy, int64_t payload_bytes)
    : policy_(std::move(policy)), payload_bytes_(payload_bytes), shards_(kShards) {
  const int64_t stride = (static_cast<int64_t>(sizeof(Feature)) + payload_bytes + 7) / 8 * 8;
  const auto arena = std::make_shared<ChunkArena>(stride * Shard::kChunkFeatures);
  const auto index_arena = std::make_shared<BlockArena>();
  for (Shard& shard : shards_) {
    shard.arena_ = arena;
    shard.index_arena_ = index_arena;
    shard.stride_ = stride;
  }
}

Status FeatureTable::Observe(const int64_t* keys, const double* shows, const double* clicks,
                             const int64_t* slots, int64_t n, const ParallelFor& parallel_for,
                             bool* admitted) {
  Status status = CheckKeys(keys, n);
  if (!status.ok()) return status;
  status = CheckCounts(shows, clicks, n);
  if (!status.ok()) return status;
  for (int64_t i = 0; slots != nullptr && i < n; ++i) {
    if (slots[i] < 0 || slots[i] >= kSlots) {
      return Status::InvalidArgument(At("slots", i) + ": found " + std::to_string(slots[i]) +
                                     "; wanted a slot in [0, 2047]");
    }
  }
  const ShardGroups groups = GroupByShard(keys, n);
  parallel_for(kShards, KeysCost(n), [&](int64_t first, int64_t last) {
    std::vector<uint64_t> places;  // local id << 32 | position
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = groups.starts[s], end = groups.starts[s + 1];
      if (begin == end) continue;
      Shard& shard = shards_[s];
      places.clear();
      bool repeats = false;
      std::lock_guard<std::mutex> lock(shard.mutex);
      ForEachKey(shard, groups, begin, end, keys,
                 [&](int64_t i, int64_t key, uint64_t mixed, int64_t local) {
                   bool created;
                   if (local < 0)
                     local = shard.FindOrCreate(key, mixed, slots ? static_cast<int>(slots[i]) : -1,
                                                &created);
                   Feature* feature = shard.At(local);
                   repeats |= (feature->marks & kBatchMark) != 0;
                   feature->marks |= kBatchMark;
                   places.push_back(static_cast<uint64_t>(local) << 32 | static_cast<uint64_t>(i));
                 });
      if (repeats) std::sort(places.begin(), places.end());
      for (size_t i = 0; i < places.size();) {
        Feature* feature = shard.At(places[i] >> 32);
        double show = 0, click = 0;
        size_t next = i;
        for (; next < places.size() && places[next] >> 32 == places[i] >> 32; ++next) {
          const uint32_t position = static_cast<uint32_t>(places[next]);
          show += shows[position];
          click += clicks[position];
        }
        Observe(feature, show, click);
        shard.NoteChange(places[i] >> 32);
        feature->marks &= ~kBatchMark;
        for (; i < next; ++i) admitted[static_cast<uint32_t>(places[i])] = feature->admitted != 0;
      }
    }
  });
  return Status();
}

Status FeatureTable::Admitted(const int64_t* keys, int64_t n, const ParallelFor& parallel_for,
                              bool* admitted) {
  LookupResult result;
  result.admitted = admitted;
  return Lookup(keys, n, parallel_for, result);
}

Status FeatureTable::Lookup(const int64_t* keys, int64_t n, const ParallelFor& parallel_for,
                            const LookupResult& result) {
  const Status status = CheckKeys(keys, n);
  if (!status.ok()) return status;
  const ShardGroups groups = GroupByShard(keys, n);
  parallel_for(kShards, KeysCost(n), [&](int64_t first, int64_t last) {
    const Feature absent = {};
    for (int64_t s = first; s < last; ++s) {
      if (groups.starts[s] == groups.starts[s + 1]) continue;
      const Shard& shard = shards_[s];
      std::lock_guard<std::mutex> lock(shard.mutex);
      ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
                 [&](int64_t i, int64_t, uint64_t, int64_t local) {
                   const Feature& feature = local < 0 ? absent : *shard.At(local);
                   if (result.show) result.show[i] = feature.show;
                   if (result.click) result.click[i] = feature.click;
                   if (result.delta_score) result.delta_score[i] = feature.delta_score;
                   if (result.unseen_days) result.unseen_days[i] = feature.unseen_days;
                   if (result.age_days) result.age_days[i] = feature.age_days;
                   if (result.slot) result.slot[i] = feature.slot;
                   if (result.admitted) result.admitted[i] = feature.admitted != 0;
                   if (result.exists) result.exists[i] = local >= 0;
                 });
    }
  });
  return Status();
}

// Calls visit(number, shard) for every shard, while it holds the shard's lock.
template <typename Visit>
void FeatureTable::ForEachShard(const ParallelFor& parallel_for, const Visit& visit) {
  parallel_for(kShards, 1000 + Size() / kShards * 4, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      std::lock_guard<std::mutex> lock(shards_[s].mutex);
      visit(s, shards_[s]);
    }
  });
}

// Calls visit(local id, feature) for every feature of a shard, whose lock is held.
template <typename Visit>
void FeatureTable::ForEachFeature(const Shard& shard, const Visit& visit) {
  for (int64_t begin = 0; begin < shard.end_; begin += Shard::kChunkFeatures) {
    char* place = shard.chunks_[begin >> Shard::kChunkBits];
    const int64_t end = std::min(shard.end_, begin + Shard::kChunkFeatures);
    for (int64_t local = begin; local < end; ++local, place += shard.stride_) {
      Feature* feature = reinterpret_cast<Feature*>(place);
      if (feature->key >= 0) visit(local, feature);
    }
  }
}

static std::vector<int64_t> Join(const std::vector<std::vector<int64_t>>& parts) {
  size_t total = 0;
  for (const auto& part : parts) total += part.size();
  std::vector<int64_t> all;
  all.reserve(total);
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// Day end.

void FeatureTable::Decay(const ParallelFor& parallel_for) {
  ForEachShard(parallel_for, [&](int64_t, Shard& shard) {
    shard.ForgetChanges();
    ForEachFeature(shard, [&](int64_t, Feature* feature) {
      const double decay = policy_.For(feature->slot).decay;
      feature->show *= decay;
      feature->click *= decay;
    });
  });
}

void FeatureTable::Age(const ParallelFor& parallel_for) {
  ForEachShard(parallel_for, [&](int64_t, Shard& shard) {
    shard.ForgetChanges();
    ForEachFeature(shard, [&](int64_t, Feature* feature) {
      if (feature->unseen_days < kMaxDays) ++feature->unseen_days;
      if (feature->age_days < kMaxDays) ++feature->age_days;
    });
  });
}

template <typename Doomed>
std::vector<int64_t> FeatureTable::EraseIf(const Doomed& doomed, const ParallelFor& parallel_for) {
  std::vector<std::vector<int64_t>> erased(kShards);
  ForEachShard(parallel_for, [&](int64_t s, Shard& shard) {
    ForEachFeature(shard, [&](int64_t local, Feature* feature) {
      if (!doomed(*feature)) return;
      erased[s].push_back(feature->key);
      if (on_erase) on_erase(static_cast<int>(s), shard.Payload(local));
      shard.Erase(local);
    });
    if (erased[s].empty()) return;
    shard.Compact();
    if (on_evicted) on_evicted(static_cast<int>(s));
  });
  return Join(erased);
}

std::vector<int64_t> FeatureTable::Evict(const ParallelFor& parallel_for) {
  if (policy_.eviction == Policy::Eviction::kNone) return {};
  const bool by_score = policy_.eviction == Policy::Eviction::kScore;
  return EraseIf(
      [&](const Feature& feature) {
        const Rules& rules = policy_.For(feature.slot);
        return feature.unseen_days > rules.delete_after_unseen_days ||
               (by_score && feature.age_days >= rules.min_age_days &&
                rules.Score(feature.show, feature.click) < rules.delete_threshold);
      },
      parallel_for);
}

Rank FeatureTable::RankOf(const Feature& feature) const {
  const bool by_show = policy_.capacity_by == Policy::CapacityBy::kFrequency;
  const double value =
      by_show ? feature.show : policy_.For(feature.slot).Score(feature.show, feature.click);
  uint64_t ordered;  // is in the same order as the numbers
  std::memcpy(&ordered, &value, sizeof(ordered));
  ordered = ordered >> 63 ? ~ordered : ordered | uint64_t{1} << 63;
  const uint64_t key =
      ~static_cast<uint64_t>(feature.key);  // of equal values, the smaller key stays
  Rank rank;
  rank[0] =
      policy_.capacity_by == Policy::CapacityBy::kRecency ? kMaxDays - feature.unseen_days : 0;
  for (int d = 0; d < 4; ++d) {
    rank[1 + d] = static_cast<uint16_t>(ordered >> (48 - 16 * d));
    rank[5 + d] = static_cast<uint16_t>(key >> (48 - 16 * d));
  }
  return rank;
}

std::vector<int64_t> FeatureTable::RankHistogram(const std::vector<uint16_t>& prefix,
                                                 const ParallelFor& parallel_for) {
  std::vector<int64_t> total(kRankBins, 0);
  if (prefix.size() >= kRankDigits) return total;
  std::mutex mutex;  // guards total; never taken while a shard's lock is held
  parallel_for(kShards, 1000 + Size() / kShards * 8, [&](int64_t first, int64_t last) {
    std::vector<int64_t> counts(kRankBins, 0);
    for (int64_t s = first; s < last; ++s) {
      std::lock_guard<std::mutex> lock(shards_[s].mutex);
      ForEachFeature(shards_[s], [&](int64_t, Feature* feature) {
        const Rank rank = RankOf(*feature);
        if (std::equal(prefix.begin(), prefix.end(), rank.begin())) ++counts[rank[prefix.size()]];
      });
    }
    std::lock_guard<std::mutex> lock(mutex);
    for (int bin = 0; bin < kRankBins; ++bin) total[bin] += counts[bin];
  });
  return total;
}

std::vector<uint16_t> FeatureTable::CapacityCut(const ParallelFor& parallel_for) {
  std::vector<uint16_t> cut;
  if (policy_.capacity == 0 || Size() <= policy_.capacity) return cut;
  int64_t wanted = policy_.capacity;  // of the features whose rank starts with the cut so far
  while (cut.size() < kRankDigits) {
    const std::vector<int64_t> counts = RankHistogram(cut, parallel_for);
    int bin = kRankBins - 1;
    for (; bin > 0 && counts[bin] < wanted; --bin) wanted -= counts[bin];
    cut.push_back(static_cast<uint16_t>(bin));
    if (counts[bin] == wanted) break;
  }
  return cut;
}

std::vector<int64_t> FeatureTable::EvictBelow(const std::vector<uint16_t>& cut,
                                              const ParallelFor& parallel_for) {
  if (cut.empty()) return {};
  return EraseIf(
      [&](const Feature& feature) {
        const Rank rank = RankOf(feature);
        const size_t digits = std::min<size_t>(cut.size(), kRankDigits);
        return std::lexicographical_compare(rank.begin(), rank.begin() + digits, cut.begin(),
                                            cut.begin() + digits);
      },
      parallel_for);
}

// Saves.

bool FeatureTable::Belongs(Kind kind, const Feature& feature) const {
  if (kind == Kind::kAll) return true;
  const Rules& rules = policy_.For(feature.slot);
  const double gain =
      kind == Kind::kDelta ? rules.delta_threshold : std::min(0.0, rules.base_threshold);
  return rules.Score(feature.show, feature.click) >= rules.base_threshold &&
         feature.delta_score >= gain && feature.unseen_days <= rules.delta_keep_days;
}

std::vector<int64_t> FeatureTable::Select(Kind kind, const ParallelFor& parallel_for) {
  const uint8_t mark = SelectedMark(kind);
  std::vector<std::vector<int64_t>> keys(kShards);
  ForEachShard(parallel_for, [&](int64_t s, Shard& shard) {
    std::vector<Shard::Selected> selected;
    ForEachFeature(shard, [&](int64_t, Feature* feature) {
      feature->marks &= ~mark;
      if (!Belongs(kind, *feature)) return;
      feature->marks |= mark;
      selected.push_back({feature->key, feature->delta_score});
    });
    keys[s] = shard.Remember(kind, std::move(selected));
  });
  return Join(keys);
}

Status FeatureTable::SelectAmong(Kind kind, const int64_t* keys, int64_t n,
                                 const ParallelFor& parallel_for, std::vector<int64_t>* selected) {
  const Status status = CheckKeys(keys, n);
  if (!status.ok()) return status;
  const uint8_t mark = SelectedMark(kind);
  const ShardGroups groups = GroupByShard(keys, n);
  std::vector<std::vector<int64_t>> found(kShards);
  parallel_for(kShards, KeysCost(n), [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      Shard& shard = shards_[s];
      std::vector<Shard::Selected> of_shard;
      std::lock_guard<std::mutex> lock(shard.mutex);
      ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
                 [&](int64_t, int64_t key, uint64_t, int64_t local) {
                   if (local < 0 || !Belongs(kind, *shard.At(local))) return;
                   shard.At(local)->marks |= mark;
                   of_shard.push_back({key, shard.At(local)->delta_score});
                 });
      found[s] = shard.Remember(kind, std::move(of_shard));
    }
  });
  *selected = Join(found);
  return Status();
}

Status FeatureTable::Commit(Kind kind, const int64_t* keys, int64_t n,
                            const ParallelFor& parallel_for) {
  const Status status = CheckKeys(keys, n);
  if (!status.ok() || kind == Kind::kAll) return status;
  const ShardGroups groups = GroupByShard(keys, n);
  const Kind other = kind == Kind::kDelta ? Kind::kBase : Kind::kDelta;
  const uint8_t mark = SelectedMark(kind), other_mark = SelectedMark(other);
  // The first round only checks: if any key was not selected, nothing changes.
  for (const bool change : {false, true}) {
    std::mutex mutex;  // guards unknown
    int64_t unknown = n;
    parallel_for(kShards, KeysCost(n), [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; ++s) {
        if (groups.starts[s] == groups.starts[s + 1]) continue;
        Shard& shard = shards_[s];
        std::lock_guard<std::mutex> lock(shard.mutex);
        ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
                   [&](int64_t i, int64_t key, uint64_t, int64_t local) {
                     Shard::Selected* entry = shard.FindSelected(kind, key);
                     if (entry == nullptr) {  // in the second round: the key occurs twice
                       std::lock_guard<std::mutex> unknown_lock(mutex);
                       unknown = std::min(unknown, i);
                     }
                     if (entry == nullptr || !change) return;
                     const double written = entry->written;
                     entry->written = std::numeric_limits<double>::quiet_NaN();
                     // Without the mark it was erased since then, and perhaps created anew.
                     if (local < 0 || !(shard.At(local)->marks & mark)) return;
                     Feature* feature = shard.At(local);
                     feature->marks &= ~mark;
                     feature->delta_score -= written;
                     shard.NoteChange(local, Reader::kCheckpoint);
                     if (!(feature->marks & other_mark)) return;
                     // The open selection of the other kind has the same gain, which must not be
                     // subtracted twice.
                     if (Shard::Selected* too = shard.FindSelected(other, key)) {
                       too->written = std::max(0.0, too->written - written);
                     }
                   });
      }
    });
    if (!change && unknown < n) {
      return Status::InvalidArgument(
          At("keys", unknown) + ": found " + std::to_string(keys[unknown]) +
          "; wanted a key of the last selection that is not committed yet");
    }
  }
  return Status();
}

int64_t FeatureTable::Size() const {
  int64_t size = 0;
  for (const Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    size += shard.size_;
  }
  return size;
}

int64_t FeatureTable::Bytes() const {
  int64_t bytes = 0;
  for (const Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    if (&shard == &shards_[0]) bytes += shard.arena_->Bytes() + shard.index_arena_->Bytes();
    bytes += sizeof(Shard) + shard.index_.bytes_outside_arena() +
             shard.chunks_.capacity() * sizeof(char*);
    for (const auto& selected : shard.selected_)
      bytes += selected.capacity() * sizeof(Shard::Selected);
    for (const auto& changes : shard.changes_)
      bytes += changes.locals.capacity() * sizeof(uint32_t);
  }
  return bytes;
}

// Export and import.

int64_t FeatureTable::Export(int s, int64_t begin, int64_t limit, bool changed,
                             FeatureColumns* columns) const {
  const Shard& shard = shards_[s];
  std::lock_guard<std::mutex> lock(shard.mutex);
  const Shard::Changes& changes = shard.changes_[static_cast<int>(Reader::kCheckpoint)];
  const bool of_list = changed && !changes.unknown;
  const int64_t end = of_list ? static_cast<int64_t>(changes.locals.size()) : shard.end_;
  int64_t place = std::max<int64_t>(0, begin);
  for (int64_t taken = 0; place < end && taken < limit; ++place) {
    const Feature& feature = *shard.At(of_list ? changes.locals[place] : place);
    if (feature.key < 0) continue;
    columns->Append(feature);
    ++taken;
  }
  return place < end ? place : -1;
}

int64_t FeatureTable::CountChanges() const {
  int64_t count = 0;
  for (const Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    const Shard::Changes& changes = shard.changes_[static_cast<int>(Reader::kCheckpoint)];
    if (changes.unknown) return -1;
    count += changes.locals.size();
  }
  return count;
}

void FeatureTable::KeepChanges() {
  for (Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    shard.BeginChanges(Reader::kCheckpoint);
  }
}

bool FeatureTable::TakeChanges(std::vector<int64_t>* keys) {
  bool known = true;
  keys->clear();
  for (Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    const Shard::Changes& changes = shard.changes_[static_cast<int>(Reader::kDelta)];
    known = known && !changes.unknown;
    for (const uint32_t local : changes.locals) keys->push_back(shard.At(local)->key);
    shard.BeginChanges(Reader::kDelta);
  }
  return known;
}

Status FeatureTable::Import(const FeatureColumns& columns) {
  const int64_t n = columns.key.size();
  const auto bad = [](const char* name, int64_t i, const std::string& value, const char* wanted) {
    return Status::DataLoss(At(name, i) + ": found " + value + "; wanted " + wanted);
  };
  for (int64_t i = 0; i < n; ++i) {
    if (columns.key[i] < 0) return bad("key", i, std::to_string(columns.key[i]), "a key >= 0");
    for (const auto& [name, value] :
         {std::make_pair("show", columns.show[i]), std::make_pair("click", columns.click[i])}) {
      if (!(value >= 0) || std::isinf(value))
        return bad(name, i, Text(value), "a finite number >= 0");
    }
    if (!std::isfinite(columns.delta_score[i]))
      return bad("delta_score", i, Text(columns.delta_score[i]), "a finite number");
    if (columns.slot[i] >= kSlots)
      return bad("slot", i, std::to_string(columns.slot[i]), "a slot in [0, 2047]");
    if (columns.admitted[i] > 1)
      return bad("admitted", i, std::to_string(columns.admitted[i]), "0 or 1");
  }
  const ShardGroups groups = GroupByShard(columns.key.data(), n);
  int64_t twice = -1;
  int64_t added = 0;  // in the groups' order
  for (int s = 0; s < kShards && twice < 0; ++s) {
    Shard& shard = shards_[s];
    std::lock_guard<std::mutex> lock(shard.mutex);
    ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], columns.key.data(),
               [&](int64_t i, int64_t key, uint64_t mixed, int64_t) {
                 if (twice >= 0) return;
                 bool created;
                 const int64_t local = shard.FindOrCreate(key, mixed, columns.slot[i], &created);
                 if (!created) {
                   twice = i;
                   return;
                 }
                 ++added;
                 Feature* feature = shard.At(local);
                 feature->show = columns.show[i];
                 feature->click = columns.click[i];
                 feature->delta_score = columns.delta_score[i];
                 feature->unseen_days = columns.unseen_days[i];
                 feature->age_days = columns.age_days[i];
                 feature->admitted = columns.admitted[i];
                 shard.NoteChange(local);
               });
  }
  if (twice < 0) return Status();
  for (int64_t i = 0; i < added; ++i) {
    const int64_t key = columns.key[groups.At(i)];
    Shard& shard = shards_[ShardOf(Mix64(key))];
    std::lock_guard<std::mutex> lock(shard.mutex);
    const int64_t local = shard.Find(key, Mix64(key));
    if (local >= 0) shard.Erase(local);
  }
  return bad("key", twice, std::to_string(columns.key[twice]), "a key that stands once");
}

void FeatureTable::Clear(const ParallelFor& parallel_for) {
  ForEachShard(parallel_for, [&](int64_t s, Shard& shard) {
    if (on_erase) {
      ForEachFeature(shard, [&](int64_t local, Feature*) {
        on_erase(static_cast<int>(s), shard.Payload(local));
      });
    }
    shard.ForgetChanges();
    shard.index_ = Block();
    shard.index_entries_ = 0;
    shard.size_ = shard.end_ = 0;
    shard.free_ = -1;
    for (auto& selected : shard.selected_) std::vector<Shard::Selected>().swap(selected);
  });
}

}  // namespace ctr

#include "ops/cc/lifecycle/feature_table.h"

#include <algorithm>
#include <atomic>
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

// Calls visit(position, key, mixed, found) for keys [begin, end) of the groups. All are of one
// shard, whose lock is held. `found` is as of Shard::Find, or -1 if the feature was absent when the
// key was prefetched; an earlier visit may have created it since.
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
    const bool sure = one.local == -1 || (one.local >= 0 && shard.At(one.local)->key == one.key);
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
  *created = found == -1;
  if (found != -1) return found;
  if (IsFull(size() + 1, index_entries_)) GrowIndex();
  const int64_t local = hot_.Add();
  Feature* feature = At(local);
  feature->key = key;
  feature->slot = static_cast<uint16_t>(slot < 0 ? SlotOf(key) : slot);
  uint64_t* index = Index();
  uint64_t p = Home(mixed);
  while (index[p] != 0) p = Next(p);
  index[p] = mixed << 32 | static_cast<uint64_t>(local + 1);
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

uint64_t FeatureTable::Shard::PlaceOf(int64_t key, uint32_t at) const {
  const uint64_t mixed = Mix64(key), entry = mixed << 32 | at;
  uint64_t p = Home(mixed);
  while (Index()[p] != entry) p = Next(p);
  return p;
}

void FeatureTable::Shard::RemoveFromIndex(int64_t key, uint32_t at) {
  uint64_t* index = Index();
  uint64_t hole = PlaceOf(key, at);
  // Closes the gap: moves entries back that lie behind it because its place was taken.
  for (uint64_t p = Next(hole); index[p] != 0; p = Next(p)) {
    const uint64_t home = Home(static_cast<uint32_t>(index[p] >> 32), index_entries_);
    if (Distance(home, p) < Distance(hole, p)) continue;
    index[hole] = index[p];
    hole = p;
  }
  index[hole] = 0;
}

void FeatureTable::Shard::Erase(int64_t local) {
  ForgetChanges();
  RemoveFromIndex(At(local)->key, static_cast<uint32_t>(local + 1));
  hot_.Remove(local);
}

void FeatureTable::Shard::EraseCold(int64_t cold) {
  ForgetChanges();
  RemoveFromIndex(ColdAt(cold)->key, kCold | static_cast<uint32_t>(cold));
  cold_.Remove(cold);
}

void FeatureTable::Shard::Compact(bool all) {
  hot_.Compact(all, [&](int64_t from, int64_t to) {
    SetIndex(At(to)->key, static_cast<uint32_t>(from + 1), static_cast<uint32_t>(to + 1));
  });
  cold_.Compact(all, [&](int64_t from, int64_t to) {
    SetIndex(ColdAt(to)->key, kCold | static_cast<uint32_t>(from),
             kCold | static_cast<uint32_t>(to));
  });
  uint64_t entries = kMinIndex;
  while (IsFull(size(), entries)) entries = LargerIndex(entries);
  if (entries * 3 <= index_entries_ * 2) ResizeIndex(entries);
}

void FeatureTable::Shard::MakeCold(int64_t local, const ColdFeature& cold) {
  const Feature& feature = *At(local);
  const int64_t number = cold_.Add();
  ColdFeature* const kept = ColdAt(number);
  *kept = cold;
  kept->key = feature.key;
  kept->marks = feature.marks;
  SetIndex(feature.key, static_cast<uint32_t>(local + 1), kCold | static_cast<uint32_t>(number));
  hot_.Remove(local);
}

int64_t FeatureTable::Shard::MakeHot(int64_t cold, const char* bytes) {
  const ColdFeature& kept = *ColdAt(cold);
  const int64_t local = hot_.Add();
  std::memcpy(hot_.At(local), bytes, hot_.bytes());
  At(local)->key = kept.key;
  At(local)->marks = kept.marks;
  SetIndex(kept.key, kCold | static_cast<uint32_t>(cold), static_cast<uint32_t>(local + 1));
  cold_.Remove(cold);
  return local;
}

void FeatureTable::Shard::ForgetChanges(Reader reader) {
  Changes& changes = changes_[static_cast<int>(reader)];
  const std::vector<int64_t>& keys = changes.keys;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kIndexAhead < keys.size()) PrefetchIndex(Mix64(keys[i + kIndexAhead]));
    if (i + kFeatureAhead < keys.size()) PrefetchFeature(Mix64(keys[i + kFeatureAhead]));
    *MarksOf(Find(keys[i], Mix64(keys[i]))) &= ~ChangedMark(reader);
  }
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
  uncommitted_[static_cast<int>(kind)] = selected.size();
  selected_[static_cast<int>(kind)] = std::move(selected);
  return keys;
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
  const int64_t bytes = (static_cast<int64_t>(sizeof(Feature)) + payload_bytes + 7) / 8 * 8;
  hot_arena_ = std::make_shared<ChunkArena>(Places::ChunkBytes(bytes));
  cold_arena_ = std::make_shared<ChunkArena>(Places::ChunkBytes(sizeof(ColdFeature)));
  const auto index_arena = std::make_shared<BlockArena>();
  for (Shard& shard : shards_) {
    shard.hot_ = Places(bytes, hot_arena_);
    shard.cold_ = Places(sizeof(ColdFeature), cold_arena_);
    shard.index_arena_ = index_arena;
  }
}

void FeatureTable::Note(const Status& status) {
  if (status.ok()) return;
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (error_.ok()) error_ = status;
}

Status FeatureTable::error() const {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return error_;
}

// Cold features.

Status FeatureTable::MakeKeysHot(int s, const ShardGroups& groups, const int64_t* keys) {
  const Shard& shard = shards_[s];
  if (shard.cold_.size() == 0) return Status();
  std::vector<ColdRef> refs;
  ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
             [&](int64_t i, int64_t, uint64_t, int64_t found) {
               if (Shard::IsCold(found)) refs.push_back({Shard::ColdOf(found), i});
             });
  return refs.empty() ? Status() : make_hot(s, refs);
}

void FeatureTable::PassDays(const Shard& shard, Days written, Feature* feature) const {
  const double decay = policy_.For(feature->slot).decay;
  for (int32_t d = written.decays; d < shard.days_.decays; ++d) {
    feature->show *= decay;
    feature->click *= decay;
  }
  const auto aged = [&](uint16_t days) {
    return static_cast<uint16_t>(
        std::min<int32_t>(kMaxDays, days + (shard.days_.ages - written.ages)));
  };
  feature->unseen_days = aged(feature->unseen_days);
  feature->age_days = aged(feature->age_days);
}

void FeatureTable::Foresee(const Shard& shard, const Feature& feature, ColdFeature* cold) const {
  constexpr int kForeseen = 400;  // days
  const Rules& rules = policy_.For(feature.slot);
  const bool gained =
      feature.delta_score >= rules.delta_threshold && feature.unseen_days <= rules.delta_keep_days;
  cold->flags = (cold->flags & ColdFeature::kHasFactors) |
                (feature.admitted ? ColdFeature::kAdmitted : 0) |
                (gained ? ColdFeature::kGained : 0);
  cold->due = kMaxDays;
  if (policy_.eviction == Policy::Eviction::kNone) {
    cold->flags |= ColdFeature::kForeseen;
    return;
  }
  // A day's end decays, evicts, then ages.
  Feature then = feature;
  for (int k = 0; k < kForeseen && shard.days_.decays + k < kMaxDays; ++k) {
    const int32_t decays = shard.days_.decays + k;
    const int32_t aged = decays - 1 - shard.days_.ages;
    then.unseen_days =
        static_cast<uint16_t>(std::min<int32_t>(kMaxDays, feature.unseen_days + aged));
    then.age_days = static_cast<uint16_t>(std::min<int32_t>(kMaxDays, feature.age_days + aged));
    if (aged >= 0 && FailsTests(then)) {
      cold->due = static_cast<uint16_t>(decays);
      cold->flags |= ColdFeature::kForeseen;
      return;
    }
    then.show *= rules.decay;
    then.click *= rules.decay;
  }
  cold->due = static_cast<uint16_t>(std::min<int32_t>(kMaxDays, shard.days_.decays + kForeseen));
}

template <typename Wanted, typename Visit>
void FeatureTable::ReadCold(int s, const Wanted& wanted, const Visit& visit) {
  std::vector<ColdRef> refs;
  shards_[s].cold_.ForEach<ColdFeature>([&](int64_t cold, const ColdFeature* kept) {
    if (wanted(*kept)) refs.push_back({cold, 0});
  });
  if (refs.empty()) return;
  Note(read_cold(s, std::move(refs),
                 [&](const ColdRef& ref, const Feature& feature) { visit(ref.cold, feature); }));
}

void FeatureTable::EraseHot(int s, int64_t local) {
  if (on_erase) on_erase(s, shards_[s].Payload(local));
  shards_[s].Erase(local);
}

void FeatureTable::EraseCold(int s, int64_t cold) {
  on_erase_cold(*shards_[s].ColdAt(cold));
  shards_[s].EraseCold(cold);
}

void FeatureTable::Erase(const int64_t* keys, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t mixed = Mix64(keys[i]);
    const int s = ShardOf(mixed);
    std::lock_guard<std::mutex> lock(shards_[s].mutex);
    const int64_t found = shards_[s].Find(keys[i], mixed);
    if (found >= 0) EraseHot(s, found);
    if (Shard::IsCold(found)) EraseCold(s, Shard::ColdOf(found));
  }
}

// Verbs.

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
      const Status hot = MakeKeysHot(static_cast<int>(s), groups, keys);
      if (!hot.ok()) return Note(hot);
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
  return error();
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
  const auto fill = [&](int64_t i, const Feature& feature, bool exists) {
    if (result.show) result.show[i] = feature.show;
    if (result.click) result.click[i] = feature.click;
    if (result.delta_score) result.delta_score[i] = feature.delta_score;
    if (result.unseen_days) result.unseen_days[i] = feature.unseen_days;
    if (result.age_days) result.age_days[i] = feature.age_days;
    if (result.slot) result.slot[i] = feature.slot;
    if (result.admitted) result.admitted[i] = feature.admitted != 0;
    if (result.exists) result.exists[i] = exists;
  };
  parallel_for(kShards, KeysCost(n), [&](int64_t first, int64_t last) {
    const Feature absent = {};
    std::vector<ColdRef> refs;
    for (int64_t s = first; s < last; ++s) {
      if (groups.starts[s] == groups.starts[s + 1]) continue;
      const Shard& shard = shards_[s];
      std::lock_guard<std::mutex> lock(shard.mutex);
      ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
                 [&](int64_t i, int64_t, uint64_t, int64_t found) {
                   if (Shard::IsCold(found))
                     refs.push_back({Shard::ColdOf(found), i});
                   else
                     fill(i, found < 0 ? absent : *shard.At(found), found >= 0);
                 });
      if (refs.empty()) continue;
      Note(read_cold(
          static_cast<int>(s), std::move(refs),
          [&](const ColdRef& ref, const Feature& feature) { fill(ref.index, feature, true); }));
      refs.clear();
    }
  });
  return error();
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
    ++shard.days_.decays;
    shard.hot_.ForEach<Feature>([&](int64_t, Feature* feature) {
      const double decay = policy_.For(feature->slot).decay;
      feature->show *= decay;
      feature->click *= decay;
    });
  });
}

void FeatureTable::Age(const ParallelFor& parallel_for) {
  ForEachShard(parallel_for, [&](int64_t, Shard& shard) {
    shard.ForgetChanges();
    ++shard.days_.ages;
    shard.hot_.ForEach<Feature>([&](int64_t, Feature* feature) {
      if (feature->unseen_days < kMaxDays) ++feature->unseen_days;
      if (feature->age_days < kMaxDays) ++feature->age_days;
    });
  });
}

template <typename Doomed>
std::vector<int64_t> FeatureTable::EraseIf(const Doomed& doomed, bool by_due,
                                           const ParallelFor& parallel_for) {
  std::vector<std::vector<int64_t>> erased(kShards);
  ForEachShard(parallel_for, [&](int64_t number, Shard& shard) {
    const int s = static_cast<int>(number);
    shard.hot_.ForEach<Feature>([&](int64_t local, Feature* feature) {
      if (!doomed(*feature)) return;
      erased[s].push_back(feature->key);
      EraseHot(s, local);
    });
    const int32_t today = shard.days_.decays;
    const bool foreseen = by_due && today == shard.days_.ages + 1 && today < kMaxDays;
    std::vector<int64_t> gone;
    shard.cold_.ForEach<ColdFeature>([&](int64_t cold, const ColdFeature* kept) {
      if (foreseen && kept->due == today && kept->flags & ColdFeature::kForeseen)
        gone.push_back(cold);
    });
    ReadCold(
        s,
        [&](const ColdFeature& cold) {
          return !foreseen || cold.due < today ||
                 (cold.due == today && !(cold.flags & ColdFeature::kForeseen));
        },
        [&](int64_t cold, const Feature& feature) {
          if (doomed(feature))
            gone.push_back(cold);
          else
            Foresee(shard, feature, shard.ColdAt(cold));
        });
    for (const int64_t cold : gone) {
      erased[s].push_back(shard.ColdAt(cold)->key);
      EraseCold(s, cold);
    }
    if (erased[s].empty()) return;
    shard.Compact(false);
    if (on_evicted) on_evicted(s);
  });
  return Join(erased);
}

bool FeatureTable::FailsTests(const Feature& feature) const {
  const Rules& rules = policy_.For(feature.slot);
  return feature.unseen_days > rules.delete_after_unseen_days ||
         (policy_.eviction == Policy::Eviction::kScore && feature.age_days >= rules.min_age_days &&
          rules.Score(feature.show, feature.click) < rules.delete_threshold);
}

std::vector<int64_t> FeatureTable::Evict(const ParallelFor& parallel_for) {
  if (policy_.eviction == Policy::Eviction::kNone) return {};
  return EraseIf([&](const Feature& feature) { return FailsTests(feature); }, true, parallel_for);
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
      const auto count = [&](int64_t, const Feature& feature) {
        const Rank rank = RankOf(feature);
        if (std::equal(prefix.begin(), prefix.end(), rank.begin())) ++counts[rank[prefix.size()]];
      };
      shards_[s].hot_.ForEach<Feature>(
          [&](int64_t local, const Feature* feature) { count(local, *feature); });
      ReadCold(static_cast<int>(s), [](const ColdFeature&) { return true; }, count);
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
      false, parallel_for);
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
    shard.hot_.ForEach<Feature>([&](int64_t, Feature* feature) {
      feature->marks &= ~mark;
      if (!Belongs(kind, *feature)) return;
      feature->marks |= mark;
      selected.push_back({feature->key, feature->delta_score});
    });
    shard.cold_.ForEach<ColdFeature>([&](int64_t, ColdFeature* cold) { cold->marks &= ~mark; });
    ReadCold(
        static_cast<int>(s),
        [&](const ColdFeature& cold) {
          return kind != Kind::kDelta || cold.flags & ColdFeature::kGained;
        },
        [&](int64_t cold, const Feature& feature) {
          if (!Belongs(kind, feature)) return;
          shard.ColdAt(cold)->marks |= mark;
          selected.push_back({feature.key, feature.delta_score});
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
      std::vector<ColdRef> refs;
      std::lock_guard<std::mutex> lock(shard.mutex);
      ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
                 [&](int64_t i, int64_t key, uint64_t, int64_t found) {
                   if (Shard::IsCold(found)) refs.push_back({Shard::ColdOf(found), i});
                   if (found < 0 || !Belongs(kind, *shard.At(found))) return;
                   shard.At(found)->marks |= mark;
                   of_shard.push_back({key, shard.At(found)->delta_score});
                 });
      if (!refs.empty()) {
        Note(read_cold(static_cast<int>(s), std::move(refs),
                       [&](const ColdRef& ref, const Feature& feature) {
                         if (!Belongs(kind, feature)) return;
                         shard.ColdAt(ref.cold)->marks |= mark;
                         of_shard.push_back({feature.key, feature.delta_score});
                       }));
      }
      found[s] = shard.Remember(kind, std::move(of_shard));
    }
  });
  *selected = Join(found);
  return error();
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
        // Of a cold feature that has gained, delta_score is about to change.
        std::vector<ColdRef> refs;
        if (change && shard.cold_.size() > 0) {
          ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
                     [&](int64_t i, int64_t key, uint64_t, int64_t found) {
                       if (!Shard::IsCold(found)) return;
                       const Shard::Selected* entry = shard.FindSelected(kind, key);
                       if (entry != nullptr && entry->written != 0)
                         refs.push_back({Shard::ColdOf(found), i});
                     });
        }
        if (!refs.empty()) Note(make_hot(static_cast<int>(s), refs));
        ForEachKey(shard, groups, groups.starts[s], groups.starts[s + 1], keys,
                   [&](int64_t i, int64_t key, uint64_t, int64_t found) {
                     Shard::Selected* entry = shard.FindSelected(kind, key);
                     if (entry == nullptr) {  // in the second round: the key occurs twice
                       std::lock_guard<std::mutex> unknown_lock(mutex);
                       unknown = std::min(unknown, i);
                     }
                     if (entry == nullptr || !change) return;
                     const double written = entry->written;
                     entry->written = std::numeric_limits<double>::quiet_NaN();
                     --shard.uncommitted_[static_cast<int>(kind)];
                     if (found == -1) return;
                     uint8_t* const marks = shard.MarksOf(found);
                     // Without the mark it was erased since then, and perhaps created anew.
                     if (!(*marks & mark)) return;
                     *marks &= ~mark;
                     if (found >= 0) shard.At(found)->delta_score -= written;
                     shard.NoteChange(key, marks, Reader::kCheckpoint);
                     if (!(*marks & other_mark)) return;
                     // The open selection of the other kind has the same gain, which must not be
                     // subtracted twice.
                     if (Shard::Selected* too = shard.FindSelected(other, key)) {
                       too->written = std::max(0.0, too->written - written);
                     }
                   });
        if (!refs.empty()) Note(make_cold(static_cast<int>(s)));
        if (shard.uncommitted_[static_cast<int>(kind)] == 0)
          std::vector<Shard::Selected>().swap(shard.selected_[static_cast<int>(kind)]);
      }
    });
    if (!change && unknown < n) {
      return Status::InvalidArgument(
          At("keys", unknown) + ": found " + std::to_string(keys[unknown]) +
          "; wanted a key of the last selection that is not committed yet");
    }
  }
  return error();
}

int64_t FeatureTable::Size() const {
  int64_t size = 0;
  for (const Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    size += shard.size();
  }
  return size;
}

int64_t FeatureTable::Bytes() const {
  int64_t bytes = 0;
  for (const Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    if (&shard == &shards_[0])
      bytes += hot_arena_->Bytes() + cold_arena_->Bytes() + shard.index_arena_->Bytes();
    bytes += sizeof(Shard) + shard.index_.bytes_outside_arena() + shard.hot_.list_bytes() +
             shard.cold_.list_bytes() + shard.exported_.capacity() * sizeof(int64_t);
    for (const auto& selected : shard.selected_)
      bytes += selected.capacity() * sizeof(Shard::Selected);
    for (const auto& changes : shard.changes_) bytes += changes.keys.capacity() * sizeof(int64_t);
  }
  return bytes;
}

int64_t FeatureTable::AdmittedSize(const ParallelFor& parallel_for) {
  std::atomic<int64_t> total{0};
  ForEachShard(parallel_for, [&](int64_t, Shard& shard) {
    int64_t size = 0;
    shard.hot_.ForEach<Feature>(
        [&](int64_t, const Feature* feature) { size += feature->admitted != 0; });
    shard.cold_.ForEach<ColdFeature>([&](int64_t, const ColdFeature* cold) {
      size += (cold->flags & ColdFeature::kAdmitted) != 0;
    });
    total += size;
  });
  return total;
}

// Export and import.

int64_t FeatureTable::Export(int s, int64_t begin, int64_t limit, bool changed,
                             FeatureColumns* columns) {
  Shard& shard = shards_[s];
  std::lock_guard<std::mutex> lock(shard.mutex);
  const Shard::Changes& changes = shard.changes_[static_cast<int>(Reader::kCheckpoint)];
  const bool of_changes = changed && !changes.unknown;
  // Cold features may come back before the next call, so places are those of a list of keys.
  if (!of_changes && begin <= 0 && make_cold) {
    shard.exported_.clear();
    shard.exported_.reserve(shard.size());
    shard.hot_.ForEach<Feature>(
        [&](int64_t, const Feature* feature) { shard.exported_.push_back(feature->key); });
    shard.cold_.ForEach<ColdFeature>(
        [&](int64_t, const ColdFeature* cold) { shard.exported_.push_back(cold->key); });
  }
  const bool of_list = of_changes || !shard.exported_.empty();
  const std::vector<int64_t>& list = of_changes ? changes.keys : shard.exported_;
  const int64_t end = of_list ? static_cast<int64_t>(list.size()) : shard.end();
  int64_t place = std::max<int64_t>(0, begin);
  std::vector<ColdRef> refs;
  for (int64_t taken = 0; place < end && taken < limit; ++place) {
    const int64_t found = of_list ? shard.Find(list[place], Mix64(list[place])) : place;
    if (Shard::IsCold(found)) {
      refs.push_back({Shard::ColdOf(found), 0});
    } else if (found >= 0 && shard.At(found)->key >= 0) {
      columns->Append(*shard.At(found));
    } else {
      continue;
    }
    ++taken;
  }
  if (!refs.empty()) {
    Note(read_cold(s, std::move(refs),
                   [&](const ColdRef&, const Feature& feature) { columns->Append(feature); }));
  }
  if (place < end) return place;
  if (!of_changes) std::vector<int64_t>().swap(shard.exported_);
  return -1;
}

int64_t FeatureTable::CountChanges() const {
  int64_t count = 0;
  for (const Shard& shard : shards_) {
    std::lock_guard<std::mutex> lock(shard.mutex);
    const Shard::Changes& changes = shard.changes_[static_cast<int>(Reader::kCheckpoint)];
    if (changes.unknown) return -1;
    count += changes.keys.size();
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
    keys->insert(keys->end(), changes.keys.begin(), changes.keys.end());
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
  for (int64_t i = 0; i < added; ++i) Erase(&columns.key[groups.At(i)], 1);
  return bad("key", twice, std::to_string(columns.key[twice]), "a key that stands once");
}

void FeatureTable::Clear(const ParallelFor& parallel_for) {
  ForEachShard(parallel_for, [&](int64_t s, Shard& shard) {
    if (on_erase) {
      shard.hot_.ForEach<Feature>(
          [&](int64_t local, Feature*) { on_erase(static_cast<int>(s), shard.Payload(local)); });
    }
    shard.cold_.ForEach<ColdFeature>(
        [&](int64_t, const ColdFeature* cold) { on_erase_cold(*cold); });
    shard.ForgetChanges();
    shard.index_ = Block();
    shard.index_entries_ = 0;
    shard.hot_.Clear();
    shard.cold_.Clear();
    std::vector<int64_t>().swap(shard.exported_);
    for (auto& selected : shard.selected_) std::vector<Shard::Selected>().swap(selected);
  });
  std::lock_guard<std::mutex> lock(error_mutex_);
  error_ = Status();
}

}  // namespace ctr

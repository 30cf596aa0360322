#include "ops/cc/rows/row_store.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/cc/lifecycle/hash.h"
#include "ops/cc/rows/bfloat16_rows.h"
#include "ops/cc/rows/initial_factors.h"

namespace ctr {
namespace {

// How many keys are processed at a time: the next phase finds in the L1 cache what one has
// prefetched.
constexpr int kGroup = 64;
constexpr int64_t kAhead = 20;  // rows between a prefetch and its copy
constexpr int64_t kChunkBytes = 8 << 10;
constexpr int kLimited = 16;     // shards from which features go to disk at a time
constexpr int32_t kOnDisk = -2;  // in place of a row's number

void Prefetch(const char* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(begin + i, 1);
  __builtin_prefetch(begin + bytes - 1, 1);
}

uint16_t* Bits(char* row) { return reinterpret_cast<uint16_t*>(row); }
float* Floats(char* row) { return reinterpret_cast<float*>(row); }

int64_t IdOf(int shard, int64_t local) { return static_cast<int64_t>(shard) << 32 | local; }

// The first error of several threads.
class FirstError {
 public:
  void Note(Status status) {
    if (status.ok()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok()) status_ = std::move(status);
  }
  Status status() {
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

 private:
  std::mutex mutex_;
  Status status_;
};

// Returns the index of the first element that is not finite, or -1.
int64_t FindNotFinite(const float* x, int64_t n) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bad |= (bits & 0x7f800000) == 0x7f800000;
  }
  if (bad == 0) return -1;
  return std::find_if(x, x + n, [](float v) { return !std::isfinite(v); }) - x;
}

}  // namespace

int RowLayout::linear_floats() const {
  int state = 0;
  for (const RowTable& table : tables) state = std::max(state, RowStateFloats(table.linear, 1));
  return 1 + state;
}

std::string RowLayout::Check() const {
  for (size_t t = 0; t < tables.size(); ++t) {
    if (tables[t].width < 0 || tables[t].width > 1 << 20) {
      return "widths[" + std::to_string(t) + "]: found " + std::to_string(tables[t].width) +
             "; wanted 0 to 2^20";
    }
    if (!(tables[t].init_scale >= 0.0f) || !std::isfinite(tables[t].init_scale)) {
      return "init_scales[" + std::to_string(t) + "]: found " +
             std::to_string(tables[t].init_scale) + "; wanted a finite number >= 0";
    }
  }
  if (slot_table.size() > kSlots)
    return "slot_table: found " + std::to_string(slot_table.size()) + " slots; wanted at most 2048";
  for (size_t s = 0; s < slot_table.size(); ++s) {
    if (slot_table[s] < -1 || slot_table[s] >= static_cast<int>(tables.size())) {
      return "slot_table[" + std::to_string(s) + "]: found " + std::to_string(slot_table[s]) +
             "; wanted -1 or a table";
    }
  }
  return "";
}

RowStore::RowStore(FeatureTable* table, RowLayout layout)
    : table_(table), layout_(std::move(layout)), shards_(kShards) {
  for (const RowTable& t : layout_.tables) {
    // A free row holds the number of the next free row.
    const int64_t stride = std::max<int64_t>(t.row_bytes(), sizeof(int32_t));
    int bits = 4;
    while ((stride << (bits + 1)) <= kChunkBytes) ++bits;
    row_bytes_.push_back(t.row_bytes());
    stride_.push_back(stride);
    chunk_bits_.push_back(bits);
    arenas_.push_back(std::make_unique<ChunkArena>(stride << bits));
    if (t.bfloat16) widest_bfloat16_ = std::max(widest_bfloat16_, t.row_size());
  }
  for (ShardRows& shard : shards_) shard.tables.resize(layout_.tables.size());
  table->on_erase = [this](int shard, char* payload) {
    FreeRow(shard, reinterpret_cast<Feature*>(payload - sizeof(Feature)),
            reinterpret_cast<Head*>(payload));
  };
  table->on_evicted = [this](int shard) { CompactRows(shard, false); };
}

Status RowStore::LimitMemory(int64_t limit, const std::string& dir) {
  limit_ = limit;
  std::vector<int64_t> bytes = row_bytes_;
  bytes.push_back(0);  // of features without factors
  for (const int64_t of_row : bytes) {
    const int64_t record = table_->feature_bytes() + of_row + static_cast<int64_t>(sizeof(Days));
    cold_.emplace_back();
    const Status status = ColdFile::Open(dir, record, &cold_.back());
    if (!status.ok()) return status;
  }
  table_->read_cold = [this](int shard, const std::vector<ColdRef>& refs, const auto& visit) {
    return ReadCold(shard, refs, [&](const ColdRef& ref, const Feature* feature, const char*) {
      visit(ref, *feature);
    });
  };
  table_->make_hot = [this](int shard, const std::vector<ColdRef>& refs) {
    return MakeHot(shard, refs);
  };
  table_->make_cold = [this](int shard) { return MakeCold(shard, share_); };
  table_->on_erase_cold = [this](const ColdFeature& cold) {
    cold_[FileOf(cold)]->Release(cold.place);
  };
  return Status();
}

int32_t RowStore::AllocateRow(int shard, int table) {
  FactorRows& rows = shards_[shard].tables[table];
  if (rows.free >= 0) {
    const int32_t row = rows.free;
    std::memcpy(&rows.free, Row(shard, table, row), sizeof(rows.free));
    return row;
  }
  if (rows.end == static_cast<int64_t>(rows.chunks.size()) << chunk_bits_[table]) {
    rows.chunks.push_back(arenas_[table]->Allocate());
    row_bytes_in_memory_ += stride_[table] << chunk_bits_[table];
  }
  return rows.end++;
}

void RowStore::InitialWeights(int64_t key, int table, float* w) const {
  const RowTable& t = layout_.tables[table];
  InitialFactors(layout_.seed, key, t.width, t.init_scale, w);
  if (!t.bfloat16) return;
  std::vector<uint16_t> bits(t.width);
  RoundToNearest(w, t.width, bits.data());
  Widen(bits.data(), t.width, w);
}

void RowStore::FreeRow(int shard, const Feature* feature, Head* head) {
  if (head->factor_row == 0) return;
  const int table = layout_.TableOf(feature->key);
  ++shards_[shard].changes;
  FactorRows& rows = shards_[shard].tables[table];
  const int32_t row = head->factor_row - 1;
  std::memcpy(Row(shard, table, row), &rows.free, sizeof(rows.free));
  rows.free = row;
  head->factor_row = 0;
}

void RowStore::CompactRows(int s, bool all) {
  const FeatureTable::Shard& shard = table_->shard(s);
  std::vector<std::vector<Head*>> heads(layout_.tables.size());  // of features with factor rows
  for (int64_t local = 0; local < shard.end(); ++local) {
    const Feature* feature = shard.At(local);
    if (feature->key < 0) continue;
    Head* const head = reinterpret_cast<Head*>(shard.Payload(local));
    if (head->factor_row > 0) heads[layout_.TableOf(feature->key)].push_back(head);
  }
  for (size_t t = 0; t < heads.size(); ++t) {
    FactorRows& rows = shards_[s].tables[t];
    const int bits = chunk_bits_[t];
    const size_t needed = (heads[t].size() + (size_t{1} << bits) - 1) >> bits;
    const size_t spare = rows.chunks.size() - needed;
    if (all ? spare == 0 : spare * 3 <= rows.chunks.size()) continue;
    // In the order of the rows, none is overwritten before it has moved.
    std::sort(heads[t].begin(), heads[t].end(),
              [](const Head* a, const Head* b) { return a->factor_row < b->factor_row; });
    int32_t to = 0;
    for (Head* head : heads[t]) {
      const int32_t from = head->factor_row - 1;
      if (to != from) {
        std::memcpy(Row(s, t, to), Row(s, t, from), row_bytes_[t]);
      }
      head->factor_row = ++to;
    }
    for (size_t i = needed; i < rows.chunks.size(); ++i) arenas_[t]->Release(rows.chunks[i]);
    row_bytes_in_memory_ -= static_cast<int64_t>(spare) * (stride_[t] << bits);
    rows.chunks.resize(needed);
    rows.chunks.shrink_to_fit();
    rows.end = to;
    rows.free = -1;
    ++shards_[s].changes;
  }
}

size_t RowStore::FileOf(const ColdFeature& cold) const {
  const bool has_factors = cold.flags & ColdFeature::kHasFactors;
  return has_factors ? layout_.TableOf(cold.key) : layout_.tables.size();
}

std::vector<std::vector<ColdFile::Row>> RowStore::ByFile(int s,
                                                         const std::vector<ColdRef>& refs) const {
  std::vector<std::vector<ColdFile::Row>> of_files(cold_.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    const ColdFeature& cold = *table_->shard(s).ColdAt(refs[i].cold);
    of_files[FileOf(cold)].push_back({cold.place, cold.key, static_cast<int64_t>(i)});
  }
  return of_files;
}

Status RowStore::ReadCold(
    int s, const std::vector<ColdRef>& refs,
    const std::function<void(const ColdRef&, Feature*, const char*)>& visit) const {
  const FeatureTable::Shard& shard = table_->shard(s);
  const int64_t feature_bytes = table_->feature_bytes();
  std::vector<double> copy(feature_bytes / sizeof(double));  // is aligned
  Feature* const feature = reinterpret_cast<Feature*>(copy.data());
  std::vector<std::vector<ColdFile::Row>> of_files = ByFile(s, refs);
  for (size_t f = 0; f < of_files.size(); ++f) {
    const int64_t row_bytes = f < row_bytes_.size() ? row_bytes_[f] : 0;
    const Status status =
        cold_[f]->Read(std::move(of_files[f]), [&](const ColdFile::Row& row, const char* bytes) {
          Days written;
          std::memcpy(static_cast<void*>(feature), bytes, feature_bytes);
          std::memcpy(&written, bytes + feature_bytes + row_bytes, sizeof(written));
          table_->PassDays(shard, written, feature);
          visit(refs[row.index], feature, f < row_bytes_.size() ? bytes + feature_bytes : nullptr);
        });
    if (!status.ok()) return status;
  }
  return Status();
}

Status RowStore::MakeHot(int s, std::vector<ColdRef> refs) {
  FeatureTable::Shard& shard = table_->shard(s);
  const auto by_number = [](const ColdRef& a, const ColdRef& b) { return a.cold < b.cold; };
  const auto is_same = [](const ColdRef& a, const ColdRef& b) { return a.cold == b.cold; };
  std::sort(refs.begin(), refs.end(), by_number);
  refs.erase(std::unique(refs.begin(), refs.end(), is_same), refs.end());
  ++shards_[s].changes;
  return ReadCold(s, refs, [&](const ColdRef& ref, Feature* feature, const char* factors) {
    const int table = layout_.TableOf(feature->key);
    const ColdFeature cold = *shard.ColdAt(ref.cold);
    cold_[FileOf(cold)]->Release(cold.place);
    const int64_t local = shard.MakeHot(ref.cold, reinterpret_cast<const char*>(feature));
    Head* const head = reinterpret_cast<Head*>(shard.Payload(local));
    head->factor_row = 0;
    if (factors == nullptr) return;
    const int32_t row = AllocateRow(s, table);
    std::memcpy(Row(s, table, row), factors, row_bytes_[table]);
    head->factor_row = row + 1;
  });
}

Status RowStore::MakeCold(int s, int64_t most) {
  FeatureTable::Shard& shard = table_->shard(s);
  const size_t tables = layout_.tables.size();
  const int64_t feature_bytes = table_->feature_bytes();
  std::vector<std::pair<uint64_t, int64_t>> hot;  // when it was last seen, local id
  std::vector<int64_t> counts(tables + 1);        // of rows, of features
  for (int64_t local = 0; local < shard.end(); ++local) {
    const Feature& feature = *shard.At(local);
    if (feature.key < 0) continue;
    ++counts[tables];
    const int table = layout_.TableOf(feature.key);
    if (table < 0) continue;  // without rows, it has no file
    const Head* head = reinterpret_cast<Head*>(shard.Payload(local));
    counts[table] += head->factor_row > 0;
    const uint64_t day = std::numeric_limits<uint16_t>::max() - feature.unseen_days;
    hot.emplace_back(day << 32 | static_cast<uint32_t>(head->last_step), local);
  }
  const auto bytes = [&] {  // in whole chunks
    int64_t sum = 0;
    for (size_t t = 0; t <= tables; ++t) {
      const int64_t chunk = t == tables ? Places::ChunkBytes(1) : int64_t{1} << chunk_bits_[t];
      sum += (counts[t] + chunk - 1) / chunk * chunk * (t == tables ? feature_bytes : stride_[t]);
    }
    return sum;
  };
  if (bytes() <= most) return Status();
  std::sort(hot.begin(), hot.end());
  std::vector<std::vector<int64_t>> leaving(tables + 1);  // by file
  for (size_t i = 0; i < hot.size() && bytes() > most; ++i) {
    const int64_t local = hot[i].second;
    const bool has_row = reinterpret_cast<Head*>(shard.Payload(local))->factor_row > 0;
    const size_t f = has_row ? layout_.TableOf(shard.At(local)->key) : tables;
    leaving[f].push_back(local);
    --counts[tables];
    if (has_row) --counts[f];
  }
  const Days today = shard.days();
  for (size_t f = 0; f <= tables; ++f) {
    const int64_t n = leaving[f].size();
    if (n == 0) continue;
    const int64_t row_bytes = f < tables ? row_bytes_[f] : 0;
    const int64_t record = feature_bytes + row_bytes + static_cast<int64_t>(sizeof(today));
    // Those in chunks that are at most half full move along, so that the file does not grow for
    // ever.
    const std::vector<bool> sparse = cold_[f]->SparseChunks();
    std::vector<ColdRef> moving;
    shard.cold().ForEach<ColdFeature>([&](int64_t cold, const ColdFeature* kept) {
      if (FileOf(*kept) != f || !sparse[cold_[f]->ChunkOf(kept->place)]) return;
      moving.push_back({cold, n + static_cast<int64_t>(moving.size())});
    });
    std::vector<int64_t> keys(n + moving.size());
    std::vector<char> records(keys.size() * record);
    const auto put = [&](int64_t i, const Feature* feature, const char* row) {
      char* const to = &records[i * record];
      std::memcpy(to, feature, feature_bytes);
      if (row_bytes > 0) std::memcpy(to + feature_bytes, row, row_bytes);
      std::memcpy(to + feature_bytes + row_bytes, &today, sizeof(today));
      keys[i] = feature->key;
    };
    for (int64_t i = 0; i < n; ++i) {
      Feature* const feature = shard.At(leaving[f][i]);
      put(i, feature, f < tables ? Row(s, f, HeadOf(feature)->factor_row - 1) : nullptr);
    }
    Status status = ReadCold(s, moving, [&](const ColdRef& ref, Feature* feature, const char* row) {
      put(ref.index, feature, row);
    });
    std::vector<int32_t> places;
    if (status.ok()) status = cold_[f]->Write(keys, records.data(), &places);
    if (!status.ok()) return status;
    for (int64_t i = 0; i < n; ++i) {
      Feature* const feature = shard.At(leaving[f][i]);
      ColdFeature cold = {};
      cold.place = places[i];
      cold.flags = f < tables ? ColdFeature::kHasFactors : 0;
      table_->Foresee(shard, *feature, &cold);
      FreeRow(s, feature, HeadOf(feature));
      shard.MakeCold(leaving[f][i], cold);
    }
    for (const ColdRef& ref : moving) {
      ColdFeature* const cold = shard.ColdAt(ref.cold);
      cold_[f]->Release(cold->place);
      cold->place = places[ref.index];
    }
  }
  shard.Compact(true);
  CompactRows(s, true);
  ++shards_[s].changes;
  return Status();
}

Status RowStore::KeepLimit(const ParallelFor& parallel_for) {
  if (limit_ == 0) return Status();
  std::lock_guard<std::mutex> limiting(limiting_);
  for (int tried = 0;; tried += kLimited) {
    const int64_t hot = table_->HotBytes();
    const int64_t fixed = table_->Bytes() - hot;
    // An eighth less than a shard's share, so that the next steps need not come here again.
    share_ = std::max<int64_t>(0, limit_ - fixed) / kShards * 7 / 8;
    if (fixed + hot + row_bytes_in_memory_ <= limit_) return Status();
    if (tried == 3 * kShards) {
      return Status::ResourceExhausted(
          "memory_limit: found " + std::to_string(limit_) + " bytes, while the index of " +
          std::to_string(table_->Size()) + " features takes " + std::to_string(fixed) +
          ", which cannot lie on disk; wanted a higher limit");
    }
    FirstError error;
    parallel_for(kLimited, 1000000, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int s = (next_limited_ + static_cast<int>(i)) % kShards;
        std::lock_guard<std::mutex> lock(table_->shard(s).mutex);
        error.Note(MakeCold(s, share_));
      }
    });
    next_limited_ = (next_limited_ + kLimited) % kShards;
    if (!error.status().ok()) return error.status();
  }
}

Status RowStore::CheckKeysAndTables(const int64_t* keys, int64_t n) const {
  const Status status = CheckKeys(keys, n);
  if (!status.ok()) return status;
  for (int64_t i = 0; i < n; ++i) {
    if (layout_.TableOf(keys[i]) < 0) {
      return Status::InvalidArgument(
          "keys[" + std::to_string(i) + "]: found " + std::to_string(keys[i]) + " of slot " +
          std::to_string(SlotOf(keys[i])) + "; wanted a slot that has a table");
    }
  }
  return Status();
}

Status RowStore::Pull(const int64_t* keys, int64_t n, bool train, const ParallelFor& parallel_for,
                      int64_t* ids, int32_t* offsets, float* linear,
                      const std::function<float*(int64_t)>& allocate_factors) {
  const ShardGroups groups = GroupByShard(keys, n);
  std::atomic<bool> right(true);  // each key has a table
  const bool at_once = train && table_->policy().admission == Policy::Admission::kNone;
  std::vector<int32_t> rows(n);           // the factor row of each key, -1 if it has none
  std::vector<int64_t> changes(kShards);  // a shard's count when its rows were looked up
  FirstError error;
  const int64_t cost = 40 * n / kShards + 50;
  parallel_for(kShards, cost, [&](int64_t first, int64_t last) {
    uint64_t mixed[kGroup];
    for (int64_t s = first; s < last; ++s) {
      if (groups.starts[s] == groups.starts[s + 1]) continue;
      FeatureTable::Shard& shard = table_->shard(s);
      std::lock_guard<std::mutex> lock(shard.mutex);
      const auto look = [&](int64_t i, int64_t local) {
        const Head* head = local < 0 ? nullptr : reinterpret_cast<Head*>(shard.Payload(local));
        ids[i] = local < 0 ? -1 : IdOf(s, local);
        linear[i] = head == nullptr ? -0.0f : head->linear + 0.0f;  // -0 + 0 is 0
        rows[i] = head == nullptr ? -1 : head->factor_row - 1;
        const bool has_row = rows[i] != -1 || at_once;
        offsets[i + 1] = has_row ? layout_.tables[layout_.TableOf(keys[i])].width : 0;
      };
      std::vector<ColdRef> refs;
      for (int64_t begin = groups.starts[s]; begin < groups.starts[s + 1]; begin += kGroup) {
        const int count = static_cast<int>(std::min<int64_t>(kGroup, groups.starts[s + 1] - begin));
        for (int k = 0; k < count; ++k) {
          mixed[k] = Mix64(keys[groups.At(begin + k)]);
          shard.PrefetchIndex(mixed[k]);
        }
        for (int k = 0; k < count; ++k) shard.PrefetchFeature(mixed[k]);
        for (int k = 0; k < count; ++k) {
          const int64_t i = groups.At(begin + k);
          if (layout_.TableOf(keys[i]) < 0 || keys[i] < 0) {
            right = false;
            return;
          }
          const int64_t found = shard.Find(keys[i], mixed[k]);
          if (FeatureTable::Shard::IsCold(found)) {
            refs.push_back({FeatureTable::Shard::ColdOf(found), i});
          } else {
            look(i, found);
          }
        }
      }
      for (const ColdRef& ref : refs) {
        const int64_t i = ref.index;
        const bool has_factors = shard.ColdAt(ref.cold)->flags & ColdFeature::kHasFactors;
        rows[i] = kOnDisk;
        offsets[i + 1] =
            has_factors || at_once ? layout_.tables[layout_.TableOf(keys[i])].width : 0;
      }
      const std::vector<std::vector<ColdFile::Row>> of_files = ByFile(s, refs);
      for (size_t f = 0; f < of_files.size(); ++f) cold_[f]->Announce(of_files[f]);
      changes[s] = shards_[s].changes;
    }
  });
  if (!right) return CheckKeysAndTables(keys, n);
  int64_t total = 0;
  offsets[0] = 0;
  for (int64_t i = 0; i < n; ++i) {
    total += offsets[i + 1];
    offsets[i + 1] = static_cast<int32_t>(total);
  }
  if (total > std::numeric_limits<int32_t>::max()) {
    return Status::InvalidArgument("keys: their factors are " + std::to_string(total) +
                                   " floats; wanted at most 2^31 - 1");
  }
  float* const factors = allocate_factors(total);
  if (factors == nullptr) return Status();
  parallel_for(kShards, cost, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = groups.starts[s], end = groups.starts[s + 1];
      if (begin == end) continue;
      FeatureTable::Shard& shard = table_->shard(s);
      std::lock_guard<std::mutex> lock(shard.mutex);
      const bool intact = changes[s] == shards_[s].changes;
      const auto copy = [&](int64_t i, const char* row) {  // null: it has none
        const int width = offsets[i + 1] - offsets[i];
        float* const to = factors + offsets[i];
        if (row == nullptr) {
          std::memset(to, 0, sizeof(float) * width);
        } else if (layout_.tables[layout_.TableOf(keys[i])].bfloat16) {
          Widen(reinterpret_cast<const uint16_t*>(row), width, to);
        } else {
          std::memcpy(to, row, sizeof(float) * width);
        }
      };
      // For a feature that may have moved since the first pass over the keys.
      const auto copy_found = [&](int64_t i, int64_t local) {
        const Head* head = reinterpret_cast<Head*>(shard.Payload(local));
        const int table = layout_.TableOf(keys[i]);
        ids[i] = IdOf(s, local);
        linear[i] = head->linear + 0.0f;
        if (head->factor_row == 0 && at_once) {
          InitialWeights(keys[i], table, factors + offsets[i]);
        } else {
          copy(i, head->factor_row == 0 ? nullptr : Row(s, table, head->factor_row - 1));
        }
      };
      std::vector<ColdRef> refs;
      for (int64_t at = begin; at < end; ++at) {
        if (at + kAhead < end) {
          const int64_t next = groups.At(at + kAhead);
          if (intact && rows[next] >= 0) {
            const int table = layout_.TableOf(keys[next]);
            const RowTable& t = layout_.tables[table];
            Prefetch(Row(s, table, rows[next]),
                     t.width * (t.bfloat16 ? sizeof(uint16_t) : sizeof(float)));
          }
        }
        const int64_t i = groups.At(at);
        const int width = offsets[i + 1] - offsets[i];
        const bool was_on_disk = rows[i] == kOnDisk;
        if (width == 0 && !was_on_disk) continue;
        const int table = layout_.TableOf(keys[i]);
        if (rows[i] == -1) {
          InitialWeights(keys[i], table, factors + offsets[i]);
          continue;
        }
        if (intact && !was_on_disk) {
          copy(i, Row(s, table, rows[i]));
          continue;
        }
        const int64_t found = shard.Find(keys[i], Mix64(keys[i]));
        if (FeatureTable::Shard::IsCold(found)) {
          refs.push_back({FeatureTable::Shard::ColdOf(found), i});
        } else if (found >= 0) {
          copy_found(i, found);
        } else {  // an eviction has deleted it since the first pass
          if (was_on_disk) ids[i] = -1, linear[i] = -0.0f;
          copy(i, nullptr);
        }
      }
      if (refs.empty()) continue;
      if (!train) {
        error.Note(ReadCold(s, refs, [&](const ColdRef& ref, Feature* feature, const char* row) {
          ids[ref.index] = IdOf(s, ref.cold);  // of no place in memory; it says that it exists
          linear[ref.index] = HeadOf(feature)->linear + 0.0f;
          copy(ref.index, row);
        }));
        continue;
      }
      const Status hot = MakeHot(s, refs);
      error.Note(hot);
      if (!hot.ok()) continue;
      for (const ColdRef& ref : refs)
        copy_found(ref.index, shard.Find(keys[ref.index], Mix64(keys[ref.index])));
    }
  });
  return error.status();
}

bool RowStore::LooksRight(const RowPush& push, const ParallelFor& parallel_for) const {
  constexpr int64_t kBlock = 1024;
  std::atomic<bool> right(push.offsets[0] == 0 && FindNotFinite(push.scale, push.scale_n) < 0);
  parallel_for((push.n + kBlock - 1) / kBlock, kBlock * 10, [&](int64_t first, int64_t last) {
    const int64_t begin = first * kBlock, end = std::min(push.n, last * kBlock);
    bool good = true;
    for (int64_t i = begin; i < end; ++i) {
      const int table = layout_.TableOf(push.keys[i]);
      const int width = push.offsets[i + 1] - push.offsets[i];
      const float show = push.shows[i], click = push.clicks[i];
      good &=
          push.keys[i] >= 0 && table >= 0 && (width == 0 || width == layout_.tables[table].width);
      good &= show >= 0.0f && click >= 0.0f && show <= kMaxCount && click <= kMaxCount &&
              (click <= show || show == 0.0f);
    }
    good = good && FindNotFinite(push.linear_grad + begin, end - begin) < 0;
    good = good && FindNotFinite(push.factors_grad + push.offsets[begin],
                                 push.offsets[end] - push.offsets[begin]) < 0;
    if (!good) right = false;
  });
  return right;
}

Status RowStore::CheckPush(const RowPush& push) const {
  const int64_t n = push.n;
  Status status = CheckKeysAndTables(push.keys, n);
  if (status.ok()) status = CheckCounts(push.shows, push.clicks, n);
  if (!status.ok()) return status;
  if (push.offsets[0] != 0)
    return Status::InvalidArgument("offsets[0]: found " + std::to_string(push.offsets[0]) +
                                   "; wanted 0");
  for (int64_t i = 0; i < n; ++i) {
    const int64_t width = static_cast<int64_t>(push.offsets[i + 1]) - push.offsets[i];
    const int wanted = layout_.tables[layout_.TableOf(push.keys[i])].width;
    if (width != 0 && width != wanted) {
      return Status::InvalidArgument("offsets[" + std::to_string(i + 1) + "]: found a range of " +
                                     std::to_string(width) + "; wanted 0 or " +
                                     std::to_string(wanted));
    }
  }
  const auto not_finite = [&](const char* name, int64_t i, const float* x, int64_t at) {
    return Status::OutOfRange(
        std::string(name) + "[" + std::to_string(at) + "]: found " + std::to_string(x[at]) +
        (i < 0 ? "" : ", of key " + std::to_string(push.keys[i])) + "; wanted a finite number");
  };
  int64_t bad = FindNotFinite(push.linear_grad, n);
  if (bad >= 0) return not_finite("linear_grad", bad, push.linear_grad, bad);
  bad = FindNotFinite(push.factors_grad, push.offsets[n]);
  if (bad >= 0) {
    const int64_t i = std::upper_bound(push.offsets, push.offsets + n + 1, bad) - push.offsets - 1;
    return not_finite("factors_grad", i, push.factors_grad, bad);
  }
  bad = FindNotFinite(push.scale, push.scale_n);
  if (bad >= 0) return not_finite("scale", push.scale_n == n ? bad : -1, push.scale, bad);
  return Status();
}

Status RowStore::MakeSteps(const RowHyper* hyper, int64_t step, std::vector<RowStep>* steps) const {
  for (size_t t = 0; t < layout_.tables.size(); ++t) {
    for (int part = 0; part < 2; ++part) {
      const RowRule* rule = part == 0 ? layout_.tables[t].linear : layout_.tables[t].factors;
      const std::string wrong = CheckRowHyper(rule, hyper[2 * t + part]);
      if (!wrong.empty()) {
        return Status::InvalidArgument("hyper[" + std::to_string(t) + ", " + std::to_string(part) +
                                       "]: " + wrong);
      }
      steps->emplace_back(rule, hyper[2 * t + part], step);
    }
  }
  return Status();
}

Status RowStore::Push(const RowPush& push, const ParallelFor& parallel_for) {
  const int64_t n = push.n;
  if (push.step < 1 || push.step > std::numeric_limits<int32_t>::max()) {
    return Status::InvalidArgument("step: found " + std::to_string(push.step) +
                                   "; wanted 1 to 2^31 - 1");
  }
  std::vector<RowStep> steps;
  Status status = MakeSteps(push.hyper, push.step, &steps);
  if (status.ok() && !LooksRight(push, parallel_for)) status = CheckPush(push);
  if (!status.ok()) return status;

  const ShardGroups groups = GroupByShard(push.keys, n);
  const bool at_once = table_->policy().admission == Policy::Admission::kNone;
  const int stride_end = static_cast<int>(sizeof(Feature) + table_->payload_bytes()) - 1;
  const int step = static_cast<int>(push.step);
  const uint64_t rounding_seed = RoundingSeed(layout_.seed, push.step);
  FirstError error;
  parallel_for(kShards, 60 * n / kShards + 50, [&](int64_t first, int64_t last) {
    int64_t locals[kGroup];
    std::vector<float> wide(widest_bfloat16_);  // a row in float32
    for (int64_t s = first; s < last; ++s) {
      if (groups.starts[s] == groups.starts[s + 1]) continue;
      FeatureTable::Shard& shard = table_->shard(s);
      std::lock_guard<std::mutex> lock(shard.mutex);
      const auto give_factors = [&](int64_t key, int table, Head* head) {
        const RowTable& t = layout_.tables[table];
        if (t.width == 0) return;
        const int32_t row = AllocateRow(s, table);
        char* const kept = Row(s, table, row);
        float* const w = t.bfloat16 ? wide.data() : Floats(kept);
        InitialWeights(key, table, w);
        InitRowState(steps[2 * table + 1], t.width, w, w + t.width);
        if (t.bfloat16) RoundToNearest(w, t.row_size(), Bits(kept));
        head->factor_row = row + 1;
      };
      for (int64_t begin = groups.starts[s]; begin < groups.starts[s + 1]; begin += kGroup) {
        const int count = static_cast<int>(std::min<int64_t>(kGroup, groups.starts[s + 1] - begin));
        for (int k = 0; k < count; ++k) {
          const int64_t id = push.ids[groups.At(begin + k)];
          const int64_t local = id & 0xffffffff;
          locals[k] = id >> 32 == s && local < shard.end() ? local : -1;
          if (locals[k] < 0) {
            shard.PrefetchIndex(Mix64(push.keys[groups.At(begin + k)]));
            continue;
          }
          const char* feature = reinterpret_cast<const char*>(shard.At(local));
          __builtin_prefetch(feature, 1);
          __builtin_prefetch(feature + stride_end, 1);
        }
        for (int k = 0; k < count; ++k) {
          if (locals[k] < 0) continue;
          const int64_t i = groups.At(begin + k);
          if (shard.At(locals[k])->key != push.keys[i]) {
            locals[k] = -1;
            continue;
          }
          const int32_t row = reinterpret_cast<Head*>(shard.Payload(locals[k]))->factor_row - 1;
          const int table = layout_.TableOf(push.keys[i]);
          if (row >= 0) Prefetch(Row(s, table, row), row_bytes_[table]);
        }
        for (int k = 0; k < count; ++k) {
          const int64_t i = groups.At(begin + k), key = push.keys[i];
          bool created;
          int64_t local =
              locals[k] >= 0 ? locals[k] : shard.FindOrCreate(key, Mix64(key), -1, &created);
          if (FeatureTable::Shard::IsCold(local)) {  // it went since the pull
            const Status hot = MakeHot(s, {{FeatureTable::Shard::ColdOf(local), i}});
            if (!hot.ok()) return error.Note(hot);
            local = shard.Find(key, Mix64(key));
          }
          Feature* const feature = shard.At(local);
          Head* const head = reinterpret_cast<Head*>(shard.Payload(local));
          const int table = layout_.TableOf(key);
          const RowTable& t = layout_.tables[table];
          const int width = t.width;
          bool train_factors = push.offsets[i + 1] > push.offsets[i];
          const float* const factors_grad = push.factors_grad + push.offsets[i];
          if (train_factors && at_once && head->factor_row == 0) give_factors(key, table, head);
          train_factors = train_factors && head->factor_row != 0;
          char* const kept = train_factors ? Row(s, table, head->factor_row - 1) : nullptr;
          float* const w = t.bfloat16 ? wide.data() : Floats(kept);
          if (train_factors && t.bfloat16) Widen(Bits(kept), t.row_size(), w);
          const RowStep* const two = &steps[2 * table];
          if (head->last_step == 0) InitRowState(two[0], 1, &head->linear, head->state());
          if (push.add) {
            AddToRow(two[0], 1, push.linear_grad + i, &head->linear, head->state());
            if (train_factors) AddToRow(two[1], width, factors_grad, w, w + width);
          } else {
            const float scale = push.scale[push.scale_n == 1 ? 0 : i];
            const int64_t missed =
                head->last_step == 0 ? 0 : std::max(0, step - 1 - head->last_step);
            UpdateRow(two[0], 1, missed, scale, push.linear_grad + i, &head->linear, head->state());
            if (train_factors) UpdateRow(two[1], width, missed, scale, factors_grad, w, w + width);
            head->last_step = std::max(head->last_step, step);
          }
          if (train_factors && t.bfloat16)
            RoundByChance(w, t.row_size(), rounding_seed, key, Bits(kept));
          table_->Observe(feature, push.shows[i], push.clicks[i]);
          shard.NoteChange(local);
          if (feature->admitted && head->factor_row == 0) give_factors(key, table, head);
        }
      }
    }
  });
  status = error.status();
  return status.ok() ? KeepLimit(parallel_for) : status;
}

Status RowStore::CatchUp(const RowHyper* hyper, int64_t step, const ParallelFor& parallel_for) {
  if (step < 0 || step >= std::numeric_limits<int32_t>::max()) {
    return Status::InvalidArgument("step: found " + std::to_string(step) +
                                   "; wanted one in [0, 2^31 - 1)");
  }
  std::vector<RowStep> steps;
  // The missed steps come before step + 1.
  const Status status = MakeSteps(hyper, step + 1, &steps);
  if (!status.ok()) return status;
  const uint64_t rounding_seed = RoundingSeed(layout_.seed, step);
  FirstError error;
  parallel_for(kShards, 100000, [&](int64_t first, int64_t last) {
    std::vector<float> wide(widest_bfloat16_);
    for (int64_t s = first; s < last; ++s) {
      FeatureTable::Shard& shard = table_->shard(s);
      std::lock_guard<std::mutex> lock(shard.mutex);
      std::vector<ColdRef> refs;
      shard.cold().ForEach<ColdFeature>(
          [&](int64_t cold, const ColdFeature*) { refs.push_back({cold, 0}); });
      if (!refs.empty()) error.Note(MakeHot(s, refs));
      for (int64_t local = 0; local < shard.end(); ++local) {
        const Feature* const feature = shard.At(local);
        if (feature->key < 0) continue;
        Head* const head = reinterpret_cast<Head*>(shard.Payload(local));
        const int table = layout_.TableOf(feature->key);
        if (table < 0 || head->last_step == 0 || head->last_step >= step) continue;
        const int64_t missed = step - head->last_step;
        TakeMissedSteps(steps[2 * table], 1, missed, &head->linear, head->state());
        const RowStep& of_factors = steps[2 * table + 1];
        if (head->factor_row > 0 && of_factors.catches_up) {
          const RowTable& t = layout_.tables[table];
          char* const kept = Row(s, table, head->factor_row - 1);
          float* const w = t.bfloat16 ? wide.data() : Floats(kept);
          if (t.bfloat16) Widen(Bits(kept), t.row_size(), w);
          TakeMissedSteps(of_factors, t.width, missed, w, w + t.width);
          if (t.bfloat16) RoundByChance(w, t.row_size(), rounding_seed, feature->key, Bits(kept));
        }
        head->last_step = static_cast<int32_t>(step);
        shard.NoteChange(local);
      }
      if (!refs.empty()) error.Note(MakeCold(s, share_));
    }
  });
  return error.status();
}

Status RowStore::ExportRows(const int64_t* keys, const bool* admitted, int64_t n, float* linear,
                            int32_t* last_step, const std::vector<char*>& factors) const {
  const Status status = CheckKeysAndTables(keys, n);
  if (!status.ok()) return status;
  const int linear_floats = layout_.linear_floats();
  std::vector<char*> next = factors;
  std::vector<char*> to(n);
  for (int64_t i = 0; i < n; ++i) {
    if (!admitted[i]) continue;
    const int table = layout_.TableOf(keys[i]);
    to[i] = next[table];
    next[table] += row_bytes_[table];
  }
  const ShardGroups groups = GroupByShard(keys, n);
  const auto write_linear = [&](int64_t i, const Head* head) {
    std::memcpy(linear + i * linear_floats, &head->linear, sizeof(float) * linear_floats);
    last_step[i] = head->last_step;
  };
  const auto write_initial = [&](int64_t i) {
    const int table = layout_.TableOf(keys[i]);
    const RowTable& t = layout_.tables[table];
    std::vector<float> w(t.row_size());
    InitialWeights(keys[i], table, w.data());
    if (t.bfloat16) {
      RoundToNearest(w.data(), t.row_size(), Bits(to[i]));
    } else {
      std::memcpy(to[i], w.data(), row_bytes_[table]);
    }
  };
  for (int s = 0; s < kShards; ++s) {
    if (groups.starts[s] == groups.starts[s + 1]) continue;
    FeatureTable::Shard& shard = table_->shard(s);
    std::lock_guard<std::mutex> lock(shard.mutex);
    std::vector<ColdRef> refs;
    for (int64_t at = groups.starts[s]; at < groups.starts[s + 1]; ++at) {
      if (at + 8 < groups.starts[s + 1]) shard.PrefetchFeature(Mix64(keys[groups.At(at + 8)]));
      const int64_t i = groups.At(at);
      const int64_t found = shard.Find(keys[i], Mix64(keys[i]));
      if (FeatureTable::Shard::IsCold(found)) {
        refs.push_back({FeatureTable::Shard::ColdOf(found), i});
        continue;
      }
      const Head* head = found < 0 ? nullptr : reinterpret_cast<Head*>(shard.Payload(found));
      if (head == nullptr) {
        std::fill_n(linear + i * linear_floats, linear_floats, 0.0f);
        last_step[i] = 0;
      } else {
        write_linear(i, head);
      }
      if (!admitted[i]) continue;
      const int table = layout_.TableOf(keys[i]);
      if (head != nullptr && head->factor_row != 0) {
        std::memcpy(to[i], Row(s, table, head->factor_row - 1), row_bytes_[table]);
      } else {
        write_initial(i);
      }
    }
    const Status read =
        ReadCold(s, refs, [&](const ColdRef& ref, Feature* feature, const char* row) {
          const int64_t i = ref.index;
          write_linear(i, HeadOf(feature));
          if (admitted[i] && row == nullptr) write_initial(i);
          if (admitted[i] && row != nullptr)
            std::memcpy(to[i], row, row_bytes_[layout_.TableOf(keys[i])]);
        });
    if (!read.ok()) return read;
  }
  return Status();
}

Status RowStore::ImportRows(const int64_t* keys, const bool* admitted, int64_t n,
                            const float* linear, const int32_t* last_step,
                            const std::vector<const char*>& factors) {
  const Status status = CheckKeysAndTables(keys, n);
  if (!status.ok()) return status;
  const int linear_floats = layout_.linear_floats();
  std::vector<const char*> next = factors;
  std::vector<const char*> from(n);
  for (int64_t i = 0; i < n; ++i) {
    if (!admitted[i]) continue;
    const int table = layout_.TableOf(keys[i]);
    from[i] = next[table];
    next[table] += row_bytes_[table];
  }
  const ShardGroups groups = GroupByShard(keys, n);
  // The first round only checks: if any key is wrong, nothing changes.
  for (const bool change : {false, true}) {
    for (int s = 0; s < kShards; ++s) {
      if (groups.starts[s] == groups.starts[s + 1]) continue;
      FeatureTable::Shard& shard = table_->shard(s);
      std::lock_guard<std::mutex> lock(shard.mutex);
      const Status hot = table_->MakeKeysHot(s, groups, keys);
      if (!hot.ok()) return hot;
      for (int64_t at = groups.starts[s]; at < groups.starts[s + 1]; ++at) {
        if (at + 8 < groups.starts[s + 1]) shard.PrefetchFeature(Mix64(keys[groups.At(at + 8)]));
        const int64_t i = groups.At(at);
        const int64_t local = shard.Find(keys[i], Mix64(keys[i]));
        Head* const head = local < 0 ? nullptr : reinterpret_cast<Head*>(shard.Payload(local));
        if (!change) {
          if (head != nullptr && head->factor_row == 0) continue;
          return Status::InvalidArgument(
              "keys[" + std::to_string(i) + "]: found " + std::to_string(keys[i]) +
              (head == nullptr ? ", which is absent" : ", which has its row already") +
              "; wanted a feature that was just imported");
        }
        if (head == nullptr) continue;  // an eviction has deleted it since the first round
        std::memcpy(&head->linear, linear + i * linear_floats, sizeof(float) * linear_floats);
        head->last_step = last_step[i];
        const int table = layout_.TableOf(keys[i]);
        if (!admitted[i] || layout_.tables[table].width == 0) continue;
        // The key repeats, or a push has admitted it since, if it has a row now.
        if (head->factor_row == 0) head->factor_row = AllocateRow(s, table) + 1;
        std::memcpy(Row(s, table, head->factor_row - 1), from[i], row_bytes_[table]);
      }
    }
  }
  return KeepLimit(Serial);
}

int64_t RowStore::ColdSize() const {
  int64_t rows = 0;
  for (const auto& file : cold_) rows += file->size();
  return rows;
}

int64_t RowStore::Bytes() const {
  int64_t bytes = sizeof(RowStore) + static_cast<int64_t>(shards_.capacity() * sizeof(ShardRows));
  for (const auto& arena : arenas_) bytes += arena->Bytes();
  for (int s = 0; s < kShards; ++s) {
    std::lock_guard<std::mutex> lock(table_->shard(s).mutex);
    bytes += static_cast<int64_t>(shards_[s].tables.capacity() * sizeof(FactorRows));
    for (const FactorRows& rows : shards_[s].tables)
      bytes += static_cast<int64_t>(rows.chunks.capacity() * sizeof(char*));
  }
  return bytes;
}

}  // namespace ctr

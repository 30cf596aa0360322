#include "ops/cc/data/keys.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string_view>

#include "ops/cc/data/farmhash.h"

namespace ctr {
namespace {

constexpr uint64_t kHashMask = (uint64_t{1} << kHashBits) - 1;

bool IsSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

int64_t KeyOf(std::string_view text, int64_t slot_id) {
  const uint64_t hash = Fingerprint64(text.data(), text.size()) & kHashMask;
  return slot_id << kHashBits | static_cast<int64_t>(hash);
}

// Returns 12 for 12.00, 0 for -0.0, true for True and TRUE, false likewise; any other text as it
// is.
std::string_view Canonical(std::string_view text) {
  if (text == "True" || text == "TRUE") return "true";
  if (text == "False" || text == "FALSE") return "false";
  size_t end = text.size();
  while (end > 0 && text[end - 1] == '0') --end;
  if (end == text.size() || end < 2 || text[end - 1] != '.') return text;
  --end;  // of the digits before the point
  const size_t begin = text[0] == '-';
  const auto is_digit = [](char c) { return '0' <= c && c <= '9'; };
  if (begin == end || !std::all_of(text.data() + begin, text.data() + end, is_digit)) return text;
  if (text.substr(0, end) == "-0") return text.substr(1, 1);
  return text.substr(0, end);
}

}  // namespace

void KeysOfTexts(const char* bytes, const int32_t* offsets, int64_t n, int64_t slot_id,
                 int64_t* keys) {
  for (int64_t i = 0; i < n; ++i) {
    const char *begin = bytes + offsets[i], *end = bytes + offsets[i + 1];
    while (begin < end && IsSpace(*begin)) ++begin;
    while (begin < end && IsSpace(end[-1])) --end;
    const std::string_view text(begin, end - begin);
    keys[i] = text.empty() ? kNoFeature : KeyOf(Canonical(text), slot_id);
  }
}

void KeysOfIntegers(const int64_t* values, int64_t n, int64_t slot_id, int64_t* keys) {
  char text[24];
  for (int64_t i = 0; i < n; ++i) {
    const char* end = std::to_chars(text, text + sizeof(text), values[i]).ptr;
    keys[i] = KeyOf(std::string_view(text, end - text), slot_id);
  }
}

bool ctr_text_keys(const char* bytes, int64_t size, const int32_t* offsets, int64_t n,
                   int64_t slot_id, int64_t* keys) {
  bool good = offsets[0] >= 0 && offsets[n] <= size;
  for (int64_t i = 0; i < n; ++i) good &= offsets[i] <= offsets[i + 1];
  if (good) KeysOfTexts(bytes, offsets, n, slot_id, keys);
  return good;
}

void ctr_integer_keys(const int64_t* values, int64_t n, int64_t slot_id, int64_t* keys) {
  KeysOfIntegers(values, n, slot_id, keys);
}

namespace {

constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15ULL;
// A bit that is set in the hash of every field, unless it holds one feature of value 1: its hash is
// the key.
constexpr uint64_t kCompared = uint64_t{1} << 63;

}  // namespace

// Makes an empty table of 2^bits entries.
void FieldCoder::Clear(int bits) {
  table_.assign(size_t{1} << bits, Entry{0, -1});
  shift_ = 64 - bits;
}

// Makes the table four times as large; it keeps its fields.
void FieldCoder::Grow() {
  std::vector<Entry> old;
  old.swap(table_);
  Clear(64 - shift_ + 2);
  const size_t mask = table_.size() - 1;
  for (const Entry& entry : old) {
    if (entry.field < 0) continue;
    size_t at = Place(entry.hash);
    while (table_[at].field >= 0) at = (at + 1) & mask;
    table_[at] = entry;
  }
}

size_t FieldCoder::Place(uint64_t hash) const {
  // The product's upper half reaches every bit of the lower one, too.
  return (hash ^ hash >> 32) * kMultiplier >> shift_;
}

// Fills features_ and hashes_ with the fields of slot f, whose keys begin at `from`. Returns where
// those of the next slot begin.
int64_t FieldCoder::TakeSlot(const Block& block, int64_t f, int64_t from) {
  if (!block.counts) {
    for (int64_t i = 0; i < block.n; ++i) {
      const int64_t key = block.keys[from + i];
      features_[i] = {from + i, key >= 0};
      hashes_[i] = key >= 0 ? static_cast<uint64_t>(key) : kCompared;
    }
    return from + block.n;
  }
  for (int64_t i = 0; i < block.n; ++i) {
    const int32_t count = block.counts[f * block.n + i];
    features_[i] = {from, count};
    const int64_t* const keys = block.keys + from;
    const float* const values = block.values ? block.values + from : nullptr;
    from += count;
    if (count == 1 && keys[0] >= 0 && (!values || values[0] == 1)) {
      hashes_[i] = static_cast<uint64_t>(keys[0]);
      continue;
    }
    uint64_t hash = static_cast<uint64_t>(count);
    for (int32_t k = 0; k < count; ++k) {
      hash = hash * kMultiplier + static_cast<uint64_t>(keys[k]);
      if (values) {
        uint32_t bits;
        std::memcpy(&bits, values + k, sizeof(bits));
        hash = hash * kMultiplier + bits;
      }
    }
    hashes_[i] = hash | kCompared;
  }
  return from;
}

void FieldCoder::Encode(const Block& block, uint16_t* codes) {
  constexpr int kSmallest = 6;        // a table of 64 entries
  constexpr int64_t kLookAhead = 16;  // samples whose places in the table are fetched early
  const int64_t n = block.n, slots = block.slots;
  fields_of.clear();
  counts.clear();
  keys.clear();
  values.clear();
  bits_.resize(slots, kSmallest);
  hashes_.resize(n);
  features_.resize(n);
  columns_.resize(n * slots);
  // Slot by slot, so that the current table stays in the cache.
  int64_t next = 0;  // where the keys of the next slot begin
  for (int64_t f = 0; f < slots; ++f) {
    next = TakeSlot(block, f, next);
    Clear(bits_[f]);
    starts_.clear();
    const size_t before = counts.size();
    uint16_t* const column = columns_.data() + f * n;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kLookAhead < n) __builtin_prefetch(&table_[Place(hashes_[i + kLookAhead])]);
      const int64_t from = features_[i].from;
      const int32_t count = features_[i].count;
      const int64_t* const own_keys = block.keys + from;
      const float* const own_values = block.values ? block.values + from : nullptr;
      const uint64_t hash = hashes_[i];
      const auto equals = [&](int32_t field) {
        const int64_t start = starts_[field];
        return counts[before + field] == count &&
               std::equal(own_keys, own_keys + count, keys.data() + start) &&
               (!own_values || std::equal(own_values, own_values + count, values.data() + start));
      };
      const size_t mask = table_.size() - 1;
      size_t at = Place(hash);
      while (table_[at].field >= 0 &&
             !(table_[at].hash == hash && (!(hash & kCompared) || equals(table_[at].field))))
        at = (at + 1) & mask;
      int32_t field = table_[at].field;
      if (field < 0) {
        field = static_cast<int32_t>(starts_.size());
        table_[at] = {hash, field};
        starts_.push_back(keys.size());
        counts.push_back(count);
        keys.insert(keys.end(), own_keys, own_keys + count);
        if (own_values) values.insert(values.end(), own_values, own_values + count);
        if (2 * starts_.size() > table_.size()) Grow();
      }
      column[i] = static_cast<uint16_t>(field);
    }
    fields_of.push_back(starts_.size());
    bits_[f] = 64 - shift_;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t f = 0; f < slots; ++f) codes[i * slots + f] = columns_[f * n + i];
  }
}

}  // namespace ctr

#include "ops/cc/data/request.h"

#include <algorithm>

#include "ops/cc/data/keys.h"

namespace ctr {

void RequestFeatures::TakeFeature(const TextSlots& slots, int64_t slot, std::string_view text) {
  const int32_t offsets[] = {0, static_cast<int32_t>(text.size())};
  int64_t key;
  KeysOfTexts(text.data(), offsets, 1, 0, &key);
  if (key == kNoFeature) return;
  const int64_t* const end = slots.markers + slots.num_markers;
  if (slots.has_markers[slot] && std::find(slots.markers, end, key) != end) return;
  keys.push_back(slots.ids[slot] << kHashBits | key);
}

void RequestFeatures::TakeText(const TextSlots& slots, int64_t slot, std::string_view separator,
                               std::string_view text) {
  const size_t first = keys.size();
  starts_.push_back(static_cast<int32_t>(first));
  while (!separator.empty()) {
    const size_t end = text.find(separator);
    if (end == text.npos) break;
    TakeFeature(slots, slot, text.substr(0, end));
    text.remove_prefix(end + separator.size());
  }
  TakeFeature(slots, slot, text);
  const int64_t most = slots.most[slot], found = keys.size() - first;
  if (most && found > most) keys.erase(keys.begin() + first, keys.end() - most);
}

bool RequestFeatures::Read(const TextSlots& slots, std::string_view texts, const int64_t* counts,
                           const bool* is_shared, const int32_t* shared, int64_t samples) {
  keys.clear();
  places.clear();
  segments.clear();
  starts_.clear();
  first_of_.clear();
  const char* separator = slots.separators;
  bool more = true;  // texts follow
  for (int64_t s = 0; s < slots.n; ++s) {
    first_of_.push_back(starts_.size());
    const std::string_view own(separator, slots.separator_sizes[s]);
    separator += own.size();
    for (int64_t i = 0; i < counts[s]; ++i) {
      if (!more) return false;
      const size_t end = texts.find('\n');
      more = end != texts.npos;
      TakeText(slots, s, own, texts.substr(0, end));
      if (more) texts.remove_prefix(end + 1);
    }
  }
  if (more && !starts_.empty()) return false;
  starts_.push_back(static_cast<int32_t>(keys.size()));
  bool one_each = slots.n == slots.fields_of_model;
  for (int64_t b = 0; b < samples; ++b) {
    for (int64_t s = 0; s < slots.n; ++s) {
      const int64_t i = is_shared[s] ? shared[b] : b;
      if (i < 0 || i >= counts[s]) return false;
      const int64_t text = first_of_[s] + i;
      one_each &= starts_[text + 1] - starts_[text] == 1;
      for (int32_t place = starts_[text]; place < starts_[text + 1]; ++place) {
        places.push_back(place);
        segments.push_back(static_cast<int32_t>(b * slots.fields_of_model + slots.fields[s]));
      }
    }
  }
  if (one_each) segments.clear();
  return true;
}

namespace {
thread_local RequestFeatures features_of_thread;
}  // namespace

bool ctr_read_request(const TextSlots* slots, const char* texts, int64_t size,
                      const int64_t* counts, const bool* is_shared, const int32_t* shared,
                      int64_t samples, int64_t* sizes) {
  RequestFeatures& found = features_of_thread;
  if (!found.Read(*slots, {texts, static_cast<size_t>(size)}, counts, is_shared, shared, samples)) {
    return false;
  }
  sizes[0] = found.keys.size();
  sizes[1] = found.places.size();
  sizes[2] = found.segments.size();
  return true;
}

void ctr_take_request(int64_t* keys, int32_t* places, int32_t* segments) {
  const RequestFeatures& found = features_of_thread;
  std::copy(found.keys.begin(), found.keys.end(), keys);
  std::copy(found.places.begin(), found.places.end(), places);
  std::copy(found.segments.begin(), found.segments.end(), segments);
}

}  // namespace ctr

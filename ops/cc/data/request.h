// Reads the texts of a request into the features of its samples.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ctr {

// The n slots of a model that are read from texts, in the order of their fields.
struct TextSlots {
  int64_t n;
  int64_t fields_of_model;  // F; more than n if other slots are not read from texts
  const int32_t* fields;    // [n], the field of each slot
  const int64_t* ids;       // [n], of their keys
  // Between the features of a text, one slot's after another's; sizes [n], 0: a text is a feature.
  const char* separators;
  const int32_t* separator_sizes;
  const int32_t* most;      // [n], features that a sample keeps, the last ones; 0: all
  const bool* has_markers;  // [n], whether texts may be `markers`
  const int64_t* markers;   // [num_markers], missing values, as keys of slot id 0
  int64_t num_markers;
};

// The features of a request's samples. What many samples share, such as their user, is read once.
struct RequestFeatures {
  std::vector<int64_t> keys;
  std::vector<int32_t> places;    // of each feature of each sample in `keys`
  std::vector<int32_t> segments;  // sample * F + field, ascending; empty if each has one feature

  // Reads the texts of all slots, one after another, with line ends between.
  //
  // counts [n]: how many texts each slot has. is_shared [n]: whether samples share these, else they
  // have one each. shared [samples]: which of the shared ones each sample has. Returns false if
  // there are more or fewer texts than `counts` says, as where one has a line end, or if a sample's
  // is beyond them.
  bool Read(const TextSlots& slots, std::string_view texts, const int64_t* counts,
            const bool* is_shared, const int32_t* shared, int64_t samples);

 private:
  void TakeText(const TextSlots& slots, int64_t slot, std::string_view separator,
                std::string_view text);
  void TakeFeature(const TextSlots& slots, int64_t slot, std::string_view text);

  std::vector<int32_t> starts_;    // of each text, where its features begin; then the end
  std::vector<int64_t> first_of_;  // [n], the first text of each slot
};

// For ops/request.py. Reads with a `RequestFeatures` of this thread; sizes [3]: of its keys,
// places and segments.
extern "C" bool ctr_read_request(const TextSlots* slots, const char* texts, int64_t size,
                                 const int64_t* counts, const bool* is_shared,
                                 const int32_t* shared, int64_t samples, int64_t* sizes);
// Copies what this thread's last call of `ctr_read_request` has read.
extern "C" void ctr_take_request(int64_t* keys, int32_t* places, int32_t* segments);

}  // namespace ctr

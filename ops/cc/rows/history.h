// Histories: the factors of the features that each sample has in one field, in order, padded to the
// longest; and the gradient of this.
#pragma once

#include <cstdint>

#include "ops/cc/lifecycle/parallel.h"

namespace ctr {

struct HistoryBatch {
  int64_t batch = 0;                  // B, samples
  int64_t n = 0;                      // occurrences of all fields
  int64_t u = 0;                      // distinct features
  int width = 0;                      // D, the first columns of a row's factors
  const int32_t* offsets = nullptr;   // [u + 1], ascending from 0 to the length of factors
  const int32_t* segments = nullptr;  // [n] sample * fields + field, ascending; null: one of each
};

// Finds the histories in `field`: that of sample b has occurrences begins[b] ... ends[b] - 1, both
// [batch]. Returns the length of the longest, L.
int64_t FindHistories(const HistoryBatch& batch, int64_t fields, int64_t field, int64_t* begins,
                      int64_t* ends);

// Writes vectors [batch, L, width]: the factors, and 0 after a history's end and for features
// without factors; mask [batch, L]: where there are factors; places [n]: for each occurrence its
// index in mask, or -1 where it has no factors or is of another field. inverse: [n], for each
// occurrence the place of its feature in offsets. Returns false if that is not in [0, u), or a
// feature has factors but fewer than `width`.
bool GatherHistories(const HistoryBatch& batch, int64_t longest, const int64_t* begins,
                     const int64_t* ends, const int32_t* inverse, const float* factors,
                     const ParallelFor& parallel_for, float* vectors, bool* mask, int32_t* places);

// Adds up the gradients of vectors, [places_end, width], by feature: `factors` [offsets[u]]. The
// occurrences of feature j are order[starts[j]:starts[j + 1]]. Returns false if an occurrence, its
// place or the width is out of bounds.
bool HistoriesGradient(const HistoryBatch& batch, const int32_t* places, int64_t places_end,
                       const int32_t* starts, const int32_t* order, const float* gradients,
                       const ParallelFor& parallel_for, float* factors);

}  // namespace ctr

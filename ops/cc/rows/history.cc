#include "ops/cc/rows/history.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace ctr {

int64_t FindHistories(const HistoryBatch& batch, int64_t fields, int64_t field, int64_t* begins,
                      int64_t* ends) {
  int64_t longest = 0;
  const int32_t* const end = batch.segments + batch.n;
  for (int64_t b = 0; b < batch.batch; ++b) {
    const int64_t segment = b * fields + field;
    if (batch.segments == nullptr) {
      begins[b] = segment;
      ends[b] = segment + 1;
    } else {
      const int32_t* const from = std::lower_bound(batch.segments, end, segment);
      begins[b] = from - batch.segments;
      ends[b] = std::upper_bound(from, end, segment) - batch.segments;
    }
    longest = std::max(longest, ends[b] - begins[b]);
  }
  return longest;
}

bool GatherHistories(const HistoryBatch& batch, int64_t longest, const int64_t* begins,
                     const int64_t* ends, const int32_t* inverse, const float* factors,
                     const ParallelFor& parallel_for, float* vectors, bool* mask, int32_t* places) {
  const int64_t width = batch.width;
  std::fill_n(places, batch.n, -1);
  std::atomic<bool> good(true);
  parallel_for(batch.batch, longest * (10 + width / 2), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      int64_t place = b * longest;
      for (int64_t i = begins[b]; i < ends[b]; ++i, ++place) {
        const int32_t j = inverse[i];
        if (j < 0 || j >= batch.u) {
          good = false;
          return;
        }
        const int32_t offset = batch.offsets[j], columns = batch.offsets[j + 1] - offset;
        mask[place] = columns > 0;
        float* const to = vectors + place * width;
        if (columns >= width) {
          std::memcpy(to, factors + offset, sizeof(float) * width);
          places[i] = static_cast<int32_t>(place);
        } else if (columns == 0) {
          std::fill_n(to, width, 0.0f);
        } else {
          good = false;
          return;
        }
      }
      const int64_t padding = (b + 1) * longest - place;
      std::fill_n(mask + place, padding, false);
      std::fill_n(vectors + place * width, padding * width, 0.0f);
    }
  });
  return good;
}

bool HistoriesGradient(const HistoryBatch& batch, const int32_t* places, int64_t places_end,
                       const int32_t* starts, const int32_t* order, const float* gradients,
                       const ParallelFor& parallel_for, float* factors) {
  const int64_t width = batch.width;
  std::atomic<bool> good(true);
  const int64_t mean = 1 + batch.n / std::max<int64_t>(batch.u, 1);
  parallel_for(batch.u, mean * (10 + width / 2), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t columns = batch.offsets[j + 1] - batch.offsets[j];
      float* const sum = factors + batch.offsets[j];
      std::fill_n(sum, columns, 0.0f);
      for (int64_t z = starts[j]; z < starts[j + 1]; ++z) {
        const int32_t i = order[z];
        const int64_t place = i < 0 || i >= batch.n ? places_end : places[i];
        if (place < 0) continue;
        if (place >= places_end || columns < width) {
          good = false;
          return;
        }
        const float* const gradient = gradients + place * width;
        for (int64_t d = 0; d < width; ++d) sum[d] += gradient[d];
      }
    }
  });
  return good;
}

}  // namespace ctr

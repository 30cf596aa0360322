// How work is spread over cores: kernels pass TensorFlow's thread pool, tests their own threads.
#pragma once

#include <cstdint>
#include <functional>

namespace ctr {

// Calls work(begin, end) for disjoint ranges that cover [0, total), on any threads, and returns
// when all are done. cost_per_unit: about how many nanoseconds one unit takes.
using ParallelFor = std::function<void(int64_t total, int64_t cost_per_unit,
                                       const std::function<void(int64_t, int64_t)>& work)>;

inline void Serial(int64_t total, int64_t /*cost_per_unit*/,
                   const std::function<void(int64_t, int64_t)>& work) {
  work(0, total);
}

}  // namespace ctr

// Initial factors, which depend only on (seed, key, column): not on the number of processes, the
// order of keys, restarts or the CPU.
#pragma once

#include <cstdint>

namespace ctr {

// Writes factors [width], each `scale` times a standard normal number (Box and Muller 1958; within
// 6 deviations). Columns 2p and 2p + 1 come from one 64-bit hash of (seed, key, p), whose top and
// bottom 24 bits are two uniform numbers in (0, 1). It uses only additions, products, quotients and
// square roots, whose rounding does not depend on a library.
void InitialFactors(uint64_t seed, int64_t key, int width, float scale, float* factors);

}  // namespace ctr

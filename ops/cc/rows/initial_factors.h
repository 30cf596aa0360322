// Initial factors: a pure function of (seed, key, column), the same for any number of processes,
// order, restart or CPU.
#pragma once

#include <cstdint>

namespace ctr {

// Columns 2p and 2p + 1 come from one 64-bit hash of (seed, key, p), whose top and bottom 24 bits
// are two uniforms in (0, 1). normal: scale times a standard normal (Box and Muller 1958; within 6
// deviations); else uniform in (-scale, scale). Of additions, products, quotients and square roots
// only: what those round to does not depend on a library.
void InitialFactors(uint64_t seed, int64_t key, int width, bool normal, float scale,
                    float* factors);

}  // namespace ctr

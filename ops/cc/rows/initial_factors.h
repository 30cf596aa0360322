// Initial factors: a pure function of (seed, key, column), the same for any number of processes,
// order, restart or CPU.
#pragma once

#include <cstdint>

namespace ctr {

// Columns 2p and 2p + 1 come from one 64-bit hash of (seed, key, p), whose top and bottom 24 bits
// are two uniforms in (0, 1), and are scale times a standard normal (Box and Muller 1958; within 6
// deviations). It uses only additions, products, quotients and square roots, whose rounding does
// not depend on a library.
void InitialFactors(uint64_t seed, int64_t key, int width, float scale, float* factors);

}  // namespace ctr

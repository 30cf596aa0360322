// CTR_MULTIVERSION before a function compiles it for AVX-512, for AVX2 and for the baseline; the
// loader picks one. It does nothing under sanitizers, whose runtime starts after the loader has
// picked.
//
// Include this file first. It also forbids to contract products and sums, so that every CPU rounds
// alike; and a function, also one of the standard headers, is inlined only into functions with the
// same options.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math", "fp-contract=off")
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(CTR_NO_MULTIVERSION)
#define CTR_MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CTR_MULTIVERSION
#endif
// Before a helper of such a function: compiles it, with the function, for each CPU.
#define CTR_INLINE inline __attribute__((always_inline))

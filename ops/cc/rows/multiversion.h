// CTR_MULTIVERSION before a function compiles it for AVX-512, AVX2 and the baseline; the loader
// picks one. Not under sanitizers, whose runtime starts after the loader has picked.
//
// Include it first: it also keeps products and sums uncontracted, so that every CPU rounds alike,
// and functions (those of the standard headers, say) inline only into others of the same options.
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
// A helper of such a function, compiled with it for each CPU.
#define CTR_INLINE inline __attribute__((always_inline))

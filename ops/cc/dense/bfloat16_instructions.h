// The processor's instructions for products in bfloat16: AVX-512's, and the tiles of AMX.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#define CTR_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace ctr {
namespace {

// Returns whether the processor has avx512_bf16 and what else CTR_BF16 names.
bool HasVectors() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

// Returns whether the processor has amx_tile and amx_bf16, and Linux lets this process use them.
bool HasTiles() {
  static const bool has = [] {
    constexpr int kRequestPermission = 0x1023,
                  kTileData = 18;  // of arch_prctl, see Linux' x86/xstate
    unsigned a, b, c, d = 0;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    return (d >> 22 & 1) && (d >> 24 & 1) && HasVectors() &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

// The tile registers of the calling thread: 0 to 7, each of 16 rows of 64 bytes. Code between Begin
// and End may use them. `row_bytes` is the distance of two rows in memory.
struct Tiles {
  static void Begin() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static void End() { asm volatile("tilerelease" ::); }
  template <int kTile>
  static void Clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static void Load(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(row_bytes)
                 : "memory");
  }
  template <int kTile>
  static void Store(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(row_bytes) : "memory");
  }
  // sums[i][j] += Σ_k a[i][k] · b[k][j], where sums has floats, and a and b have pairs of bfloat16
  // numbers, whose product is a scalar product.
  template <int kSums, int kA, int kB>
  static void MultiplyAndAdd() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace ctr

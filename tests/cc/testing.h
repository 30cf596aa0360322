// The little that a test needs: TEST registers a function, CHECK ends the process where it does not
// hold, RunAll runs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ops/cc/lifecycle/parallel.h"

namespace testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

struct Register {
  Register(const char* name, void (*run)()) { Tests().push_back({name, run}); }
};

inline int RunAll() {
  for (const Test& test : Tests()) {
    std::printf("  %s\n", test.name);
    std::fflush(stdout);
    test.run();
  }
  return 0;
}

// Spreads work over `threads` threads of its own.
inline ctr::ParallelFor Threads(int threads) {
  return [threads](int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& work) {
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
      running.emplace_back(
          [&work, total, t, threads] { work(total * t / threads, total * (t + 1) / threads); });
    }
    for (std::thread& thread : running) thread.join();
  };
}

}  // namespace testing

#define TEST(name)                                         \
  static void name();                                      \
  static ::testing::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

#define CHECK_EQ(a, b)                                                          \
  do {                                                                          \
    if (!((a) == (b))) {                                                        \
      std::fprintf(stderr, "%s:%d: %s = %s, %s = %s\n", __FILE__, __LINE__, #a, \
                   std::to_string(a).c_str(), #b, std::to_string(b).c_str());   \
      std::exit(1);                                                             \
    }                                                                           \
  } while (false)

// The lifecycle's rules and thresholds; ops/policy.py says what each field means and checks its
// range.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/hash.h"
#include "ops/cc/lifecycle/status.h"

namespace ctr {

constexpr int kSlots = 2048;

// Bits 52..62 of a key are its slot.
inline int SlotOf(int64_t key) { return static_cast<int>(key >> 52) & (kSlots - 1); }

// The thresholds that apply to one slot.
struct Rules {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  double nonclk_coeff = 0.1;
  double clk_coeff = 1.0;
  double admission_threshold = 10.0;
  double admission_count = 10.0;
  double admission_probability = 0.1;
  double base_threshold = 1.5;    // minus infinity: off
  double delta_threshold = 0.25;  // the least positive number: any gain
  int64_t delta_keep_days = 16;   // kNever: off
  double decay = 0.98;
  double delete_threshold = 0.8;
  int64_t delete_after_unseen_days = 30;  // kNever: off
  int64_t min_age_days = 0;

  double Score(double show, double click) const {
    return (show - click) * nonclk_coeff + click * clk_coeff;
  }
};

class Policy {
 public:
  enum class Admission { kScore, kCount, kProbability, kNone };
  enum class Eviction { kScore, kUnseen, kNone };
  enum class CapacityBy { kScore, kRecency, kFrequency };

  Policy() : rules_(1), rule_of_slot_(kSlots, 0) {}

  // Reads what `ops.policy.Policy.serialize` writes: a line of pairs `name=value`, then, for each
  // slot with thresholds of its own, a line `slot name=value …`. A field that is left out keeps its
  // default.
  static Status Parse(const std::string& text, Policy* policy);

  const Rules& For(int slot) const { return rules_[rule_of_slot_[slot]]; }

  // Whether a feature with these sums of shows and clicks has earned its factors.
  bool Admits(const Rules& rules, int64_t key, double show, double click) const {
    switch (admission) {
      case Admission::kScore:
        return rules.Score(show, click) >= rules.admission_threshold;
      case Admission::kCount:
        return show >= rules.admission_count;
      case Admission::kProbability:
        return AdmitsByChance(rules.admission_probability, key, show);
      case Admission::kNone:
        break;
    }
    return true;
  }

  Admission admission = Admission::kScore;
  Eviction eviction = Eviction::kScore;
  uint64_t seed = 0;
  int64_t capacity = 0;  // how many features an eviction keeps; 0: no bound
  CapacityBy capacity_by = CapacityBy::kScore;
  bool empty_push_is_seen = true;  // whether an observation of no shows sets unseen_days to 0

 private:
  // Each whole show admits with probability p, so the number of the show that admits is distributed
  // geometrically. This number is drawn once, by inversion, from a hash of (seed, key): the answer
  // then depends only on the count, not on the pushes by which it was reached.
  bool AdmitsByChance(double p, int64_t key, double show) const {
    const double count = std::floor(show);
    if (count < 1 || p <= 0) return false;
    if (p >= 1) return true;
    const uint64_t bits = Mix64(key ^ static_cast<int64_t>(Mix64(seed + 0x9e3779b97f4a7c15ULL)));
    const double uniform = static_cast<double>(Mix64(bits + 1) >> 11) * 0x1p-53;
    return uniform < -std::expm1(count * std::log1p(-p));
  }

  std::vector<Rules> rules_;            // [0]: for every slot that has none of its own
  std::vector<uint16_t> rule_of_slot_;  // [kSlots], index into rules_
};

}  // namespace ctr

#include "ops/cc/lifecycle/policy.h"

#include <charconv>
#include <sstream>
#include <utility>

namespace ctr {
namespace {

Status Bad(const std::string& field, const std::string& value, const char* wanted) {
  return Status::InvalidArgument("policy: " + field + ": found '" + value + "'; wanted " + wanted);
}

template <typename T>
bool ReadNumber(const std::string& value, T* number) {
  const char* end = value.data() + value.size();
  const auto result = std::from_chars(value.data(), end, *number);
  return result.ec == std::errc() && result.ptr == end;
}

template <typename E>
bool ReadName(const std::string& value, std::initializer_list<std::pair<const char*, E>> names,
              E* out) {
  for (const auto& name : names) {
    if (value != name.first) continue;
    *out = name.second;
    return true;
  }
  return false;
}

// Sets a threshold by its name; InvalidArgument if the name is unknown.
Status SetRule(const std::string& field, const std::string& value, Rules* rules) {
  static constexpr std::pair<const char*, double Rules::*> kNumbers[] = {
      {"nonclk_coeff", &Rules::nonclk_coeff},
      {"clk_coeff", &Rules::clk_coeff},
      {"admission_threshold", &Rules::admission_threshold},
      {"admission_count", &Rules::admission_count},
      {"admission_probability", &Rules::admission_probability},
      {"base_threshold", &Rules::base_threshold},
      {"delta_threshold", &Rules::delta_threshold},
      {"decay", &Rules::decay},
      {"delete_threshold", &Rules::delete_threshold}};
  for (const auto& [name, member] : kNumbers) {
    if (field != name) continue;
    if (value == "null" && member == &Rules::base_threshold) {
      rules->base_threshold = -std::numeric_limits<double>::infinity();
      return Status();
    }
    if (value == "null" && member == &Rules::delta_threshold) {
      rules->delta_threshold = std::numeric_limits<double>::min();  // any gain
      return Status();
    }
    if (!ReadNumber(value, &(rules->*member)) || !std::isfinite(rules->*member))
      return Bad(field, value, "a finite number");
    return Status();
  }
  static constexpr struct {
    const char* name;
    int64_t Rules::*member;
    int64_t null;
  } kDays[] = {{"delta_keep_days", &Rules::delta_keep_days, Rules::kNever},
               {"delete_after_unseen_days", &Rules::delete_after_unseen_days, Rules::kNever},
               {"min_age_days", &Rules::min_age_days, 0}};
  for (const auto& days : kDays) {
    if (field != days.name) continue;
    if (value == "null") {
      rules->*days.member = days.null;
    } else if (!ReadNumber(value, &(rules->*days.member)) || rules->*days.member < 0) {
      return Bad(field, value, "a whole number >= 0 or null");
    }
    return Status();
  }
  return Bad(field, value, "a field of Policy");
}

}  // namespace

Status Policy::Parse(const std::string& text, Policy* policy) {
  *policy = Policy();
  std::istringstream lines(text);
  std::string line;
  for (bool first = true; std::getline(lines, line); first = false) {
    std::istringstream words(line);
    Rules* rules = &policy->rules_[0];
    std::string word;
    if (!first) {
      int slot = -1;
      if (!(words >> word) || !ReadNumber(word, &slot) || slot < 0 || slot >= kSlots) {
        return Bad("slot", word, "a whole number in [0, 2047]");
      }
      policy->rule_of_slot_[slot] = static_cast<uint16_t>(policy->rules_.size());
      policy->rules_.push_back(policy->rules_[0]);
      rules = &policy->rules_.back();
    }
    while (words >> word) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) return Bad("field", word, "name=value");
      const std::string field = word.substr(0, equals), value = word.substr(equals + 1);
      if (first && field == "admission") {
        if (!ReadName(value,
                      {{"score", Admission::kScore},
                       {"count", Admission::kCount},
                       {"probability", Admission::kProbability},
                       {"none", Admission::kNone}},
                      &policy->admission)) {
          return Bad(field, value, "score, count, probability or none");
        }
      } else if (first && field == "eviction") {
        if (!ReadName(value,
                      {{"score", Eviction::kScore},
                       {"unseen", Eviction::kUnseen},
                       {"none", Eviction::kNone}},
                      &policy->eviction)) {
          return Bad(field, value, "score, unseen or none");
        }
      } else if (first && field == "capacity_by") {
        if (!ReadName(value,
                      {{"score", CapacityBy::kScore},
                       {"recency", CapacityBy::kRecency},
                       {"frequency", CapacityBy::kFrequency}},
                      &policy->capacity_by)) {
          return Bad(field, value, "score, recency or frequency");
        }
      } else if (first && field == "empty_push_is_seen") {
        if (!ReadName(value, {{"True", true}, {"False", false}}, &policy->empty_push_is_seen))
          return Bad(field, value, "True or False");
      } else if (first && field == "seed") {
        if (!ReadNumber(value, &policy->seed))
          return Bad(field, value, "a whole number in [0, 2^64)");
      } else if (first && field == "capacity") {
        policy->capacity = 0;
        if (value != "null" && (!ReadNumber(value, &policy->capacity) || policy->capacity < 1)) {
          return Bad(field, value, "a whole number >= 1 or null");
        }
      } else {
        const Status status = SetRule(field, value, rules);
        if (!status.ok()) return status;
      }
    }
  }
  return Status();
}

}  // namespace ctr

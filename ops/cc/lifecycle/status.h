// The result of a function: ok, or an error with a message. Without exceptions and TensorFlow.
#pragma once

#include <string>
#include <utility>

namespace ctr {

class Status {
 public:
  enum Code { kOk, kInvalidArgument, kOutOfRange, kDataLoss, kAborted, kResourceExhausted };

  Status() = default;
  static Status InvalidArgument(std::string message) {
    return Status(kInvalidArgument, std::move(message));
  }
  // For a gradient that is not finite: so that callers can tell it from their own mistakes.
  static Status OutOfRange(std::string message) { return Status(kOutOfRange, std::move(message)); }
  static Status DataLoss(std::string message) { return Status(kDataLoss, std::move(message)); }
  static Status Aborted(std::string message) { return Status(kAborted, std::move(message)); }

  // For a full disk, or a limit that is too small.
  static Status ResourceExhausted(std::string message) {
    return Status(kResourceExhausted, std::move(message));
  }

  bool ok() const { return code_ == kOk; }
  Code code() const { return code_; }
  const std::string& message() const {
    return message_;
  }  // one line: argument, index, value found, value wanted

 private:
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  Code code_ = kOk;
  std::string message_;
};

}  // namespace ctr

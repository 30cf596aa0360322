// Collectives between processes over stream sockets, one after the other. TensorFlow-free.
//
// A process that has nothing for another one sends it a header of 8 bytes all the same, so that all meet in every call.
// What crosses is `int64 bytes` and as many bytes, in the machines' own order: hosts of one kind are taken for granted.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/status.h"

namespace ctr {

// Memory that is sent from, or received into.
struct Span {
  char* data;
  int64_t bytes;
};
using Spans = std::vector<Span>;

// Bytes [begin, end) of what `spans` hold together.
Spans Slice(const Spans& spans, int64_t begin, int64_t end);

class Lane {
 public:
  // fds: a connected socket to each process, which the lane owns from here on; -1 at `rank`, this process's own place.
  Lane(std::vector<int> fds, int rank);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  int size() const { return static_cast<int>(fds_.size()); }

  // Gives the memory for what comes: bytes[r] from each process r. Its failure ends the lane, here and, by its
  // connections, for all.
  using Allocate = std::function<Status(const std::vector<int64_t>& bytes, std::vector<Spans>* to)>;

  // Sends from[r] to each process r and takes what each sends here. Every process calls it, in the same order of calls;
  // one call at a time. Aborted naming the process whose connection ended; from then on every call fails.
  Status AllToAll(const std::vector<Spans>& from, const Allocate& allocate);

  // Sums floats over all processes, in the order of their ranks: the same bits everywhere. Each sums a share of them
  // and sends it to all (reduce-scatter, then all-gather), so that what travels does not grow with the number of
  // processes. own, sums: of as many floats, the same number on every process. Errors as of AllToAll, and DataLoss for
  // processes that differ in this number.
  Status AllReduce(const Spans& own, const Spans& sums);

 private:
  // One connection's part of a call.
  struct Transfer {
    int64_t header_out = 0, header_in = 0;
    Spans from, to;
    bool has_memory = false;
    int64_t sent = 0, received = 0;  // bytes, headers included

    bool all_sent() const { return sent == kHeader + header_out; }
    bool has_header() const { return received >= kHeader; }
    bool all_received() const { return has_header() && received == kHeader + header_in; }
    bool can_receive() const { return !has_header() || (has_memory && !all_received()); }
  };
  static constexpr int64_t kHeader = sizeof(int64_t);

  // What the socket takes, or has, now. false: the connection ended.
  static bool Send(int fd, Transfer* t);
  static bool Receive(int fd, Transfer* t);
  Status Broken(Status why);  // ends the lane, for the others too

  const std::vector<int> fds_;
  const int rank_;
  Status broken_;
};

}  // namespace ctr

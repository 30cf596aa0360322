// Collectives between processes over stream sockets, one after the other. TensorFlow-free.
//
// In every collective each process sends each other one a message, with no bytes where it has
// nothing to say. A message is a header and its bytes, in the machines' own byte order, which all
// hosts of a job share. The header names the operation and its place in the sequence of operations:
// processes that are out of step get an error that names both operations.
#pragma once

#include <atomic>
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

class Connections {
 public:
  // fds: a connected stream socket to each process, which this object closes in the end; -1 at
  // `rank`, the place of this process.
  Connections(std::vector<int> fds, int rank);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  int size() const { return static_cast<int>(connections_.size()); }

  // Provides the memory for what arrives: bytes[r] from each process r. Where it fails, the
  // collective fails on every process.
  using Allocate = std::function<Status(const std::vector<int64_t>& bytes, std::vector<Spans>* to)>;

  // Sends from[r] to each process r and receives what each has for this one. Every process calls
  // it; each Connections takes one call at a time.
  //
  // operation: the same on every process, such as "all_to_all int64"; its first 47 characters
  // count. Errors: Aborted names a process whose connection ended. DataLoss names a process that
  // was at another operation. After an error every call fails, here and on the other processes.
  Status AllToAll(const std::string& operation, const std::vector<Spans>& from,
                  const Allocate& allocate);

  // Sums values of type T (float, double or int64_t) over all processes, in the order of their
  // ranks: the result has the same bits everywhere. Each process sums a share of the values and
  // sends the sums to all (reduce-scatter, then all-gather), so that the bytes a process sends do
  // not grow with the number of processes.
  //
  // own, sums: of as many values, the same number on every process.
  // Errors: as AllToAll, and DataLoss for processes that differ in the number of values.
  template <typename T>
  Status AllReduce(const Spans& own, const Spans& sums);

  // What this object has done since it was made; any thread may ask.
  struct Counters {
    int64_t connections, bytes_sent, bytes_received, system_calls;
  };
  Counters counters() const;

 private:
  struct Header {
    char operation[48];
    uint64_t sequence;
    int64_t bytes;
  };
  static constexpr int64_t kHeader = sizeof(Header);

  // A connection. epoll tells a change of the first two flags once (edge-triggered): a system call
  // that moves less than it was asked to clears the flag, the next event sets it again.
  struct Connection {
    int fd;
    bool readable = true, writable = true;
    bool ended = false;  // at the other side; what it sent before may still be read
  };

  // One connection's part of an operation.
  struct Transfer {
    Header header_out = {}, header_in = {};
    Spans from, to;
    bool has_memory = false;
    int64_t sent = 0, received = 0;  // bytes, headers included

    bool all_sent() const { return sent == kHeader + header_out.bytes; }
    bool has_header() const { return received >= kHeader; }
    bool all_received() const { return has_header() && received == kHeader + header_in.bytes; }
    bool can_receive() const { return !has_header() || (has_memory && !all_received()); }
  };

  // Sends and receives what one connection takes and has at the moment.
  Status Serve(int r, Transfer* transfer);
  // false: the connection ended; errno says why, 0 where the other side closed it.
  bool Send(Connection* connection, Transfer* transfer);
  bool Receive(Connection* connection, Transfer* transfer);
  // Marks the connections that have become ready, and returns them.
  std::vector<int> Wait();
  // Makes all calls fail from here on, on the other processes too.
  Status Break(Status why);

  std::vector<Connection> connections_;
  const int rank_;
  int epoll_;
  uint64_t sequence_ = 0;
  Status broken_;
  std::atomic<int64_t> bytes_sent_{0}, bytes_received_{0}, system_calls_{0};
};

}  // namespace ctr

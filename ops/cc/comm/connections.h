// Collectives between processes over stream sockets, one after the other. Uses no TensorFlow.
//
// In every collective, each process sends a message to each other process; the message is empty if
// there is nothing to send. A message is a header, then bytes in the byte order of the machines,
// which all hosts of a job share. The header names the operation, and its number in the sequence of
// operations: processes that are out of step get an error that names both operations.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ops/cc/lifecycle/status.h"

namespace ctr {

// Memory to send from or to receive into.
struct Span {
  char* data;
  int64_t bytes;
};
using Spans = std::vector<Span>;

class Connections {
 public:
  // fds: for each process, a stream socket connected to it; -1 at `rank`, the place of this
  // process. The destructor closes them.
  Connections(std::vector<int> fds, int rank);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  int size() const { return static_cast<int>(connections_.size()); }

  // Provides the memory for what arrives: bytes[r] from each process r. If it fails, the collective
  // fails on every process.
  using Allocate = std::function<Status(const std::vector<int64_t>& bytes, std::vector<Spans>* to)>;

  // Sends from[r] to each process r, and waits for what each sends to this one. Every process calls
  // it; each Connections takes one call at a time.
  //
  // operation: the same on every process, such as "all_to_all int64"; only its first 47 characters
  // are compared. Errors: Aborted if a connection ended; DataLoss if a process runs another
  // operation. Both name the process. Aborted also if the connections cannot be watched; it gives
  // the reason. After an error, every call fails, here and on the others.
  Status AllToAll(const std::string& operation, const std::vector<Spans>& from,
                  const Allocate& allocate);

  // Counts what this object has done since it was made. Any thread may call counters().
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

  // A connection. epoll reports a change of the first two flags only once (edge-triggered): a
  // system call that moves fewer bytes than it was asked to clears its flag, and the next event
  // sets it.
  struct Connection {
    int fd;
    bool readable = true, writable = true;
    bool ended = false;  // the other side closed it; what that sent before may still be read
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

  // Sends as much as one connection takes now, and receives what it has.
  Status Serve(int r, Transfer* transfer);
  // Both return false if the connection ended; errno says why, and is 0 if the other side closed
  // it.
  bool Send(Connection* connection, Transfer* transfer);
  bool Receive(Connection* connection, Transfer* transfer);
  // Marks the connections that have become ready, and sets `ready` to them. Aborted if it cannot
  // wait.
  Status Wait(std::vector<int>* ready);
  // Makes all calls from now on fail, on the other processes too. Returns `why`.
  Status Break(Status why);

  std::vector<Connection> connections_;
  const int rank_;
  int epoll_;
  uint64_t sequence_ = 0;
  Status broken_;
  std::atomic<int64_t> bytes_sent_{0}, bytes_received_{0}, system_calls_{0};
};

}  // namespace ctr

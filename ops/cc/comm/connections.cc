#include "ops/cc/comm/connections.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace ctr {
namespace {

constexpr size_t kMaxParts = 64;                 // in one system call
constexpr int kMaxEvents = 64;                   // in one system call
constexpr int64_t kMaxBytes = int64_t{1} << 50;  // of a message; more than any machine's memory

int64_t Bytes(const Spans& spans) {
  int64_t bytes = 0;
  for (const Span& s : spans) bytes += s.bytes;
  return bytes;
}

// Fills `parts` with the bytes of `header`, then `spans`, without the first `done` bytes. Returns
// the number of parts; what has no room in them is left for the next call.
size_t Remaining(Span header, const Spans& spans, int64_t done, iovec* parts) {
  size_t n = 0;
  const auto add = [&](const Span& s) {
    const int64_t skip = std::min(done, s.bytes);
    done -= skip;
    if (s.bytes > skip && n < kMaxParts) {
      parts[n++] = {s.data + skip, static_cast<size_t>(s.bytes - skip)};
    }
  };
  add(header);
  for (const Span& s : spans) add(s);
  return n;
}

size_t Bytes(const iovec* parts, size_t n) {
  size_t bytes = 0;
  for (size_t i = 0; i < n; ++i) bytes += parts[i].iov_len;
  return bytes;
}

// Describes the error of the last system call, one of epoll's.
Status CannotWatch() {
  return Status::Aborted(std::string("connections cannot be watched: ") + std::strerror(errno));
}

void Copy(const Spans& from, const Spans& to) {
  auto t = to.begin();
  int64_t at = 0;  // in *t
  for (const Span& f : from) {
    for (int64_t done = 0; done < f.bytes;) {
      if (at == t->bytes) {
        ++t;
        at = 0;
        continue;
      }
      const int64_t n = std::min(f.bytes - done, t->bytes - at);
      std::memmove(t->data + at, f.data + done, n);
      done += n;
      at += n;
    }
  }
}

}  // namespace

Connections::Connections(std::vector<int> fds, int rank)
    : rank_(rank), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  Status broken = epoll_ < 0 ? CannotWatch() : Status();
  for (const int fd : fds) {
    if (fd >= 0) {
      fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
      epoll_event event = {};
      event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
      event.data.u32 = static_cast<uint32_t>(connections_.size());
      if (epoll_ >= 0 && epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) broken = CannotWatch();
    }
    connections_.push_back({fd});
  }
  if (!broken.ok()) Break(broken);
}

Connections::~Connections() {
  for (const Connection& connection : connections_) {
    if (connection.fd >= 0) close(connection.fd);
  }
  if (epoll_ >= 0) close(epoll_);
}

Connections::Counters Connections::counters() const {
  return {size() - 1, bytes_sent_, bytes_received_, system_calls_};
}

bool Connections::Send(Connection* connection, Transfer* t) {
  while (connection->writable && !t->all_sent()) {
    iovec parts[kMaxParts];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen =
        Remaining({reinterpret_cast<char*>(&t->header_out), kHeader}, t->from, t->sent, parts);
    const ssize_t n = sendmsg(connection->fd, &message, MSG_NOSIGNAL);
    ++system_calls_;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (n > 0) {
      t->sent += n;
      bytes_sent_ += n;
    }
    connection->writable = n == static_cast<ssize_t>(Bytes(parts, message.msg_iovlen));
  }
  return true;
}

bool Connections::Receive(Connection* connection, Transfer* t) {
  while (connection->readable && t->can_receive()) {
    iovec parts[kMaxParts];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen =
        Remaining({reinterpret_cast<char*>(&t->header_in), kHeader}, t->to, t->received, parts);
    const ssize_t n = recvmsg(connection->fd, &message, 0);
    ++system_calls_;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (n == 0) {
      errno = 0;
      return false;
    }
    if (n > 0) {
      t->received += n;
      bytes_received_ += n;
    }
    // A stream that gave less than was asked for is empty. If the other side has ended it, it stays
    // readable, so that the next read meets the end.
    connection->readable =
        n == static_cast<ssize_t>(Bytes(parts, message.msg_iovlen)) || (n > 0 && connection->ended);
  }
  return true;
}

Status Connections::Serve(int r, Transfer* t) {
  const bool had_header = t->has_header();
  if (!Send(&connections_[r], t) || !Receive(&connections_[r], t)) {
    return Status::Aborted("rank " + std::to_string(r) + " is gone: its connection ended (" +
                           (errno == 0 ? "closed by that side" : std::strerror(errno)) + ")");
  }
  if (had_header || !t->has_header()) return Status();
  Header& in = t->header_in;
  in.operation[sizeof(in.operation) - 1] = '\0';
  const Header& out = t->header_out;
  if (in.bytes >= 0 && in.bytes <= kMaxBytes && in.sequence == out.sequence &&
      !std::strcmp(in.operation, out.operation)) {
    return Status();
  }
  for (char& c : in.operation) {
    if (c != '\0' && (c < ' ' || c > '~')) c = '?';  // whoever reads the message wants text
  }
  return Status::DataLoss("ranks are out of step: operation " + std::to_string(out.sequence) +
                          " of rank " + std::to_string(rank_) + " is '" + out.operation +
                          "', rank " + std::to_string(r) + " sent operation " +
                          std::to_string(in.sequence) + ", '" + in.operation + "', of " +
                          std::to_string(in.bytes) + " bytes");
}

Status Connections::Wait(std::vector<int>* ready) {
  ready->clear();
  epoll_event events[kMaxEvents];
  const int n = epoll_wait(epoll_, events, kMaxEvents, -1);
  ++system_calls_;
  if (n < 0 && errno != EINTR) return CannotWatch();
  for (int i = 0; i < n; ++i) {
    ready->push_back(static_cast<int>(events[i].data.u32));
    Connection& connection = connections_[ready->back()];
    // If a connection ended, the next system call on it says why.
    if ((events[i].events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) != 0) connection.ended = true;
    if (connection.ended || (events[i].events & EPOLLIN) != 0) connection.readable = true;
    if (connection.ended || (events[i].events & EPOLLOUT) != 0) connection.writable = true;
  }
  return Status();
}

Status Connections::Break(Status why) {
  broken_ = std::move(why);
  for (const Connection& connection : connections_) {
    if (connection.fd >= 0)
      shutdown(connection.fd, SHUT_RDWR);  // nobody waits for this process any more
  }
  return broken_;
}

Status Connections::AllToAll(const std::string& operation, const std::vector<Spans>& from,
                             const Allocate& allocate) {
  if (!broken_.ok()) return broken_;
  const int n = size();
  ++sequence_;
  std::vector<Transfer> transfers(n);
  for (int r = 0; r < n; ++r) {
    Transfer& t = transfers[r];
    operation.copy(t.header_out.operation, sizeof(t.header_out.operation) - 1);
    t.header_out.sequence = sequence_;
    t.header_out.bytes = Bytes(from[r]);
    t.from = from[r];
  }
  transfers[rank_].sent = transfers[rank_].received = kHeader;  // this process's own part is copied
  transfers[rank_].header_in = transfers[rank_].header_out;

  // How many connections have a header here, and how many have sent and received all.
  int headers = 1, done = 1;
  // Serves one connection, and updates these numbers.
  const auto serve = [&](int r) {
    Transfer& t = transfers[r];
    const bool had_header = t.has_header(), was_done = t.all_sent() && t.all_received();
    const Status status = Serve(r, &t);
    if (!status.ok()) return status;
    headers += !had_header && t.has_header();
    done += !was_done && t.all_sent() && t.all_received();
    return status;
  };
  // Each begins with the rank after its own, so that not all send to the same one at first.
  std::vector<int> ready;
  for (int i = 1; i < n; ++i) ready.push_back((rank_ + i) % n);
  bool allocated = false;
  while (true) {
    for (const int r : ready) {
      const Status status = serve(r);
      if (!status.ok()) return Break(status);
    }
    if (headers == n && !allocated) {
      std::vector<int64_t> bytes(n);
      for (int r = 0; r < n; ++r) bytes[r] = transfers[r].header_in.bytes;
      std::vector<Spans> to(n);
      const Status status = allocate(bytes, &to);
      if (!status.ok()) return Break(status);
      Copy(from[rank_], to[rank_]);
      ready.clear();
      for (int i = 1; i < n; ++i) {
        const int r = (rank_ + i) % n;
        transfers[r].to = std::move(to[r]);
        transfers[r].has_memory = true;
        ready.push_back(r);
      }
      allocated = true;
      continue;
    }
    if (done == n && allocated) return Status();
    const Status status = Wait(&ready);
    if (!status.ok()) return Break(status);
  }
}

}  // namespace ctr

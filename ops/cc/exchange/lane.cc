#include "ops/cc/exchange/lane.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace ctr {
namespace {

constexpr size_t kMaxParts = 64;  // of one system call

int64_t Bytes(const Spans& spans) {
  int64_t bytes = 0;
  for (const Span& s : spans) bytes += s.bytes;
  return bytes;
}

// The first parts of what `header`, then `spans`, hold after `done` bytes. Returns how many.
size_t Remaining(Span header, const Spans& spans, int64_t done, iovec* parts) {
  size_t n = 0;
  const auto add = [&](const Span& s) {
    const int64_t skip = std::min(done, s.bytes);
    done -= skip;
    if (s.bytes > skip && n < kMaxParts) parts[n++] = {s.data + skip, static_cast<size_t>(s.bytes - skip)};
  };
  add(header);
  for (const Span& s : spans) add(s);
  return n;
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

Spans Slice(const Spans& spans, int64_t begin, int64_t end) {
  Spans slice;
  for (const Span& s : spans) {
    const int64_t from = std::clamp<int64_t>(begin, 0, s.bytes), to = std::clamp<int64_t>(end, 0, s.bytes);
    if (from < to) slice.push_back({s.data + from, to - from});
    begin -= s.bytes;
    end -= s.bytes;
  }
  return slice;
}

Lane::Lane(std::vector<int> fds, int rank) : fds_(std::move(fds)), rank_(rank) {
  for (const int fd : fds_) {
    if (fd >= 0) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
}

Lane::~Lane() {
  for (const int fd : fds_) {
    if (fd >= 0) close(fd);
  }
}

bool Lane::Send(int fd, Transfer* t) {
  while (!t->all_sent()) {
    iovec parts[kMaxParts];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = Remaining({reinterpret_cast<char*>(&t->header_out), kHeader}, t->from, t->sent, parts);
    const ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    t->sent += n;
  }
  return true;
}

bool Lane::Receive(int fd, Transfer* t) {
  while (t->can_receive()) {
    iovec parts[kMaxParts];
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = Remaining({reinterpret_cast<char*>(&t->header_in), kHeader}, t->to, t->received, parts);
    const ssize_t n = recvmsg(fd, &message, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (n == 0) return false;
    t->received += n;
    if (t->has_header() && t->header_in < 0) return false;
  }
  return true;
}

Status Lane::Broken(Status why) {
  broken_ = std::move(why);
  for (const int fd : fds_) {
    if (fd >= 0) shutdown(fd, SHUT_RDWR);  // nobody waits for this process any more
  }
  return broken_;
}

Status Lane::AllToAll(const std::vector<Spans>& from, const Allocate& allocate) {
  if (!broken_.ok()) return broken_;
  const int n = size();
  std::vector<Transfer> transfers(n);
  for (int r = 0; r < n; ++r) {
    transfers[r].header_out = Bytes(from[r]);
    transfers[r].from = from[r];
  }
  bool allocated = false;
  std::vector<pollfd> waiting;
  while (true) {
    bool headers = true;
    waiting.clear();
    for (int r = 0; r < n; ++r) {
      if (r == rank_) continue;
      Transfer& t = transfers[r];
      if (!Send(fds_[r], &t) || !Receive(fds_[r], &t)) {
        return Broken(
            Status::Aborted("rank " + std::to_string(r) + " is gone: its connection for rows and sums ended"));
      }
      headers = headers && t.has_header();
      const int events = (t.all_sent() ? 0 : POLLOUT) | (t.can_receive() ? POLLIN : 0);
      if (events != 0) waiting.push_back({fds_[r], static_cast<short>(events), 0});
    }
    if (headers && !allocated) {
      std::vector<int64_t> received(n);
      for (int r = 0; r < n; ++r) received[r] = r == rank_ ? transfers[r].header_out : transfers[r].header_in;
      std::vector<Spans> to(n);
      const Status status = allocate(received, &to);
      if (!status.ok()) return Broken(status);
      Copy(from[rank_], to[rank_]);
      for (int r = 0; r < n; ++r) {
        transfers[r].to = std::move(to[r]);
        transfers[r].has_memory = true;
      }
      allocated = true;
      continue;
    }
    if (waiting.empty()) return Status();
    poll(waiting.data(), waiting.size(), -1);  // whatever it says, all are tried again
  }
}

Status Lane::AllReduce(const Spans& own, const Spans& sums) {
  const int n = size();
  const int64_t floats = Bytes(own) / static_cast<int64_t>(sizeof(float));
  const auto start = [&](int r) { return floats * r / n * static_cast<int64_t>(sizeof(float)); };  // of a rank's share
  const auto expect = [](const std::vector<int64_t>& bytes, const std::vector<Spans>& to) {
    for (size_t r = 0; r < bytes.size(); ++r) {
      if (bytes[r] != Bytes(to[r])) {
        return Status::DataLoss("rank " + std::to_string(r) + " sent " + std::to_string(bytes[r]) +
                                " bytes of a sum; wanted " + std::to_string(Bytes(to[r])));
      }
    }
    return Status();
  };

  const int64_t mine = (start(rank_ + 1) - start(rank_)) / static_cast<int64_t>(sizeof(float));
  const std::unique_ptr<float[]> shares(new float[n * mine]);  // of my floats each rank's
  std::vector<Spans> from(n);
  for (int r = 0; r < n; ++r) from[r] = Slice(own, start(r), start(r + 1));
  Status status = AllToAll(from, [&](const std::vector<int64_t>& bytes, std::vector<Spans>* to) {
    for (int r = 0; r < n; ++r) {
      (*to)[r] = {{reinterpret_cast<char*>(shares.get() + r * mine), mine * static_cast<int64_t>(sizeof(float))}};
    }
    return expect(bytes, *to);
  });
  if (!status.ok()) return status;

  for (int r = 1; r < n; ++r) {
    const float* const share = shares.get() + r * mine;
    for (int64_t i = 0; i < mine; ++i) shares[i] += share[i];
  }
  const Spans sum = {{reinterpret_cast<char*>(shares.get()), mine * static_cast<int64_t>(sizeof(float))}};
  return AllToAll(std::vector<Spans>(n, sum), [&](const std::vector<int64_t>& bytes, std::vector<Spans>* to) {
    for (int r = 0; r < n; ++r) (*to)[r] = Slice(sums, start(r), start(r + 1));
    return expect(bytes, *to);
  });
}

}  // namespace ctr

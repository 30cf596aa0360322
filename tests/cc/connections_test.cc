// Connections between threads that stand for processes: what each sends arrives, also where it is
// larger than a socket's buffer; whoever is out of step, or gone, is named.
#include "ops/cc/comm/connections.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/testing.h"

namespace ctr {
namespace {

// One Connections for each of n ranks, all connected with one another.
std::vector<std::unique_ptr<Connections>> Connect(int n) {
  std::vector<std::vector<int>> fds(n, std::vector<int>(n, -1));
  for (int a = 0; a < n; ++a) {
    for (int b = 0; b < a; ++b) {
      int pair[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
      fds[a][b] = pair[0];
      fds[b][a] = pair[1];
    }
  }
  std::vector<std::unique_ptr<Connections>> connections;
  for (int r = 0; r < n; ++r) connections.push_back(std::make_unique<Connections>(fds[r], r));
  return connections;
}

// What `from` sends to `to` in a turn: none in some turns, megabytes in others.
std::string Message(int from, int to, int turn) {
  const int size = (from + 2 * to + turn) % 4 == 0
                       ? 0
                       : (turn % 5 == 4 ? 3 << 20 : 1000 * from + 10 * to + turn);
  return std::string(size, static_cast<char>('a' + (5 * from + 3 * to + turn) % 26));
}

Spans WholeOf(std::string* s) { return {{&(*s)[0], static_cast<int64_t>(s->size())}}; }

// received: what each rank sent here.
Status Exchange(Connections* connections, int rank, int turn, std::vector<std::string>* received) {
  std::vector<std::string> messages;
  for (int to = 0; to < connections->size(); ++to) messages.push_back(Message(rank, to, turn));
  std::vector<Spans> from;
  for (std::string& m : messages) {  // in two parts
    const int64_t bytes = m.size(), first = bytes / 3;
    from.push_back({{&m[0], first}, {&m[0] + first, bytes - first}});
  }
  return connections->AllToAll(
      "all_to_all bytes", from,
      [received](const std::vector<int64_t>& bytes, std::vector<Spans>* to) {
        received->resize(bytes.size());
        for (size_t r = 0; r < bytes.size(); ++r) {
          (*received)[r].resize(bytes[r]);
          (*to)[r] = WholeOf(&(*received)[r]);
        }
        return Status();
      });
}

TEST(EveryRankGetsWhatAllSent) {
  for (int n = 1; n <= 4; ++n) {
    const auto connections = Connect(n);
    std::vector<std::thread> ranks;
    for (int r = 0; r < n; ++r) {
      ranks.emplace_back([&connections, n, r] {
        for (int turn = 0; turn < 40; ++turn) {
          std::vector<std::string> received;
          CHECK(Exchange(connections[r].get(), r, turn, &received).ok());
          for (int from = 0; from < n; ++from) CHECK(received[from] == Message(from, r, turn));
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
}

TEST(MessagesAndSystemCallsAreAsManyAsTheRanksAsk) {
  constexpr int kRanks = 16, kTurns = 20, kBytes = 100;
  const auto connections = Connect(kRanks);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) {
    ranks.emplace_back([&, r] {
      for (int turn = 0; turn < kTurns; ++turn) {
        std::string sent(kBytes, 'x'), received(kRanks * kBytes, ' ');
        const std::vector<Spans> from(kRanks, WholeOf(&sent));
        CHECK(connections[r]
                  ->AllToAll("all_to_all", from,
                             [&](const std::vector<int64_t>&, std::vector<Spans>* to) {
                               for (int i = 0; i < kRanks; ++i) {
                                 (*to)[i] = {{&received[i * kBytes], kBytes}};
                               }
                               return Status();
                             })
                  .ok());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const auto& one : connections) {
    const Connections::Counters counters = one->counters();
    const int64_t messages = kTurns * (kRanks - 1);
    CHECK_EQ(counters.connections, kRanks - 1);
    CHECK_EQ(counters.bytes_sent, messages * (64 + kBytes));
    CHECK_EQ(counters.bytes_received, messages * (64 + kBytes));
    // A message is sent by one call, and received by one for its header and one for its bytes, with
    // a call that finds nothing at most once for each; every wait but one in 64 begins a message.
    CHECK(counters.system_calls <= 6 * messages + kTurns);
  }
}

TEST(NamesTheRankThatIsGone) {
  auto connections = Connect(3);
  std::vector<std::thread> ranks;
  for (const int r : {0, 1}) {
    ranks.emplace_back([&connections, r] {
      std::vector<std::string> received;
      for (int turn = 0; turn < 2; ++turn) {  // it stays so
        const Status status = Exchange(connections[r].get(), r, turn, &received);
        // Either the lost one, or the other that noticed first and gave up.
        CHECK(status.code() == Status::kAborted &&
              status.message().find("is gone") != std::string::npos);
      }
    });
  }
  connections[2] = nullptr;
  for (std::thread& rank : ranks) rank.join();
}

TEST(AFailureEndsTheConnectionsForAll) {
  const auto connections = Connect(2);
  std::thread other([&connections] {
    std::vector<std::string> received;
    for (int turn = 0; turn < 2; ++turn) {
      const Status status = Exchange(connections[1].get(), 1, 1 + turn, &received);
      CHECK(turn == 0 || status.code() == Status::kAborted);  // the first may have been through
    }
  });
  const auto none = [](const std::vector<int64_t>&, std::vector<Spans>*) {
    return Status::Aborted("no memory");
  };
  for (int turn = 0; turn < 2; ++turn) {  // it stays so
    CHECK(connections[0]->AllToAll("all_to_all bytes", {{}, {}}, none).message() == "no memory");
  }
  other.join();
}

TEST(RanksOutOfStepAreNamedWithTheirOperations) {
  const auto connections = Connect(2);
  Status status[2];
  std::thread other([&] {
    status[1] = connections[1]->AllToAll(
        "all_to_all float32", {{}, {}},
        [](const std::vector<int64_t>&, std::vector<Spans>*) { return Status(); });
  });
  std::vector<std::string> received;
  status[0] = Exchange(connections[0].get(), 0, 1, &received);
  other.join();
  // Whoever notices first ends the connection for the other, who may not have noticed yet.
  int named = 0;
  for (int r = 0; r < 2; ++r) {
    const std::string& text = status[r].message();
    CHECK(!status[r].ok());
    named += status[r].code() == Status::kDataLoss &&
             text.find("out of step") != std::string::npos &&
             text.find("'all_to_all bytes'") != std::string::npos &&
             text.find("'all_to_all float32'") != std::string::npos;
  }
  CHECK(named >= 1);
}

TEST(BytesThatAreNoMessageAreRefused) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  Connections connections({-1, pair[0]}, 0);
  const std::string rubbish(1000, 'x');
  CHECK(write(pair[1], rubbish.data(), rubbish.size()) == 1000);
  std::vector<std::string> received;
  const Status status = Exchange(&connections, 0, 1, &received);
  CHECK(status.code() == Status::kDataLoss);
  CHECK(status.message().find("rank 1 sent operation") != std::string::npos);
  close(pair[1]);
}

// The number of the next descriptor that this process opens.
int NextDescriptor() {
  const int fd = open("/dev/null", O_RDONLY);
  CHECK(fd >= 0);
  close(fd);
  return fd;
}

TEST(AnErrorOfTheWaitEndsTheConnections) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  const int epoll = NextDescriptor();
  Connections connections({-1, pair[0]}, 0);
  // Something that epoll_wait refuses takes the place of the epoll.
  const int other = open("/dev/null", O_RDONLY);
  CHECK(dup2(other, epoll) == epoll);
  close(other);
  std::vector<std::string> received;
  for (int turn = 0; turn < 2; ++turn) {  // it stays so
    const Status status = Exchange(&connections, 0, turn, &received);
    CHECK(status.code() == Status::kAborted);
    CHECK(status.message().find("connections cannot be watched: Invalid argument") == 0);
  }
  char byte;
  while (read(pair[1], &byte, 1) == 1) {
  }  // until the end: the other side is told
  close(pair[1]);
}

TEST(WithoutAnEpollNoConnectionWorks) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit few = {static_cast<rlim_t>(NextDescriptor()), limit.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  Connections connections({-1, pair[0]}, 0);
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  std::vector<std::string> received;
  const Status status = Exchange(&connections, 0, 0, &received);
  CHECK(status.code() == Status::kAborted);
  CHECK(status.message() == "connections cannot be watched: Too many open files");
  char byte;
  CHECK(read(pair[1], &byte, 1) == 0);  // the other side is told
  close(pair[1]);
}

TEST(AMessageLargerThanAnyMemoryIsRefused) {
  int pair[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  Connections connections({-1, pair[0]}, 0);
  char header[64] = "all_to_all bytes";
  const uint64_t sequence = 1;
  const int64_t bytes = std::numeric_limits<int64_t>::max();
  std::memcpy(header + 48, &sequence, 8);
  std::memcpy(header + 56, &bytes, 8);
  CHECK(write(pair[1], header, 64) == 64);
  std::vector<std::string> received;
  CHECK(Exchange(&connections, 0, 1, &received).code() == Status::kDataLoss);
  close(pair[1]);
}

TEST(WhatWasSentBeforeAConnectionEndedIsReceived) {
  auto connections = Connect(2);
  std::vector<std::string> received;
  std::thread other([&connections] {
    std::vector<std::string> here;
    CHECK(Exchange(connections[1].get(), 1, 4, &here).ok());  // megabytes
    connections[1] = nullptr;
  });
  CHECK(Exchange(connections[0].get(), 0, 4, &received).ok());
  other.join();
  CHECK(received[1] == Message(1, 0, 4));
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }

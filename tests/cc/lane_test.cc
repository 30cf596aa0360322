// Lanes between threads in the place of processes: what each sends arrives, unevenly shared and larger than any
// socket's buffer.
#include "ops/cc/exchange/lane.h"

#include <sys/socket.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cc/testing.h"

namespace ctr {
namespace {

// A lane for each of n ranks, connected to one another.
std::vector<std::unique_ptr<Lane>> Connect(int n) {
  std::vector<std::vector<int>> fds(n, std::vector<int>(n, -1));
  for (int a = 0; a < n; ++a) {
    for (int b = 0; b < a; ++b) {
      int pair[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
      fds[a][b] = pair[0];
      fds[b][a] = pair[1];
    }
  }
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int r = 0; r < n; ++r) lanes.push_back(std::make_unique<Lane>(fds[r], r));
  return lanes;
}

// What `from` sends to `to` in a turn: none in some turns, megabytes in others.
std::string Message(int from, int to, int turn) {
  const int size = (from + 2 * to + turn) % 4 == 0 ? 0 : (turn % 5 == 4 ? 3 << 20 : 1000 * from + 10 * to + turn);
  return std::string(size, static_cast<char>('a' + (5 * from + 3 * to + turn) % 26));
}

Spans WholeOf(std::string* s) { return {{&(*s)[0], static_cast<int64_t>(s->size())}}; }

// received: what each rank sent here.
Status Exchange(Lane* lane, int rank, int turn, std::vector<std::string>* received) {
  std::vector<std::string> messages;
  for (int to = 0; to < lane->size(); ++to) messages.push_back(Message(rank, to, turn));
  std::vector<Spans> from;
  for (std::string& m : messages) {  // in two parts
    const int64_t bytes = m.size();
    from.push_back(Slice(WholeOf(&m), 0, bytes / 3));
    for (const Span& s : Slice(WholeOf(&m), bytes / 3, bytes)) from.back().push_back(s);
  }
  return lane->AllToAll(from, [received](const std::vector<int64_t>& bytes, std::vector<Spans>* to) {
    received->resize(bytes.size());
    for (size_t r = 0; r < bytes.size(); ++r) {
      (*received)[r].resize(bytes[r]);
      (*to)[r] = WholeOf(&(*received)[r]);
    }
    return Status();
  });
}

TEST(SlicesOfSpans) {
  std::string a = "abcde", none, b = "fgh";
  const Spans spans = {WholeOf(&a)[0], WholeOf(&none)[0], WholeOf(&b)[0]};
  const auto text = [&](int64_t begin, int64_t end) {
    std::string joined;
    for (const Span& s : Slice(spans, begin, end)) joined += std::string(s.data, s.bytes) + "|";
    return joined;
  };
  CHECK(text(0, 8) == "abcde|fgh|");
  CHECK(text(2, 6) == "cde|f|");
  CHECK(text(5, 8) == "fgh|");
  CHECK(text(3, 3).empty());
}

TEST(EveryRankGetsWhatAllSent) {
  for (int n = 1; n <= 4; ++n) {
    const auto lanes = Connect(n);
    std::vector<std::thread> ranks;
    for (int r = 0; r < n; ++r) {
      ranks.emplace_back([&lanes, n, r] {
        for (int turn = 0; turn < 40; ++turn) {
          std::vector<std::string> received;
          CHECK(Exchange(lanes[r].get(), r, turn, &received).ok());
          for (int from = 0; from < n; ++from) CHECK(received[from] == Message(from, r, turn));
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
  }
}

TEST(SumsAreTheSameEverywhere) {
  for (int n = 1; n <= 4; ++n) {
    for (const int size : {0, 1, 2, 3, 100, 1 << 20}) {
      const auto lanes = Connect(n);
      std::vector<std::vector<float>> own(n), sums(n);
      std::vector<std::thread> ranks;
      for (int r = 0; r < n; ++r) {
        for (int i = 0; i < size; ++i) own[r].push_back(1.0f / static_cast<float>(1 + 7 * r + i));
        sums[r].resize(size);
        ranks.emplace_back([&, r] {
          const auto span = [&](std::vector<float>* v, int begin, int end) {
            return Span{reinterpret_cast<char*>(v->data() + begin),
                        static_cast<int64_t>(sizeof(float)) * (end - begin)};
          };
          // Values and sums may lie in parts, cut at other places.
          CHECK(lanes[r]
                    ->AllReduce({span(&own[r], 0, size / 5), span(&own[r], size / 5, size)},
                                {span(&sums[r], 0, size / 2), span(&sums[r], size / 2, size)})
                    .ok());
        });
      }
      for (std::thread& rank : ranks) rank.join();
      for (int i = 0; i < size; ++i) {
        float wanted = own[0][i];
        for (int r = 1; r < n; ++r) wanted += own[r][i];
        for (int r = 0; r < n; ++r) CHECK(sums[r][i] == wanted);
      }
    }
  }
}

TEST(NamesTheRankThatIsGone) {
  auto lanes = Connect(3);
  std::vector<std::thread> ranks;
  for (const int r : {0, 1}) {
    ranks.emplace_back([&lanes, r] {
      std::vector<std::string> received;
      for (int turn = 0; turn < 2; ++turn) {  // it stays so
        const Status status = Exchange(lanes[r].get(), r, turn, &received);
        // Either the lost one, or the other that noticed first and gave up.
        CHECK(status.code() == Status::kAborted && status.message().find("is gone") != std::string::npos);
      }
    });
  }
  lanes[2] = nullptr;
  for (std::thread& rank : ranks) rank.join();
}

TEST(AFailureEndsTheLaneForAll) {
  const auto lanes = Connect(2);
  std::thread other([&lanes] {
    std::vector<std::string> received;
    for (int turn = 0; turn < 2; ++turn) {
      const Status status = Exchange(lanes[1].get(), 1, 1 + turn, &received);
      CHECK(turn == 0 || status.code() == Status::kAborted);  // the first may have been through
    }
  });
  const auto none = [](const std::vector<int64_t>&, std::vector<Spans>*) { return Status::Aborted("no memory"); };
  CHECK(lanes[0]->AllToAll({{}, {}}, none).message() == "no memory");
  CHECK(lanes[0]->AllToAll({{}, {}}, none).message() == "no memory");
  other.join();
}

TEST(SumsOfDifferentSizesAreRefused) {
  const auto lanes = Connect(2);
  float a[4] = {}, b[5] = {};
  Status status[2];
  std::thread other(
      [&] { status[1] = lanes[1]->AllReduce({{reinterpret_cast<char*>(b), 20}}, {{reinterpret_cast<char*>(b), 20}}); });
  status[0] = lanes[0]->AllReduce({{reinterpret_cast<char*>(a), 16}}, {{reinterpret_cast<char*>(a), 16}});
  other.join();
  CHECK(status[0].code() == Status::kDataLoss || status[1].code() == Status::kDataLoss);
  CHECK(!status[0].ok() && !status[1].ok());
}

}  // namespace
}  // namespace ctr

int main() { return testing::RunAll(); }

// Memory for tables: filled with zeros; large pieces are in huge pages, so that random access
// misses the TLB less often.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ctr {

constexpr size_t kHugePage = size_t{2} << 20;

class BlockArena;

// Memory filled with zeros, aligned to 64 bytes; from 2 MiB on, aligned to huge pages. With an
// arena, blocks of 64 KiB to 8 MiB lie in the arena's huge pages, if they are whole pages. Use few
// different sizes, such as 8 to 15 * 2^k.
class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes, std::shared_ptr<BlockArena> arena = nullptr);
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(arena_, other.arena_);
    std::swap(mapped_, other.mapped_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(begin_, other.begin_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Block();

  char* data() const { return begin_; }
  size_t bytes() const { return bytes_; }
  size_t bytes_outside_arena() const { return arena_ ? 0 : bytes_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  std::shared_ptr<BlockArena> arena_;
  char* mapped_ = nullptr;
  size_t mapped_bytes_ = 0;
  char* begin_ = nullptr;
  size_t bytes_ = 0;
};

// Packs small blocks into huge pages, blocks of one size together. A released block's memory goes
// back to the system until the block is used again. Safe to use from several threads.
class BlockArena {
 public:
  static constexpr size_t kPage = size_t{4} << 10;

  static bool Takes(size_t bytes) {
    return bytes >= 16 * kPage && bytes <= 4 * kHugePage && bytes % kPage == 0;
  }

  char* Allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<char*>& free = free_[bytes];
    if (free.empty()) {
      slabs_.emplace_back(std::lcm(kHugePage, bytes));
      for (size_t at = slabs_.back().bytes(); at > 0; at -= bytes)
        free.push_back(slabs_.back().data() + at - bytes);
    }
    char* block = free.back();
    free.pop_back();
    used_bytes_ += bytes;
    return block;
  }

  void Release(char* block, size_t bytes) {
    madvise(block, bytes, MADV_DONTNEED);  // reads as zeros from now on
    std::lock_guard<std::mutex> lock(mutex_);
    free_[bytes].push_back(block);
    used_bytes_ -= bytes;
  }

  // The bytes of blocks in use. What lies between them was never touched, or went back to the
  // system.
  int64_t Bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(used_bytes_);
  }

 private:
  mutable std::mutex mutex_;  // guards what follows; a leaf: no other lock is taken under it
  std::vector<Block> slabs_;
  std::unordered_map<size_t, std::vector<char*>> free_;  // by size
  size_t used_bytes_ = 0;
};

inline Block::Block(size_t bytes, std::shared_ptr<BlockArena> arena) : bytes_(bytes) {
  if (bytes == 0) return;
  if (arena != nullptr && BlockArena::Takes(bytes)) {
    arena_ = std::move(arena);
    begin_ = arena_->Allocate(bytes);
    return;
  }
  if (bytes < kHugePage) {
    data_.reset(static_cast<char*>(std::calloc(bytes + 64, 1)));
    if (data_ == nullptr) throw std::bad_alloc();
    begin_ =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(data_.get()) + 63) & ~uintptr_t{63});
    return;
  }
  mapped_bytes_ =
      bytes + kHugePage;  // never touched beyond `bytes`, so it costs address space only
  void* mapped =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  mapped_ = static_cast<char*>(mapped);
  begin_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) &
                                   ~(kHugePage - 1));
  madvise(begin_, bytes, MADV_HUGEPAGE);
}
inline Block::~Block() {
  if (arena_ != nullptr) arena_->Release(begin_, bytes_);
  if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
}

// Hands out zero-filled chunks of one size. The pages of a released chunk go back to the system
// until the chunk is used again. Safe to use from several threads.
class ChunkArena {
 public:
  explicit ChunkArena(size_t chunk_bytes) : chunk_bytes_((chunk_bytes + 63) & ~size_t{63}) {
#if defined(__SANITIZE_ADDRESS__)
    chunks_per_slab_ = 1;  // chunks of their own, so that an access beyond one is seen
#else
    chunks_per_slab_ = chunk_bytes_ >= kHugePage ? 1 : kHugePage / chunk_bytes_;
#endif
  }

  char* Allocate() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      char* chunk = *free_.begin();
      free_.erase(free_.begin());
      released_bytes_ -= PagesOf(chunk).second;
      return chunk;
    }
    if (used_in_last_ == chunks_per_slab_ || slabs_.empty()) {
      slabs_.emplace_back(chunks_per_slab_ == 1 ? chunk_bytes_ : kHugePage);
      used_in_last_ = 0;
    }
    return slabs_.back().data() + chunk_bytes_ * used_in_last_++;
  }

  void Release(char* chunk) {
    std::memset(chunk, 0, chunk_bytes_);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [pages, bytes] = PagesOf(chunk);
    if (bytes > 0) madvise(pages, bytes, MADV_DONTNEED);  // reads as zeros from now on
    free_.insert(chunk);
    released_bytes_ += bytes;
  }

  int64_t Bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    if (slabs_.empty()) return 0;
    // What lies behind the last chunk was never touched.
    const size_t touched =
        (slabs_.size() - 1) * slabs_.back().bytes() + used_in_last_ * chunk_bytes_;
    return static_cast<int64_t>(touched - released_bytes_);
  }

 private:
  // Returns the pages that nobody uses once this chunk is free: where they begin, and their bytes.
  // A page that it shares with a neighbour is among them if the neighbour is free.
  std::pair<char*, size_t> PagesOf(char* chunk) const {
    constexpr uintptr_t kPage = BlockArena::kPage;
    uintptr_t begin = reinterpret_cast<uintptr_t>(chunk), end = begin + chunk_bytes_;
    if (free_.count(chunk - chunk_bytes_) == 0) begin += kPage - 1;
    if (free_.count(chunk + chunk_bytes_) != 0) end += kPage - 1;
    begin = begin / kPage * kPage;
    end = end / kPage * kPage;
    if (begin >= end) return {chunk, 0};
    return {reinterpret_cast<char*>(begin), end - begin};
  }

  const size_t chunk_bytes_;
  size_t chunks_per_slab_;
  mutable std::mutex mutex_;  // guards what follows; a leaf: no other lock is taken under it
  std::vector<Block> slabs_;
  size_t used_in_last_ = 0;
  std::set<char*> free_;  // released chunks
  size_t released_bytes_ = 0;
};

}  // namespace ctr

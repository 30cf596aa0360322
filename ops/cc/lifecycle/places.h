// Numbered places of one size, in chunks, for things that begin with a key >= 0.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "ops/cc/lifecycle/memory.h"

namespace ctr {

// A freed place is used again; its key is negative meanwhile. Who uses it locks it.
class Places {
 public:
  Places() = default;
  // bytes: of a place, a multiple of 8. arena: of ChunkBytes(bytes); several may share it.
  Places(int64_t bytes, std::shared_ptr<ChunkArena> arena)
      : bytes_(bytes), arena_(std::move(arena)) {}

  static constexpr int64_t ChunkBytes(int64_t bytes) { return bytes << kChunkBits; }

  char* At(int64_t i) const { return chunks_[i >> kChunkBits] + (i & (kChunkPlaces - 1)) * bytes_; }
  int64_t bytes() const { return bytes_; }
  int64_t size() const { return size_; }  // how many places are in use
  int64_t end() const { return end_; }    // all numbers are in [0, end)
  int64_t list_bytes() const { return static_cast<int64_t>(chunks_.capacity() * sizeof(char*)); }

  // Returns a place, filled with zeros.
  int64_t Add() {
    int64_t i = free_;
    if (i >= 0) {
      free_ = Key(i) == kLast ? -1 : ~Key(i);
    } else {
      i = end_++;
      if (i >> kChunkBits == static_cast<int64_t>(chunks_.size()))
        chunks_.push_back(arena_->Allocate());
    }
    std::memset(At(i), 0, bytes_);
    ++size_;
    return i;
  }

  void Remove(int64_t i) {
    Key(i) = free_ < 0 ? kLast : ~free_;
    free_ = i;
    --size_;
  }

  // If that frees over a third of the chunks, or any with `all`, moves the last things into free
  // places and gives chunks back. Calls moved(from, to) for each, which lies at `to` by then.
  template <typename Moved>
  void Compact(bool all, const Moved& moved) {
    const size_t needed = static_cast<size_t>((size_ + kChunkPlaces - 1) >> kChunkBits);
    const size_t spare = chunks_.size() - needed;
    if (all ? spare == 0 : spare * 3 <= chunks_.size()) return;
    for (int64_t to = 0, from = end_; to < size_; ++to) {
      if (Key(to) >= 0) continue;
      do --from;
      while (Key(from) < 0);
      std::memcpy(At(to), At(from), bytes_);
      moved(from, to);
    }
    for (size_t c = needed; c < chunks_.size(); ++c) arena_->Release(chunks_[c]);
    chunks_.resize(needed);
    chunks_.shrink_to_fit();
    end_ = size_;
    free_ = -1;
  }

  // Forgets all, and keeps the chunks.
  void Clear() {
    size_ = end_ = 0;
    free_ = -1;
  }

  // Calls visit(number, thing) for each.
  template <typename T, typename Visit>
  void ForEach(const Visit& visit) const {
    for (int64_t begin = 0; begin < end_; begin += kChunkPlaces) {
      char* at = chunks_[begin >> kChunkBits];
      const int64_t end = begin + kChunkPlaces < end_ ? begin + kChunkPlaces : end_;
      for (int64_t i = begin; i < end; ++i, at += bytes_) {
        T* const thing = reinterpret_cast<T*>(at);
        if (thing->key >= 0) visit(i, thing);
      }
    }
  }

 private:
  static constexpr int kChunkBits = 7;
  static constexpr int64_t kChunkPlaces = int64_t{1} << kChunkBits;
  static constexpr int64_t kLast = std::numeric_limits<int64_t>::min();  // no next free place

  int64_t& Key(int64_t i) const { return *reinterpret_cast<int64_t*>(At(i)); }

  int64_t bytes_ = 0;
  std::shared_ptr<ChunkArena> arena_;
  std::vector<char*> chunks_;
  int64_t size_ = 0, end_ = 0;
  int64_t free_ = -1;  // the first free place below end_; ~key there is the next one
};

}  // namespace ctr

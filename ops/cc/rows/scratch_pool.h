// Working memory that a kernel keeps from step to step: a piece for each of the calls that run at
// the same time.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ctr {

template <typename T>
class ScratchPool {
 public:
  // Borrows a piece for as long as it lives; must not outlive the pool.
  class Lease {
   public:
    explicit Lease(ScratchPool* pool) : pool_(pool) {
      std::lock_guard<std::mutex> lock(pool->mutex_);
      if (!pool->free_.empty()) {
        piece_ = std::move(pool->free_.back());
        pool->free_.pop_back();
      }
      if (piece_ == nullptr) piece_ = std::make_unique<T>();
    }
    ~Lease() {
      std::lock_guard<std::mutex> lock(pool_->mutex_);
      pool_->free_.push_back(std::move(piece_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    T* operator->() const { return piece_.get(); }
    T* get() const { return piece_.get(); }

   private:
    ScratchPool* const pool_;
    std::unique_ptr<T> piece_;
  };

 private:
  std::mutex mutex_;  // guards free_; a leaf
  std::vector<std::unique_ptr<T>> free_;
};

}  // namespace ctr

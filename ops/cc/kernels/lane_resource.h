// The lane that a handle points to, with a thread of its own: none of TensorFlow's waits for a peer.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/cc/exchange/lane.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace ctr {

class LaneResource : public tensorflow::ResourceBase {
 public:
  LaneResource(std::vector<int> fds, int rank) : state_(std::make_shared<State>(std::move(fds), rank)) {
    std::thread([state = state_] { Work(state.get()); }).detach();
  }
  ~LaneResource() override { Run(nullptr); }

  Lane* lane() { return &state_->lane; }
  // Runs `work` after all that was given before, on the lane's thread; null ends it.
  void Run(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->works.push_back(std::move(work));
    state_->more.notify_one();
  }
  std::string DebugString() const override { return "Lane"; }

 private:
  // Outlives the resource, whose last user may be a work on this thread.
  struct State {
    State(std::vector<int> fds, int rank) : lane(std::move(fds), rank) {}
    Lane lane;  // of the works, which follow one another
    std::mutex mutex;
    std::condition_variable more;
    std::deque<std::function<void()>> works;  // guarded by mutex
  };

  static void Work(State* state) {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(state->mutex);
        state->more.wait(lock, [state] { return !state->works.empty(); });
        work = std::move(state->works.front());
        state->works.pop_front();
      }
      if (work == nullptr) return;
      work();
    }
  }

  const std::shared_ptr<State> state_;
};

// The lane of input 0, held while it is used.
inline tensorflow::Status LookupLane(tensorflow::OpKernelContext* context, std::shared_ptr<LaneResource>* lane) {
  tensorflow::core::RefCountPtr<LaneResource> found;
  TF_RETURN_IF_ERROR(tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &found));
  lane->reset(found.release(), [](LaneResource* r) { r->Unref(); });
  return absl::OkStatus();
}

// A tensor's memory.
inline Span SpanOf(const tensorflow::Tensor& t) {
  return {const_cast<char*>(t.tensor_data().data()), static_cast<int64_t>(t.tensor_data().size())};
}

}  // namespace ctr

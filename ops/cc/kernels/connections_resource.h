// The connections that a handle points to, and the thread that uses them, so that a peer never
// blocks one of TensorFlow's threads.
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

#include "ops/cc/comm/connections.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace ctr {

class ConnectionsResource : public tensorflow::ResourceBase {
 public:
  ConnectionsResource(std::vector<int> fds, int rank)
      : state_(std::make_shared<State>(std::move(fds), rank)) {
    std::thread([state = state_] { Work(state.get()); }).detach();
  }
  ~ConnectionsResource() override { Run(nullptr); }

  Connections* connections() { return &state_->connections; }
  // Queues `work` for the thread, which runs it after all earlier work; nullptr ends the thread.
  void Run(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->works.push_back(std::move(work));
    state_->more.notify_one();
  }
  std::string DebugString() const override { return "Connections"; }

 private:
  // The thread shares it, because the last user of the resource may be work on the thread.
  struct State {
    State(std::vector<int> fds, int rank) : connections(std::move(fds), rank) {}
    Connections connections;  // only the thread calls its collectives
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

// Finds the connections of input 0, and keeps them alive while `connections` does.
inline absl::Status LookupConnections(tensorflow::OpKernelContext* context,
                                      std::shared_ptr<ConnectionsResource>* connections) {
  tensorflow::core::RefCountPtr<ConnectionsResource> found;
  TF_RETURN_IF_ERROR(
      tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &found));
  connections->reset(found.release(), [](ConnectionsResource* r) { r->Unref(); });
  return absl::OkStatus();
}

// Returns the memory of a tensor.
inline Span SpanOf(const tensorflow::Tensor& t) {
  return {const_cast<char*>(t.tensor_data().data()), static_cast<int64_t>(t.tensor_data().size())};
}

}  // namespace ctr

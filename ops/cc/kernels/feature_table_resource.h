// The resource to which the handle of a feature table points, and what its kernels share.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cc/lifecycle/feature_table.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/util/work_sharder.h"

namespace ctr {

// An object that belongs to a table and uses the payload of its features: the row store.
struct TableAttachment {
  virtual ~TableAttachment() = default;
  virtual int64_t Bytes() const = 0;
};

class FeatureTableResource : public tensorflow::ResourceBase {
 public:
  // description: the attributes of the handle op, such as the policy. A second handle op with the
  // same name must have the same.
  FeatureTableResource(Policy policy, int64_t payload_bytes, std::string description)
      : table_(std::move(policy), payload_bytes), description_(std::move(description)) {}

  FeatureTable* table() { return &table_; }
  TableAttachment* attachment() const { return attachment_.get(); }
  // Call it only before the resource is published.
  void set_attachment(std::unique_ptr<TableAttachment> attachment) {
    attachment_ = std::move(attachment);
  }
  const std::string& description() const { return description_; }

  int64_t Bytes() const { return table_.Bytes() + (attachment_ ? attachment_->Bytes() : 0); }
  std::string DebugString() const override {
    return "FeatureTable of " + std::to_string(table_.Size()) + " features";
  }
  int64_t MemoryUsed() const override { return Bytes(); }

 private:
  FeatureTable table_;
  const std::string description_;
  std::unique_ptr<TableAttachment> attachment_;
};

inline absl::Status ToTensorFlow(const Status& status) {
  switch (status.code()) {
    case Status::kOk:
      return absl::OkStatus();
    case Status::kInvalidArgument:
      return absl::InvalidArgumentError(status.message());
    case Status::kAborted:
      return absl::AbortedError(status.message());
    case Status::kOutOfRange:
      return absl::OutOfRangeError(status.message());
    case Status::kResourceExhausted:
      return absl::ResourceExhaustedError(status.message());
    case Status::kDataLoss:
      break;
  }
  return absl::DataLossError(status.message());
}

// Returns a function that shares work among the device's threads.
inline ParallelFor ParallelForOf(tensorflow::OpKernelContext* context) {
  const auto* workers = context->device()->tensorflow_cpu_worker_threads();
  return [workers](int64_t total, int64_t cost_per_unit,
                   const std::function<void(int64_t, int64_t)>& work) {
    tensorflow::Shard(workers->num_threads, workers->workers, total, cost_per_unit, work);
  };
}

// Returns InvalidArgument, which names the argument and its shape, unless it is a vector; if
// length >= 0, of `length` elements.
inline absl::Status CheckVector(const tensorflow::Tensor& tensor, const char* name,
                                int64_t length = -1) {
  if (tensor.dims() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": found shape ", tensor.shape().DebugString(), "; wanted [n]"));
  }
  if (tensor.dim_size(0) > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": found ", tensor.dim_size(0), " elements; wanted at most 2^31 - 1"));
  }
  if (length >= 0 && tensor.dim_size(0) != length) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, ": found ", tensor.dim_size(0), " elements; wanted ", length, ", as many as keys"));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status OutputVector(tensorflow::OpKernelContext* context, int index,
                          const std::vector<T>& values) {
  tensorflow::Tensor* output;
  TF_RETURN_IF_ERROR(context->allocate_output(
      index, tensorflow::TensorShape({static_cast<int64_t>(values.size())}), &output));
  std::copy(values.begin(), values.end(), output->flat<T>().data());
  return absl::OkStatus();
}

// A kernel whose input 0 is a table's handle.
class FeatureTableOpKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tensorflow::OpKernelContext* context) final {
    tensorflow::core::RefCountPtr<FeatureTableResource> resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    ComputeOn(context, resource.get());
    if (context->status().ok()) OP_REQUIRES_OK(context, ToTensorFlow(resource->table()->error()));
  }

 protected:
  virtual void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) = 0;
};

}  // namespace ctr

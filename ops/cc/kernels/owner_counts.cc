// Counts how many keys of a batch each process owns.
#include "ops/cc/lifecycle/hash.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

REGISTER_OP("CtrOwnerCounts")
    .Input("keys: int64")
    .Attr("owners: int >= 1")
    .Output("counts: int32")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &keys));
      int64_t owners;
      TF_RETURN_IF_ERROR(c->GetAttr("owners", &owners));
      c->set_output(0, c->Vector(owners));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Counts the keys of each owner: the owner of key k among N processes is LogicalShardOf(Mix64(k)) * N / 4096.

keys: [n], grouped by logical shard as CtrDedupe leaves them, so that each owner's keys are contiguous.
counts: [owners].
)doc");

class OwnerCountsOp : public tensorflow::OpKernel {
 public:
  explicit OwnerCountsOp(tensorflow::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("owners", &owners_));
  }
  void Compute(tensorflow::OpKernelContext* c) override {
    const tensorflow::Tensor& keys = c->input(0);
    OP_REQUIRES(c, keys.dims() == 1, absl::InvalidArgumentError("keys: wanted rank 1"));
    tensorflow::Tensor* counts;
    OP_REQUIRES_OK(c, c->allocate_output(0, tensorflow::TensorShape({owners_}), &counts));
    auto out = counts->flat<int32_t>();
    out.setZero();
    const auto in = keys.flat<int64_t>();
    int64_t last = 0;
    for (int64_t i = 0; i < in.size(); ++i) {
      const int64_t owner = ctr::LogicalShardOf(ctr::Mix64(in(i))) * owners_ / ctr::kLogicalShards;
      OP_REQUIRES(c, owner >= last,
                  absl::InvalidArgumentError("keys: wanted them grouped by logical shard"));
      last = owner;
      ++out(owner);
    }
  }

 private:
  int64_t owners_;
};
REGISTER_KERNEL_BUILDER(Name("CtrOwnerCounts").Device(tensorflow::DEVICE_CPU), OwnerCountsOp);

}  // namespace

// CtrBfloat16Product; ops/cc/dense/bfloat16_product.h says how. It keeps nothing between calls.
#include "ops/cc/dense/bfloat16_product.h"

#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace {

class Bfloat16ProductOp : public tensorflow::OpKernel {
 public:
  explicit Bfloat16ProductOp(tensorflow::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("transpose_a", &transpose_a_));
    OP_REQUIRES_OK(c, c->GetAttr("transpose_b", &transpose_b_));
    OP_REQUIRES(c, ctr::HasBfloat16Products(),
                absl::UnimplementedError("this processor has no avx512_bf16"));
  }

  void Compute(tensorflow::OpKernelContext* c) override {
    const tensorflow::Tensor &a = c->input(0), &b = c->input(1);
    OP_REQUIRES(
        c, a.dims() == 2 && b.dims() == 2,
        absl::InvalidArgumentError("wanted two matrices, found shapes " + a.shape().DebugString() +
                                   " and " + b.shape().DebugString()));
    const int64_t inner = a.dim_size(transpose_a_ ? 0 : 1);
    OP_REQUIRES(
        c, inner == b.dim_size(transpose_b_ ? 1 : 0),
        absl::InvalidArgumentError("wanted equal inner sizes, found shapes " +
                                   a.shape().DebugString() + " and " + b.shape().DebugString()));
    const ctr::Matrix left{a.flat<float>().data(), a.dim_size(0), a.dim_size(1), transpose_a_};
    const ctr::Matrix right{b.flat<float>().data(), b.dim_size(0), b.dim_size(1), transpose_b_};
    tensorflow::Tensor* product;
    const tensorflow::TensorShape shape(
        {a.dim_size(transpose_a_ ? 1 : 0), b.dim_size(transpose_b_ ? 0 : 1)});
    OP_REQUIRES_OK(c, c->allocate_output(0, shape, &product));
    if (shape.num_elements() == 0) return;
    tensorflow::Tensor packed;
    OP_REQUIRES_OK(c, c->allocate_temp(tensorflow::DT_UINT16, {ctr::PackedSize(right)}, &packed));
    const auto* workers = c->device()->tensorflow_cpu_worker_threads();
    ctr::Bfloat16Product(
        left, right,
        [workers](int64_t total, int64_t cost, const std::function<void(int64_t, int64_t)>& work) {
          tensorflow::Shard(workers->num_threads, workers->workers, total, cost, work);
        },
        packed.flat<uint16_t>().data(), product->flat<float>().data());
  }

 private:
  bool transpose_a_, transpose_b_;
};
REGISTER_KERNEL_BUILDER(Name("CtrBfloat16Product").Device(tensorflow::DEVICE_CPU),
                        Bfloat16ProductOp);

}  // namespace

// Gathers samples of a prepared pass by their places, by ops/cc/data/samples.h.
#include <limits>

#include "ops/cc/data/samples.h"
#include "ops/cc/kernels/row_store_kernels.h"
#include "ops/cc/rows/scratch_pool.h"

namespace ctr {
namespace {

class GatherSamplesOp : public tensorflow::OpKernel {
 public:
  explicit GatherSamplesOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("slots", &slots_));
    OP_REQUIRES_OK(context, context->GetAttr("chunk", &chunk_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    const tensorflow::Tensor &rows = context->input(0), &codes = context->input(1),
                             &bases = context->input(2), &keys = context->input(3),
                             &splits = context->input(4), &values = context->input(5),
                             &dense = context->input(6);
    OP_REQUIRES_OK(context, CheckVector(rows, "rows"));
    SampleArrays arrays;
    const auto fits = [](const tensorflow::Tensor& tensor, int dims) {
      return tensor.dims() == dims;
    };
    OP_REQUIRES(
        context,
        fits(codes, 2) && fits(bases, 3) && fits(dense, 2) && fits(keys, 1) && fits(splits, 1) &&
            fits(values, 1) && bases.dim_size(2) == 2 && bases.dim_size(1) == codes.dim_size(1) &&
            dense.dim_size(0) == codes.dim_size(0) &&
            (codes.dim_size(1) == slots_ || codes.dim_size(1) == slots_ + 1) &&
            (values.dim_size(0) == 0 || values.dim_size(0) == keys.dim_size(0)),
        absl::InvalidArgumentError(absl::StrCat(
            "found codes of shape ", codes.shape().DebugString(), ", bases ",
            bases.shape().DebugString(), ", dense ", dense.shape().DebugString(), ", keys ",
            keys.shape().DebugString(), ", splits ", splits.shape().DebugString(), ", values ",
            values.shape().DebugString(), "; wanted those of one pass of ", slots_, " slots")));
    arrays.samples = codes.dim_size(0);
    arrays.width = codes.dim_size(1);
    arrays.chunk = chunk_;
    arrays.chunks = bases.dim_size(0);
    arrays.codes = codes.unaligned_flat<uint16_t>().data();
    arrays.bases = bases.unaligned_flat<int64_t>().data();
    arrays.num_keys = keys.dim_size(0);
    arrays.keys = keys.unaligned_flat<int64_t>().data();
    arrays.num_splits = splits.dim_size(0);
    arrays.splits = splits.unaligned_flat<uint32_t>().data();
    if (values.dim_size(0) > 0) arrays.values = values.unaligned_flat<float>().data();
    arrays.dense_columns = dense.dim_size(1);
    arrays.dense = dense.unaligned_flat<float>().data();
    const int64_t n = rows.dim_size(0);
    const int64_t* const places = rows.flat<int64_t>().data();
    const ScratchPool<FieldPlaces>::Lease found(&pool_);
    OP_REQUIRES(context,
                n <= std::numeric_limits<int32_t>::max() / slots_ &&
                    FindFields(arrays, places, n, slots_, found.get()),
                absl::InvalidArgumentError(absl::StrCat(
                    "rows, or what the pass says of them: out of range; wanted places in [0, ",
                    arrays.samples, ")")));
    const bool fast = arrays.num_splits == 0 && arrays.values == nullptr;
    const int64_t rest = fast ? 0 : found->features;
    const bool grouped = arrays.width > slots_;
    tensorflow::Tensor *of_keys, *of_values, *segments, *of_dense, *group;
    OP_REQUIRES_OK(context, context->allocate_output(0, {found->features}, &of_keys));
    OP_REQUIRES_OK(context, context->allocate_output(1, {rest}, &of_values));
    OP_REQUIRES_OK(context, context->allocate_output(2, {rest}, &segments));
    OP_REQUIRES_OK(context, context->allocate_output(3, {n, arrays.dense_columns}, &of_dense));
    OP_REQUIRES_OK(context, context->allocate_output(4, {grouped ? n : 0}, &group));
    SampleResults to;
    to.keys = of_keys->flat<int64_t>().data();
    to.dense = of_dense->flat<float>().data();
    if (!fast) {
      to.values = of_values->flat<float>().data();
      to.segments = segments->flat<int32_t>().data();
    }
    if (grouped) to.group = group->flat<int64_t>().data();
    CopySamples(arrays, places, n, slots_, *found.get(), to);
  }

 private:
  int64_t slots_, chunk_;
  ScratchPool<FieldPlaces> pool_;
};
REGISTER_KERNEL_BUILDER(Name("CtrGatherSamples").Device(tensorflow::DEVICE_CPU), GatherSamplesOp);

}  // namespace
}  // namespace ctr

// Exports the features of a table and imports them, for checkpoints.
#include <algorithm>
#include <vector>

#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

constexpr const char* kColumns[] = {"key",         "show",     "click", "delta_score",
                                    "unseen_days", "age_days", "slot",  "admitted"};

class LifecycleExportOp : public FeatureTableOpKernel {
 public:
  explicit LifecycleExportOp(tensorflow::OpKernelConstruction* context)
      : FeatureTableOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("changed", &changed_));
  }

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    OP_REQUIRES_OK(context, CheckVector(context->input(1), "span", 4));
    const auto span = context->input(1).flat<int64_t>();
    int64_t shard = span(0), place = span(1);
    const int64_t stop = span(2), limit = span(3);
    OP_REQUIRES(context, shard >= 0 && stop <= kShards,
                absl::InvalidArgumentError(absl::StrCat("span: found shards [", shard, ", ", stop,
                                                        "); wanted some of the table's [0, 256)")));
    OP_REQUIRES(context, place >= 0,
                absl::InvalidArgumentError(
                    absl::StrCat("span[1]: found ", place, "; wanted a place >= 0")));
    OP_REQUIRES(context, limit >= 1,
                absl::InvalidArgumentError(
                    absl::StrCat("span[3]: found ", limit, "; wanted a number >= 1")));
    FeatureColumns columns;
    for (int64_t left = limit; shard < stop && left > 0;) {
      place = resource->table()->Export(shard, place, left, changed_, &columns);
      left = limit - static_cast<int64_t>(columns.key.size());
      if (place < 0) {
        ++shard;
        place = 0;
      }
    }
    OP_REQUIRES_OK(context, OutputVector(context, 0, columns.key));
    OP_REQUIRES_OK(context, OutputVector(context, 1, columns.show));
    OP_REQUIRES_OK(context, OutputVector(context, 2, columns.click));
    OP_REQUIRES_OK(context, OutputVector(context, 3, columns.delta_score));
    OP_REQUIRES_OK(context, OutputVector(context, 4, columns.unseen_days));
    OP_REQUIRES_OK(context, OutputVector(context, 5, columns.age_days));
    OP_REQUIRES_OK(context, OutputVector(context, 6, columns.slot));
    tensorflow::Tensor* output;
    const int64_t n = columns.key.size();
    OP_REQUIRES_OK(context, context->allocate_output(7, tensorflow::TensorShape({n}), &output));
    std::copy(columns.admitted.begin(), columns.admitted.end(), output->flat<bool>().data());
    OP_REQUIRES_OK(context, context->allocate_output(8, {2}, &output));
    output->flat<int64_t>()(0) = shard;
    output->flat<int64_t>()(1) = place;
  }

  bool changed_;
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleExport").Device(tensorflow::DEVICE_CPU),
                        LifecycleExportOp);

template <typename T>
std::vector<T> Column(tensorflow::OpKernelContext* context, int i) {
  const auto values = context->input(i).flat<T>();
  return std::vector<T>(values.data(), values.data() + values.size());
}

class LifecycleImportOp : public FeatureTableOpKernel {
 public:
  using FeatureTableOpKernel::FeatureTableOpKernel;

 private:
  void ComputeOn(tensorflow::OpKernelContext* context, FeatureTableResource* resource) override {
    for (int i = 0; i < 8; ++i) {
      const int64_t length = i == 0 ? -1 : context->input(1).NumElements();
      OP_REQUIRES_OK(context, CheckVector(context->input(1 + i), kColumns[i], length));
    }
    FeatureColumns columns;
    columns.key = Column<int64_t>(context, 1);
    columns.show = Column<double>(context, 2);
    columns.click = Column<double>(context, 3);
    columns.delta_score = Column<double>(context, 4);
    columns.unseen_days = Column<uint16_t>(context, 5);
    columns.age_days = Column<uint16_t>(context, 6);
    columns.slot = Column<uint16_t>(context, 7);
    const auto admitted = context->input(8).flat<bool>();
    columns.admitted.assign(admitted.data(), admitted.data() + admitted.size());
    OP_REQUIRES_OK(context, ToTensorFlow(resource->table()->Import(columns)));
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrLifecycleImport").Device(tensorflow::DEVICE_CPU),
                        LifecycleImportOp);

}  // namespace
}  // namespace ctr

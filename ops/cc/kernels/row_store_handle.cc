// Creates or finds a row store by name.
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cc/kernels/row_store_kernels.h"
#include "tensorflow/core/framework/resource_op_kernel.h"

namespace ctr {
namespace {

class RowStoreHandleOp : public tensorflow::ResourceOpKernel<FeatureTableResource> {
 public:
  explicit RowStoreHandleOp(tensorflow::OpKernelConstruction* context) : ResourceOpKernel(context) {
    std::string text;
    OP_REQUIRES_OK(context, context->GetAttr("policy", &text));
    OP_REQUIRES_OK(context, ToTensorFlow(Policy::Parse(text, &policy_)));
    std::vector<int> slot_table, widths;
    std::vector<std::string> linear, factors, dtypes;
    std::vector<float> init_scales;
    int64_t seed;
    OP_REQUIRES_OK(context, context->GetAttr("slot_table", &slot_table));
    OP_REQUIRES_OK(context, context->GetAttr("widths", &widths));
    OP_REQUIRES_OK(context, context->GetAttr("init_scales", &init_scales));
    OP_REQUIRES_OK(context, context->GetAttr("linear_optimizers", &linear));
    OP_REQUIRES_OK(context, context->GetAttr("factors_optimizers", &factors));
    OP_REQUIRES_OK(context, context->GetAttr("factors_dtypes", &dtypes));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    OP_REQUIRES_OK(context, context->GetAttr("memory_limit", &memory_limit_));
    OP_REQUIRES_OK(context, context->GetAttr("cold_dir", &cold_dir_));
    const size_t tables = widths.size();
    OP_REQUIRES(context,
                init_scales.size() == tables && linear.size() == tables &&
                    factors.size() == tables && dtypes.size() == tables,
                absl::InvalidArgumentError(
                    "init_scales, linear_optimizers, factors_optimizers, factors_dtypes: "
                    "wanted as many as widths, one a table"));
    layout_.slot_table = slot_table;
    layout_.seed = static_cast<uint64_t>(seed);
    for (size_t t = 0; t < tables; ++t) {
      RowTable table;
      table.width = widths[t];
      table.init_scale = init_scales[t];
      OP_REQUIRES(
          context, dtypes[t] == "float32" || dtypes[t] == "bfloat16",
          absl::InvalidArgumentError(absl::StrCat("factors_dtypes[", t, "]: found '", dtypes[t],
                                                  "'; wanted 'float32' or 'bfloat16'")));
      table.bfloat16 = dtypes[t] == "bfloat16";
      for (const auto& [name, rule] :
           {std::make_pair(linear[t], &table.linear), {factors[t], &table.factors}}) {
        *rule = FindRowRule(name);
        OP_REQUIRES(context, *rule != nullptr,
                    absl::InvalidArgumentError(absl::StrCat("optimizers: found '", name,
                                                            "'; wanted one of ", RowRuleNames())));
      }
      layout_.tables.push_back(table);
    }
    const std::string wrong = layout_.Check();
    OP_REQUIRES(context, wrong.empty(), absl::InvalidArgumentError(wrong));
    description_ = text;
    for (const int t : slot_table) absl::StrAppend(&description_, " ", t);
    for (size_t t = 0; t < tables; ++t) {
      absl::StrAppend(&description_, "; ", widths[t], " ", init_scales[t], " ", linear[t], " ",
                      factors[t], " ", dtypes[t]);
    }
    absl::StrAppend(&description_, "; ", seed);
    if (memory_limit_ > 0) absl::StrAppend(&description_, "; ", memory_limit_, " ", cold_dir_);
  }

 private:
  absl::Status CreateResource(FeatureTableResource** resource) override {
    tensorflow::core::RefCountPtr<FeatureTableResource> created(
        new FeatureTableResource(policy_, RowStore::PayloadBytes(layout_), description_));
    auto rows = std::make_unique<RowStoreAttachment>(created->table(), layout_);
    if (memory_limit_ > 0) {
      // The process of the store counts, which may be a server on another machine.
      const double machine = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
      const double bytes = memory_limit_ > 1 ? memory_limit_ : memory_limit_ * machine;
      TF_RETURN_IF_ERROR(
          ToTensorFlow(rows->store.LimitMemory(static_cast<int64_t>(bytes), cold_dir_)));
    }
    created->set_attachment(std::move(rows));
    *resource = created.release();
    return absl::OkStatus();
  }

  absl::Status VerifyResource(FeatureTableResource* resource) override {
    if (resource->description() == description_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("row store: found '", description_,
                                                   "'; wanted '", resource->description(),
                                                   "', that of the store of the same name"));
  }

  Policy policy_;
  RowLayout layout_;
  float memory_limit_ = 0.0f;
  std::string cold_dir_;
  std::string description_;  // must be equal in all handles of one name
};
REGISTER_KERNEL_BUILDER(Name("CtrRowStoreHandle").Device(tensorflow::DEVICE_CPU), RowStoreHandleOp);

}  // namespace
}  // namespace ctr

// CtrAllToAll: sends rows to every rank and receives rows from every rank.
#include "ops/cc/kernels/connections_resource.h"
#include "ops/cc/kernels/feature_table_resource.h"

namespace ctr {
namespace {

using tensorflow::Tensor;

class AllToAllOp : public tensorflow::AsyncOpKernel {
 public:
  explicit AllToAllOp(tensorflow::OpKernelConstruction* context) : AsyncOpKernel(context) {
    for (int i = 1; i + 1 < context->num_inputs(); ++i) {
      absl::StrAppend(&operation_, " ", tensorflow::DataTypeString(context->input_type(i)));
    }
  }

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override {
    std::shared_ptr<ConnectionsResource> resource;
    OP_REQUIRES_OK_ASYNC(context, LookupConnections(context, &resource), done);
    const int n = resource->connections()->size();
    tensorflow::OpInputList values;
    OP_REQUIRES_OK_ASYNC(context, context->input_list("values", &values), done);
    const Tensor& counts = context->input(context->num_inputs() - 1);
    OP_REQUIRES_ASYNC(context, counts.dims() == 1 && counts.dim_size(0) == n,
                      absl::InvalidArgumentError(
                          absl::StrCat("counts: found shape ", counts.shape().DebugString(),
                                       "; wanted [", n, "], one for each rank")),
                      done);
    Spans sent;
    std::vector<int64_t> row_bytes;  // of each tensor in values
    for (const Tensor& t : values) {
      OP_REQUIRES_ASYNC(context, t.dims() >= 1 && t.dim_size(0) == values[0].dim_size(0),
                        absl::InvalidArgumentError(absl::StrCat(
                            "values: found shapes ", values[0].shape().DebugString(), " and ",
                            t.shape().DebugString(), "; wanted [n, …], the same n of all")),
                        done);
      sent.push_back(SpanOf(t));
      row_bytes.push_back(tensorflow::DataTypeSize(t.dtype()));
      for (int d = 1; d < t.dims(); ++d) row_bytes.back() *= t.dim_size(d);
      OP_REQUIRES_ASYNC(context, row_bytes.back() > 0,
                        absl::InvalidArgumentError("values: found rows of no bytes"), done);
    }
    std::vector<Spans> from(n);
    int64_t rows = 0;
    for (int r = 0; r < n; ++r) {
      const int32_t count = counts.flat<int32_t>()(r);
      OP_REQUIRES_ASYNC(context, count >= 0 && count <= values[0].dim_size(0) - rows,
                        absl::InvalidArgumentError(
                            absl::StrCat("counts[", r, "]: found ", count, "; wanted at most ",
                                         values[0].dim_size(0) - rows, ", what values has left")),
                        done);
      from[r] = RowsOf(sent, row_bytes, rows, count);
      rows += count;
    }
    OP_REQUIRES_ASYNC(
        context, rows == values[0].dim_size(0),
        absl::InvalidArgumentError(absl::StrCat("counts: found a sum of ", rows, "; wanted ",
                                                values[0].dim_size(0), ", the rows of values")),
        done);
    resource->Run([this, context, resource, done = std::move(done), from = std::move(from),
                   row_bytes = std::move(row_bytes)] {
      absl::Status error;  // an error of TensorFlow, for which Status has no code
      const Status status = resource->connections()->AllToAll(
          operation_, from, [&](const std::vector<int64_t>& bytes, std::vector<Spans>* to) {
            error = Allocate(context, bytes, row_bytes, to);
            return error.ok() ? Status() : Status::Aborted("there was no memory for an all-to-all");
          });
      context->SetStatus(error.ok() ? ToTensorFlow(status) : error);
      done();
    });
  }

 private:
  // Returns rows [begin, begin + count) of each of `tensors`.
  static Spans RowsOf(const Spans& tensors, const std::vector<int64_t>& row_bytes, int64_t begin,
                      int64_t count) {
    Spans spans;
    for (size_t i = 0; i < row_bytes.size(); ++i) {
      spans.push_back({tensors[i].data + begin * row_bytes[i], count * row_bytes[i]});
    }
    return spans;
  }

  // Allocates the outputs and fills in the counts.
  static absl::Status Allocate(tensorflow::OpKernelContext* context,
                               const std::vector<int64_t>& bytes,
                               const std::vector<int64_t>& row_bytes, std::vector<Spans>* to) {
    int64_t of_all = 0;
    for (const int64_t b : row_bytes) of_all += b;
    const int outputs = static_cast<int>(row_bytes.size());
    Tensor* counts;
    TF_RETURN_IF_ERROR(
        context->allocate_output(outputs, {static_cast<int64_t>(bytes.size())}, &counts));
    int64_t rows = 0;
    for (size_t r = 0; r < bytes.size(); ++r) {
      const int64_t count = bytes[r] / of_all;
      rows += count;
      if (bytes[r] % of_all != 0 || rows > std::numeric_limits<int32_t>::max()) {
        return absl::DataLossError(
            absl::StrCat("rank ", r, " sent ", bytes[r], " bytes; wanted rows of ", of_all));
      }
      counts->flat<int32_t>()(r) = static_cast<int32_t>(count);
    }
    Spans received;
    for (int i = 0; i < outputs; ++i) {
      tensorflow::TensorShape shape = context->input(1 + i).shape();
      shape.set_dim(0, rows);
      Tensor* output;
      TF_RETURN_IF_ERROR(context->allocate_output(i, shape, &output));
      received.push_back(SpanOf(*output));
    }
    int64_t begin = 0;
    for (size_t r = 0; r < bytes.size(); ++r) {
      const int32_t count = counts->flat<int32_t>()(r);
      (*to)[r] = RowsOf(received, row_bytes, begin, count);
      begin += count;
    }
    return absl::OkStatus();
  }

  std::string operation_ = "all_to_all";  // and the types of its values
};
REGISTER_KERNEL_BUILDER(Name("CtrAllToAll").Device(tensorflow::DEVICE_CPU), AllToAllOp);

}  // namespace
}  // namespace ctr

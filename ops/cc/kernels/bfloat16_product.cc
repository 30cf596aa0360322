// Products in bfloat16 and their gradients, computed by ops/cc/dense/bfloat16_product.h. The
// kernels have no state.
#include "ops/cc/dense/bfloat16_product.h"

#include <vector>

#include "ops/cc/kernels/row_store_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace ctr {
namespace {

Matrix Whole(const tensorflow::Tensor& of) {
  return {of.flat<float>().data(), of.dim_size(0), of.dim_size(1), of.dim_size(1)};
}

Matrix Transposed(Matrix of) {
  of.transposed = !of.transposed;
  return of;
}

absl::Status WrongShape(const char* name, const tensorflow::TensorShape& found,
                        const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": found shape ", found.DebugString(), "; wanted ", wanted));
}

class Kernel : public tensorflow::OpKernel {
 public:
  explicit Kernel(tensorflow::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("transpose_b", &transpose_b_));
    OP_REQUIRES_OK(c, c->GetAttr("relu", &relu_));
    OP_REQUIRES(c, HasBfloat16Products(),
                absl::UnimplementedError("this processor has no avx512_bf16"));
  }

 protected:
  // Checks that the parts of a have equal heights and together as many columns as b has rows.
  absl::Status CheckFactors(const tensorflow::OpInputList& a, const tensorflow::Tensor& b) const {
    if (b.dims() != 2) return WrongShape("b", b.shape(), "a matrix");
    int64_t inner = 0;
    for (const tensorflow::Tensor& part : a) {
      if (part.dims() != 2 || part.dim_size(0) != a[0].dim_size(0))
        return WrongShape("a", part.shape(), "matrices of one height");
      inner += part.dim_size(1);
    }
    if (b.dim_size(transpose_b_ ? 1 : 0) != inner) {
      return WrongShape("b", b.shape(),
                        absl::StrCat(inner, " in its ", transpose_b_ ? "columns" : "rows",
                                     ", which a has columns"));
    }
    return absl::OkStatus();
  }

  int64_t ProductColumns(const tensorflow::Tensor& b) const {
    return b.dim_size(transpose_b_ ? 0 : 1);
  }

  // The inputs of both gradients.
  struct Inputs {
    tensorflow::OpInputList a;
    const tensorflow::Tensor* b;
    Matrix grad;  // the gradient of the product; its gate hides what was rectified to 0
  };
  absl::Status ReadInputs(tensorflow::OpKernelContext* c, Inputs* in) const {
    const tensorflow::Tensor *product, *grad;
    TF_RETURN_IF_ERROR(c->input_list("a", &in->a));
    TF_RETURN_IF_ERROR(c->input("b", &in->b));
    TF_RETURN_IF_ERROR(c->input("product", &product));
    TF_RETURN_IF_ERROR(c->input("grad", &grad));
    TF_RETURN_IF_ERROR(CheckFactors(in->a, *in->b));
    const tensorflow::TensorShape wanted({in->a[0].dim_size(0), ProductColumns(*in->b)});
    if (grad->shape() != wanted) return WrongShape("grad", grad->shape(), wanted.DebugString());
    in->grad = Whole(*grad);
    if (!relu_) return absl::OkStatus();
    if (product->shape() != wanted)
      return WrongShape("product", product->shape(), wanted.DebugString());
    in->grad.gate = product->flat<float>().data();
    return absl::OkStatus();
  }

  // Returns the rows of b, transposed if transpose_b, by which a part of a is multiplied.
  Matrix RowsOf(const tensorflow::Tensor& b, int64_t first, int64_t count) const {
    const float* data = b.flat<float>().data();
    const int64_t stride = b.dim_size(1);
    if (transpose_b_) return {data + first, b.dim_size(0), count, stride, true};
    return {data + first * stride, count, stride, stride};
  }

  bool transpose_b_, relu_;
};

// Temporary memory for packed factors.
class Room {
 public:
  absl::Status Allocate(tensorflow::OpKernelContext* c, int64_t size) {
    TF_RETURN_IF_ERROR(c->allocate_temp(tensorflow::DT_INT32, {size}, &memory_));
    next_ = memory_.flat<int32_t>().data();
    return absl::OkStatus();
  }
  const int32_t* Take(const Matrix& b, const ParallelFor& parallel_for, float* sums = nullptr) {
    int32_t* const packed = next_;
    next_ += PackedSize(b);
    Pack(b, parallel_for, packed, sums);
    return packed;
  }

 private:
  tensorflow::Tensor memory_;
  int32_t* next_ = nullptr;
};

class ProductOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Compute(tensorflow::OpKernelContext* c) override {
    tensorflow::OpInputList a, biases;
    const tensorflow::Tensor* b;
    OP_REQUIRES_OK(c, c->input_list("a", &a));
    OP_REQUIRES_OK(c, c->input("b", &b));
    OP_REQUIRES_OK(c, c->input_list("bias", &biases));
    OP_REQUIRES_OK(c, CheckFactors(a, *b));
    const int64_t rows = a[0].dim_size(0), columns = ProductColumns(*b);
    const float* bias = nullptr;
    for (const tensorflow::Tensor& one : biases) {
      OP_REQUIRES_OK(c, CheckLength(one, "bias", columns));
      bias = one.flat<float>().data();
    }
    tensorflow::Tensor* product;
    OP_REQUIRES_OK(c, c->allocate_output(0, {rows, columns}, &product));
    if (product->NumElements() == 0) return;
    const ParallelFor parallel_for = ParallelForOf(c);
    std::vector<Matrix> of_b;
    int64_t first = 0, size = 0;
    for (const tensorflow::Tensor& part : a) {
      of_b.push_back(RowsOf(*b, first, part.dim_size(1)));
      first += part.dim_size(1);
      size += PackedSize(of_b.back());
    }
    Room room;
    OP_REQUIRES_OK(c, room.Allocate(c, size));
    std::vector<Term> terms;
    for (int i = 0; i < a.size(); ++i)
      terms.push_back({Whole(a[i]), {room.Take(of_b[i], parallel_for)}});
    Multiply(terms, rows, {{product->flat<float>().data(), columns, columns, bias, relu_}},
             parallel_for);
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrBfloat16Product").Device(tensorflow::DEVICE_CPU), ProductOp);

class GradientOfAOp : public Kernel {
 public:
  using Kernel::Kernel;

  void Compute(tensorflow::OpKernelContext* c) override {
    Inputs in;
    OP_REQUIRES_OK(c, ReadInputs(c, &in));
    const int64_t rows = in.grad.rows;
    tensorflow::OpOutputList outputs;
    OP_REQUIRES_OK(c, c->output_list("a_grads", &outputs));
    const ParallelFor parallel_for = ParallelForOf(c);
    std::vector<Matrix> of_b;
    std::vector<Result> results;
    int64_t first = 0, size = 0;
    for (int i = 0; i < in.a.size(); ++i) {
      const int64_t columns = in.a[i].dim_size(1);
      tensorflow::Tensor* output;
      OP_REQUIRES_OK(c, outputs.allocate(i, {rows, columns}, &output));
      of_b.push_back(Transposed(RowsOf(*in.b, first, columns)));
      results.push_back({output->flat<float>().data(), columns, columns});
      first += columns;
      size += PackedSize(of_b.back());
    }
    Room room;
    OP_REQUIRES_OK(c, room.Allocate(c, size));
    Term term{in.grad, {}};
    for (const Matrix& part : of_b) term.b.push_back(room.Take(part, parallel_for));
    Multiply({term}, rows, results, parallel_for);
  }
};
REGISTER_KERNEL_BUILDER(Name("CtrBfloat16ProductGradA").Device(tensorflow::DEVICE_CPU),
                        GradientOfAOp);

class GradientOfBOp : public Kernel {
 public:
  explicit GradientOfBOp(tensorflow::OpKernelConstruction* c) : Kernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("bias", &bias_));
    OP_REQUIRES(c, !(bias_ && transpose_b_),
                absl::InvalidArgumentError("bias wants a b that is not transposed"));
  }

  void Compute(tensorflow::OpKernelContext* c) override {
    Inputs in;
    OP_REQUIRES_OK(c, ReadInputs(c, &in));
    const int64_t columns = in.grad.columns;
    tensorflow::Tensor *of_b, *of_bias;
    OP_REQUIRES_OK(c, c->allocate_output(0, in.b->shape(), &of_b));
    OP_REQUIRES_OK(c, c->allocate_output(1, {bias_ ? columns : 0}, &of_bias));
    const ParallelFor parallel_for = ParallelForOf(c);
    float* const to = of_b->flat<float>().data();
    int64_t first = 0;
    Room room;
    if (!transpose_b_) {  // b's gradient is aᵀ times grad, which is packed once for all parts
      OP_REQUIRES_OK(c, room.Allocate(c, PackedSize(in.grad)));
      const int32_t* packed =
          room.Take(in.grad, parallel_for, bias_ ? of_bias->flat<float>().data() : nullptr);
      for (const tensorflow::Tensor& part : in.a) {
        const int64_t count = part.dim_size(1);
        Multiply({{Transposed(Whole(part)), {packed}}}, count,
                 {{to + first * columns, columns, columns}}, parallel_for);
        first += count;
      }
      return;
    }
    int64_t size = 0;
    for (const tensorflow::Tensor& part : in.a) size += PackedSize(Whole(part));
    OP_REQUIRES_OK(c, room.Allocate(c, size));
    Term term{Transposed(in.grad), {}};
    std::vector<Result> results;
    for (const tensorflow::Tensor& part : in.a) {
      term.b.push_back(room.Take(Whole(part), parallel_for));
      results.push_back({to + first, part.dim_size(1), in.b->dim_size(1)});
      first += part.dim_size(1);
    }
    Multiply({term}, columns, results, parallel_for);
  }

 private:
  bool bias_;
};
REGISTER_KERNEL_BUILDER(Name("CtrBfloat16ProductGradB").Device(tensorflow::DEVICE_CPU),
                        GradientOfBOp);

}  // namespace
}  // namespace ctr

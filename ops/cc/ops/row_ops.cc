// Registrations of the ops on rows: dedupe, the row store, pooling, the exchange between ranks, the
// row optimizers.
#include <string>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace ctr {
namespace {

using absl::Status;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// Inputs first … last are vectors.
Status Vectors(InferenceContext* c, int first, int last) {
  ShapeHandle vector;
  for (int i = first; i <= last; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
  return absl::OkStatus();
}

// Input i, a vector [n]; `length` gets n.
Status LengthOf(InferenceContext* c, int i, DimensionHandle* length) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
  *length = c->Dim(vector, 0);
  return absl::OkStatus();
}

// Output i is [n + 1].
Status OnePast(InferenceContext* c, int i, DimensionHandle n) {
  DimensionHandle more;
  TF_RETURN_IF_ERROR(c->Add(n, 1, &more));
  c->set_output(i, c->Vector(more));
  return absl::OkStatus();
}

REGISTER_OP("CtrDedupe")
    .Input("keys: int64")
    .Input("shows: float")
    .Input("clicks: float")
    .Input("segments: int32")
    .Attr("fields: int >= 0 = 0")
    .Output("unique: int64")
    .Output("inverse: int32")
    .Output("unique_shows: float")
    .Output("unique_clicks: float")
    .Output("starts: int32")
    .Output("order: int32")
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle n;
      TF_RETURN_IF_ERROR(LengthOf(c, 0, &n));
      TF_RETURN_IF_ERROR(Vectors(c, 1, 3));
      const DimensionHandle u = c->UnknownDim();
      for (const int i : {0, 2, 3}) c->set_output(i, c->Vector(u));
      for (const int i : {1, 5}) c->set_output(i, c->Vector(n));
      return OnePast(c, 4, u);
    })
    .Doc(R"doc(
The distinct keys of a batch, with the sums of their shows and clicks.

keys: [n].
shows: of each occurrence, [n], or [1] for all.
clicks: likewise; where fields > 0, of each sample.
segments: where fields > 0, as CtrPool's: [n], sample * fields + field, ascending; or [0]: one occurrence for each.
fields: F, or 0.
unique: [u], by logical shard, then first occurrence.
inverse: [n], the place in unique of each occurrence.
unique_shows: [u], summed in the order of occurrence.
unique_clicks: [u].
starts: [u + 1].
order: [n]; the occurrences of unique j are order[starts[j]:starts[j + 1]], ascending.
)doc");

REGISTER_OP("CtrRowStoreHandle")
    .Attr("policy: string")
    .Attr("slot_table: list(int)")
    .Attr("widths: list(int)")
    .Attr("init_scales: list(float)")
    .Attr("linear_optimizers: list(string)")
    .Attr("factors_optimizers: list(string)")
    .Attr("factors_dtypes: list(string)")
    .Attr("seed: int")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Output("table: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a feature table with rows beside its features, or finds the one of the same container and shared_name. The ops of
the feature lifecycle work on it too.

policy: what `ops.policy.Policy.serialize` writes.
slot_table: the table of each slot id, -1 for none.
widths: factors of a row, of each table; 0: linear weights only.
init_scales: the standard deviation of each table's initial factors.
linear_optimizers: the name of a row optimizer (ops/cc/rows/row_optimizers.cc), of each table.
factors_optimizers: likewise.
factors_dtypes: float32 or bfloat16, of each table: what its factors and their optimizer state are kept in.
seed: of the initial factors and the rounding.
shared_name: empty: the store is this node's own. A second handle of one name must be told the same.
)doc");

REGISTER_OP("CtrRowStorePull")
    .Input("table: resource")
    .Input("keys: int64")
    .Attr("train: bool")
    .Output("ids: int64")
    .Output("offsets: int32")
    .Output("linear: float")
    .Output("factors: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle n;
      TF_RETURN_IF_ERROR(LengthOf(c, 1, &n));
      c->set_output(0, c->Vector(n));
      TF_RETURN_IF_ERROR(OnePast(c, 1, n));
      c->set_output(2, c->Vector(n));
      c->set_output(3, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads rows; changes nothing.

keys: [u], >= 0; fastest where grouped by shard of the table.
train: with admission `none`, features that have no factors yet read their initial ones.
ids: [u], hints for the push; -1 where absent.
offsets: [u + 1]; feature j's factors are factors[offsets[j]:offsets[j + 1]], none before admission.
linear: [u], 0 where absent.
)doc");

REGISTER_OP("CtrRowStorePush")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("ids: int64")
    .Input("offsets: int32")
    .Input("shows: float")
    .Input("clicks: float")
    .Input("linear_grad: float")
    .Input("factors_grad: float")
    .Input("scale: float")
    .Input("hyper: float")
    .Input("step: int64")
    .Attr("add: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Vectors(c, 1, 8));
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(9), 3, &shape));
      return c->WithRank(c->input(10), 0, &shape);
    })
    .Doc(R"doc(
One optimizer step on rows; then observes shows and clicks, and admits.

keys: [u]; repeats take their turns.
ids: [u], of the pull; -1 is always right.
offsets: [u + 1], of the pull.
shows: [u], summed over the batch.
clicks: [u].
linear_grad: [u], summed over the batch.
factors_grad: [offsets[u]].
scale: [1] or [u], multiplies the gradients.
hyper: [tables, 2, fields], of linear weight and factors; fields in the order of `RowHyper` (ops/cc/rows/row_optimizers.h).
step: the global step, from 1.
add: the gradients are differences, which are added to the weights; no state moves but FTRL's z.
)doc");

REGISTER_OP("CtrRowStoreCatchUp")
    .Input("table: resource")
    .Input("hyper: float")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 3, &shape));
      return c->WithRank(c->input(2), 0, &shape);
    })
    .Doc(R"doc(
Takes, on every row, the steps up to and with `step` that the row missed, where its optimizer has l2_catch_up.

hyper: [tables, 2, fields], as of CtrRowStorePush.
)doc");

REGISTER_OP("CtrRowStoreExport")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("admitted: bool")
    .Attr("dtypes: list({float, uint16}) >= 0")
    .Output("linear: float")
    .Output("last_step: int32")
    .Output("factors: dtypes")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle n;
      TF_RETURN_IF_ERROR(LengthOf(c, 1, &n));
      c->set_output(0, c->Matrix(n, c->UnknownDim()));
      c->set_output(1, c->Vector(n));
      for (int i = 2; i < c->num_outputs(); ++i) c->set_output(i, c->UnknownShapeOfRank(2));
      return Vectors(c, 2, 2);
    })
    .Doc(R"doc(
Rows of features, for checkpoints.

keys: [n], as CtrLifecycleExport gave them.
admitted: [n], likewise.
linear: [n, 1 + k], weight, then optimizer state.
last_step: [n].
factors: of each table [its admitted keys, width + state], weights, then state; the bits of bfloat16 as uint16.
)doc");

REGISTER_OP("CtrRowStoreImport")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("admitted: bool")
    .Input("linear: float")
    .Input("last_step: int32")
    .Input("factors: dtypes")
    .Attr("dtypes: list({float, uint16}) >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Gives features that CtrLifecycleImport added the rows that CtrRowStoreExport gave.");

REGISTER_OP("CtrInitialFactors")
    .Input("keys: int64")
    .Attr("seed: int")
    .Attr("width: int >= 1")
    .Attr("scale: float")
    .Output("factors: float")
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle n;
      TF_RETURN_IF_ERROR(LengthOf(c, 0, &n));
      int64_t width;
      TF_RETURN_IF_ERROR(c->GetAttr("width", &width));
      c->set_output(0, c->Matrix(n, width));
      return absl::OkStatus();
    })
    .Doc(R"doc(
What the row store initialises factors with: a pure function of (seed, key, column).

keys: [n].
scale: the standard deviation.
factors: [n, width].
)doc");

REGISTER_OP("CtrRowInit")
    .Input("weights: float")
    .Input("hyper: float")
    .Attr("kind: string")
    .Output("rows: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle weights;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &weights));
      c->set_output(0, c->Matrix(c->Dim(weights, 0), c->UnknownDim()));
      return Vectors(c, 1, 1);
    })
    .Doc(R"doc(
Weights with the fresh state of a row optimizer behind them.

weights: [n, dim].
hyper: [fields], in the order of `RowHyper` (ops/cc/rows/row_optimizers.h).
kind: the name of a row optimizer.
rows: [n, dim + state].
)doc");

REGISTER_OP("CtrRowUpdate")
    .Input("rows: float")
    .Input("gradient: float")
    .Input("scale: float")
    .Input("last_step: int32")
    .Input("hyper: float")
    .Input("step: int64")
    .Attr("kind: string")
    .Attr("add: bool = false")
    .Output("updated: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows, shape;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &rows));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &shape));
      TF_RETURN_IF_ERROR(Vectors(c, 2, 4));
      c->set_output(0, rows);
      return c->WithRank(c->input(5), 0, &shape);
    })
    .Doc(R"doc(
One step of a row optimizer on looked-up rows.

rows: [n, dim + state], weights, then state.
gradient: [n, dim].
scale: [1] or [n], multiplies the gradient.
last_step: [n], of the row's last update; 0: none yet, the state is initialised first.
hyper: [fields], in the order of `RowHyper` (ops/cc/rows/row_optimizers.h).
step: the global step, from 1.
kind: the name of a row optimizer.
add: the gradient is a difference, which is added to the weights; no state moves but FTRL's z.
updated: [n, dim + state].
)doc");

Status PoolShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(Vectors(c, 0, 5));
  TF_RETURN_IF_ERROR(Vectors(c, 7, 8));
  std::vector<int> table_of_field, part_tables, part_widths;
  std::vector<bool> part_field, part_slots, part_totals;
  TF_RETURN_IF_ERROR(c->GetAttr("table_of_field", &table_of_field));
  TF_RETURN_IF_ERROR(c->GetAttr("part_tables", &part_tables));
  TF_RETURN_IF_ERROR(c->GetAttr("part_widths", &part_widths));
  TF_RETURN_IF_ERROR(c->GetAttr("part_field", &part_field));
  TF_RETURN_IF_ERROR(c->GetAttr("part_slots", &part_slots));
  TF_RETURN_IF_ERROR(c->GetAttr("part_totals", &part_totals));
  const size_t parts = part_tables.size();
  if (part_widths.size() != parts || part_field.size() != parts || part_slots.size() != parts ||
      part_totals.size() != parts || c->num_outputs() != static_cast<int>(2 + 3 * parts)) {
    return absl::InvalidArgumentError(
        "part_tables, part_widths, part_field, part_slots, part_totals: wanted one a part");
  }
  ShapeHandle scalar;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(6), 0, &scalar));
  DimensionHandle batch;
  TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(6, &batch));
  const int64_t fields = table_of_field.size();
  std::vector<std::string> poolings;
  TF_RETURN_IF_ERROR(c->GetAttr("poolings", &poolings));
  c->set_output(0, c->Matrix(batch, fields));
  c->set_output(1, c->Matrix(poolings.empty() ? c->MakeDim(0) : batch, fields));
  for (size_t p = 0; p < parts; ++p) {
    int64_t own = 0;
    for (const int t : table_of_field) own += t == part_tables[p];
    const int64_t columns = part_field[p] ? part_widths[p] * fields : part_widths[p];
    const DimensionHandle none = c->MakeDim(0);
    const DimensionHandle width = c->MakeDim(columns);
    c->set_output(2 + p, c->MakeShape({part_slots[p] ? batch : none, c->MakeDim(own), width}));
    c->set_output(2 + parts + p, c->Matrix(part_totals[p] ? batch : none, width));
    c->set_output(2 + 2 * parts + p, c->Vector(part_totals[p] || part_field[p] ? batch : none));
  }
  return absl::OkStatus();
}

REGISTER_OP("CtrPool")
    .Input("linear: float")
    .Input("inverse: int32")
    .Input("factors: float")
    .Input("offsets: int32")
    .Input("values: float")
    .Input("segments: int32")
    .Input("batch_size: int32")
    .Input("starts: int32")
    .Input("order: int32")
    .Attr("parts: int >= 0")
    .Attr("table_of_field: list(int)")
    .Attr("part_tables: list(int)")
    .Attr("part_widths: list(int)")
    .Attr("part_field: list(bool)")
    .Attr("part_slots: list(bool)")
    .Attr("part_totals: list(bool)")
    .Attr("poolings: list(string)")
    .Output("pooled_linear: float")
    .Output("norm: float")
    .Output("slots: parts * float")
    .Output("totals: parts * float")
    .Output("squares: parts * float")
    .SetShapeFn(PoolShape)
    .Doc(R"doc(
Rows of distinct features -> slot sums of a batch of samples with F fields.

linear: [u].
inverse: [n], the feature of each occurrence.
factors: [offsets[u]].
offsets: [u + 1]; feature j's factors are factors[offsets[j]:offsets[j + 1]], none or its table's parts side by side.
values: [n], or [0]: all 1.
segments: [n], sample * F + field, ascending; or [0]: one occurrence for each.
batch_size: B.
starts: [u + 1], for the gradient: see CtrDedupe.
order: [n], likewise.
table_of_field: [F], ascending.
part_tables: of each part, in the order of a row's columns.
part_widths: D.
part_field: a part of F * D columns, D for each field.
part_slots: whether its slot sums are wanted.
part_totals: whether its totals are wanted, of a plain part.
poolings: [F] of sum, mean, sqrtn; or empty: norm is not wanted.
pooled_linear: [B, F], sum of x * w.
norm: [B, F], what pooling divides a slot's sum by: sum of x (mean) or the square root of the sum of x^2 (sqrtn), infinity
  where that is 0; 1 for sum and for empty slots; or [0, F].
slots: of each part [B, fields of its table, columns], sum of x * v; or [0, ...].
totals: of each part [B, columns], sum of x * v over all its fields; or [0, columns].
squares: where there are totals, and of field parts, [B], sum of x^2 * |v|^2, for field parts over the columns of the
  occurrence's own field; else [0].
)doc");

REGISTER_OP("CtrPoolGrad")
    .Input("factors: float")
    .Input("offsets: int32")
    .Input("values: float")
    .Input("segments: int32")
    .Input("batch_size: int32")
    .Input("starts: int32")
    .Input("order: int32")
    .Input("linear_grad: float")
    .Input("slots_grads: parts * float")
    .Input("totals_grads: parts * float")
    .Input("squares_grads: parts * float")
    .Attr("parts: int >= 0")
    .Attr("table_of_field: list(int)")
    .Attr("part_tables: list(int)")
    .Attr("part_widths: list(int)")
    .Attr("part_field: list(bool)")
    .Attr("part_slots: list(bool)")
    .Attr("part_totals: list(bool)")
    .Attr("poolings: list(string)")
    .Output("linear_sums: float")
    .Output("factors_sums: float")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Vectors(c, 0, 3));
      TF_RETURN_IF_ERROR(Vectors(c, 5, 6));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->input(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of CtrPool, summed over the occurrences of each feature in their order.

linear_grad: [B, F], or empty for none; likewise slots_grads, totals_grads and squares_grads.
linear_sums: [u].
factors_sums: [offsets[u]].
)doc");

REGISTER_OP("CtrPackRows")
    .Input("linear: float")
    .Input("factors: float")
    .Input("offsets: int32")
    .Input("inverse: int32")
    .Input("counts: int32")
    .Attr("T: {float, half, bfloat16}")
    .Output("buffer: T")
    .Output("splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Vectors(c, 0, 4));
      c->set_output(0, c->UnknownShapeOfRank(1));
      c->set_output(1, c->input(4));
      return absl::OkStatus();
    })
    .Doc(R"doc(
An owner's answer to the ranks that asked for rows.

linear: [u], factors, offsets: of the pull.
inverse: [n], the feature of each key asked for, in the order of the asking ranks.
counts: [N], keys that each rank asked for.
buffer: blocks for each rank: linear weights, a bit a key (has it factors?), factors of those that do.
splits: [N], values of each block.
)doc");

REGISTER_OP("CtrUnpackRows")
    .Input("buffer: T")
    .Input("counts: int32")
    .Input("keys: int64")
    .Attr("T: {float, half, bfloat16}")
    .Attr("slot_table: list(int)")
    .Attr("widths: list(int)")
    .Output("linear: float")
    .Output("factors: float")
    .Output("offsets: int32")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Vectors(c, 0, 2));
      DimensionHandle u;
      TF_RETURN_IF_ERROR(LengthOf(c, 2, &u));
      c->set_output(0, c->Vector(u));
      c->set_output(1, c->Vector(c->UnknownDim()));
      return OnePast(c, 2, u);
    })
    .Doc(R"doc(
Rows from what the owners' CtrPackRows sent.

counts: [N], keys that each owner was asked for.
keys: [u], by owner.
slot_table: the table of each slot id, -1 for none.
widths: factors of a row, of each table.
linear: [u], factors, offsets: as the owners' pulls gave them.
)doc");

REGISTER_OP("CtrPackGradients")
    .Input("linear_grad: float")
    .Input("factors_grad: float")
    .Input("offsets: int32")
    .Input("counts: int32")
    .Attr("T: {float, half, bfloat16}")
    .Output("buffer: T")
    .Output("splits: int32")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Vectors(c, 0, 3));
      c->set_output(0, c->UnknownShapeOfRank(1));
      c->set_output(1, c->input(3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradients for their owners.

linear_grad: [u], of keys grouped by owner.
factors_grad: [offsets[u]].
counts: [N], keys of each owner.
buffer: blocks for each owner: linear gradients, then those of factors.
splits: [N], values of each block.
)doc");

REGISTER_OP("CtrSumGradients")
    .Input("buffer: T")
    .Input("counts: int32")
    .Input("offsets: int32")
    .Input("inverse: int32")
    .Input("starts: int32")
    .Input("order: int32")
    .Attr("T: {float, half, bfloat16}")
    .Output("linear_grad: float")
    .Output("factors_grad: float")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Vectors(c, 0, 5));
      c->set_output(0, c->Vector(c->UnknownDim()));
      c->set_output(1, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
An owner's sums of the gradients that ranks sent by CtrPackGradients, in float, in the order of the ranks.

counts: [N], keys of each rank.
offsets: [u + 1], of the owner's pull.
inverse: [n], starts: [u + 1], order: [n]: of CtrDedupe on the keys of all ranks, one after the other.
linear_grad: [u].
factors_grad: [offsets[u]].
)doc");

}  // namespace
}  // namespace ctr

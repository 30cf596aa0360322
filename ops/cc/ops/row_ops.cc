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

// Checks that inputs first … last are vectors.
Status Vectors(InferenceContext* c, int first, int last) {
  ShapeHandle vector;
  for (int i = first; i <= last; ++i) TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
  return absl::OkStatus();
}

// Checks that input i is a vector [n], and sets `length` to n.
Status LengthOf(InferenceContext* c, int i, DimensionHandle* length) {
  ShapeHandle vector;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
  *length = c->Dim(vector, 0);
  return absl::OkStatus();
}

// Gives output i the shape [n + 1].
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
Finds the distinct keys of a batch, and sums the shows and clicks of each.

keys: [n].
shows: [n], for each occurrence, or [1] for all.
clicks: [n], for each occurrence, or [1] for all; if fields > 0, [B], for each sample.
segments: read if fields > 0, as in CtrPool: [n], sample * fields + field, ascending; or [0] if each
  field of each sample has one occurrence.
fields: F; 0 if clicks are given for each occurrence.
unique: [u], ordered by logical shard, then by first occurrence.
inverse: [n], for each occurrence the place of its key in unique.
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
    .Attr("memory_limit: float = 0.0")
    .Attr("cold_dir: string = ''")
    .Attr("container: string = ''")
    .Attr("shared_name: string = ''")
    .Output("table: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Creates a feature table with rows beside its features, or finds the one of the same container and
shared_name. The ops of the feature lifecycle work on it too.

policy: what `ops.policy.Policy.serialize` writes.
slot_table: the table of each slot id, -1 for none.
widths: for each table, the number of factors in a row; 0: linear weights only.
init_scales: for each table, the standard deviation of initial factors.
linear_optimizers: for each table, the row optimizer of linear weights, by its name in
  ops/cc/rows/row_optimizers.cc.
factors_optimizers: for each table, the row optimizer of factors.
factors_dtypes: for each table, the dtype in which factors and their optimizer state are kept:
  float32 or bfloat16.
seed: the seed of initial factors and of the random rounding to bfloat16.
memory_limit: how many bytes of memory features and rows may take; up to 1: a share of the machine's
  memory; 0: as many as they need.
cold_dir: where further features lie with their rows, in files that have no name.
shared_name: if empty, no other node shares the store. All handles of one name must have the same
  attributes.
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
Reads the rows of keys, and changes nothing.

keys: [u], >= 0; fastest if grouped by shard of the table.
train: whether features that have no factors yet read their initial factors, if the policy's
  admission is none.
ids: [u], where the push will look for the features first; -1 for an absent feature.
offsets: [u + 1]; the factors of key j are factors[offsets[j]:offsets[j + 1]], none before admission.
linear: [u], 0 for an absent feature.
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
Takes one optimizer step on each key's row, then adds the key's shows and clicks to its feature, and
admits the feature if the policy says so. Creates absent features.

keys: [u]; if a key repeats, its occurrences are processed one after the other.
ids: [u], from the pull; -1 is always right.
offsets: [u + 1], from the pull.
shows: [u], summed over the batch.
clicks: [u], summed over the batch.
linear_grad: [u], summed over the batch.
factors_grad: [offsets[u]], summed over the batch.
scale: [1] or [u], multiplies the gradients.
hyper: [tables, 2, fields]: for each table the hyperparameters of linear weights, then of factors, in
  the order of `RowHyper` (ops/cc/rows/row_optimizers.h).
step: the number of this global step, from 1.
add: whether the gradients are differences to add to the weights, without an optimizer. The state
  then stays, except FTRL's z, which follows its weight.
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
Takes, on every row whose optimizer has l2_catch_up, the steps up to `step` that the row missed,
`step` included.

hyper: [tables, 2, fields], as in CtrRowStorePush.
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
Returns the rows of features, for checkpoints.

keys: [n], from CtrLifecycleExport.
admitted: [n], from CtrLifecycleExport.
linear: [n, 1 + k], the weight, then its optimizer state.
last_step: [n], the step of the row's last update.
factors: for each table [its admitted keys, width + state], the weights, then their state; uint16
  holds the bits of bfloat16.
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
    .Doc(
        "Sets the rows of features that CtrLifecycleImport has added; the inputs are outputs of "
        "CtrRowStoreExport.");

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
Returns the factors that features start with, which depend only on (seed, key, column).

keys: [n].
scale: their standard deviation.
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
Returns rows of these weights, followed by the initial state of a row optimizer.

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
Returns rows after one more step of a row optimizer.

rows: [n, dim + state], weights, then state.
gradient: [n, dim].
scale: [1] or [n], multiplies the gradient.
last_step: [n], the step of each row's last update. 0: it had none, so its state is initialised
  first.
hyper: [fields], in the order of `RowHyper` (ops/cc/rows/row_optimizers.h).
step: the global step, from 1.
kind: the name of a row optimizer.
add: as in CtrRowStorePush.
updated: [n, dim + state].
)doc");

Status PoolShape(InferenceContext* c) {
  TF_RETURN_IF_ERROR(Vectors(c, 0, 5));
  TF_RETURN_IF_ERROR(Vectors(c, 7, 7));
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
    .Attr("parts: int >= 0")
    .Attr("table_of_field: list(int)")
    .Attr("part_tables: list(int)")
    .Attr("part_widths: list(int)")
    .Attr("part_field: list(bool)")
    .Attr("part_slots: list(bool)")
    .Attr("part_totals: list(bool)")
    .Attr("poolings: list(string)")
    .Attr("averaged: list(bool)")
    .Output("pooled_linear: float")
    .Output("norm: float")
    .Output("slots: parts * float")
    .Output("totals: parts * float")
    .Output("squares: parts * float")
    .SetShapeFn(PoolShape)
    .Doc(R"doc(
Adds up the rows of distinct features to slot sums of B samples with F fields.

A plain part of a row's factors has D columns; a field part has F * D columns, D for each field.

linear: [u], the linear weights w.
inverse: [n], for each occurrence the place of its feature in linear.
factors: [offsets[u]], the factors v.
offsets: [u + 1]; the factors of feature j are factors[offsets[j]:offsets[j + 1]], none or the parts
  of its table side by side.
values: [n], the values x; or [0] if all are 1.
segments: [n], sample * F + field, ascending; or [0] if each field of each sample has one occurrence.
batch_size: B.
starts: [u + 1], from CtrDedupe, for the gradient.
table_of_field: [F], ascending.
part_tables: for each part its table, in the order of a row's columns.
part_widths: for each part D.
part_field: for each part, whether it is a field part.
part_slots: for each part, whether to return slot sums.
part_totals: for each part, whether to return totals; plain parts only.
poolings: [F], each sum, mean or sqrtn; empty: norm is not returned.
averaged: [F], whether a field's values are divided by their number in the sample; empty: none are.
pooled_linear: [B, F], sum of x * w.
norm: [B, F], by what pooling divides a slot's sum: the sum of x (mean) or the square root of the sum
  of x^2 (sqrtn), infinity if that is 0; 1 for sum and for empty slots. [0, F] if not returned.
slots: for each part [B, fields of its table, columns], sum of x * v; [0, ...] if not returned.
totals: for each part [B, columns], sum of x * v over all its fields; [0, columns] if not returned.
squares: for each part [B], sum of x^2 * |v|^2; in a field part, over the columns of the occurrence's
  own field only. [0] for a plain part without totals.
)doc");

REGISTER_OP("CtrPoolGrad")
    .Input("factors: float")
    .Input("offsets: int32")
    .Input("values: float")
    .Input("segments: int32")
    .Input("batch_size: int32")
    .Input("inverse: int32")
    .Input("starts: int32")
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
    .Attr("averaged: list(bool)")
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
Gradients of CtrPool with respect to linear and factors; a feature's occurrences are added in their
order.

linear_grad: [B, F]; empty if it is 0. The same holds for slots_grads, totals_grads and
  squares_grads.
linear_sums: [u].
factors_sums: [offsets[u]].
)doc");

REGISTER_OP("CtrHistory")
    .Input("factors: float")
    .Input("offsets: int32")
    .Input("inverse: int32")
    .Input("segments: int32")
    .Input("batch_size: int32")
    .Input("starts: int32")
    .Input("order: int32")
    .Attr("fields: int >= 1")
    .Attr("field: int >= 0")
    .Attr("width: int >= 1")
    .Output("vectors: float")
    .Output("mask: bool")
    .Output("places: int32")
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle n, batch;
      TF_RETURN_IF_ERROR(Vectors(c, 0, 3));
      TF_RETURN_IF_ERROR(Vectors(c, 5, 6));
      TF_RETURN_IF_ERROR(LengthOf(c, 2, &n));
      ShapeHandle scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 0, &scalar));
      TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(4, &batch));
      int width;
      TF_RETURN_IF_ERROR(c->GetAttr("width", &width));
      const DimensionHandle longest = c->UnknownDim();
      c->set_output(0, c->MakeShape({batch, longest, c->MakeDim(width)}));
      c->set_output(1, c->Matrix(batch, longest));
      c->set_output(2, c->Vector(n));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gathers the factors of the features that each of B samples has in one field, its history.

The inputs are those of CtrPool.

fields: F, the number of fields.
field: the field of the histories, less than F.
width: D, how many of a row's factors are read, from its first column.
vectors: [B, L, D], in order; L is the length of the longest history. 0 where a history has ended or
  a feature has no factors.
mask: [B, L], whether there are factors.
places: [n], for each occurrence its index in mask, or -1; for the gradient.
)doc");

REGISTER_OP("CtrHistoryGrad")
    .Input("factors: float")
    .Input("offsets: int32")
    .Input("places: int32")
    .Input("starts: int32")
    .Input("order: int32")
    .Input("vectors_grad: float")
    .Output("factors_sums: float")
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(Vectors(c, 0, 4));
      ShapeHandle gradients;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(5), 3, &gradients));
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gradient of CtrHistory with respect to factors; a feature's occurrences are added in their order.

vectors_grad: [B, L, D].
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
Packs the rows with which an owner answers the ranks that asked for them.

linear: [u], from the pull; so are factors and offsets.
inverse: [n], the place in linear of each key that was asked for, in the order of the asking ranks.
counts: [N], how many keys each rank asked for.
buffer: a block for each rank: the linear weights; for each key a bit, whether it has factors; the
  factors of the keys that have them.
splits: [N], how many values each block has.
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
Unpacks the rows that owners packed with CtrPackRows.

counts: [N], how many keys each owner was asked for.
keys: [u], grouped by owner.
slot_table: the table of each slot id, -1 for none.
widths: for each table, the number of factors in a row.
linear: [u], as the owners pulled it; so are factors and offsets.
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
Packs gradients for the owners of their keys.

linear_grad: [u]; keys are grouped by owner.
factors_grad: [offsets[u]].
counts: [N], how many of the keys each owner owns.
buffer: a block for each owner: the gradients of linear weights, then of factors.
splits: [N], how many values each block has.
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
Unpacks the gradients that ranks packed with CtrPackGradients, and sums those of each key, in float,
in the order of the ranks.

counts: [N], how many keys each rank sent.
offsets: [u + 1], from the owner's pull.
inverse: [n], from CtrDedupe on the keys of all ranks, rank by rank; so are starts and order.
linear_grad: [u].
factors_grad: [offsets[u]].
)doc");

}  // namespace
}  // namespace ctr

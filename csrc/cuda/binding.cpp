// The launchers as torch ops, on torch's stable ABI: one library for every build of torch from 2.13 on. pydml/cuda/
// allocates what they fill. The same source binds the real library, for GPU tensors, and the emulated one, for CPU
// tensors.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "cuda/launchers.h"

namespace pydml {
namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;
using Floats = std::vector<double>;

// The device and the stream that kernels of these tensors are for.
#if defined(PYDML_EMULATED)
class Queue {
 public:
  explicit Queue(const Tensor&) {}
  void* stream() const { return nullptr; }
};
#else
class Queue {
 public:
  explicit Queue(const Tensor& t)
      : guard_(t.get_device_index()), stream_(torch::stable::accelerator::getCurrentStream(t.get_device_index())) {}
  void* stream() const { return stream_.nativeHandle(); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  torch::stable::accelerator::Stream stream_;
};
#endif

template <class T>
T* out(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}
template <class T>
const T* in(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
const T* in(const OptionalTensor& t) {
  return t ? in<T>(*t) : nullptr;
}

void check(int error, const char* op) {
  STD_TORCH_CHECK(error == 0, "pydml: the launch of ", op, " failed with CUDA error ", error, ": ", describe(error));
}

Rows rows(const Tensors& t, size_t first, int64_t n, int64_t pool) {
  const Tensor &x = t[first], &meta = t[first + 1], &index = t[first + 2];
  const int64_t places = x.size(0);
  STD_TORCH_CHECK(meta.size(1) == places && index.size(0) == places && x.is_contiguous() && meta.is_contiguous(),
                  "pydml: rows, numbers of rows and index disagree");
  const float* numbers = in<float>(meta);
  return {x.const_data_ptr(), numbers, numbers + places, numbers + 2 * places, in<int64_t>(index), int(n), int(pool)};
}

// tensors: x, numbers [3, places], index of own and of other, range, trouble; shape as pydml/cuda/ packs it.
Matrix matrix(const Tensors& t, const Ints& shape, double sharpness) {
  STD_TORCH_CHECK(t.size() == 8 && shape.size() == 9, "pydml: a matrix is 8 tensors and 9 numbers");
  Matrix m = {};
  m.own = rows(t, 0, shape[0], shape[1]);
  m.other = rows(t, 3, shape[2], shape[3]);
  m.range = in<int>(t[6]), m.trouble = in<int>(t[7]);
  m.d = int(shape[4]), m.math = int(shape[5]), m.view = int(shape[6]), m.symmetric = int(shape[7]);
  m.splits = int(shape[8]);
  m.slabs = int(t[0].size(1) * int64_t(t[0].element_size()) / 128);
  m.sharpness = float(sharpness);
  return m;
}

template <class A>
void set_policy(A& a, int64_t policy, const Floats& parameters) {
  STD_TORCH_CHECK(parameters.size() <= sizeof(a.parameters) / sizeof(float), "pydml: too many parameters");
  a.policy = int(policy);
  for (size_t k = 0; k < parameters.size(); ++k) a.parameters[k] = float(parameters[k]);
}

void prepare(const Tensor& z, const Tensor& index, bool normalize, int64_t math, const Tensor& x, const Tensor& numbers,
             const Tensor& trouble) {
  const Queue queue(z);
  PrepareArguments a = {};
  const int64_t places = x.size(0);
  a.z = z.const_data_ptr(), a.row_stride = z.stride(0), a.col_stride = z.stride(1);
  a.index = in<int64_t>(index);
  a.x = x.mutable_data_ptr();
  a.scale = out<float>(numbers), a.size = a.scale + places, a.norm = a.size + places;
  a.trouble = out<int>(trouble);
  a.places = int(places), a.slabs = int(x.size(1) * int64_t(x.element_size()) / 128), a.d = int(z.size(1));
  a.math = int(math), a.normalize = normalize;
  check(launch_prepare(a, queue.stream()), "prepare");
}

void finish(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& parts, bool normalize,
            const Tensor& grad) {
  const Queue queue(grad);
  FinishArguments a = {};
  a.parts = out<float>(parts), a.grad = grad.mutable_data_ptr();
  a.row_stride = grad.stride(0), a.col_stride = grad.stride(1);
  a.places = int(tensors[0].size(0)), a.splits = int(parts.size(0)), a.normalize = normalize;
  check(launch_finish(matrix(tensors, shape, sharpness), a, queue.stream()), "finish");
}

void pair(const Tensors& tensors, const Ints& shape, double sharpness, int64_t policy, const Floats& parameters,
          const OptionalTensor& row_field, const OptionalTensor& col_field, std::optional<double> epsilon,
          const Tensor& thresholds, const Tensor& parts, const Tensor& stats) {
  const Queue queue(stats);
  PairArguments a = {};
  set_policy(a, policy, parameters);
  a.row_field = in<float>(row_field), a.col_field = in<float>(col_field);
  a.mines = epsilon.has_value(), a.epsilon = float(epsilon.value_or(0));
  a.thresholds = out<float>(thresholds), a.parts = out<float>(parts), a.stats = out<float>(stats);
  check(launch_pair(matrix(tensors, shape, sharpness), a, queue.stream()), "pair");
}

// Each side: its statistics and their gradient, thresholds, row and column fields; absent where it has no anchors.
PairSide side(const OptionalTensor& stats, const OptionalTensor& grad, const OptionalTensor& thresholds,
              const OptionalTensor& row_field, const OptionalTensor& col_field) {
  return {in<float>(stats), in<float>(grad), in<float>(thresholds), in<float>(row_field), in<float>(col_field)};
}

void pair_backward(const Tensors& tensors, const Ints& shape, double sharpness, int64_t policy,
                   const Floats& parameters, bool mines, const OptionalTensor& own_stats,
                   const OptionalTensor& own_grad, const OptionalTensor& own_thresholds,
                   const OptionalTensor& own_row_field, const OptionalTensor& own_col_field,
                   const OptionalTensor& other_stats, const OptionalTensor& other_grad,
                   const OptionalTensor& other_thresholds, const OptionalTensor& other_row_field,
                   const OptionalTensor& other_col_field, const Tensor& parts) {
  const Queue queue(parts);
  PairBackwardArguments a = {};
  set_policy(a, policy, parameters);
  a.mines = mines, a.own_anchors = own_stats.has_value(), a.other_anchors = other_stats.has_value();
  a.own = side(own_stats, own_grad, own_thresholds, own_row_field, own_col_field);
  a.other = side(other_stats, other_grad, other_thresholds, other_row_field, other_col_field);
  a.parts = out<float>(parts);
  check(launch_pair_backward(matrix(tensors, shape, sharpness), a, queue.stream()), "pair_backward");
}

void histogram(const Tensors& tensors, const Ints& shape, double sharpness, int64_t nodes, double low, double density,
               bool positives, const Tensor& parts) {
  const Queue queue(parts);
  HistogramArguments a = {};
  a.nodes = int(nodes), a.low = float(low), a.density = float(density);
  a.positives = positives, a.parts = out<float>(parts);
  check(launch_histogram(matrix(tensors, shape, sharpness), a, queue.stream()), "histogram");
}

void histogram_backward(const Tensors& tensors, const Ints& shape, double sharpness, int64_t nodes, double low,
                        double density, const OptionalTensor& own, const OptionalTensor& other, const Tensor& parts) {
  const Queue queue(parts);
  HistogramBackwardArguments a = {};
  a.nodes = int(nodes), a.low = float(low), a.density = float(density);
  a.own = in<float>(own), a.other = in<float>(other), a.parts = out<float>(parts);
  check(launch_histogram_backward(matrix(tensors, shape, sharpness), a, queue.stream()), "histogram_backward");
}

void dots(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& i, const Tensor& j,
          const OptionalTensor& grad, const Tensor& u) {
  const Queue queue(u);
  const DotsArguments a = {in<int64_t>(i), in<int64_t>(j), in<float>(grad), out<float>(u), i.size(0)};
  check(launch_dots(matrix(tensors, shape, sharpness), a, queue.stream()), "dots");
}

void gather(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& start, const Tensor& order,
            const Tensor& partner, const Tensor& factor, const Tensor& parts) {
  const Queue queue(parts);
  const GatherArguments a = {in<int64_t>(start), in<int64_t>(order), in<int64_t>(partner), in<float>(factor),
                             out<float>(parts)};
  check(launch_gather(matrix(tensors, shape, sharpness), a, queue.stream()), "gather");
}

void extremes(const Tensors& tensors, const Ints& shape, double sharpness, const Ints& sign, const Floats& missing,
              const OptionalTensor& above, const OptionalTensor& below, const Tensor& values, const Tensor& columns,
              const Tensor& chosen, const Tensor& u) {
  const Queue queue(u);
  const int64_t n = shape[0];
  ExtremesArguments a = {};
  for (int side = 0; side < 2; ++side) {
    a.sign[side] = int(sign[side]), a.missing[side] = float(missing[side]);
    a.chosen[side] = out<int64_t>(chosen) + side * n, a.u[side] = out<float>(u) + side * n;
  }
  a.above = in<float>(above), a.below = in<float>(below);
  a.values = out<float>(values), a.columns = out<int64_t>(columns);
  check(launch_extremes(matrix(tensors, shape, sharpness), a, queue.stream()), "extremes");
}

void mined(const Tensors& tensors, const Ints& shape, double sharpness, const OptionalTensor& thresholds,
           const Tensor& counts, const OptionalTensor& positives, const OptionalTensor& negatives) {
  const Queue queue(counts);
  MinedArguments a = {};
  a.thresholds = in<float>(thresholds), a.counts = out<int64_t>(counts);
  a.list = positives && negatives;  // which may be empty, and then have no address
  if (a.list) a.pairs[0] = out<int64_t>(*positives), a.pairs[1] = out<int64_t>(*negatives);
  check(launch_mined(matrix(tensors, shape, sharpness), a, queue.stream()), "mined");
}

void sample(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& seed, double cutoff,
            double nonzero_loss_cutoff, const Tensor& values, const Tensor& columns, const Tensor& drawn) {
  const Queue queue(drawn);
  const SampleArguments a = {
      in<int64_t>(seed), cutoff, nonzero_loss_cutoff, out<double>(values), out<int64_t>(columns), out<int64_t>(drawn)};
  check(launch_sample(matrix(tensors, shape, sharpness), a, queue.stream()), "sample");
}

// list: how many, pairs, their losses; before, needed: only for equals of the threshold.
void topk(const Tensors& tensors, const Ints& shape, double sharpness, int64_t policy, const Floats& parameters,
          bool positives, bool negatives, int64_t stage, const Tensor& run, const Tensor& found,
          const OptionalTensor& counts, const Tensors& list, const OptionalTensor& ties, const OptionalTensor& before,
          const OptionalTensor& needed) {
  const Queue queue(found);
  TopkArguments a = {};
  set_policy(a, policy, parameters);
  a.positives = positives, a.negatives = negatives, a.stage = int(stage);
  a.run = in<int>(run), a.found = in<int64_t>(found);
  if (counts) a.counts = out<unsigned long long>(*counts);
  if (ties) a.ties = out<unsigned long long>(*ties);
  a.before = in<int64_t>(before), a.needed = in<int64_t>(needed);
  if (list.size() == 3) {
    a.room = list[1].size(0);
    a.listed = out<unsigned long long>(list[0]), a.pairs = out<int64_t>(list[1]), a.losses = out<float>(list[2]);
  } else if (list.size() == 1) {
    a.losses = out<float>(list[0]);
  }
  check(launch_topk(matrix(tensors, shape, sharpness), a, queue.stream()), "topk");
}

void rank(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& number, const Tensor& above,
          const Tensor& hits, const Tensor& precision) {
  const Queue queue(number);
  const RankArguments a = {out<int64_t>(number), out<int64_t>(above), out<int64_t>(hits), out<double>(precision)};
  check(launch_rank(matrix(tensors, shape, sharpness), a, queue.stream()), "rank");
}

// tables: rising, pushed and negative [anchors, width] of a window; none where sums are wanted.
void triplet(const Tensors& tensors, const Ints& shape, double sharpness, bool semihard, bool smooth, double margin,
             int64_t window, const Tensors& tables, const OptionalTensor& sums) {
  const Queue queue(tensors[0]);
  TripletArguments a = {};
  a.semihard = semihard, a.smooth = smooth, a.margin = float(margin), a.window = int(window);
  STD_TORCH_CHECK(tables.size() == (sums ? 0 : 3), "pydml: triplet fills three tables, or sums");
  if (sums) {
    a.sums = out<float>(*sums);
  } else {
    a.width = int(tables[0].size(1));
    a.rising = out<float>(tables[0]), a.pushed = out<float>(tables[1]), a.negative = out<int>(tables[2]);
  }
  check(launch_triplet(matrix(tensors, shape, sharpness), a, queue.stream()), "triplet");
}

void triplet_backward(const Tensors& tensors, const Ints& shape, double sharpness, bool semihard, bool smooth,
                      double margin, int64_t window, bool own_anchors, bool other_anchors, const Tensor& range,
                      const Tensor& longest, const Tensors& tables, const Tensor& grad, const Tensor& parts) {
  const Queue queue(parts);
  STD_TORCH_CHECK(tables.size() == 3, "pydml: triplet_backward takes three tables");
  TripletBackwardArguments a = {};
  a.semihard = semihard, a.smooth = smooth, a.margin = float(margin);
  a.own_anchors = own_anchors, a.other_anchors = other_anchors;
  a.window = int(window), a.width = int(tables[0].size(1));
  a.range = in<int>(range), a.longest = in<int>(longest);
  a.rising = in<float>(tables[0]), a.pushed = in<float>(tables[1]), a.negative = in<int>(tables[2]);
  a.grad = in<float>(grad), a.parts = out<float>(parts);
  check(launch_triplet_backward(matrix(tensors, shape, sharpness), a, queue.stream()), "triplet_backward");
}

// Ops mutate what they fill and return nothing. Each begins with the matrix.
template <class Library>
void define(Library& m) {
#define PYDML_DEFINE(name, arguments) \
  m.def(#name "(Tensor[] matrix, int[] shape, float sharpness, " arguments ") -> ()")
  m.def(
      "prepare(Tensor z, Tensor index, bool normalize, int math, Tensor(a!) x, Tensor(b!) numbers, Tensor(c!) trouble) "
      "-> ()");
  PYDML_DEFINE(finish, "Tensor(a!) parts, bool normalize, Tensor(b!) grad");
  PYDML_DEFINE(pair,
               "int policy, float[] parameters, Tensor? row_field, Tensor? col_field, float? epsilon, "
               "Tensor(a!) thresholds, Tensor(b!) parts, Tensor(c!) stats");
  PYDML_DEFINE(pair_backward,
               "int policy, float[] parameters, bool mines, Tensor? own_stats, Tensor? own_grad, "
               "Tensor? own_thresholds, Tensor? own_row_field, Tensor? own_col_field, Tensor? other_stats, "
               "Tensor? other_grad, Tensor? other_thresholds, Tensor? other_row_field, Tensor? other_col_field, "
               "Tensor(a!) parts");
  PYDML_DEFINE(histogram, "int nodes, float low, float density, bool positives, Tensor(a!) parts");
  PYDML_DEFINE(histogram_backward, "int nodes, float low, float density, Tensor? own, Tensor? other, Tensor(a!) parts");
  PYDML_DEFINE(dots, "Tensor i, Tensor j, Tensor? grad, Tensor(a!) u");
  PYDML_DEFINE(gather, "Tensor start, Tensor order, Tensor partner, Tensor factor, Tensor(a!) parts");
  PYDML_DEFINE(extremes,
               "int[] sign, float[] missing, Tensor? above, Tensor? below, Tensor(a!) values, Tensor(b!) columns, "
               "Tensor(c!) chosen, Tensor(d!) u");
  PYDML_DEFINE(mined, "Tensor? thresholds, Tensor(a!) counts, Tensor(b!)? positives, Tensor(c!)? negatives");
  PYDML_DEFINE(sample,
               "Tensor seed, float cutoff, float nonzero_loss_cutoff, Tensor(a!) values, Tensor(b!) columns, "
               "Tensor(c!) drawn");
  PYDML_DEFINE(topk,
               "int policy, float[] parameters, bool positives, bool negatives, int stage, Tensor run, Tensor found, "
               "Tensor(a!)? counts, Tensor(b!)[] list, Tensor(c!)? ties, Tensor? before, Tensor? needed");
  PYDML_DEFINE(rank, "Tensor(a!) number, Tensor(b!) above, Tensor(c!) hits, Tensor(d!) precision");
  PYDML_DEFINE(triplet, "bool semihard, bool smooth, float margin, int window, Tensor(a!)[] tables, Tensor(b!)? sums");
  PYDML_DEFINE(triplet_backward,
               "bool semihard, bool smooth, float margin, int window, bool own_anchors, bool other_anchors, "
               "Tensor range, Tensor longest, Tensor[] tables, Tensor grad, Tensor(a!) parts");
#undef PYDML_DEFINE
}

template <class Library>
void implement(Library& m) {
  m.impl("prepare", TORCH_BOX(&prepare));
  m.impl("finish", TORCH_BOX(&finish));
  m.impl("pair", TORCH_BOX(&pair));
  m.impl("pair_backward", TORCH_BOX(&pair_backward));
  m.impl("histogram", TORCH_BOX(&histogram));
  m.impl("histogram_backward", TORCH_BOX(&histogram_backward));
  m.impl("dots", TORCH_BOX(&dots));
  m.impl("gather", TORCH_BOX(&gather));
  m.impl("extremes", TORCH_BOX(&extremes));
  m.impl("mined", TORCH_BOX(&mined));
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("topk", TORCH_BOX(&topk));
  m.impl("rank", TORCH_BOX(&rank));
  m.impl("triplet", TORCH_BOX(&triplet));
  m.impl("triplet_backward", TORCH_BOX(&triplet_backward));
}

}  // namespace
}  // namespace pydml

#if defined(PYDML_EMULATED)
STABLE_TORCH_LIBRARY(pydml_cuda_emulated, m) { pydml::define(m); }
STABLE_TORCH_LIBRARY_IMPL(pydml_cuda_emulated, CPU, m) { pydml::implement(m); }
#else
STABLE_TORCH_LIBRARY(pydml_cuda, m) { pydml::define(m); }
STABLE_TORCH_LIBRARY_IMPL(pydml_cuda, CUDA, m) { pydml::implement(m); }
#endif

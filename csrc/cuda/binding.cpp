// The launchers as torch ops, on torch's stable ABI: one library for every build of torch from 2.13 on. pydml/cuda/
// allocates what they fill. The same source binds the real library, for GPU tensors, and the emulated one, for CPU
// tensors.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <climits>
#include <optional>
#include <vector>

#include "cuda/checks.h"
#include "cuda/launchers.h"
#include "losses.h"

namespace pydml {
namespace {

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;
using Floats = std::vector<double>;

// The device and the stream that kernels of these tensors are for.
#if defined(PYDML_EMULATED)
class Queue {
 public:
  explicit Queue(const Arrays&) {}
  void* stream() const { return nullptr; }
};
#else
class Queue {
 public:
  explicit Queue(const Arrays& arrays)
      : guard_(arrays.first().get_device_index()),
        stream_(torch::stable::accelerator::getCurrentStream(arrays.first().get_device_index())) {}
  void* stream() const { return stream_.nativeHandle(); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  torch::stable::accelerator::Stream stream_;
};
#endif

void check(int error, const char* op) {
  STD_TORCH_CHECK(error == 0, "pydml: the launch of ", op, " failed with CUDA error ", error, ": ", describe(error));
}

ScalarType type_of_math(int64_t math) {
  check_number("math", math, 0, 4);
  return math == int(Math::bf16)   ? ScalarType::BFloat16
         : math == int(Math::fp16) ? ScalarType::Half
                                   : ScalarType::Float;
}

// Rows as they are stored: whole slabs, each piece of which cp.async takes at once.
void check_rows(const Arrays& arrays, const std::string& name, const Tensor& x, int64_t math, int64_t places,
                int64_t d) {
  arrays.check_device(name, x);
  check_type(name, x, type_of_math(math));
  check_dims(name, x, 2);
  const int64_t width = x.size(1), columns = kRowBytes / int64_t(x.element_size());
  if (width < d || width % columns) refuse(name, width, " columns, wanted ", d, " padded to a multiple of ", columns);
  check_shape(name, x, {places, width});
  if (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16) refuse(name, "a tensor out of line, wanted 16-byte rows");
}

// What an op does with a matrix.
struct Uses {
  bool range = true;   // does it look at classes?
  bool pools = false;  // may neighbours be one item?
  int64_t least = 1;   // rows
};

// The matrix of a call: x, numbers [3, places], index of own and of other, range, trouble, then the items of the other
// side that those of own and of other themselves are (empty: not among them); shape as pydml/cuda/ packs it.
class Call : public Arrays {
 public:
  Matrix m = {};

  Call(const Tensors& t, const Ints& shape, double sharpness, const Uses& uses = {})
      : Arrays("matrix[0]", of(t)), t_(t) {
    if (shape.size() != 9) refuse("shape", shape.size(), " numbers, wanted 9");
    auto number = [&](size_t k, int64_t least, int64_t below) {
      check_number("shape[" + std::to_string(k) + "]", shape[k], least, below);
      return int(shape[k]);
    };
    m.d = number(4, 1, INT_MAX), m.math = number(5, 0, 4), m.view = number(6, 0, 4), m.symmetric = number(7, 0, 2);
    m.splits = number(8, 1, 65536);
    const int64_t most = uses.pools ? kTile + 1 : 2;
    m.own = rows(0, number(0, uses.least, INT_MAX - kTile), number(1, 1, most));
    m.other = rows(3, number(2, 0, INT_MAX - kTile), number(3, 1, m.own.pool > 1 ? 2 : most));
    if (t_[3].size(1) != t_[0].size(1))
      refuse("matrix[3]", t_[3].size(1), " columns, wanted ", t_[0].size(1), " as matrix[0]");
    if (m.symmetric && (m.own.n != m.other.n || m.own.pool * m.other.pool > 1))
      refuse("shape[2]", m.other.n, " items of pools of ", m.own.pool * m.other.pool, ", wanted ", m.own.n,
             " of 1: it is symmetric");
    if (uses.range) {
      m.range = in<int>("matrix[6]", t_[6], {m.own.n, 2});
      check_places<int>("matrix[6]", t_[6], 2 * int64_t(m.own.n), 0, int64_t(m.other.n) + 1);
    }
    m.trouble = in<int>("matrix[7]", t_[7], {1});
    m.own.self = selves("matrix[8]", t_[8], m.own.n, m.other.n);
    m.other.self = selves("matrix[9]", t_[9], m.other.n, m.own.n);
    m.slabs = int(t_[0].size(1) * int64_t(t_[0].element_size()) / kRowBytes);
    m.sharpness = float(sharpness);
  }

  int64_t n() const { return m.own.n; }
  int64_t places() const { return t_[0].size(0); }
  int64_t parts() const { return int64_t(m.splits) * kHalves; }

  // A result has a place for every row of z that is looked at: own.index says where.
  void check_index(int64_t below) const { check_places<int64_t>("matrix[2]", t_[2], n(), 0, below); }
  // The same of a gradient, which has none for padding.
  void check_padded_index(int64_t below) const { check_places<int64_t>("matrix[2]", t_[2], places(), -1, below); }

  // dL/dx̂ by parts.
  float* gradient(const Tensor& parts) const { return out<float>("parts", parts, {m.splits, places(), m.d}); }

 private:
  static const Tensor& of(const Tensors& t) {
    if (t.size() != 10) refuse("matrix", t.size(), " tensors, wanted 10");
    return t[0];
  }

  Rows rows(size_t first, int64_t n, int64_t pool) const {
    auto name = [&](size_t k) { return "matrix[" + std::to_string(first + k) + "]"; };
    const int64_t per = kTile / pool, places = (n + per - 1) / per * kTile;
    check_rows(*this, name(0), t_[first], m.math, places, m.d);
    const float* const numbers = in<float>(name(1), t_[first + 1], {3, places});
    const int64_t* const index = in<int64_t>(name(2), t_[first + 2], {places});
    return {
        t_[first].const_data_ptr(), numbers, numbers + places, numbers + 2 * places, index, nullptr, int(n), int(pool)};
  }

  const int* selves(const std::string& name, const Tensor& t, int64_t n, int64_t below) const {
    check_dims(name, t, 1);
    if (!t.size(0)) {
      in<int>(name, t, {0});
      return nullptr;
    }
    const int* const self = in<int>(name, t, {n});
    check_places<int>(name, t, n, -1, below);
    return self;
  }

  const Tensors& t_;
};

struct PolicySizes {
  const char* name;
  int64_t slots;
  size_t parameters;
};
// A policy is its parameters; one that has none is a byte.
template <class P>
constexpr PolicySizes sizes_of(const char* name) {
  return {name, sizeof(P::slots) / sizeof(Slot), sizeof(P) / sizeof(float)};
}
#define PYDML_SIZES(name, Policy) sizes_of<Policy<float>>(#name),
constexpr PolicySizes kPolicies[] = {PYDML_POLICIES(PYDML_SIZES)};
#undef PYDML_SIZES

template <class A>
PolicySizes set_policy(A& a, int64_t policy, const Floats& parameters) {
  check_number("policy", policy, 0, std::size(kPolicies));
  const PolicySizes sizes = kPolicies[policy];
  if (parameters.size() != sizes.parameters)
    refuse("parameters", parameters.size(), " numbers, wanted ", sizes.parameters, " of ", sizes.name);
  a.policy = int(policy);
  for (size_t k = 0; k < parameters.size(); ++k) a.parameters[k] = float(parameters[k]);
  return sizes;
}

// Kernels of softmax losses are the only ones that pool.
void check_pools(const Matrix& m, const PolicySizes& policy) {
  if (m.own.pool * m.other.pool > 1 && policy.name != std::string("exponential"))
    refuse("policy", policy.name, ", wanted exponential where columns are pooled");
}

void prepare(const Tensor& z, const Tensor& index, bool normalize, int64_t math, const OptionalTensor& centre,
             const Tensor& x, const Tensor& numbers, const Tensor& trouble) {
  const Arrays arrays("z", z);
  check_type("z", z, type_of_math(math));
  check_dims("z", z, 2);
  check_dims("index", index, 1);
  const int64_t places = index.size(0), d = z.size(1);
  check_number("index: places", places, 1, INT_MAX);
  check_number("z: columns", d, 1, INT_MAX);
  if (centre && z.element_size() != sizeof(float)) refuse("centre", "one of 16-bit rows, wanted none");
  PrepareArguments a = {};
  a.z = z.const_data_ptr(), a.row_stride = z.stride(0), a.col_stride = z.stride(1);
  a.index = arrays.in<int64_t>("index", index, {places});
  check_places<int64_t>("index", index, places, -1, z.size(0));
  a.centre = arrays.in<float>("centre", centre, {d});
  check_rows(arrays, "x", x, math, places, d);
  a.x = x.mutable_data_ptr();
  a.scale = arrays.out<float>("numbers", numbers, {3, places}), a.size = a.scale + places, a.norm = a.size + places;
  a.trouble = arrays.out<int>("trouble", trouble, {1});
  a.places = int(places), a.slabs = int(x.size(1) * int64_t(x.element_size()) / kRowBytes), a.d = int(d);
  a.math = int(math), a.normalize = normalize;
  const Queue queue(arrays);
  check(launch_prepare(a, queue.stream()), "prepare");
}

void finish(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& parts, bool normalize,
            const OptionalTensor& centre, const Tensor& grad) {
  const Call call(tensors, shape, sharpness, {.range = false, .pools = true});
  call.check_device("grad", grad);
  check_type("grad", grad, type_of_math(call.m.math));
  check_dims("grad", grad, 2);
  if (grad.size(1) != call.m.d) refuse("grad", grad.size(1), " columns, wanted ", call.m.d);
  call.check_padded_index(grad.size(0));
  FinishArguments a = {};
  a.parts = call.gradient(parts), a.grad = grad.mutable_data_ptr();
  a.centre = call.in<float>("centre", centre, {call.m.d});
  a.row_stride = grad.stride(0), a.col_stride = grad.stride(1);
  a.places = int(call.places()), a.splits = call.m.splits, a.normalize = normalize;
  const Queue queue(call);
  check(launch_finish(call.m, a, queue.stream()), "finish");
}

void pair(const Tensors& tensors, const Ints& shape, double sharpness, int64_t policy, const Floats& parameters,
          const OptionalTensor& row_field, const OptionalTensor& col_field, std::optional<double> epsilon, bool bounded,
          int64_t visits, const Tensor& thresholds, const Tensor& parts, const Tensor& stats) {
  const Call call(tensors, shape, sharpness, {.pools = true});
  const int64_t n = call.n();
  check_number("shape[1]", call.m.own.pool, 1, 2);
  PairArguments a = {};
  const PolicySizes sizes = set_policy(a, policy, parameters);
  check_pools(call.m, sizes);
  a.row_field = call.in<float>("row_field", row_field, {n});
  a.col_field = call.in<float>("col_field", col_field, {call.m.other.n});
  a.mines = epsilon.has_value(), a.epsilon = float(epsilon.value_or(0));
  check_number("visits", visits, 0, 3);
  a.bounded = bounded, a.visits = int(visits);
  a.thresholds = call.out<float>("thresholds", thresholds, {n, 2});
  a.parts = call.out<float>("parts", parts, {call.parts(), n, kKept});
  a.stats = call.out<float>("stats", stats, {n, sizes.slots});
  call.check_index(n);
  const Queue queue(call);
  check(launch_pair(call.m, a, queue.stream()), "pair");
}

// Each side: its statistics and their gradient, thresholds, row and column fields; absent where it has no anchors.
PairSide side(const Call& call, const std::string& name, int64_t n, int64_t slots, bool mines,
              const OptionalTensor& stats, const OptionalTensor& grad, const OptionalTensor& thresholds,
              const OptionalTensor& row_field, const OptionalTensor& col_field) {
  if (stats && !grad) refuse(name + "_grad", "none, wanted one of ", name, "_stats");
  if (stats && mines && !thresholds) refuse(name + "_thresholds", "none, wanted those of mining");
  return {call.in<float>(name + "_stats", stats, {n, slots}), call.in<float>(name + "_grad", grad, {n, slots}),
          call.in<float>(name + "_thresholds", thresholds, {n, 2}), call.in<float>(name + "_row_field", row_field, {n}),
          call.in<float>(name + "_col_field", col_field, {n})};
}

void pair_backward(const Tensors& tensors, const Ints& shape, double sharpness, int64_t policy,
                   const Floats& parameters, bool mines, int64_t visits, const OptionalTensor& own_stats,
                   const OptionalTensor& own_grad, const OptionalTensor& own_thresholds,
                   const OptionalTensor& own_row_field, const OptionalTensor& own_col_field,
                   const OptionalTensor& other_stats, const OptionalTensor& other_grad,
                   const OptionalTensor& other_thresholds, const OptionalTensor& other_row_field,
                   const OptionalTensor& other_col_field, const Tensor& parts) {
  const Call call(tensors, shape, sharpness, {.pools = true});
  PairBackwardArguments a = {};
  const PolicySizes sizes = set_policy(a, policy, parameters);
  check_pools(call.m, sizes);
  check_number("visits", visits, 0, 3);
  a.mines = mines, a.visits = int(visits);
  a.own_anchors = own_stats.has_value(), a.other_anchors = other_stats.has_value();
  a.own = side(call, "own", call.n(), sizes.slots, mines, own_stats, own_grad, own_thresholds, own_row_field,
               own_col_field);
  a.other = side(call, "other", call.m.other.n, sizes.slots, mines, other_stats, other_grad, other_thresholds,
                 other_row_field, other_col_field);
  a.parts = call.gradient(parts);
  const Queue queue(call);
  check(launch_pair_backward(call.m, a, queue.stream()), "pair_backward");
}

// Two nodes at least: u lies between a node and the next.
void histogram(const Tensors& tensors, const Ints& shape, double sharpness, int64_t nodes, double low, double density,
               bool positives, const Tensor& parts) {
  const Call call(tensors, shape, sharpness);
  check_number("nodes", nodes, 2, INT_MAX);
  HistogramArguments a = {};
  a.nodes = int(nodes), a.low = float(low), a.density = float(density), a.positives = positives;
  a.parts = call.out<float>("parts", parts, {call.m.splits, call.n(), nodes});
  const Queue queue(call);
  check(launch_histogram(call.m, a, queue.stream()), "histogram");
}

void histogram_backward(const Tensors& tensors, const Ints& shape, double sharpness, int64_t nodes, double low,
                        double density, const OptionalTensor& own, const OptionalTensor& other, const Tensor& parts) {
  const Call call(tensors, shape, sharpness);
  check_number("nodes", nodes, 2, INT_MAX);
  HistogramBackwardArguments a = {};
  a.nodes = int(nodes), a.low = float(low), a.density = float(density);
  a.own = call.in<float>("own", own, {2, call.n(), nodes - 1});
  a.other = call.in<float>("other", other, {2, call.m.other.n, nodes - 1});
  a.parts = call.gradient(parts);
  const Queue queue(call);
  check(launch_histogram_backward(call.m, a, queue.stream()), "histogram_backward");
}

void dots(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& i, const Tensor& j,
          const OptionalTensor& grad, const Tensor& u) {
  const Call call(tensors, shape, sharpness, {.range = false, .least = 0});
  check_dims("i", i, 1);
  const int64_t n = i.size(0);
  const DotsArguments a = {call.in<int64_t>("i", i, {n}), call.in<int64_t>("j", j, {n}),
                           call.in<float>("grad", grad, {n}), call.out<float>("u", u, {n}), n};
  check_places<int64_t>("i", i, n, 0, call.n());
  check_places<int64_t>("j", j, n, 0, call.m.other.n);
  const Queue queue(call);
  check(launch_dots(call.m, a, queue.stream()), "dots");
}

void gather(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& start, const Tensor& order,
            const Tensor& partner, const Tensor& factor, const Tensor& parts) {
  const Call call(tensors, shape, sharpness, {.range = false});
  check_dims("order", order, 1);
  const int64_t n = order.size(0);
  const GatherArguments a = {call.in<int64_t>("start", start, {call.n() + 1}), call.in<int64_t>("order", order, {n}),
                             call.in<int64_t>("partner", partner, {n}), call.in<float>("factor", factor, {n}),
                             call.gradient(parts)};
  check_places<int64_t>("start", start, call.n() + 1, 0, n + 1);
  check_places<int64_t>("order", order, n, 0, n);
  check_places<int64_t>("partner", partner, n, 0, call.m.other.n);
  const Queue queue(call);
  check(launch_gather(call.m, a, queue.stream()), "gather");
}

void extremes(const Tensors& tensors, const Ints& shape, double sharpness, const Ints& sign, const Floats& missing,
              const OptionalTensor& above, const OptionalTensor& below, const Tensor& values, const Tensor& columns,
              const Tensor& chosen, const Tensor& u) {
  const Call call(tensors, shape, sharpness);
  const int64_t n = call.n();
  if (sign.size() != 2) refuse("sign", sign.size(), " numbers, wanted 2");
  if (missing.size() != 2) refuse("missing", missing.size(), " numbers, wanted 2");
  ExtremesArguments a = {};
  for (int side = 0; side < 2; ++side) {
    check_number("sign", sign[side], -1, 2);
    a.sign[side] = int(sign[side]), a.missing[side] = float(missing[side]);
    a.chosen[side] = call.out<int64_t>("chosen", chosen, {2, n}) + side * n;
    a.u[side] = call.out<float>("u", u, {2, n}) + side * n;
  }
  a.above = call.in<float>("above", above, {n}), a.below = call.in<float>("below", below, {n});
  a.values = call.out<float>("values", values, {call.parts(), n, 2});
  a.columns = call.out<int64_t>("columns", columns, {call.parts(), n, 2});
  call.check_index(n);
  const Queue queue(call);
  check(launch_extremes(call.m, a, queue.stream()), "extremes");
}

void mined(const Tensors& tensors, const Ints& shape, double sharpness, const OptionalTensor& thresholds,
           const Tensor& counts, const OptionalTensor& positives, const OptionalTensor& negatives) {
  const Call call(tensors, shape, sharpness);
  MinedArguments a = {};
  a.thresholds = call.in<float>("thresholds", thresholds, {call.n(), 2});
  a.counts = call.out<int64_t>("counts", counts, {2, call.n() * call.parts()});
  a.list = positives && negatives;  // which may be empty, and then have no address
  if (positives.has_value() != negatives.has_value()) refuse("negatives", "one list of two, wanted both or none");
  for (int side = 0; a.list && side < 2; ++side) {
    const char* const name = side ? "negatives" : "positives";
    const Tensor& list = side ? *negatives : *positives;
    check_dims(name, list, 1);
    a.room[side] = list.size(0), a.pairs[side] = call.out<int64_t>(name, list, {list.size(0)});
  }
  const Queue queue(call);
  check(launch_mined(call.m, a, queue.stream()), "mined");
}

void sample(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& seed, double cutoff,
            double nonzero_loss_cutoff, const Tensor& values, const Tensor& columns, const Tensor& drawn) {
  const Call call(tensors, shape, sharpness);
  call.check_device("seed", seed);
  if (seed.numel() != 1) refuse("seed", seed.numel(), " numbers, wanted 1");
  const int64_t n = call.n();
  const int64_t* const first = seed.dim() ? call.in<int64_t>("seed", seed, {1}) : call.in<int64_t>("seed", seed, {});
  const SampleArguments a = {first,
                             cutoff,
                             nonzero_loss_cutoff,
                             call.out<double>("values", values, {call.parts(), n}),
                             call.out<int64_t>("columns", columns, {call.parts(), n}),
                             call.out<int64_t>("drawn", drawn, {n})};
  const Queue queue(call);
  check(launch_sample(call.m, a, queue.stream()), "sample");
}

// list: how many, pairs, their losses, for stages that list; losses alone for the last one. counts: only for digits;
// ties: pairs above; before, needed: equals of the threshold.
void topk(const Tensors& tensors, const Ints& shape, double sharpness, int64_t policy, const Floats& parameters,
          bool positives, bool negatives, int64_t stage, const Tensor& run, const Tensor& found,
          const OptionalTensor& counts, const Tensors& list, const OptionalTensor& ties, const OptionalTensor& before,
          const OptionalTensor& needed) {
  const Call call(tensors, shape, sharpness);
  const int64_t n = call.n();
  TopkArguments a = {};
  set_policy(a, policy, parameters);
  check_number("stage", stage, 0, 6);
  a.positives = positives, a.negatives = negatives, a.stage = int(stage);
  a.run = call.in<int>("run", run, {1}), a.found = call.in<int64_t>("found", found, {1});
  const bool digits = stage < 3, above = stage == 3, equal = stage == 4;
  const size_t lists = digits ? 0 : above || equal ? 3 : 1;
  if (list.size() != lists) refuse("list", list.size(), " tensors, wanted ", lists, " in stage ", stage);
  auto needs = [&](const char* name, bool wanted, const OptionalTensor& t) {
    if (wanted && !t) refuse(name, "none, wanted one in stage ", stage);
    return wanted;
  };
  if (needs("counts", digits, counts)) a.counts = call.out<unsigned long long>("counts", *counts, {kDigits});
  if (needs("ties", above, ties)) a.ties = call.out<unsigned long long>("ties", *ties, {n});
  if (needs("before", equal, before)) a.before = call.in<int64_t>("before", *before, {n});
  if (needs("needed", equal, needed)) a.needed = call.in<int64_t>("needed", *needed, {1});
  if (lists == 3) {
    check_dims("list[1]", list[1], 1);
    a.room = list[1].size(0);
    a.listed = call.out<unsigned long long>("list[0]", list[0], {1});
    a.pairs = call.out<int64_t>("list[1]", list[1], {a.room});
    a.losses = call.out<float>("list[2]", list[2], {a.room});
    call.check_index(n);
  } else if (lists == 1) {
    a.losses = call.out<float>("list[0]", list[0], {n, call.m.other.n});
  }
  const Queue queue(call);
  check(launch_topk(call.m, a, queue.stream()), "topk");
}

void rank(const Tensors& tensors, const Ints& shape, double sharpness, const Tensor& number, const Tensor& above,
          const Tensor& hits, const Tensor& precision) {
  const Call call(tensors, shape, sharpness);
  const int64_t n = call.n();
  const RankArguments a = {call.out<int64_t>("number", number, {n}), call.out<int64_t>("above", above, {n, 2}),
                           call.out<int64_t>("hits", hits, {n, 2}), call.out<double>("precision", precision, {n, 2})};
  call.check_index(n);
  const Queue queue(call);
  check(launch_rank(call.m, a, queue.stream()), "rank");
}

// Tables of a window of positives: whole chunks of them, the first of which begins a chunk too.
int table_width(const Tensors& tables, int64_t window, int64_t most) {
  if (tables.size() != 3) refuse("tables", tables.size(), " tensors, wanted 3");
  check_dims("tables[0]", tables[0], 2);
  const int64_t width = tables[0].size(1);
  if (width < 1 || width % kChunk || width > INT_MAX)
    refuse("tables[0]", width, " columns, wanted a multiple of ", kChunk);
  check_number("window", window, 0, most + 1);
  if (window % kChunk) refuse("window", window, ", wanted a multiple of ", kChunk);
  return int(width);
}

// tables: rising, pushed and negative [anchors, width] of a window; none where sums are wanted.
void triplet(const Tensors& tensors, const Ints& shape, double sharpness, bool semihard, bool smooth, double margin,
             int64_t window, const Tensors& tables, const OptionalTensor& sums) {
  const Call call(tensors, shape, sharpness);
  const int64_t n = call.n();
  if ((semihard || !sums) && call.m.splits != 1)
    refuse("shape[8]", call.m.splits, " splits, wanted 1 of such triplets");
  TripletArguments a = {};
  a.semihard = semihard, a.smooth = smooth, a.margin = float(margin);
  if (sums) {
    if (!tables.empty()) refuse("tables", tables.size(), " tensors beside sums, wanted one of both");
    check_number("window", window, 0, 1);
    a.sums = call.out<float>("sums", *sums, {call.parts(), n, 2});
  } else {
    a.window = int(window), a.width = table_width(tables, window, call.m.other.n);
    a.rising = call.out<float>("tables[0]", tables[0], {n, a.width});
    a.pushed = call.out<float>("tables[1]", tables[1], {n, a.width});
    a.negative = call.out<int>("tables[2]", tables[2], {n, a.width});
  }
  const Queue queue(call);
  check(launch_triplet(call.m, a, queue.stream()), "triplet");
}

void triplet_backward(const Tensors& tensors, const Ints& shape, double sharpness, bool semihard, bool smooth,
                      double margin, int64_t window, bool own_anchors, bool other_anchors, const Tensor& range,
                      const Tensor& longest, const Tensors& tables, const Tensor& grad, const Tensor& parts) {
  const Call call(tensors, shape, sharpness);
  const int64_t n = own_anchors ? call.n() : call.m.other.n, columns = own_anchors ? call.m.other.n : call.n();
  if (!own_anchors && !other_anchors) refuse("other_anchors", "anchors on no side, wanted some");
  if (own_anchors && other_anchors && n != columns)
    refuse("other_anchors", "anchors on both sides of a matrix ", n, " × ", columns, ", wanted a square one");
  TripletBackwardArguments a = {};
  a.semihard = semihard, a.smooth = smooth, a.margin = float(margin);
  a.own_anchors = own_anchors, a.other_anchors = other_anchors;
  a.window = int(window), a.width = table_width(tables, window, columns);
  a.range = call.in<int>("range", range, {n, 2}), a.longest = call.in<int>("longest", longest, {1});
  check_places<int>("range", range, 2 * n, 0, columns + 1);
  a.rising = call.in<float>("tables[0]", tables[0], {n, a.width});
  a.pushed = call.in<float>("tables[1]", tables[1], {n, a.width});
  a.negative = call.in<int>("tables[2]", tables[2], {n, a.width});
  a.grad = call.in<float>("grad", grad, {n}), a.parts = call.gradient(parts);
  const Queue queue(call);
  check(launch_triplet_backward(call.m, a, queue.stream()), "triplet_backward");
}

// Ops mutate what they fill and return nothing. Each begins with the matrix.
template <class Library>
void define(Library& m) {
#define PYDML_DEFINE(name, arguments) \
  m.def(#name "(Tensor[] matrix, int[] shape, float sharpness, " arguments ") -> ()")
  m.def(
      "prepare(Tensor z, Tensor index, bool normalize, int math, Tensor? centre, Tensor(a!) x, Tensor(b!) numbers, "
      "Tensor(c!) trouble) -> ()");
  PYDML_DEFINE(finish, "Tensor(a!) parts, bool normalize, Tensor? centre, Tensor(b!) grad");
  PYDML_DEFINE(pair,
               "int policy, float[] parameters, Tensor? row_field, Tensor? col_field, float? epsilon, "
               "bool bounded, int visits, Tensor(a!) thresholds, Tensor(b!) parts, Tensor(c!) stats");
  PYDML_DEFINE(pair_backward,
               "int policy, float[] parameters, bool mines, int visits, Tensor? own_stats, Tensor? own_grad, "
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

// The launchers of csrc/cuda/*.cu: each starts its kernels on a stream and returns 0 or CUDA's error code; none waits.
// Sorted order everywhere: item i of a side is what `prepare` left at its place.
#pragma once
#include "cuda/matrix.h"

namespace pydml {

constexpr int kKept = 10;      // numbers that a part of a row of `pair` keeps
constexpr int kDigits = 2048;  // values of a digit of a loss in `topk`

// prepare.cu: CUDA's words for an error code.
const char* describe(int error);

// prepare.cu: z -> x, scale, size, norm of one side; `trouble` becomes 1 where an entry is not finite. A centre, which
// only rows of fp32 have, is taken from every row, and x̂ is what is left.
struct PrepareArguments {
  const void* z;  // [rows, d] by strides
  int64_t row_stride, col_stride;
  const int64_t* index;  // [places]
  const float* centre;   // [d] or null
  void* x;
  float *scale, *size, *norm;
  int* trouble;
  int places, slabs, d, math;
  bool normalize;
};
int launch_prepare(const PrepareArguments& a, void* stream);

// prepare.cu: dL/dz from parts of dL/dx̂ [splits, places, d]; the parts are used up.
struct FinishArguments {
  float* parts;
  void* grad;           // [rows, d] by strides, in the type of z
  const float* centre;  // [d] or null: what was taken from the rows
  int64_t row_stride, col_stride;
  int places, splits;
  bool normalize;
};
int launch_finish(const Matrix& m, const FinishArguments& a, void* stream);

// pair.cu. Which pairs to visit; statistics of the others are those of nothing.
enum class Visits : int { both, positives, negatives };

struct PairArguments {
  int policy;
  float parameters[5];
  const float *row_field, *col_field;  // [own.n], [other.n] or null
  int visits;
  bool mines, bounded;  // are pairs mined, and are their thresholds known?
  float epsilon;
  float* thresholds;  // [own.n, 2], sorted; -inf and +inf before, or those that are known
  float* parts;       // [splits·2, own.n, kKept]
  float* stats;       // [own.n, slots], in the order of z
};
int launch_pair(const Matrix& m, const PairArguments& a, void* stream);

struct PairSide {
  const float *stats, *grad;           // [n, slots] of anchors
  const float* thresholds;             // [n, 2]
  const float *row_field, *col_field;  // [n] or null
};
struct PairBackwardArguments {
  int policy;
  float parameters[5];
  int visits;
  bool own_anchors, other_anchors, mines;
  PairSide own, other;
  float* parts;  // [splits, places of own, d]
};
int launch_pair_backward(const Matrix& m, const PairBackwardArguments& a, void* stream);

// histogram.cu
struct HistogramArguments {
  int nodes;
  float low, density;  // the first node, and nodes in a unit of u
  bool positives;      // whom to count
  float* parts;        // [splits, own.n, nodes], zeros
};
int launch_histogram(const Matrix& m, const HistogramArguments& a, void* stream);

struct HistogramBackwardArguments {
  int nodes;
  float low, density;
  const float *own, *other;  // [2, n, nodes-1] slopes for positives and for negatives, or null
  float* parts;              // [splits, places of own, d]
};
int launch_histogram_backward(const Matrix& m, const HistogramBackwardArguments& a, void* stream);

// dots.cu: rows are not sorted here, place = row.
struct DotsArguments {
  const int64_t *i, *j;  // [n]
  const float* grad;     // [n] dL/du, or null for the forward pass
  float* u;              // [n] gets u, or what multiplies y_j (x_i-y_j where u is a distance)
  int64_t n;
};
int launch_dots(const Matrix& m, const DotsArguments& a, void* stream);

// parts [own.n, d] += what the pairs order[start[i]] … order[start[i+1]-1] send to row i.
struct GatherArguments {
  const int64_t *start, *order, *partner;  // [own.n+1], [n], [n] the row on the other side
  const float* factor;                     // [n]
  float* parts;
};
int launch_gather(const Matrix& m, const GatherArguments& a, void* stream);

// select.cu. Pairs of arrays are for positives and for negatives.
struct ExtremesArguments {
  int sign[2];                 // 1: the largest u, -1: the smallest, 0: do not look
  const float *above, *below;  // [own.n] or null: positives must be above, negatives below
  float missing[2];            // u where there is none
  float* values;               // [splits·2, own.n, 2]
  int64_t* columns;            // [splits·2, own.n, 2]
  int64_t* chosen[2];          // [own.n] in the order of z
  float* u[2];                 // [own.n] sorted
};
int launch_extremes(const Matrix& m, const ExtremesArguments& a, void* stream);

struct MinedArguments {
  const float* thresholds;  // [own.n, 2] or null for all pairs
  bool list;                // else count
  int64_t* counts;          // [2, own.n·splits·2] gets numbers of pairs, or holds where each thread's begin
  int64_t* pairs[2];        // row·columns + column
  int64_t room[2];          // pairs that the lists can hold
};
int launch_mined(const Matrix& m, const MinedArguments& a, void* stream);

struct SampleArguments {
  const int64_t* seed;
  double cutoff, nonzero_loss_cutoff;
  double* values;    // [splits·2, own.n]
  int64_t* columns;  // [splits·2, own.n]
  int64_t* drawn;    // [own.n]
};
int launch_sample(const Matrix& m, const SampleArguments& a, void* stream);

// topk.cu: one stage of the search. Of a symmetric matrix every pair is looked at once, and is row·columns + column of
// the smaller index first.
struct TopkArguments {
  int policy;
  float parameters[5];
  bool positives, negatives;       // whom to look at
  int stage;                       // 0, 1, 2: count digits; 3: list pairs above; 4: list equals; 5: all losses
  const int* run;                  // [1] 0: do nothing
  const int64_t* found;            // [1] the digits of the k-th largest loss that are known; 3, 4: the threshold
  unsigned long long* counts;      // [kDigits] pairs by their next digit, zeros before
  int64_t room;                    // 3, 4: pairs that the list can hold
  unsigned long long* listed;      // [1] pairs that would be in it, 0 before
  int64_t* pairs;                  // [room]
  float* losses;                   // [room]; 5: [own.n, other.n], -inf where a pair is not looked at
  unsigned long long* ties;        // 3: [rows of z] gets how many of its pairs equal the threshold, zeros before
  const int64_t *before, *needed;  // 4: [rows of z] how many equals the rows before it have; [1] how many are wanted
};
int launch_topk(const Matrix& m, const TopkArguments& a, void* stream);

// rank.cu; pairs of numbers are for ties in favour of a positive and against it. In the order of z.
struct RankArguments {
  int64_t* number;        // [own.n]
  int64_t *above, *hits;  // [own.n, 2]
  double* precision;      // [own.n, 2]
};
int launch_rank(const Matrix& m, const RankArguments& a, void* stream);

// triplet.cu: what the triplets of each anchor add up to, or tables of a window of its positives, for the gradient.
struct TripletArguments {
  bool semihard, smooth;
  float margin;
  float* sums;        // [splits·2, own.n, 2] losses and how many are above 0; semi-hard: splits is 1
  int window, width;  // tables of positives window … window+width-1 of each anchor's class, itself among them; 0: sums
  float* rising;      // [own.n, width] their u, rising in each chunk of 32, +inf where there is none
  float* pushed;      // [own.n, width] Σ of their triplets' slopes, in the order of columns
  int* negative;      // [own.n, width] semi-hard: their negatives, -1 where there is none
};
int launch_triplet(const Matrix& m, const TripletArguments& a, void* stream);

struct TripletBackwardArguments {
  bool semihard, smooth, own_anchors, other_anchors;
  float margin;
  int window, width;
  const int *range, *longest;           // [anchors, 2] columns of the same class; [1] the most columns of any
  const float *rising, *pushed, *grad;  // [anchors, width], [anchors, width], [anchors]
  const int* negative;
  float* parts;  // [splits, places of own, d]
};
int launch_triplet_backward(const Matrix& m, const TripletBackwardArguments& a, void* stream);

}  // namespace pydml

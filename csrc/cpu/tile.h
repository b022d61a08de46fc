// One tile of the matrix as the engines hand it to the vector kernels: plain pointers, no torch, no std.
#pragma once
#include <stdint.h>

namespace pydml {

// How a dot product becomes the oriented similarity u. `cosine` is `dot` with near pairs taken from the rows.
enum class View { dot, cosine, euclidean, squared };

constexpr int kMaxSlots = 4;

// A pair that still has a weight, remembered by the forward pass for a sparse backward pass.
template <class R>
struct Live {
  uint16_t i, j;  // within the tile
  R u;
};

// Row statistics of one slot as they grow: log-sum-exps as m + log z, sums as z.
template <class R>
struct Stat {
  R* m;
  double* z;
};

// Rows i and columns j of the tile. In a symmetric matrix the columns are rows as well (`symmetric`): the pair (i, j)
// then counts in row i and in row j. Column range [skip0_i, skip1_i) of row i is not in this tile's side.
template <class R>
struct Tile {
  R* u;  // [ni, ld]
  int64_t ld;
  int ni, nj;
  const int *skip0, *skip1;  // [ni]
  bool symmetric;
  const R *row_i, *col_j, *row_j, *col_i;  // fields of rows and columns in either role, or null
  const R *cut_i, *cut_j;                  // mining: keep positives below, negatives above; or null
};

template <class R>
struct Forward {
  Tile<R> t;
  Stat<R> stat_i[kMaxSlots], stat_j[kMaxSlots];
  R *top_i, *top_j;  // largest u of the row so far, for mining; or null
  Live<R>* live;     // [live_capacity] or null
  int live_capacity;
  int n_live;  // out; -1: more than fit
  R* scratch;  // [2·ni + 4·nj]
};

template <class R>
struct Backward {
  Tile<R> t;
  const R *grad_i[kMaxSlots], *grad_j[kMaxSlots];  // dL/dstat
  const R *stat_i[kMaxSlots], *stat_j[kMaxSlots];  // final statistics
  R* scratch;                                      // [2·ni + 4·nj]
};

// Soft histograms of the pairs of a tile.
template <class R>
struct Histogram {
  Tile<R> t;
  int nodes;
  R low, inverse;                // first node, nodes per unit of u
  R *counts_i, *counts_j;        // forward: [ni, nodes], [nj, nodes]
  const R *slopes_i, *slopes_j;  // backward: [ni, nodes-1], [nj, nodes-1]
  int* left;                     // scratch [nj]
  R* share;                      // scratch [nj]
};

// The negatives of a tile against thresholds of their rows, mostly the similarities of the row's positives. Arrays over
// thresholds are [most, stride] with the row or column running fastest; unused places hold +inf.
template <class R>
struct Thresholds {
  Tile<R> t;
  int64_t stride;
  const R *value_i, *value_j;
  const int* n_i;  // thresholds of each row
  int most_j;      // most thresholds of any column
  R margin;
  bool smooth;
  double *sum_i, *sum_j, *count_i, *count_j;  // triplets forward
  const R *grad_i, *grad_j;                   // triplets backward
  R *slope_i, *slope_j;                       // triplets backward, per threshold
  int *over_i, *over_j, *reach_i, *reach_j;   // rank, per threshold
  R *best_i, *best_j;                         // best below, per threshold
  int64_t *where_i, *where_j;                 // best below, per threshold: the column it stands in
  const int64_t *name_i, *name_j;             // original row or column
  R* scratch;                                 // [2·nj]
};

// Which pairs of a tile lie above the cut of their row, and of their column: one bit each. `below`: under the cut.
template <class R>
struct Marks {
  Tile<R> t;
  const R *cut_i, *cut_j;  // cut_j null: columns are not asked for
  bool below;
  uint32_t *rows, *cols;  // [ni, most / 32] and [most / 32, nj], where a tile has at most so many rows and columns
  static constexpr int most = 256;
};

// Some listed triplets of one anchor: places of their positives and negatives among the anchor's similarities.
constexpr int kPiece = 256;
template <class R>
struct Piece {
  const int64_t *p, *n;
  int number;    // up to kPiece
  const R* u;    // of the anchor and all columns; null: the violations are there already
  R* violation;  // [number] u_an - u_ap + margin
  R* slope;      // of the anchor's pairs: what the triplets add to them; null: not wanted
  R margin;
  bool smooth;
  double sum;  // of the losses
  int above;   // how many of them are above 0
};

// Kernels of one policy and one side, for one instruction set.
template <class R>
struct PairKernels {
  void (*forward)(const R* params, Forward<R>&);
  void (*backward)(const R* params, const Backward<R>&);  // u becomes w = dL/du, 0 outside the side
  // w of listed pairs, in place of their u: row i and column j of entry e are at t.row_i[i] and so on
  void (*backward_live)(const R* params, const Backward<R>&, Live<R>*, int n);
  void (*terms)(const R* params, const R* u, R* out, int n);  // of the side's first slot, without fields
};

// Everything that is compiled once for each instruction set.
template <class R>
struct Kernels {
  PairKernels<R> pair[16][2][2];  // [policy][side][mined]
  // u from dot products, in place: scale_j multiplies column j first where it is not null. Returns the number of pairs
  // with D² below tolerance·size, which the caller mends.
  int (*to_view)(View, R* s, int64_t ld, int ni, int nj, const R* scale_j, const R* size_i, const R* size_j,
                 R tolerance);
  // q from w and u: what multiplies rows in the gradient (dot: w; euclidean: w/u; squared: -2w)
  void (*to_coefficient)(View, const R* u, R* w, int64_t n);
  void (*dot)(const R* x, const R* y, int64_t d, R* out);
  void (*squared_distance)(const R* x, const R* y, int64_t d, R* out);
  void (*axpy)(R a, const R* x, R* y, int64_t d);
  // softmax pooling of every k neighbouring columns: u [ni, nj·k] -> pooled [ni, nj]; and w back onto the columns
  void (*pool)(const R* u, int64_t ld, int ni, int nj, int k, R sharpness, R* pooled);
  void (*histogram_forward)(const Histogram<R>&);
  void (*histogram_backward)(const Histogram<R>&);
  R (*tile_max)(const Tile<R>&);
  void (*rank_forward)(const Thresholds<R>&);
  void (*triplet_forward)(const Thresholds<R>&);
  void (*triplet_backward)(const Thresholds<R>&);
  void (*best_below)(const Thresholds<R>&);
  void (*mark)(const Marks<R>&);
  void (*triplets)(Piece<R>&);
  void (*unpool)(R* u, int64_t ld, int ni, int nj, int k, R sharpness, const R* pooled, const R* w);
};

}  // namespace pydml

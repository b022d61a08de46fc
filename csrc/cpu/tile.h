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

// Kernels of one policy and one side, for one instruction set.
template <class R>
struct PairKernels {
  void (*forward)(const R* params, Forward<R>&);
  void (*backward)(const R* params, const Backward<R>&);  // u becomes w = dL/du, 0 outside the side
  // w of listed pairs, in place of their u: row i and column j of entry e are at t.row_i[i] and so on
  void (*backward_live)(const R* params, const Backward<R>&, Live<R>*, int n);
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
  void (*unpool)(R* u, int64_t ld, int ni, int nj, int k, R sharpness, const R* pooled, const R* w);
};

}  // namespace pydml

// The matrix of oriented similarities on the CPU, never stored: rows and columns sorted by label, its tiles, the
// schedule by which threads visit them, and the way of a gradient back to the embeddings. What all engines share.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <memory>
#include <utility>
#include <vector>

#include "cpu/checks.h"
#include "cpu/interrupt.h"
#include "cpu/tile.h"
#include "policy.h"

namespace pydml {

// The kernels for the best instruction set of this CPU (PYDML_ISA=portable|avx2|avx512 asks for another).
template <class R>
const Kernels<R>& kernels();
const char* isa_name();

int policy_id(c10::string_view name);
std::vector<Slot> slots_of(int policy);
// Has the policy this many numbers?
void check_params(int policy, size_t given);
View view_of(c10::string_view name);

// S within this of 1: 2-2S has lost its digits, and D² is taken from the rows themselves.
template <class R>
constexpr R kNear = sizeof(R) == 4 ? R(1e-5) : R(1e-13);

// Columns that are pooled into one: a thread holds their weights on its stack. Also in pydml/native.py.
constexpr int64_t kMostPooled = 4096;

using Block = std::pair<int, int>;  // a row block and a column block

// Run f(task, worker) for all tasks of a round. There are always as many workers as threads, so that BLAS inside a task
// stays on one thread and results do not hang on how many tasks there are.
template <class F>
void parallel(int64_t tasks, const F& f) {
  const int64_t workers = at::in_parallel_region() ? 1 : at::get_num_threads();
  Watched::run([&](Watched& loop) {
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      const Watched::Thread here(loop);
      for (int64_t worker = begin; worker < end; ++worker)
        for (int64_t task = worker; task < tasks; task += workers) f(task, worker);
    });
  });
}

// Rounds of tasks, each of which is a few tiles, where no row block and no column block occurs in two tasks of a round:
// threads own what they write, no atomics, and the order of additions is the same for any number of threads. Symmetric:
// a round-robin tournament over I <= J. Else a Latin square whose longer side is cut into strips: threads wait for each
// other after a round, so there are as few as the shorter side has blocks.
using Round = std::vector<std::vector<Block>>;
std::vector<Round> rounds(int row_blocks, int col_blocks, bool symmetric);

// Edge of a square tile. Also
// computed by pydml/native.py for the size of what the forward pass leaves behind.
inline int64_t block_size(int64_t n) { return n >= 1024 ? 256 : n >= 512 ? 128 : 64; }

// What one thread works in.
template <class R>
struct Workspace {
  std::vector<R> u;       // [ni, nj] the tile
  std::vector<R> raw;     // [ni, nj·pool] its columns before pooling
  std::vector<R> window;  // the last product that a small tile was cut out of
  int64_t window_i = 0, window_j = 0, window_rows = 0, window_cols = 0;
  std::vector<R> kept, scratch, x, y;
  std::vector<R> gathered;  // [gathered_rows, d] unit columns from gathered_first on
  int64_t gathered_first = 0, gathered_rows = 0;
  std::vector<int> skip0, skip1, left;
  std::vector<std::pair<int, int>> near;  // pairs of the tile whose D² came from the rows
};

// May embeddings stay where they are? Those that are not copied are brought into order, and to unit length, tile by
// tile: for a set that few rows are compared with, that is cheaper than a copy of all of it.
enum class Keep { never, if_sorted, always };

// One set of embeddings, sorted by label: x = z/‖z‖ (or z).
template <class R>
struct Vectors {
  Vectors(const at::Tensor& z, const at::Tensor& labels, bool normalize, Keep keep, int64_t group);

  at::Tensor z;                      // as given
  at::Tensor x;                      // [n, d] rows in sorted order; where `loose`, in the order of z
  std::vector<int64_t> order;        // sorted place -> row of z; empty: the same
  std::vector<int64_t> label;        // [n / group] sorted
  std::vector<R> norm, scale, size;  // scale: 1/‖z‖ where x holds z itself; size: ‖x‖²
  bool normalize, finite, loose = false;
  bool clamped = false;  // is any ‖z‖ so small that x is no unit vector?
  at::Tensor unit;       // x as it was before `centre_on`
  at::Tensor grad;       // [n, d] dL/dx in sorted order

  int64_t n() const { return x.size(0); }
  int64_t place(int64_t i) const { return order.empty() ? i : order[i]; }
  // Rows [first, first+count), to be multiplied by `late_scale` where that is not null; from w.gathered where loose.
  at::Tensor span(int64_t first, int64_t count, Workspace<R>& w) const;
  const R* late_scale(int64_t first) const { return loose || scale.empty() ? nullptr : scale.data() + first; }
  // Row i as a contiguous unit vector; copied to `copy` [d] where x does not hold it so.
  const R* row(int64_t i, R* copy) const;
  // A vector that all rows are near, where they are much nearer to it than to the origin; else nothing.
  std::vector<R> centre() const;
  // Distances do not change, and lose no digits, where a centre is taken from all rows. They must be a copy.
  void centre_on(const std::vector<R>& centre);
  void start_gradient();
  at::Tensor gradient();  // dL/dz in the order, dtype and layout of z
  void add_to_gradient(int64_t i, R a, const R* v);
};

// Must equal rows give equal bits wherever they stand? Then even the smallest tiles are left to BLAS. Engines that
// compare positives with negatives need it.
enum class Ties { any, exact };

template <class R>
class Matrix {
 public:
  Matrix(const at::Tensor& rows, const std::optional<at::Tensor>& cols, const at::Tensor& row_labels,
         const std::optional<at::Tensor>& col_labels, const std::optional<at::Tensor>& selves, View view,
         bool normalize, Ties ties = Ties::any, int64_t pool = 1, R sharpness = 1);

  const Kernels<R>& k;
  const View view;
  const Ties ties;
  const bool symmetric;
  const int64_t pool;
  const R sharpness;
  Vectors<R> row;
  const std::vector<R> centre;  // what was taken from rows and columns, empty: nothing
  std::unique_ptr<Vectors<R>> other;
  Vectors<R>& col;
  const bool tangent;  // is q·x_i, a part of a distance's gradient, taken out by the normalisation's backward?
  const int64_t n_rows, n_cols, d, T, col_block;
  std::vector<int64_t> same0, same1;  // columns [same0_i, same1_i) have the label of row i
  std::vector<int64_t> self;          // the column that row i itself is, -1: none; empty: no row is a column
  bool finite;
  struct Range {  // rows and columns of one class
    int64_t r0, r1, c0, c1;
  };
  std::vector<Range> classes;  // those with rows and columns

  std::vector<Workspace<R>> workspaces() const;

  // u of rows [i0, i0+ni) × columns [j0, j0+nj) into w.u [ni, nj]; near pairs into w.near.
  void tile(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const;
  // Skip ranges of the negatives of a tile: same-class columns, and in a symmetric matrix all that is not above the
  // diagonal.
  void negatives(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const;
  // Skip ranges of the positives of a tile that lies inside one class.
  void positives(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const;

  // Call f(i0, ni, j0, nj, worker, tile number, task) for every tile; after each round, on the calling thread,
  // `then(first tile number, tiles, task)` for its tasks in turn.
  template <class F, class G>
  void for_tiles(const F& f, const G& then) const {
    int64_t first = 0;
    for (const Round& round : rounds(row_blocks(), col_blocks(), symmetric)) {
      std::vector<int64_t> number;
      for (const auto& tiles : round) number.push_back(first), first += int64_t(tiles.size());
      parallel(int64_t(round.size()), [&](int64_t task, int64_t worker) {
        int64_t n = number[task];
        for (const auto& [I, J] : round[task]) {
          const int64_t i0 = I * T, j0 = J * col_block;
          f(i0, int(std::min(T, n_rows - i0)), j0, int(std::min(col_block, n_cols - j0)), worker, n++, task);
        }
      });
      for (size_t task = 0; task < round.size(); ++task) then(number[task], int64_t(round[task].size()), int64_t(task));
    }
  }
  template <class F>
  void for_tiles(const F& f) const {
    for_tiles(
        [&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker, int64_t, int64_t) { f(i0, ni, j0, nj, worker); },
        [](int64_t, int64_t, int64_t) {});
  }
  // The same for the positives: tiles inside classes. Small classes in parallel, large ones one by one in rounds.
  template <class F>
  void for_class_tiles(const F& f) const {
    std::vector<const Range*> small;
    for (const Range& c : classes) {
      if (c.r1 - c.r0 <= T && c.c1 - c.c0 <= col_block) {
        small.push_back(&c);
        continue;
      }
      const int nr = int((c.r1 - c.r0 + T - 1) / T), nc = int((c.c1 - c.c0 + col_block - 1) / col_block);
      for (const Round& round : rounds(nr, nc, symmetric))
        parallel(int64_t(round.size()), [&](int64_t task, int64_t worker) {
          for (const auto& [I, J] : round[task]) {
            const int64_t i0 = c.r0 + I * T, j0 = c.c0 + J * col_block;
            f(i0, int(std::min(T, c.r1 - i0)), j0, int(std::min(col_block, c.c1 - j0)), worker);
          }
        });
    }
    parallel(int64_t(small.size()), [&](int64_t task, int64_t worker) {
      const Range& c = *small[task];
      f(c.r0, int(c.r1 - c.r0), c.c0, int(c.c1 - c.c0), worker);
    });
  }

  // Call f(i, j, u) for every positive pair of row i, in a symmetric matrix for (j, i) too.
  template <class F>
  void for_positives(std::vector<Workspace<R>>& work, const F& f) const {
    for_class_tiles([&](int64_t i0, int ni, int64_t j0, int nj, int64_t worker) {
      Workspace<R>& w = work[worker];
      tile(i0, ni, j0, nj, w);
      positives(i0, ni, j0, nj, w);
      for (int i = 0; i < ni; ++i)
        for (int j = 0; j < nj; ++j) {
          if (j >= w.skip0[i] && j < w.skip1[i]) continue;
          const R u = w.u[int64_t(i) * nj + j];
          f(i0 + i, j0 + j, u);
          if (symmetric) f(j0 + j, i0 + i, u);
        }
    });
  }

  int row_blocks() const { return int((n_rows + T - 1) / T); }
  int col_blocks() const { return int((n_cols + col_block - 1) / col_block); }
  int64_t n_tiles() const {
    return symmetric ? int64_t(row_blocks()) * (row_blocks() + 1) / 2 : int64_t(row_blocks()) * col_blocks();
  }

  void start_gradient(bool want_rows, bool want_cols);
  // Remember the tile in w.kept for add_weights, where u is a distance or pooled.
  void keep(int ni, int nj, Workspace<R>& w) const;
  // Carry dL/du, which now stands in w.u in place of the tile's u, to the gradients.
  void add_weights(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w);
  // The same, pair by pair where few of the tile's weights are not 0.
  void add_weights_sparsely(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w);
  // The same for one pair.
  void add_weight(int64_t i, int64_t j, R weight, R u, Workspace<R>& w);
  std::tuple<at::Tensor, at::Tensor> gradients();

 private:
  bool is_distance() const { return view == View::euclidean || view == View::squared; }
  R coefficient(R weight, R u) const;                     // what multiplies rows in the gradient
  void push(int64_t i, int64_t j, R q, Workspace<R>& w);  // q·(x_i - x_j) to row i, the opposite to column j
  void mend(int64_t i0, int ni, int64_t j0, int nj, Workspace<R>& w) const;
  bool want_rows_ = false, want_cols_ = false;
};

// dtype in which embeddings are computed: fp64 in fp64, everything else in fp32.
inline at::ScalarType compute_type(const at::Tensor& z) {
  return z.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace pydml

// A 64×64 tile of the similarity matrix, by one block of 128 or 256 threads: slabs of rows come in by cp.async, dot
// products are formed on ordinary or on tensor cores, and the tile is left in shared memory as oriented similarities.
// No loss is known here.
#pragma once
#include "cuda/matrix.h"
#include "cuda/ptx.cuh"
#include "policy.h"

namespace pydml {

constexpr int kThreads = kHalves * kTile;  // unless a function says otherwise
constexpr int kSlab = kTile * kRowBytes;   // a slab: 128 bytes of each of 64 rows
constexpr int kStages = 3;
// The tile lies where the slabs were: they are used up when it is written.
constexpr int kArena = kStages * 2 * kSlab;
// Sweeps give a thread a row of the tile, gradients read it as operands of mma: each pitch spares its reader bank
// conflicts.
constexpr int kSweepPitch = kTile + 1, kCarryPitch = kTile + 8;
constexpr float kTiny = 1e-12f;  // ‖z‖ is clamped here, as torch.nn.functional.normalize does
// S within this of 1: 2-2S has lost its digits, and D² is taken from the rows themselves. And what each product may add
// to it: tensor cores cut the digits of long sums off instead of rounding them.
constexpr float kNear = 1e-5f, kNearStep = 1e-8f;

template <int n>
struct Int {
  static constexpr int value = n;
};

// Formats: what x is stored as, what its products are formed with, and the columns of a slab.
struct Fp32 {
  using Element = float;
  static constexpr int columns = 32;
  static __device__ __forceinline__ float to_float(float x) { return x; }
};
struct Tf32Rows {
  using Element = float;
  using Product = Tf32;
  static constexpr int columns = 32;
  static __device__ __forceinline__ float to_float(float x) { return x; }
};
struct Bf16 {
  using Element = __nv_bfloat16;
  using Product = __nv_bfloat16;
  static constexpr int columns = 64;
  static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
};
struct Fp16 {
  using Element = __half;
  using Product = __half;
  static constexpr int columns = 64;
  static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
  static __device__ __forceinline__ float low(unsigned pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xffffu)));
  }
  static __device__ __forceinline__ float high(unsigned pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
};

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ bool is_distance(const Matrix& m) {
  return View(m.view) == View::euclidean || View(m.view) == View::squared;
}

// Is item j of `other` in the class of item i of `own`?
__device__ __forceinline__ bool same_class(const Matrix& m, int64_t i, int j) {
  return j >= m.range[2 * i] && j < m.range[2 * i + 1];
}

// The item of `other` that item i of `own` itself is, -1: none. It has the class of i, and they make no pair.
__device__ __forceinline__ int self_of(const Matrix& m, int64_t i) {
  return m.symmetric ? int(i) : m.own.self ? m.own.self[i] : -1;
}

// Are items i of `own` and j of `other` the same? Whichever of the two sides knows it.
__device__ __forceinline__ bool is_self(const Matrix& m, int64_t i, int64_t j) {
  return m.symmetric ? i == j : (m.own.self && m.own.self[i] == j) || (m.other.self && m.other.self[j] == i);
}

template <class F>
int with_math(int math, const F& f) {
  switch (Math(math)) {
    case Math::fp32:
      return f(Fp32());
    case Math::tf32:
      return f(Tf32Rows());
    case Math::bf16:
      return f(Bf16());
    default:
      return f(Fp16());
  }
}

// Where 16 bytes of a row lie in a slab: permuted by the row, so that neither rows nor columns of an 8×8 block meet in
// a bank.
__device__ __forceinline__ int swizzle(int row, int piece) { return row * kRowBytes + ((piece ^ (row & 7)) << 4); }

__device__ __forceinline__ const char* slab_of(const Matrix& m, const Rows& rows, int64_t place, int slab) {
  return static_cast<const char*>(rows.x) + (place * m.slabs + slab) * kRowBytes;
}

// Fetch a slab of a tile by `threads` threads, of which this is number `thread`.
template <int threads>
__device__ __forceinline__ void fetch(const Matrix& m, const Rows& rows, int tile, int slab, char* to, int thread) {
  for (int e = thread; e < kTile * 8; e += threads) {
    const int row = e >> 3, piece = e & 7;
    cp_async16(to + swizzle(row, piece), slab_of(m, rows, int64_t(tile) * kTile + row, slab) + piece * 16);
  }
}

// x̂ of one place and column, straight from global memory.
template <class M>
__device__ __forceinline__ float entry(const Matrix& m, const Rows& rows, int64_t place, int column) {
  const auto* x = static_cast<const typename M::Element*>(rows.x);
  return M::to_float(x[place * m.slabs * M::columns + column]) * rows.scale[place];
}

// Are both rows of length 1, neither 0 nor too short to be normalised?
__device__ __forceinline__ bool are_unit(const Matrix& m, int64_t i, int64_t j) {
  return m.own.norm[i] > kTiny && m.other.norm[j] > kTiny;
}

// ‖x̂_i-x̂_j‖² from the rows themselves.
template <class M>
__device__ __forceinline__ float exact_square(const Matrix& m, int64_t i, int64_t j) {
  float total = 0;
  for (int k = 0; k < m.d; ++k) {
    const float away = entry<M>(m, m.own, i, k) - entry<M>(m, m.other, j, k);
    total = Fma(away, away, total);
  }
  return total;
}

// The dot products of a tile, in the registers of the block: two rows of warps, each of which has 32 rows of the tile.
template <class M, int threads>
struct Products {
  static constexpr int across = threads / 64, columns = kTile / across;  // warps side by side, and columns of each
  float s[2][columns / 8][4] = {};

  static __device__ __forceinline__ int lane() { return int(threadIdx.x) % 32; }
  static __device__ __forceinline__ int row0() { return int(threadIdx.x) / 32 / across * 32; }
  static __device__ __forceinline__ int col0() { return int(threadIdx.x) / 32 % across * columns; }

  __device__ __forceinline__ void add(const char* own, const char* other) {
    for (int k = 0; k < 8; k += 2) {  // 32 bytes of a row are one step of mma
      unsigned a[2][4], b[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_x4(a[i], own + swizzle(row0() + 16 * i + lane() % 16, k + lane() / 16));
#pragma unroll
      for (int n = 0; n < columns / 16; ++n) {
        ldmatrix_x4(b, other + swizzle(col0() + 16 * n + lane() % 8 + lane() / 16 * 8, k + lane() / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<typename M::Product>(s[i][2 * n], a[i], b[0], b[1]);
          mma<typename M::Product>(s[i][2 * n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < columns / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          f(row0() + 16 * i + lane() / 4 + 8 * (e / 2), col0() + 8 * n + 2 * (lane() % 4) + e % 2, s[i][n][e]);
  }
};

// On ordinary cores a thread has every (threads/16)-th row from ty on, and columns tx, tx+16, ….
template <int threads>
struct Products<Fp32, threads> {
  static constexpr int rows = kTile * 16 / threads;
  float s[rows][4] = {};

  __device__ __forceinline__ void add(const char* own, const char* other) {
    const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) / 16;
    for (int piece = 0; piece < 8; ++piece) {
      float4 y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = *reinterpret_cast<const float4*>(other + swizzle(tx + 16 * j, piece));
#pragma unroll
      for (int i = 0; i < rows; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(own + swizzle(ty + threads / 16 * i, piece));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          s[i][j] = Fma(x.x, y[j].x, s[i][j]);
          s[i][j] = Fma(x.y, y[j].y, s[i][j]);
          s[i][j] = Fma(x.z, y[j].z, s[i][j]);
          s[i][j] = Fma(x.w, y[j].w, s[i][j]);
        }
      }
    }
  }
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
    const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) / 16;
#pragma unroll
    for (int i = 0; i < rows; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(ty + threads / 16 * i, tx + 16 * j, s[i][j]);
  }
};

// S -> u of a tile for the views that look at distances. `near`, where it is given, gets a bit for each pair whose D²
// came from the rows.
template <class M, int pitch, int threads>
__device__ __forceinline__ void orient(const Matrix& m, int own_tile, int other_tile, float* tile, unsigned* near) {
  const int col = int(threadIdx.x) % kTile;
  const int64_t j = int64_t(other_tile) * kTile + col;
  for (int row = int(threadIdx.x) / kTile; row < kTile; row += threads / kTile) {
    const int64_t i = int64_t(own_tile) * kTile + row;
    float& u = tile[row * pitch + col];
    const float size = m.own.size[i] + m.other.size[j];
    float d2 = Fma(-2.f, u, size);
    // Where items are pools, places are not items, and nobody is among them.
    const bool items = m.own.pool * m.other.pool == 1 && i < m.own.n && j < m.other.n;
    const bool close = d2 < fmaxf(kNear, kNearStep * m.d) * size && m.own.index[i] >= 0 && m.other.index[j] >= 0 &&
                       !(items && is_self(m, i, j));
    if (close) d2 = exact_square<M>(m, i, j);
    if (View(m.view) == View::cosine) {
      if (close && are_unit(m, i, j)) u = Fma(-0.5f, d2, 1.f);
      continue;
    }
    d2 = Relu(d2);
    u = View(m.view) == View::squared ? -d2 : -Sqrt(d2);
    if (close && near) atomicOr(&near[2 * row + col / 32], 1u << (col % 32));
  }
}

// Leave the tile (own_tile, other_tile) in shared memory: tile[row·pitch + col] = u. All threads must be done with the
// arena before, and may read the tile after.
template <class M, int pitch, int threads = kThreads>
__device__ __forceinline__ void make_tile(const Matrix& m, int own_tile, int other_tile, char* arena, unsigned* near) {
  Products<M, threads> products;
  auto stage = [&](int slab) {
    if (slab < m.slabs) {
      char* const to = arena + slab % kStages * 2 * kSlab;
      fetch<threads>(m, m.own, own_tile, slab, to, int(threadIdx.x));
      fetch<threads>(m, m.other, other_tile, slab, to + kSlab, int(threadIdx.x));
    }
    cp_async_commit();  // an empty group too: waits count groups
  };
  for (int slab = 0; slab < kStages - 1; ++slab) stage(slab);
  for (int slab = 0; slab < m.slabs; ++slab) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this slab is there for all, and all are done with the one before
    stage(slab + kStages - 1);
    const char* const from = arena + slab % kStages * 2 * kSlab;
    products.add(from, from + kSlab);
  }
  cp_async_wait<0>();
  __syncthreads();
  float* const tile = reinterpret_cast<float*>(arena);
  const float *own = m.own.scale + int64_t(own_tile) * kTile, *other = m.other.scale + int64_t(other_tile) * kTile;
  // own·other first: a pair has the same bits from both of its sides
  products.each([&](int row, int col, float s) { tile[row * pitch + col] = s * (own[row] * other[col]); });
  if (near)
    for (int e = int(threadIdx.x); e < 2 * kTile; e += threads) near[e] = 0;
  __syncthreads();
  if (View(m.view) == View::dot) return;
  orient<M, pitch, threads>(m, own_tile, other_tile, tile, near);
  __syncthreads();
}

}  // namespace pydml

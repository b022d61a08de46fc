// The way back: a block owns the gradients of 64 rows, makes each tile again, lets an engine turn u into dL/du in
// place, and adds W·X̂ of the tile's columns. Rows are owned, so there are no atomics. A block is two groups of 128
// threads, each of which has 128 columns of the gradient in its registers; rows wider than 256 take more blocks, and
// each of them makes the tile again.
//
// W·X̂ is formed in TF32, whose operands hold bf16 and fp16 exactly and have the range of fp32: weights may be tiny.
// Distances need more digits, as q·(x_i-x_j) is a small difference: there W is split in two such numbers.
#pragma once
#include "cuda/sweep.cuh"

namespace pydml {

constexpr int kGroups = 2, kCarryThreads = kGroups * kThreads, kParts = kCarryThreads / kTile;
constexpr int kDepth = 128;                                         // columns of the gradient in a group
constexpr int kSpareSlabs = 3;                                      // buffers of a group beside the tile
constexpr int kSlabsAt = kTile * kCarryPitch * int(sizeof(float));  // where they lie in the arena
constexpr int kNearAt = kSlabsAt + kGroups * kSpareSlabs * kSlab;   // the bits of near pairs
constexpr int kCarryArena = kNearAt + 2 * kTile * int(sizeof(unsigned));
static_assert(kCarryArena >= kArena, "what make_tile takes");

// 64 × kDepth numbers of the gradient in the registers of a group: 4 warps, two by two.
template <class M>
struct Gradient {
  static constexpr int slabs = kDepth / M::columns, groups = M::columns / 16;
  float g[slabs][2][groups][4] = {};

  static __device__ __forceinline__ int lane() { return int(threadIdx.x) % 32; }
  static __device__ __forceinline__ int row0() { return int(threadIdx.x) % kThreads / 64 * 32; }
  static __device__ __forceinline__ int col0() { return int(threadIdx.x) / 32 % 2 * (M::columns / 2); }

  // The weights of 8 columns of the tile as an operand of mma: k is a column, in the order 0 2 4 6 1 3 5 7.
  static __device__ __forceinline__ void weights(const float* w, int row, unsigned (&high)[4], unsigned (&low)[4]) {
    const float2 upper = *reinterpret_cast<const float2*>(w + row * kCarryPitch);
    const float2 lower = *reinterpret_cast<const float2*>(w + (row + 8) * kCarryPitch);
    const float v[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
    for (int e = 0; e < 4; ++e) high[e] = to_tf32(v[e]), low[e] = to_tf32(v[e] - __uint_as_float(high[e]));
  }
  static __device__ __forceinline__ void multiply(float (&g)[4], const unsigned (&high)[4], const unsigned (&low)[4],
                                                  float x0, float x1, bool precise) {
    const unsigned b0 = __float_as_uint(x0), b1 = __float_as_uint(x1);
    mma<Tf32>(g, high, b0, b1);
    if (precise) mma<Tf32>(g, low, b0, b1);
  }

  template <int p>
  __device__ __forceinline__ void add(const float* tile, const char* slab, bool precise) {
    for (int j = 0; j < kTile; j += 8) {
      unsigned high[2][4], low[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) weights(tile + j + 2 * (lane() % 4), row0() + 16 * i + lane() / 4, high[i], low[i]);
      float x[groups][2];
      columns(slab, j, x);
#pragma unroll
      for (int n = 0; n < groups; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply(g[p][i][n], high[i], low[i], x[n][0], x[n][1], precise);
    }
  }

  // Rows j+2(lane%4) and the next of a slab, at columns lane/4 of each group of 8.
  static __device__ __forceinline__ void columns(const char* slab, int j, float (&x)[groups][2]) {
    if constexpr (sizeof(typename M::Element) == 2) {
#pragma unroll
      for (int n = 0; n < groups; n += 4) {
        unsigned pair[4];
        ldmatrix_x4_trans(pair, slab + swizzle(j + lane() % 8, (col0() + 8 * n) / 8 + lane() / 8));
#pragma unroll
        for (int q = 0; q < 4; ++q) x[n + q][0] = M::low(pair[q]), x[n + q][1] = M::high(pair[q]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < groups; ++n) {
        const int col = col0() + 8 * n + lane() / 4, row = j + 2 * (lane() % 4);
        x[n][0] = *reinterpret_cast<const float*>(slab + swizzle(row, col / 4) + col % 4 * 4);
        x[n][1] = *reinterpret_cast<const float*>(slab + swizzle(row + 1, col / 4) + col % 4 * 4);
      }
    }
  }

  // f(row, column, number) for what this thread has.
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int p = 0; p < slabs; ++p)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < groups; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            f(row0() + 16 * i + lane() / 4 + 8 * (e / 2), p * M::columns + col0() + 8 * n + 2 * (lane() % 4) + e % 2,
              g[p][i][n][e]);
  }
};

template <>
struct Gradient<Fp32> {
  static constexpr int slabs = kDepth / Fp32::columns;
  float g[slabs][8][2] = {};

  template <int p>
  __device__ __forceinline__ void add(const float* tile, const char* slab, bool) {
    const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) % kThreads / 16;
    for (int j = 0; j < kTile; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(slab + swizzle(j, tx / 2) + tx % 2 * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float w = tile[(ty + 8 * i) * kCarryPitch + j];
        g[p][i][0] = Fma(w, x.x, g[p][i][0]), g[p][i][1] = Fma(w, x.y, g[p][i][1]);
      }
    }
  }
  template <class F>
  __device__ __forceinline__ void each(const F& f) {
    const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) % kThreads / 16;
#pragma unroll
    for (int p = 0; p < slabs; ++p)
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) f(ty + 8 * i, p * Fp32::columns + 2 * tx + e, g[p][i][e]);
  }
};

// A tile on its way from u to what multiplies the columns' rows; what an engine sees of it.
struct WeightTile {
  const Matrix& m;
  int own_tile, other_tile;
  float* u;

  __device__ __forceinline__ bool pooled() const { return m.own.pool * m.other.pool > 1; }
  // dL/du -> the factor of x of a column: x̂ = scale·x; of distances q(x̂_i-x̂_j) with q = 2w·du/dD², so -q.
  __device__ __forceinline__ void put(int row, int col, float u_, float w) const {
    float& to = u[row * kCarryPitch + col];
    if (!is_distance(m)) {
      to = w * m.other.scale[int64_t(other_tile) * kTile + col];
    } else if (View(m.view) == View::squared) {
      to = 2 * w;
    } else {
      to = u_ < 0 ? -w / u_ : 0.f;  // at D=0 the gradient of D is 0
    }
  }

  // w = f(i, j, same, u) for every pair.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    const int col = int(threadIdx.x) % kTile, j = other_tile * kTile + col;
    for (int row = int(threadIdx.x) / kTile; row < kTile; row += kParts) {
      const int i = own_tile * kTile + row;
      const float v = u[row * kCarryPitch + col];
      const bool inside = i < m.own.n && j < m.other.n && !is_self(m, i, j);
      put(row, col, v, inside ? f(i, j, same_class(m, i, j), v) : 0.f);
    }
  }

  // The same where one side is pooled: dL/dU times dU/du_k = p_k(1+sharpness(u_k-U)).
  template <class F>
  __device__ __forceinline__ void each_pool(const F& f) const {
    const bool own_pools = m.own.pool > 1;
    const int pool = own_pools ? m.own.pool : m.other.pool, per = kTile / pool;
    for (int e = int(threadIdx.x); e < kTile * per; e += kCarryThreads) {
      const int line = e % kTile, item = e / kTile;
      const int i = own_pools ? own_tile * per + item : own_tile * kTile + line;
      const int j = own_pools ? other_tile * kTile + line : other_tile * per + item;
      auto row = [&](int k) { return own_pools ? item * pool + k : line; };
      auto col = [&](int k) { return own_pools ? line : item * pool + k; };
      auto value = [&](int k) { return u[row(k) * kCarryPitch + col(k)]; };
      const Pooled all(value, pool, m.sharpness);
      const float w = i < m.own.n && j < m.other.n && !is_self(m, i, j) ? f(i, j, same_class(m, i, j), all.mean) : 0.f;
      for (int k = 0; k < pool; ++k) {
        const float v = value(k), p = Exp(m.sharpness * (v - all.top)) / all.sum;
        put(row(k), col(k), v, w * p * (1 + m.sharpness * (v - all.mean)));
      }
    }
  }
};

template <int pending>
__device__ __forceinline__ void wait_for_slab() {
  cp_async_wait<pending>();
  __syncthreads();
}

// Engine::weigh(tile) turns every u of a tile into dL/du; idle() says that there is nothing to do, adds() that parts
// hold what an earlier launch has found, positives_only() that no other pair has a weight.
template <class M, class Engine>
__global__ void __launch_bounds__(kCarryThreads, 1) carry(const Matrix m, const Engine engine, float* parts) {
  if (engine.idle()) return;
  SharedPieces pieces;
  char* const arena = pieces.take<char>(kCarryArena);
  float* const tile = reinterpret_cast<float*>(arena);
  unsigned* const near = reinterpret_cast<unsigned*>(arena + kNearAt);
  const int own_tile = int(blockIdx.x), row = int(threadIdx.x) % kTile, part = int(threadIdx.x) / kTile;
  const int group = int(threadIdx.x) / kThreads;
  const int column0 = (int(blockIdx.z) * kGroups + group) * kDepth, slab0 = column0 / M::columns;
  char* const slabs = arena + kSlabsAt + group * kSpareSlabs * kSlab;
  const bool distance = is_distance(m);
  Gradient<M> gradient;
  float pull = 0;  // Σ of this row's far pairs: what multiplies x̂_i itself
  const Walk walk = walk_of(m, engine.positives_only());
  for (int t = walk.first; t < walk.last; ++t) {
    make_tile<M, kCarryPitch, kCarryThreads>(m, own_tile, t, arena, distance ? near : nullptr);
    auto fetch_slab = [&](int p) {
      if (slab0 + p < m.slabs)
        fetch<kThreads>(m, m.other, t, slab0 + p, slabs + p % kSpareSlabs * kSlab, int(threadIdx.x) % kThreads);
      cp_async_commit();
    };
    for (int p = 0; p < min(kSpareSlabs, Gradient<M>::slabs); ++p) fetch_slab(p);
    engine.weigh(WeightTile{m, own_tile, t, tile});
    __syncthreads();
    if (distance) {
      const bool any = __syncthreads_or(near[2 * row + part % 2] != 0);
      for (int col = 0; any && col < kTile; ++col) {
        gradient.each([&](int r, int column, float& g) {
          if (!(near[2 * r + col / 32] >> (col % 32) & 1) || column0 + column >= m.d) return;
          const float x = entry<M>(m, m.own, int64_t(own_tile) * kTile + r, column0 + column);
          const float y = entry<M>(m, m.other, int64_t(t) * kTile + col, column0 + column);
          g = Fma(tile[r * kCarryPitch + col], y - x, g);  // differences first: q is huge where D is tiny
        });
      }
      __syncthreads();
      for (int e = 0; e < kTile / kParts; ++e) {
        const int col = part * (kTile / kParts) + e;
        float& w = tile[row * kCarryPitch + col];
        w = near[2 * row + col / 32] >> (col % 32) & 1 ? 0.f : w;
        pull -= w;
        w *= m.other.scale[int64_t(t) * kTile + col];
      }
      __syncthreads();
    }
    auto add = [&](auto p_) {
      constexpr int p = decltype(p_)::value, n = Gradient<M>::slabs;
      if constexpr (p < n) {
        constexpr int after = n - 1 - p;
        wait_for_slab < after<kSpareSlabs - 1 ? after : kSpareSlabs - 1>();
        if (slab0 + p < m.slabs) gradient.template add<p>(tile, slabs + p % kSpareSlabs * kSlab, distance);
        if constexpr (p + kSpareSlabs < n) {
          __syncthreads();
          fetch_slab(p + kSpareSlabs);
        }
      }
    };
    add(Int<0>()), add(Int<1>()), add(Int<2>()), add(Int<3>());
    __syncthreads();
  }
  float* const pulls = reinterpret_cast<float*>(arena);
  pulls[part * kTile + row] = pull;
  __syncthreads();
  gradient.each([&](int r, int column, float& g) {
    const int64_t place = int64_t(own_tile) * kTile + r;
    if (column0 + column >= m.d || m.own.index[place] < 0) return;
    if (distance) {
      float all = 0;
      for (int q = 0; q < kParts; ++q) all += pulls[q * kTile + r];
      g = Fma(all, entry<M>(m, m.own, place, column0 + column), g);
    }
    const int64_t places = int64_t(gridDim.x) * kTile;
    float& to = parts[(int64_t(blockIdx.y) * places + place) * m.d + column0 + column];
    to = engine.adds() ? to + g : g;
  });
}

template <class Engine>
int launch_carry(const Matrix& m, const Engine& engine, float* parts, void* stream) {
  const int per_own = kTile / m.own.pool;
  const dim3 grid((m.own.n + per_own - 1) / per_own, m.splits, (m.d + kGroups * kDepth - 1) / (kGroups * kDepth));
  return with_math(m.math, [&](auto math) {
    return launch(&carry<decltype(math), Engine>, grid, kCarryThreads, SharedPieces::bytes<char>(kCarryArena), stream,
                  m, engine, parts);
  });
}

}  // namespace pydml

// Before and after the engines: rows gathered in sorted order, normalised and padded to whole slabs, so that no kernel
// meets a ragged edge or an unaligned row; and the way of a gradient back through the normalisation. A warp does a row.
#include "cuda/launchers.h"
#include "cuda/tile.cuh"

namespace pydml {
namespace {

constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ float from_float(float x, float) { return x; }
__device__ __forceinline__ __nv_bfloat16 from_float(float x, __nv_bfloat16) { return __float2bfloat16(x); }
__device__ __forceinline__ __half from_float(float x, __half) { return __float2half(x); }

// fp32 rows are stored as x̂, less the centre. 16-bit rows are stored as they came, which is exact, and x̂ = scale·x.
template <class M>
__global__ void __launch_bounds__(kThreads, 4) prepare(const PrepareArguments a) {
  using Element = typename M::Element;
  constexpr bool exact = sizeof(Element) == 2;
  const int64_t place = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = int(threadIdx.x) % 32, width = a.slabs * M::columns;
  if (place >= a.places) return;
  const int64_t from = a.index[place];
  const Element* const z = static_cast<const Element*>(a.z) + (from < 0 ? 0 : from * a.row_stride);
  Element* const x = static_cast<Element*>(a.x) + place * width;
  const int d = from < 0 ? 0 : a.d;
  float square = 0;
  bool finite = true;
  for (int k = lane; k < d; k += 32) {
    const float v = M::to_float(z[k * a.col_stride]);
    square = Fma(v, v, square);
    finite = finite && v - v == 0;
  }
  if (!finite) atomicOr(a.trouble, 1);
  const float norm = Sqrt(warp_sum(square)), divisor = a.normalize ? max(norm, kTiny) : 1.f;
  float size = 0;
  for (int k = lane; k < width; k += 32) {
    Element e = k < d ? z[k * a.col_stride] : from_float(0.f, Element());
    if constexpr (!exact) {
      if (k < d) e = e / divisor - (a.centre ? a.centre[k] : 0.f);
      if constexpr (std::is_same_v<M, Tf32Rows>) e = __uint_as_float(to_tf32(e));
    }
    x[k] = e;
    const float v = exact ? M::to_float(e) / divisor : M::to_float(e);
    size = Fma(v, v, size);
  }
  size = warp_sum(size);
  if (lane == 0) {
    a.scale[place] = from < 0 ? 0.f : exact ? 1 / divisor : 1.f;
    a.size[place] = size;
    a.norm[place] = norm;
  }
}

// dL/dz from dL/dx̂: what is along the unit row, x̂ and the centre, does not change it.
template <class M>
__global__ void __launch_bounds__(kThreads, 4) finish(const Matrix m, const FinishArguments a) {
  using Element = typename M::Element;
  const int64_t place = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int lane = int(threadIdx.x) % 32;
  if (place >= a.places || m.own.index[place] < 0) return;
  float* const g = a.parts + place * m.d;
  auto unit = [&](int k) { return entry<M>(m, m.own, place, k) + (a.centre ? a.centre[k] : 0.f); };
  float radial = 0;
  for (int k = lane; k < m.d; k += 32) {
    float total = g[k];
    for (int split = 1; split < a.splits; ++split) total += g[int64_t(split) * a.places * m.d + k];
    g[k] = total;
    radial = Fma(total, unit(k), radial);
  }
  radial = warp_sum(radial);
  const float norm = m.own.norm[place];
  Element* const to = static_cast<Element*>(a.grad) + m.own.index[place] * a.row_stride;
  const bool whole = *m.trouble == 0;
  for (int k = lane; k < m.d; k += 32) {
    float v = g[k];
    if (a.normalize) {
      if (norm > kTiny) v = Fma(-radial, unit(k), v);
      v /= max(norm, kTiny);
    }
    to[k * a.col_stride] = from_float(whole ? v : NAN, Element());
  }
}

}  // namespace

const char* describe(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int launch_prepare(const PrepareArguments& a, void* stream) {
  return with_math(a.math, [&](auto math) {
    return launch(&prepare<decltype(math)>, dim3((a.places + kWarps - 1) / kWarps), kThreads, 0, stream, a);
  });
}

int launch_finish(const Matrix& m, const FinishArguments& a, void* stream) {
  return with_math(m.math, [&](auto math) {
    return launch(&finish<decltype(math)>, dim3((a.places + kWarps - 1) / kWarps), kThreads, 0, stream, m, a);
  });
}

}  // namespace pydml

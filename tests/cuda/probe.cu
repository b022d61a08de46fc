// One kernel for each thing that the emulator's tests look at, called through ctypes.
#include "cuda/ptx.cuh"

namespace pydml {
namespace {

template <class T>
__global__ void do_mma(const unsigned* a, const unsigned* b, float* d) {
  const int lane = int(threadIdx.x);
  unsigned mine[4];
  float sum[4];
  for (int r = 0; r < 4; ++r) {
    mine[r] = a[4 * lane + r];
    sum[r] = d[4 * lane + r];
  }
  mma<T>(sum, mine, b[2 * lane], b[2 * lane + 1]);
  for (int r = 0; r < 4; ++r) d[4 * lane + r] = sum[r];
}

__global__ void do_ldmatrix(const uint4* rows, unsigned* r, bool transposed) {
  PYDML_SHARED(uint4, tile, [32]);
  const int lane = int(threadIdx.x);
  tile[lane] = rows[lane];
  __syncwarp();
  unsigned got[4];
  if (transposed)
    ldmatrix_x4_trans(got, &tile[lane]);
  else
    ldmatrix_x4(got, &tile[lane]);
  for (int m = 0; m < 4; ++m) r[4 * lane + m] = got[m];
}

// Lanes of `mask` only; y[lane] keeps what it was elsewhere.
__global__ void do_shuffle(int kind, unsigned mask, int by, int width, int* y) {
  const int lane = int(threadIdx.x), mine = 100 + lane;
  if (!(mask >> lane & 1)) return;
  y[lane] = kind == 0   ? __shfl_sync(mask, mine, by, width)
            : kind == 1 ? __shfl_xor_sync(mask, mine, by, width)
            : kind == 2 ? __shfl_down_sync(mask, mine, unsigned(by), width)
                        : __shfl_up_sync(mask, mine, unsigned(by), width);
}

// What every thread sees of predicates and values: votes of its warp, equals in its warp, votes of its block.
__global__ void do_votes(const int* x, unsigned* y) {
  const int t = int(threadIdx.x);
  unsigned* const mine = y + 7 * t;
  mine[0] = __ballot_sync(~0u, x[t] > 0);
  mine[1] = unsigned(__any_sync(~0u, x[t] > 0));
  mine[2] = unsigned(__all_sync(~0u, x[t] > 0));
  mine[3] = __match_any_sync(~0u, x[t]);
  mine[4] = unsigned(__syncthreads_count(x[t] > 0));
  mine[5] = unsigned(__syncthreads_or(x[t] > 0));
  mine[6] = unsigned(__syncthreads_and(x[t] > 0));
}

__global__ void do_atomics(const int* x, int n, int* y) {
  for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += int(gridDim.x * blockDim.x)) {
    atomicAdd(&y[0], x[i]);
    atomicMax(&y[1], x[i]);
    atomicMin(&y[2], x[i]);
    atomicOr(&y[3], x[i]);
    int before = y[4], seen;
    do {
      seen = before;
      before = atomicCAS(&y[4], seen, seen ^ x[i]);
    } while (before != seen);
  }
}

// What shared memory holds before anything is written, and what cp.async leaves there: before and after its wait.
__global__ void do_copy(const float* x, int bytes, float* y) {
  SharedPieces pieces;
  float* const tile = pieces.take<float>(4);
  for (int k = 0; k < 4; ++k) y[k] = tile[k];
  for (int k = 0; k < 4; ++k) tile[k] = 7;
  cp_async16(tile, x, bytes);
  cp_async_commit();
  for (int k = 0; k < 4; ++k) y[4 + k] = tile[k];
  cp_async_wait<0>();
  for (int k = 0; k < 4; ++k) y[8 + k] = tile[k];
}

__global__ void do_convert(const float* x, int n, unsigned short* bf16, unsigned short* fp16, unsigned* tf32) {
  for (int i = int(threadIdx.x); i < n; i += int(blockDim.x)) {
    bf16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
    fp16[i] = __half_as_ushort(__float2half_rn(x[i]));
    tf32[i] = to_tf32(x[i]);
  }
}

// y[i] = how often thread i of the whole grid ran.
__global__ void do_count(int* y, size_t taken) {
  SharedPieces pieces;
  if (taken) pieces.take<char>(taken)[0] = 1;
  const size_t block = (size_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const size_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  y[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1;
}

}  // namespace
}  // namespace pydml

using pydml::launch;

extern "C" {

int probe_mma(int format, const unsigned* a, const unsigned* b, float* d) {
  const auto kernel = format == 0   ? &pydml::do_mma<__nv_bfloat16>
                      : format == 1 ? &pydml::do_mma<__half>
                                    : &pydml::do_mma<pydml::Tf32>;
  return launch(kernel, 1, 32, 0, nullptr, a, b, d);
}
int probe_ldmatrix(const void* rows, unsigned* r, int transposed) {
  return launch(&pydml::do_ldmatrix, 1, 32, 0, nullptr, static_cast<const uint4*>(rows), r, transposed != 0);
}
int probe_shuffle(int kind, unsigned mask, int by, int width, int* y) {
  return launch(&pydml::do_shuffle, 1, 32, 0, nullptr, kind, mask, by, width, y);
}
int probe_votes(const int* x, int threads, unsigned* y) {
  return launch(&pydml::do_votes, 1, unsigned(threads), 0, nullptr, x, y);
}
int probe_atomics(const int* x, int n, int* y) { return launch(&pydml::do_atomics, 8, 64, 0, nullptr, x, n, y); }
int probe_copy(const float* x, int bytes, float* y) {
  return launch(&pydml::do_copy, 1, 1, pydml::SharedPieces::bytes<float>(4), nullptr, x, bytes, y);
}
int probe_convert(const float* x, int n, unsigned short* bf16, unsigned short* fp16, unsigned* tf32) {
  return launch(&pydml::do_convert, 1, 32, 0, nullptr, x, n, bf16, fp16, tf32);
}
int probe_count(const unsigned* grid, const unsigned* block, size_t shared, size_t taken, int* y) {
  return launch(&pydml::do_count, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), shared, nullptr,
                y, taken);
}
const char* probe_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
}

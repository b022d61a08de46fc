// Kernels with a bug each, and the same kernels without: what the checkers must find, and must not. The program takes
// the name of a bug (or none), runs the kernels and compares their results.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/ptx.cuh"

namespace {

using namespace pydml;

#define BUGS(X)               \
  X(none)                     \
  X(no_barrier_after_store)   \
  X(no_barrier_before_store)  \
  X(divergent_barrier)        \
  X(global_overrun)           \
  X(shared_overrun)           \
  X(dynamic_overrun)          \
  X(divergent_shuffle)        \
  X(no_warp_barrier)          \
  X(no_async_wait)            \
  X(no_barrier_after_wait)    \
  X(no_barrier_before_refill) \
  X(shared_sum_not_atomic)    \
  X(global_sum_not_atomic)    \
  X(misaligned_vector)        \
  X(misaligned_row)           \
  X(not_initialised)
#define ENUMERATOR(name) name,
enum class Bug { BUGS(ENUMERATOR) };

constexpr int kThreads = 64, kSteps = 3, kBlocks = 2;

// y[block, t] = Σ over tiles of the tile's entry at the mirrored place, through shared memory.
template <Bug bug>
__global__ void mirror(const float* x, float* y) {
  PYDML_SHARED(float, tile, [kThreads]);
  const int t = int(threadIdx.x), first = int(blockIdx.x) * kSteps * kThreads;
  float sum = 0;
  for (int step = 0; step < kSteps; ++step) {
    tile[t] = x[first + step * kThreads + t + (bug == Bug::global_overrun ? kThreads : 0)];
    if (bug != Bug::no_barrier_after_store) {
      if (bug != Bug::divergent_barrier || t < 32)
        __syncthreads();
      else
        __syncthreads();
    }
    sum += tile[kThreads - 1 - t + (bug == Bug::shared_overrun ? 1 : 0)];
    if (bug != Bug::no_barrier_before_store) __syncthreads();
  }
  y[blockIdx.x * kThreads + t] = sum;
}

// The same by cp.async into two buffers, four numbers a thread, and through pieces of dynamic shared memory.
template <Bug bug>
__global__ void mirror_async(const float* x, float* y) {
  constexpr int in_tile = 4 * kThreads;
  SharedPieces pieces;
  float* const stages[2] = {pieces.take<float>(in_tile), pieces.take<float>(in_tile)};
  const int t = int(threadIdx.x), first = int(blockIdx.x) * kSteps * in_tile;
  auto fetch = [&](int step) {
    cp_async16(stages[step % 2] + 4 * t, x + first + step * in_tile + 4 * t);
    cp_async_commit();
  };
  float4 sum = {0, 0, 0, 0};
  fetch(0);
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) fetch(step + 1);
    if (bug == Bug::no_async_wait)
      cp_async_wait<1>();  // right but for the last step
    else if (step + 1 < kSteps)
      cp_async_wait<1>();
    else
      cp_async_wait<0>();
    if (bug != Bug::no_barrier_after_wait) __syncthreads();
    const float* const from = stages[step % 2] + in_tile - 4 * (t + 1) + (bug == Bug::misaligned_vector ? 1 : 0) +
                              (bug == Bug::dynamic_overrun ? 4 * (t + 1) : 0);
    const float4 v = *reinterpret_cast<const float4*>(from);
    sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
    if (bug != Bug::no_barrier_before_refill) __syncthreads();
  }
  if (bug == Bug::no_async_wait) cp_async_wait<0>();
  reinterpret_cast<float4*>(y)[blockIdx.x * kThreads + t] = sum;
}

// y[0] = Σ x over all blocks: by shuffles, then through shared memory, then through global memory.
template <Bug bug>
__global__ void total(const float* x, float* y, int n) {
  PYDML_SHARED(float, partial, [2]);
  const int t = int(threadIdx.x);
  if (bug != Bug::not_initialised && t < 2) partial[t] = 0;
  __syncthreads();
  float sum = 0;
  for (int i = int(blockIdx.x) * kThreads + t; i < n; i += kBlocks * kThreads) sum += x[i];
  if (bug != Bug::divergent_shuffle || t % 32 < 20)
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (t % 32 == 0) {
    if (bug == Bug::shared_sum_not_atomic)
      partial[0] += sum;
    else
      atomicAdd(&partial[0], sum);
  }
  __syncthreads();
  if (t == 0) {
    if (bug == Bug::global_sum_not_atomic)
      *y += partial[0];
    else
      atomicAdd(y, partial[0]);
  }
}

// y[t] = entry that lane t+1 of the warp left in shared memory; rows of 16-bit numbers by ldmatrix, unused but checked.
template <Bug bug>
__global__ void neighbour(const float* x, float* y) {
  PYDML_SHARED(float, left, [kThreads]);
  const int t = int(threadIdx.x);
  left[t] = x[t];
  if (bug != Bug::no_warp_barrier) __syncwarp();
  y[t] = left[t / 32 * 32 + (t + 1) % 32];
  __syncthreads();
  unsigned r[4];
  ldmatrix_x4(r, reinterpret_cast<const char*>(left) + (bug == Bug::misaligned_row ? 4 : 16 * (t % 16)));
}

int failed(int status) {
  if (status) printf("launch failed: %s\n", cudaGetErrorString(static_cast<cudaError_t>(status)));
  return status ? 4 : 0;
}

int compare(const char* kernel, const std::vector<float>& got, const std::vector<float>& want) {
  for (size_t i = 0; i < want.size(); ++i)
    if (!(got[i] == want[i])) {
      printf("%s: wrong result: entry %zu is %g, wanted %g\n", kernel, i, got[i], want[i]);
      return 3;
    }
  return 0;
}

template <Bug bug>
int run() {
  constexpr int n = kBlocks * kSteps * kThreads;
  std::vector<float> x(n), x4(4 * n), y(kBlocks * kThreads), want(y.size());
  for (int i = 0; i < n; ++i) x[i] = float(i % 97);
  for (int i = 0; i < 4 * n; ++i) x4[i] = float(i % 89);
  int status = failed(launch(&mirror<bug>, dim3(kBlocks), dim3(kThreads), 0, nullptr, x.data(), y.data()));
  for (int i = 0; i < n; ++i) want[i / (kSteps * kThreads) * kThreads + kThreads - 1 - i % kThreads] += x[i];
  if (status || (status = compare("mirror", y, want))) return status;

  std::vector<float> y4(kBlocks * kThreads * 4), want4(y4.size());
  status = failed(launch(&mirror_async<bug>, dim3(kBlocks), dim3(kThreads),
                         2 * SharedPieces::bytes<float>(4 * kThreads), nullptr, x4.data(), y4.data()));
  for (int i = 0; i < 4 * n; ++i)
    want4[i / (kSteps * 4 * kThreads) * 4 * kThreads + 4 * (kThreads - 1 - i / 4 % kThreads) + i % 4] += x4[i];
  if (status || (status = compare("mirror_async", y4, want4))) return status;

  std::vector<float> sum(1), want_sum(1);
  status = failed(launch(&total<bug>, dim3(kBlocks), dim3(kThreads), 0, nullptr, x.data(), sum.data(), n));
  for (float v : x) want_sum[0] += v;
  if (status || (status = compare("total", sum, want_sum))) return status;

  status = failed(launch(&neighbour<bug>, dim3(1), dim3(kThreads), 0, nullptr, x.data(), y.data()));
  for (int t = 0; t < kThreads; ++t) want[t] = x[t / 32 * 32 + (t + 1) % 32];
  want.resize(kThreads);
  return status ? status : compare("neighbour", y, want);
}

}  // namespace

int main(int count, char** words) {
  const std::string wanted = count > 1 ? words[1] : "none";
#define RUN(name) \
  if (wanted == #name) return run<Bug::name>();
  BUGS(RUN)
  printf("no bug is called %s\n", wanted.c_str());
  return 2;
}

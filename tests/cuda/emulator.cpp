// The host's side of the emulator: launches with their limits, and the functions of CUDA's runtime.
//
// Environment, read at every launch: PYDML_EMULATOR_ORDER = forward, reverse or random:SEED, the order of threads and
// blocks; PYDML_EMULATOR_ARCH = 80, 86, …, whose limit of shared memory holds (default: the smallest of all);
// PYDML_EMULATOR_WORKERS, how many blocks run at once; PYDML_EMULATOR_LOG, a file that gets a line for each launch:
// place of the kernel in its library, threads of a block, bytes of dynamic shared memory.
#include <dlfcn.h>
#include <stdio.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "block.h"

namespace emulator {

namespace {

// What the host's calls leave behind; a launch's workers report here when all of them are done.
struct Host {
  cudaError_t error = cudaSuccess;
  std::string message;
};
thread_local Host host;
std::mutex kernels_lock;
std::map<const void*, size_t> kernel_shared;  // by cudaFuncSetAttribute

cudaError_t report(cudaError_t error, const std::string& message) {
  host.message = message;
  return host.error = error;
}

Order order_from_environment() {
  const char* text = getenv("PYDML_EMULATOR_ORDER");
  const std::string order = text ? text : "forward";
  if (order == "forward" || order == "") return {};
  if (order == "reverse") return {Order::reverse, 0};
  if (order.rfind("random", 0) == 0) return {Order::random, order.size() > 7 ? strtoull(&order[7], nullptr, 10) : 0};
  throw Error("PYDML_EMULATOR_ORDER: got '" + order + "', wanted forward, reverse or random:SEED");
}

size_t shared_limit() {
  static const std::map<int, size_t> kibibytes = {{80, 163}, {86, 99}, {89, 99}, {90, 227}, {100, 227}, {120, 99}};
  const char* text = getenv("PYDML_EMULATOR_ARCH");
  const auto found = kibibytes.find(text ? atoi(text) : 86);
  if (found == kibibytes.end()) throw Error(std::string("PYDML_EMULATOR_ARCH: unknown architecture ") + text);
  return found->second * 1024;
}

// Blocks' places that are not in use.
std::mutex pool_lock;
std::vector<std::unique_ptr<Running>> pool;

std::unique_ptr<Running> borrow() {
  const std::lock_guard<std::mutex> guard(pool_lock);
  if (pool.empty()) return std::make_unique<Running>();
  std::unique_ptr<Running> place = std::move(pool.back());
  pool.pop_back();
  return place;
}

void give_back(std::unique_ptr<Running> place) {
#if defined(EMULATOR_TSAN)
  // Only now, at the end of the launch: blocks are not ordered among themselves.
  __tsan_acquire(&place->launch->done_sync);
#endif
  place->used_places = 0;
  place->retired.clear();
  place->retired_sync.clear();
  const std::lock_guard<std::mutex> guard(pool_lock);
  pool.push_back(std::move(place));
}

void log_launch(const void* kernel, uint64_t threads, size_t shared) {
  const char* path = getenv("PYDML_EMULATOR_LOG");
  Dl_info library;
  if (!path || !dladdr(kernel, &library)) return;
  if (FILE* file = fopen(path, "a")) {
    const auto place = static_cast<const char*>(kernel) - static_cast<const char*>(library.dli_fbase);
    fprintf(file, "%zx %zu %zu\n", size_t(place), size_t(threads), shared);
    fclose(file);
  }
}

unsigned worker_count(uint64_t blocks) {
#if defined(EMULATOR_TSAN) || defined(__SANITIZE_ADDRESS__)
  (void)blocks;
  return 1;
#else
  const char* text = getenv("PYDML_EMULATOR_WORKERS");
  const unsigned most = text ? unsigned(atoi(text)) : std::thread::hardware_concurrency();
  return unsigned(std::max<uint64_t>(1, std::min<uint64_t>(most, blocks / 2)));
#endif
}

}  // namespace

void launch(const void* kernel, dim3 grid, dim3 threads, size_t shared, void (*body)(void*), void* data) {
  const uint64_t in_block = uint64_t(threads.x) * threads.y * threads.z, blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (!in_block || in_block > kMostThreads || threads.z > 64) {
    report(cudaErrorInvalidConfiguration, "invalid configuration: threads of a block");
    return;
  }
  if (!blocks || grid.x > 0x7fffffffu || grid.y > 0xffffu || grid.z > 0xffffu) {
    report(cudaErrorInvalidConfiguration, "invalid configuration: blocks of the grid");
    return;
  }
  try {
    size_t allowed = kSharedByDefault;
    {
      const std::lock_guard<std::mutex> guard(kernels_lock);
      if (const auto found = kernel_shared.find(kernel); found != kernel_shared.end()) allowed = found->second;
    }
    if (shared > allowed) {
      report(cudaErrorInvalidValue, "invalid value: " + std::to_string(shared) + " bytes of dynamic shared memory, " +
                                        std::to_string(allowed) + " allowed (cudaFuncSetAttribute)");
      return;
    }
    log_launch(kernel, in_block, shared);
    Launch l = {kernel, grid, threads, shared, shared_limit(), body, data, order_from_environment()};
    std::vector<unsigned> turns;
    if (l.order.kind != Order::forward) {
      turns.resize(blocks);
      std::iota(turns.begin(), turns.end(), 0u);
      l.order.apply(turns, 0);
    }
    std::atomic<uint64_t> next{0};
    std::mutex lock;
    std::string error;
    auto work = [&] {
      std::unique_ptr<Running> place = borrow();
      for (uint64_t i; (i = next++) < blocks;) {
        place->run(l, turns.empty() ? i : turns[i]);
        if (!place->error.empty()) {
          const std::lock_guard<std::mutex> guard(lock);
          error = place->error;
          next = blocks;
          return;  // its fibers stopped anywhere: not to be used again
        }
      }
      give_back(std::move(place));
    };
    std::vector<std::thread> workers;
    for (unsigned extra = worker_count(blocks); extra > 1; --extra) workers.emplace_back(work);
    work();
    for (std::thread& worker : workers) worker.join();
    if (!error.empty()) report(cudaErrorLaunchFailure, error);
  } catch (const Error& error) {
    report(cudaErrorInvalidValue, error.what());
  }
}

}  // namespace emulator

// The runtime functions

cudaError_t cudaPeekAtLastError() { return emulator::host.error; }

cudaError_t cudaGetLastError() { return std::exchange(emulator::host.error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : emulator::host.message.c_str();
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  try {
    if (value < 0 || size_t(value) > emulator::shared_limit())
      return emulator::report(cudaErrorInvalidValue, "invalid value: " + std::to_string(value) +
                                                         " bytes of dynamic shared memory, the architecture has " +
                                                         std::to_string(emulator::shared_limit()));
  } catch (const emulator::Error& error) {
    return emulator::report(cudaErrorInvalidValue, error.what());
  }
  const std::lock_guard<std::mutex> guard(emulator::kernels_lock);
  emulator::kernel_shared[kernel] = size_t(value);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 4 : int(emulator::shared_limit());
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  memset(p, value, bytes);
  return cudaSuccess;
}

// NVIDIA's occupancy calculator, which is a header, on lines of: architecture, registers, static and dynamic shared
// memory, threads. Prints percent of the warps that an SM can hold.
#include <cuda_runtime.h>
// It takes the types of the one above for granted.
#include <cuda_occupancy.h>

#include <cstdio>

int main() {
  int arch, registers, fixed, dynamic, threads;
  while (scanf("%d %d %d %d %d", &arch, &registers, &fixed, &dynamic, &threads) == 5) {
    const bool small = arch == 86 || arch == 89 || arch == 120;  // the GPUs that are not for data centres
    cudaOccDeviceProp device;
    device.computeMajor = arch / 10;
    device.computeMinor = arch % 10;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = small ? 1536 : 2048;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.numSms = 1;
    device.sharedMemPerMultiprocessor = (small ? 100 : arch == 80 ? 164 : 228) * 1024;
    device.sharedMemPerBlockOptin = device.sharedMemPerMultiprocessor - 1024;
    device.sharedMemPerBlock = 48 * 1024;
    device.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = threads;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = size_t(fixed);
    kernel.maxDynamicSharedSizeBytes = size_t(dynamic);
    kernel.numBlockBarriers = 1;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, size_t(dynamic))) return 1;
    printf("%d\n", 100 * result.activeBlocksPerMultiprocessor * threads / device.maxThreadsPerMultiprocessor);
  }
}

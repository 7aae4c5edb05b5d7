// Blocks that only hold their SM, for hardware/calibrate/suite/placement.py:
//   nvcc -O2 -arch=sm_90a -shared -Xcompiler -fPIC -o placement.so placement.cu
#include <cuda_runtime.h>

// Each block notes its SM, when it began and when it ended (ns of the GPU's global timer); it spins for spin_ns without
// touching memory. Dynamic shared memory keeps other blocks off its SM.
__global__ void hold(long long spin_ns, long long* out) {
  extern __shared__ char room[];
  if (threadIdx.x == 0) {
    unsigned sm;
    long long began, now;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    do {
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - began < spin_ns);
    out[3 * blockIdx.x] = sm;
    out[3 * blockIdx.x + 1] = began;
    out[3 * blockIdx.x + 2] = now;
    room[0] = 1;
  }
}

// Launches `blocks` blocks in clusters of `cluster` on `stream`; `out` has room for three numbers a block. 0, or the
// CUDA error (plus 1000 or 2000 where an attribute was refused).
extern "C" int hold_launch(void* stream, int blocks, int cluster, long long spin_ns, long long* out, int shared_bytes) {
  cudaError_t e = cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (e) return 1000 + e;
  if (cluster > 8) {
    e = cudaFuncSetAttribute(hold, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (e) return 2000 + e;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = (cudaStream_t)stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeClusterDimension;
  attribute[0].val.clusterDim.x = cluster;
  attribute[0].val.clusterDim.y = 1;
  attribute[0].val.clusterDim.z = 1;
  config.attrs = attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return (int)cudaLaunchKernelEx(&config, hold, spin_ns, out);
}

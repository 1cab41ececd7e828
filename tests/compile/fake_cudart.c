/* The part of the CUDA runtime that FlashInfer's host code calls, without a GPU: a device with the limits of an H100,
 * copies that are made and recorded, launches that are recorded and not run. Built by tools/check_cuda.py. */

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>

#define RECORDS 4096
enum { MULTIPROCESSORS = 132, SHARED_OF_MULTIPROCESSOR = 233472, SHARED_OF_BLOCK = 232448, BLOCKS_AT_ONCE = 4 };

static uint64_t copies[RECORDS][3];   /* destination, source, bytes */
static uint64_t launches[RECORDS][7]; /* grid, block, bytes of shared memory */
static int copied, launched;

void fake_reset(void) { copied = launched = 0; }
int fake_copied(void) { return copied; }
int fake_launched(void) { return launched; }
const uint64_t *fake_copy(int i) { return copies[i]; }
const uint64_t *fake_launch(int i) { return launches[i]; }

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device ? cudaErrorInvalidDevice : cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  (void)device;
  switch (attribute) {
  case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_OF_MULTIPROCESSOR; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_OF_BLOCK; break;
  case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
  case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
  default: return cudaErrorInvalidValue; /* a new question needs an answer here */
  }
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
  (void)kernel, (void)threads, (void)shared, (void)flags;
  *blocks = BLOCKS_AT_ONCE;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  (void)kind, (void)stream;
  if (copied == RECORDS) return cudaErrorMemoryAllocation;
  uint64_t *record = copies[copied++];
  record[0] = (uint64_t)to, record[1] = (uint64_t)from, record[2] = bytes;
  memcpy(to, from, bytes);
  return cudaSuccess;
}

/* The variables of a device that are read here say how much shared memory a kernel takes. */
cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
  (void)symbol, (void)offset, (void)kind;
  memset(to, 0, bytes);
  return cudaSuccess;
}

/* Of the driver: descriptors of tensors, which only the device reads. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *memory,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  (void)type, (void)rank, (void)memory, (void)sizes, (void)strides, (void)box, (void)steps, (void)interleave,
      (void)swizzle, (void)promotion, (void)fill;
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
  (void)error;
  *name = "none";
  return CUDA_SUCCESS;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  (void)kernel, (void)arguments, (void)stream;
  if (launched == RECORDS) return cudaErrorMemoryAllocation;
  uint64_t *record = launches[launched++];
  record[0] = grid.x, record[1] = grid.y, record[2] = grid.z;
  record[3] = block.x, record[4] = block.y, record[5] = block.z, record[6] = shared;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
  return cudaLaunchKernel(kernel, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                          config->stream);
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t error) { return error ? "refused by the fake runtime" : "none"; }
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

/* What nvcc makes a program call: it registers its kernels when it is loaded, and launches them by a handle. */
void **__cudaRegisterFatBinary(void *code) {
  static void *handle;
  (void)code;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, void *thread,
                            void *block, void *block_size, void *grid_size, int *warp) {
  (void)handle, (void)host, (void)device, (void)name, (void)threads, (void)thread, (void)block, (void)block_size,
      (void)grid_size, (void)warp;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                       int constant, int global) {
  (void)handle, (void)host, (void)device, (void)name, (void)external, (void)bytes, (void)constant, (void)global;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return cudaErrorInvalidConfiguration; /* launches by <<<>>> are none of those that are looked at */
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return cudaErrorInvalidConfiguration;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = (cudaKernel_t)host;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared, stream);
}

// CUTLASS's products for Hopper: of small integers, which are exact, element by element.
#include "core/hopper_gemm.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>
#include <string>
#include <vector>

#include "core/cuda_testing.h"

namespace jax_overlap {
namespace {

constexpr int kMultiprocessors = 132;

// Element i of an operand: -2 to 2.
__host__ __device__ int Small(int64_t i, int salt) {
  const uint64_t h = (static_cast<uint64_t>(i) + salt) * 0x9E3779B97F4A7C15ull;
  return static_cast<int>((h >> 40) % 5) - 2;
}

template <class T>
__global__ void Fill(T* data, int64_t size, int salt) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) {
    data[i] = static_cast<T>(static_cast<float>(salt < 0 ? 77 : Small(i, salt)));
  }
}

// Counts wrong elements of d, and what is written outside of its matrices.
template <class T>
__global__ void Check(const GemmKey key, const T* d, int64_t size, unsigned* wrong) {
  for (int64_t at = blockIdx.x * blockDim.x + threadIdx.x; at < size;
       at += gridDim.x * blockDim.x) {
    const int64_t b = key.batch == 1 ? 0 : at / key.d_block, rest = at - b * key.d_block;
    const int64_t i = rest / key.ldd, j = rest % key.ldd;
    float right = 77;
    if (b < key.batch && i < key.m && j < key.n) {
      int sum = 0;
      for (int64_t k = 0; k < key.k; ++k) {
        const int64_t w = key.transposed != 0 ? j * key.ldw + k : k * key.ldw + j;
        sum += Small(b * key.x_block + i * key.ldx + k, 1) * Small(b * key.w_block + w, 2);
      }
      if (key.accumulates != 0) sum += Small(b * key.c_block + i * key.ldc + j, 3);
      right = static_cast<float>(static_cast<T>(static_cast<float>(sum)));
    }
    if (static_cast<float>(d[at]) != right) atomicAdd(wrong, 1u);
  }
}

template <class T>
struct Array {
  Array(int64_t n, int salt) : size(n), memory(n * sizeof(T)) { Fill<<<256, 256>>>(data, n, salt); }
  const int64_t size;
  const Memory memory;
  T* const data = reinterpret_cast<T*>(memory.data());
};

template <class T>
void Case(GemmType type, int64_t m, int64_t n, int64_t k, int64_t batch, bool transposed,
          bool accumulates, bool one_weight) {
  GemmKey key = {};
  key.m = m;
  key.n = n;
  key.k = k;
  key.batch = batch;
  key.in = key.in_w = key.out = type;
  key.transposed = transposed;
  key.accumulates = accumulates;
  key.ldx = k + 8;  // rows apart
  key.ldw = (transposed ? k : n) + 16;
  key.ldc = n;
  key.ldd = n + 8;
  key.x_block = m * key.ldx;
  key.w_block = one_weight ? 0 : (transposed ? n : k) * key.ldw;
  key.c_block = m * key.ldc;
  key.d_block = (m + 1) * key.ldd;
  key.x_align = key.w_align = key.c_align = key.d_align = 16;
  cudaDeviceProp device;
  JO_CUDA(cudaGetDeviceProperties(&device, 0));
  JO_CHECK(HopperGemmTakes(key, device));
  const Array<T> x(batch * key.x_block, 1), c(batch * key.c_block, 3), d(batch * key.d_block, -1);
  const Array<T> w((one_weight ? 1 : batch) * (transposed ? n : k) * key.ldw, 2);
  const std::string error =
      LaunchHopperGemm({key, x.data, w.data, c.data, d.data, kMultiprocessors}, nullptr);
  JO_CHECK_IN(error.empty(), "%s", error.c_str());
  unsigned wrong = 1;
  const Memory counted(sizeof(wrong));
  Check<<<256, 256>>>(key, d.data, d.size, reinterpret_cast<unsigned*>(counted.data()));
  JO_CUDA(cudaMemcpy(&wrong, counted.data(), sizeof(wrong), cudaMemcpyDeviceToHost));
  JO_CHECK_IN(wrong == 0, "[%d x] %d x %d x %d, w%s, %s: %u elements are wrong",
              static_cast<int>(batch), static_cast<int>(m), static_cast<int>(k),
              static_cast<int>(n), transposed ? " transposed" : "", accumulates ? "c + x w" : "x w",
              wrong);
}

template <class T>
int All(GemmType type) {
  int passed = 0;
  for (const bool transposed : {false, true}) {
    for (const bool accumulates : {false, true}) {
      Case<T>(type, 1, 8, 8, 1, transposed, accumulates, false);
      Case<T>(type, 128, 128, 64, 1, transposed, accumulates, false);
      Case<T>(type, 129, 136, 72, 1, transposed, accumulates, false);
      Case<T>(type, 1000, 520, 264, 1, transposed, accumulates, false);
      Case<T>(type, 77, 256, 136, 3, transposed, accumulates, false);
      Case<T>(type, 300, 264, 128, 5, transposed, accumulates, true);
      Case<T>(type, 2048, 2048, 512, 2, transposed, accumulates, false);
      passed += 7;
    }
  }
  return passed;
}

// What the hardware cannot address is not taken.
int Refused() {
  cudaDeviceProp hopper = {};
  hopper.major = 9;
  GemmKey key = {};
  key.m = key.n = key.k = key.batch = key.ldx = key.ldw = key.ldc = key.ldd = 64;
  key.in = key.in_w = key.out = GemmType::kBF16;
  key.x_align = key.w_align = key.c_align = key.d_align = 16;
  JO_CHECK(HopperGemmTakes(key, hopper));
  const auto refused = [&](auto change) {
    GemmKey changed = key;
    cudaDeviceProp device = hopper;
    change(&changed, &device);
    JO_CHECK(!HopperGemmTakes(changed, device));
    return 1;
  };
  return refused([](GemmKey*, cudaDeviceProp* device) { device->major = 10; }) +
         refused([](GemmKey* k, cudaDeviceProp*) { k->out = GemmType::kF32; }) +
         refused([](GemmKey* k, cudaDeviceProp*) { k->in = k->in_w = k->out = GemmType::kF32; }) +
         refused([](GemmKey* k, cudaDeviceProp*) { k->ldx = 68; }) +
         refused([](GemmKey* k, cudaDeviceProp*) { k->n = 60; }) +
         refused([](GemmKey* k, cudaDeviceProp*) { k->d_align = 8; }) +
         refused([](GemmKey* k, cudaDeviceProp*) { k->d_block = int64_t{1} << 40; }) +
         refused([](GemmKey* k, cudaDeviceProp*) { k->m = int64_t{1} << 31; });
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  const int passed = All<__nv_bfloat16>(GemmType::kBF16) + All<__half>(GemmType::kF16) + Refused();
  std::printf("hopper_gemm_test (CUDA): %d passed, 0 failed\n", passed);
}

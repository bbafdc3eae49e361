#include "core/hopper_gemm.h"

#include <cstdint>

namespace jax_overlap {
namespace {

#ifdef JAX_OVERLAP_CUTLASS
constexpr bool kBuilt = true;
#else
constexpr bool kBuilt = false;
#endif

// What the hardware that copies tiles can address.
constexpr int64_t kAlign = 16;
constexpr int64_t kMostStride = int64_t{1} << 40, kMostSize = int64_t{1} << 31;

}  // namespace

bool HopperGemmTakes(const GemmKey& key, const cudaDeviceProp& device) {
  const bool types = key.in == key.in_w && key.in == key.out &&
                     (key.in == GemmType::kBF16 || key.in == GemmType::kF16);
  bool fits = kBuilt && device.major == 9 && types;
  for (const int64_t size : {key.m, key.n, key.k, key.batch}) {
    fits = fits && size > 0 && size < kMostSize;
  }
  for (const int64_t stride : {key.ldx, key.ldw, key.ldc, key.ldd}) {
    fits = fits && stride * 2 % kAlign == 0 && stride * 2 < kMostStride;
  }
  for (const int64_t block : {key.x_block, key.w_block, key.c_block, key.d_block}) {
    fits = fits && (key.batch == 1 || (block >= 0 && block * 2 < kMostStride));
  }
  for (const int32_t align : {key.x_align, key.w_align, key.c_align, key.d_align}) {
    fits = fits && align >= kAlign;  // distances from matrix to matrix, too
  }
  // Rows that are read and written in whole lines.
  return fits && key.k * 2 % kAlign == 0 && key.n * 2 % kAlign == 0;
}

const char* HopperGemmName() { return kBuilt ? "-CUTLASS-128x128x64-pingpong" : ""; }

std::string LaunchHopperGemm(const HopperGemmCall& call, cudaStream_t stream) {
#ifdef JAX_OVERLAP_CUTLASS
  const bool transposed = call.key.transposed != 0;
  if (call.key.in == GemmType::kBF16) {
    return transposed ? LaunchHopperGemmBF16T(call, stream) : LaunchHopperGemmBF16(call, stream);
  }
  return transposed ? LaunchHopperGemmF16T(call, stream) : LaunchHopperGemmF16(call, stream);
#else
  static_cast<void>(call);
  static_cast<void>(stream);
  return "built without CUTLASS";
#endif
}

}  // namespace jax_overlap

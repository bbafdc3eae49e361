// How psum is launched over the peer link: the kernel, the cut of the operands, the grid.
//
// A call is one launch. Its grid and the cut of its operands depend on shapes only, so
// that they are alike on all ranks and in a captured graph. Everything that changes from
// call to call, the sequence numbers, is in the channel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/gpu_channel.h"
#include "ops/psum.h"
#include "xla/ffi/api/ffi.h"

namespace jax_overlap {

constexpr int kMaxLeaves = 32;  // operands of one launch

// An operand. Its pieces go to the blocks in turn, from block `first_block` on.
struct PsumLeaf {
  const void* in;
  void* out;
  size_t count;  // of elements
  uint32_t pieces;
  uint32_t first_block;
};

struct PsumArguments {
  uint32_t block_bytes;  // of the channel, for each block
  uint32_t piece;        // elements, at most
  uint32_t leaf_count;
  PsumLeaf leaf;  // the first; most calls have one
  GpuChannel channel;
  PsumLeaf more[kMaxLeaves - 1];
};

// What decides, beside the element type, which kernel serves a call.
struct PsumChoice {
  PsumAlgorithm algorithm;
  bool small;  // in cells rather than with flags
  int ranks;
};
// `bytes`: of a rank's operands.
PsumChoice ChoosePsum(PsumAlgorithm algorithm, int ranks, size_t bytes);

// How a call is cut, and what it needs of its channel.
struct PsumLayout {
  size_t piece;  // elements
  int grid;
  int threads;
  size_t block_bytes;

  size_t channel_bytes() const { return GpuChannel::kHeadBytes + grid * block_bytes; }
};
struct PsumLimits {
  size_t bytes;  // of the channel
  int blocks;
};
// `puts`: to ranks of other nodes, by ops/psum_nvshmem.cu. `counts`: elements of each operand.
PsumLayout LayOutPsum(const PsumChoice& choice, xla::ffi::DataType dtype, TeamShape shape,
                      bool puts, const std::vector<int64_t>& counts, PsumLimits limits);

// Without puts.
cudaError_t LaunchPsum(const PsumChoice& choice, xla::ffi::DataType dtype, const PsumLayout& layout,
                       const PsumArguments& arguments, cudaStream_t stream);

// To be loaded before any runs: loading one while another spins may wait for that one.
std::vector<const void*> PsumKernels();

}  // namespace jax_overlap

// The kernel of psum: each thread block of a rank runs an algorithm of psum.h with the
// same block of the other ranks, over a part of the channel that is theirs.
//
// A call's operands are cut into pieces, dealt out to the blocks. Nothing passes between
// the blocks of a rank, so all that the grid needs is to be the same on all ranks.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/gpu_channel.h"
#include "core/status.h"
#include "ops/psum.h"
#include "ops/psum_launch.h"

namespace jax_overlap {

// What a failed call leaves as its result: NaN, or the smallest integer.
template <class T>
__device__ T Poison() {
  return Numeric<T>::Narrow(static_cast<Acc<T>>(NAN));
}
template <>
__device__ inline int32_t Poison() {
  return INT32_MIN;
}
template <>
__device__ inline int8_t Poison() {
  return INT8_MIN;
}

// f(leaf, begin, end) for the pieces that are this block's.
template <class F>
__device__ void ForPieces(const PsumArguments& a, F f) {
  PsumLeaf leaf = a.leaf;
  for (uint32_t l = 0;;) {
    uint32_t p = blockIdx.x - leaf.first_block;
    if (blockIdx.x < leaf.first_block) p += gridDim.x;
    for (; p < leaf.pieces; p += gridDim.x) {
      const size_t begin = static_cast<size_t>(p) * a.piece;
      f(leaf, begin, Min(begin + a.piece, leaf.count));
    }
    if (++l == a.leaf_count) return;
    leaf = a.more[l - 1];
  }
}

template <class Link, class Algorithm, class T>
__global__ void __launch_bounds__(Link::kMaxThreads)
    PsumKernel(const __grid_constant__ PsumArguments a) {
  __shared__ Status status;
  const GpuChannel& channel = a.channel;
  const BlockThreads threads;
  // All that can be loaded before anything is known is under way at once.
  Carver carver(channel.own + GpuChannel::kHeadBytes +
                static_cast<size_t>(blockIdx.x) * a.block_bytes);
  BlockHead* const head = carver.Take<BlockHead>(1);
  Sequence sequence(&head->sequence);
  const bool broken = *head->broken() != 0;
  bool early = blockIdx.x < a.leaf.pieces;  // its first piece is of the first operand
  const auto load = [&](const PsumLeaf& leaf, size_t begin, size_t end) {
    return Algorithm::Early(threads, static_cast<const T*>(leaf.in) + begin, end - begin);
  };
  typename Algorithm::Loaded loaded = {};
  if (early) {
    const size_t begin = static_cast<size_t>(blockIdx.x) * a.piece;
    loaded = load(a.leaf, begin, Min(begin + a.piece, a.leaf.count));
  }
  Link link(channel, &status);
  const auto memory = Algorithm::Carve(carver, channel.shape, a.piece);
  bool fails = broken;
  if (JO_RARELY(sequence.first() && !broken)) {
    channel.Meet(link);
    fails = link.failed();
  }
  if (!JO_RARELY(fails)) {
    ForPieces(a, [&](const PsumLeaf& leaf, size_t begin, size_t end) {
      if (!early) loaded = load(leaf, begin, end);
      early = false;
      Algorithm::Run(threads, link, memory, channel.shape, sequence.Next(), loaded,
                     static_cast<const T*>(leaf.in) + begin, end - begin,
                     static_cast<T*>(leaf.out) + begin);
      threads.sync();
    });
    sequence.Keep(threads);
    if (!JO_RARELY(link.failed())) return;
  }
  ForPieces(a, [&](const PsumLeaf& leaf, size_t begin, size_t end) {
    T* const out = static_cast<T*>(leaf.out);
    for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x) out[i] = Poison<T>();
  });
  if (threadIdx.x != 0) return;
  if (broken) return channel.Report({kBroken, channel.shape.rank, -1, 0, 0, 0});
  *head->broken() = 1;
  channel.Tell(status);
}

}  // namespace jax_overlap

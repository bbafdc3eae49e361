// Reduce-scatter: rank r gets the sum of the ranks' parts r, in rank order.
//
//   in [outer, P, inner] of each rank  ->  out [outer, inner] of rank r: sum of [:, r, :]
//
// Staged, a rank sends each part to its owner's slot for it, and adds what it has
// received. Direct, it adds its part of all inputs in place.
#pragma once

#include "ops/block_op.h"

namespace jax_overlap {

struct PsumScatter {
  template <class T, class Threads, class Link>
  static JO_HD void Run(const Threads& threads, Link& link, const Inbox<T>& inbox,
                        uint64_t sequence, const Blocks& blocks, size_t begin, size_t end,
                        const T* in, T* out) {
    const int rank = link.rank(), size = blocks.parts;
    if constexpr (!Link::kDirect) {
      for (int k = 1; k < size; ++k) {
        const int peer = Rotated(rank, k, size);
        inbox.Send(threads, link, sequence, peer, [&](T* slot) {
          blocks.ForRuns(peer, begin, end, [&](size_t at, size_t i, size_t n) {
            Copy(threads, in + i, n, slot + (at - begin));
          });
        });
      }
      for (int k = 1; k < size; ++k) {
        inbox.Receive(threads, link, sequence, Rotated(rank, k, size));
      }
    }
    blocks.ForRuns(rank, begin, end, [&](size_t at, size_t i, size_t n) {
      SumRows<T>(
          threads, size,
          [&](int source) {
            if constexpr (Link::kDirect) return link.Input(in, source) + i;
            return source == rank ? in + i : inbox.slot(sequence, source, size) + (at - begin);
          },
          n, out + at);
    });
  }
};

}  // namespace jax_overlap

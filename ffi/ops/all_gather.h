// All-gather: every rank gets the ranks' operands side by side.
//
//   in [outer, inner] of rank r  ->  out [outer, P, inner] of each rank: [:, r, :]
//
// Staged, a rank sends its operand to a slot of each peer, and copies what it has
// received into place. Direct, it writes its part of all outputs.
#pragma once

#include "ops/block_op.h"

namespace jax_overlap {

struct AllGather {
  template <class T, class Threads, class Link>
  static JO_HD void Run(const Threads& threads, Link& link, const Inbox<T>& inbox,
                        uint64_t sequence, const Blocks& blocks, size_t begin, size_t end,
                        const T* in, T* out) {
    const int rank = link.rank(), size = blocks.parts;
    const auto place = [&](int source, const T* from, T* to) {  // from: at `begin`
      blocks.ForRuns(source, begin, end, [&](size_t at, size_t i, size_t n) {
        Copy(threads, from + (at - begin), n, to + i);
      });
    };
    for (int k = FirstPeer(); k < size; ++k) {
      const int peer = Rotated(rank, k, size);
      if constexpr (Link::kDirect) {
        place(rank, in + begin, link.Output(out, peer));
      } else {
        inbox.Send(threads, link, sequence, peer,
                   [&](T* slot) { Copy(threads, in + begin, end - begin, slot); });
      }
    }
    place(rank, in + begin, out);
    if constexpr (!Link::kDirect) {
      for (int k = FirstPeer(); k < size; ++k) {
        const int source = Rotated(rank, k, size);
        place(source, inbox.Receive(threads, link, sequence, source), out);
      }
    }
  }
};

}  // namespace jax_overlap

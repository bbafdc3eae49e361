// All-to-all: part j of rank r becomes part r of rank j.
//
//   in [outer, P, inner] of rank r: [:, j, :]  ->  out [outer, P, inner] of rank j: [:, r, :]
//
// Staged, a rank sends each part to a slot of its receiver, which copies it into
// place. Direct, it writes the parts where they belong.
#pragma once

#include "ops/block_op.h"

namespace jax_overlap {

struct AllToAll {
  template <class T, class Threads, class Link>
  static JO_HD void Run(const Threads& threads, Link& link, const Inbox<T>& inbox,
                        uint64_t sequence, const Blocks& blocks, size_t begin, size_t end,
                        const T* in, T* out) {
    const int rank = link.rank(), size = blocks.parts;
    const size_t stride = blocks.inner;          // from a part to the next
    for (int k = FirstPeer(); k <= size; ++k) {  // the own part, for which nobody waits, last
      const int peer = Rotated(rank, k, size);
      if (Link::kDirect || peer == rank) {
        T* const target = link.Output(out, peer);
        blocks.ForRuns(peer, begin, end, [&](size_t, size_t i, size_t n) {
          Copy(threads, in + i, n, target + i - peer * stride + rank * stride);
        });
      } else {
        inbox.Send(threads, link, sequence, peer, [&](T* slot) {
          blocks.ForRuns(peer, begin, end, [&](size_t at, size_t i, size_t n) {
            Copy(threads, in + i, n, slot + (at - begin));
          });
        });
      }
    }
    if constexpr (!Link::kDirect) {
      for (int k = FirstPeer(); k < size; ++k) {
        const int source = Rotated(rank, k, size);
        const T* const slot = inbox.Receive(threads, link, sequence, source);
        blocks.ForRuns(source, begin, end, [&](size_t at, size_t i, size_t n) {
          Copy(threads, slot + (at - begin), n, out + i);
        });
      }
    }
  }
};

}  // namespace jax_overlap

// What psum_scatter, all_gather and all_to_all share: operands seen as blocks, and a
// slot for each source. block_handler.h has the CPU handler around such an algorithm.
//
// An array that is cut in P parts along a dimension is [outer, P, inner] in memory:
// a part is `outer` runs of `inner` elements, a run P * inner after the last.
#pragma once

#include "core/channel.h"
#include "core/link.h"
#include "core/mutants.h"
#include "core/schedule.h"
#include "core/sum.h"
#include "core/threads.h"

namespace jax_overlap {

struct Blocks {
  int parts;
  size_t outer;
  size_t inner;

  JO_HD size_t part_size() const { return outer * inner; }

  // f(k, i, n) for the runs of elements [begin, end) of a part: `n` elements that
  // are at k of the part by itself, and at i of the whole when it is `part`.
  template <class F>
  JO_HD void ForRuns(int part, size_t begin, size_t end, F f) const {
    for (size_t k = begin; k < end;) {
      const size_t row = k / inner, column = k % inner;
      const size_t n = Min(inner - column, end - k);
      f(k, (row * parts + part) * inner + column, n);
      k += n;
    }
  }
};

// Peers are rank + k for k from here on.
JO_HD int FirstPeer() { return JO_MUTANT("skip_peer") ? 2 : 1; }

// A slot of `capacity` elements for each source, two used in turn, and its flag.
// Every rank hears from every other in each call, so two slots are enough
// (ops/psum.h says why).
template <class T>
struct Inbox {
  T* slots;     // [2][source][capacity]
  Word* flags;  // [source]
  size_t capacity;

  static JO_HD Inbox Carve(Carver& carver, int size, size_t capacity) {
    T* const slots = carver.Take<T>(2 * size * capacity);
    return {slots, carver.Take<Word>(size), capacity};
  }
  JO_HD T* slot(uint64_t sequence, int source, int size) const {
    return slots + (SlotOf(sequence) * size + source) * capacity;
  }

  // fill(slot) stores what `peer` gets at the peer's slot for this rank. After a wait in
  // vain it is not called: the peer may still read what was sent last time.
  template <class Threads, class Link, class Fill>
  JO_HD void Send(const Threads& threads, Link& link, uint64_t sequence, int peer,
                  Fill fill) const {
    const int rank = link.rank();
    const bool too_early = JO_MUTANT("flag_before_data");
    if (too_early && threads.index() == 0) link.Signal(&flags[rank].value, peer, sequence);
    if (MayStore(link)) fill(link.At(slot(sequence, rank, link.size()), peer));
    threads.sync();
    if (!too_early && threads.index() == 0) link.Signal(&flags[rank].value, peer, sequence);
  }

  // What `source` has sent, once it is there.
  template <class Threads, class Link>
  JO_HD const T* Receive(const Threads& threads, Link& link, uint64_t sequence, int source) const {
    if (threads.index() == 0) link.Wait(&flags[source].value, sequence, {source, 0});
    threads.sync();
    return slot(sequence, source, link.size());
  }
};

// An algorithm on blocks has
//   Run(threads, link, inbox, sequence, blocks, begin, end, in, out)
// for the elements [begin, end) of the parts. Direct needs no inbox and is not cut.
template <class Algorithm, class T, class Threads, class Link>
JO_HD void RunBlocks(const Threads& threads, Link& link, char* channel, size_t capacity,
                     const Blocks& blocks, const T* in, T* out) {
  if constexpr (Link::kDirect) {
    Algorithm::Run(threads, link, Inbox<T>{}, 0, blocks, 0, blocks.part_size(), in, out);
  } else {
    Carver carver(channel);
    Word* const last = carver.Take<Word>(1);
    const auto inbox = Inbox<T>::Carve(carver, blocks.parts, capacity);
    ForChunksInSequence(threads, last, blocks.part_size(), capacity,
                        [&](uint64_t sequence, size_t begin, size_t end) {
                          Algorithm::Run(threads, link, inbox, sequence, blocks, begin, end, in,
                                         out);
                        });
  }
}

template <class T>
JO_HD size_t BlockChannelBytes(int size, size_t capacity) {
  Carver carver(nullptr);
  carver.Take<Word>(1);
  Inbox<T>::Carve(carver, size, capacity);
  return carver.bytes();
}

}  // namespace jax_overlap

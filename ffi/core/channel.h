// The memory of a channel: how an algorithm lays it out, and which of two slots a
// call uses. A channel is at the same offset of every rank's heap, so the layout
// has to come out alike on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/annotations.h"
#include "core/mutants.h"
#include "core/schedule.h"

namespace jax_overlap {

// A flag or ready word has a cache line to itself.
struct alignas(64) Word {
  uint64_t value;
};

// Hands out consecutive pieces of a channel, which starts at a cache line. With a
// null base it counts.
class Carver {
 public:
  explicit JO_HD Carver(char* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  JO_HD T* Take(size_t count) {
    const uintptr_t piece = base_ + bytes_;
    bytes_ = RoundUp(bytes_ + count * sizeof(T), alignof(Word));
    return reinterpret_cast<T*>(piece);
  }
  JO_HD size_t bytes() const { return bytes_; }

 private:
  const uintptr_t base_;
  size_t bytes_ = 0;  // taken so far: the same on all ranks, wherever their heaps are
};

// The slot, of two used in turn, of a sequence number.
JO_HD size_t SlotOf(uint64_t sequence) {
  if (JO_MUTANT("one_slot")) return 0;
  if (JO_MUTANT("wrong_parity")) sequence >>= 1;
  return sequence & 1;
}

// The sequence numbers of a call: those after the last, which is kept in the word that a
// channel begins with and is the same on all ranks.
class Sequence {
 public:
  explicit JO_HD Sequence(Word* last) : last_(last), value_(last->value) {}

  JO_HD bool first() const { return value_ == 0; }
  JO_HD uint64_t Next() {
    if (!JO_MUTANT("stale_epoch") || value_ == 0) ++value_;
    return value_;
  }
  // After a sync: other threads may not have read it yet.
  template <class Threads>
  JO_HD void Keep(const Threads& threads) const {
    if (threads.index() == 0) last_->value = value_;
  }

 private:
  Word* const last_;
  uint64_t value_;
};

// f(sequence, begin, end) for chunks of up to `capacity` of `n` elements, each with a
// sequence number of its own.
template <class Threads, class F>
JO_HD void ForChunksInSequence(const Threads& threads, Word* last, size_t n, size_t capacity, F f) {
  Sequence sequence(last);
  for (size_t begin = 0; begin < n; begin += capacity) {
    f(sequence.Next(), begin, Min(begin + capacity, n));
    threads.sync();
  }
  sequence.Keep(threads);
}

}  // namespace jax_overlap

// All-reduce: out = the sum of the ranks' vectors, on every rank.
//
// Written once for CPU and GPU, on the seams Threads (core/threads.h) and Link
// (core/link.h). Each algorithm is a class with
//   Carve(carver, team, capacity)   the memory for chunks of up to `capacity` elements
//   Early(threads, in, n)           what a thread can load before a call may begin
//   Run(...)                        one rank's part of one chunk
// and RunPsum cuts a vector into chunks, each with a sequence number of its own.
//
//   one_shot   every rank sends all to every other rank, small vectors in cells that say
//              themselves that they have come: one latency, (P-1) n bytes.
//   two_shot   reduce-scatter, then all-gather: two latencies, 2 (P-1)/P n bytes.
//   nvrar      reduce-scatter in the node, recursive doubling across nodes,
//              all-gather in the node (arXiv:2511.09557): log2(nodes) latencies
//              across nodes, where every rank sends only its 1/G of the vector.
//
// Order of the sum: one_shot and two_shot add in rank order; nvrar adds in rank
// order inside a node, then lower + higher node. All ranks compute every element
// with the same operations, so they hold the same bits. Sums travel between
// nodes in the accumulator's type, so half types are rounded once.
//
// Reuse of slots. one_shot and the steps inside a node use two slots in turn: a
// rank that starts sequence e + 2 has heard from every rank in e + 1, and those
// sent e + 1 only after they had read e. Recursive doubling hears from one
// partner a step, so it waits for that partner's `ready` word: the sequence number
// up to which the partner has read, sent back at the end of a call and waited for
// at the start of the next, off the critical path. The same word frees the staging of a
// link that puts (core/nvshmem_link.cuh), in which an exchange has a slot of its own, too:
// who has read what arrived has proved that it left.
#pragma once

#include "core/channel.h"
#include "core/group.h"
#include "core/link.h"
#include "core/schedule.h"
#include "core/sum.h"
#include "core/threads.h"

namespace jax_overlap {

// The values of the attribute `algorithm`; jax_overlap/_plan.py has the same.
enum class PsumAlgorithm : int64_t { kOneShot = 0, kTwoShot = 1, kNvrar = 2 };

// Where nothing is loaded early.
struct LoadsNothing {
  struct Loaded {};
  template <class Threads, class T>
  static JO_HD Loaded Early(const Threads&, const T*, Index) {
    return {};
  }
};

// ------------------------------------------------------------------ one_shot
// kAtOnce and kEach: SumCells' (core/group.h); kAtOnce best the ranks of the team, kEach more
// than one where a thread has several cells.
template <class T, int kAtOnce = 8, int kEach = 1>
struct OneShot {
  struct Memory {
    Cell* slots;  // [2][source][cells of a chunk]
    size_t cells;
    JO_HD Cell* slot(uint64_t sequence, int source, int size) const {
      return slots + (SlotOf(sequence) * size + source) * cells;
    }
  };
  static JO_HD Memory Carve(Carver& carver, TeamShape team, size_t capacity) {
    const size_t cells = CeilDiv(capacity, kPerCell<T>);
    return {carver.Take<Cell>(2 * team.size * cells), cells};
  }

  // The first cells of this thread.
  struct Loaded {
    uint64_t cells[kEach];
  };
  template <class Threads>
  static JO_HD Loaded Early(const Threads& threads, const T* in, Index n) {
    Loaded loaded = {};
    const Index first = threads.index();
    if (first < CeilDiv(n, kPerCell<T>)) loaded = Load(threads, in, n, first);
    return loaded;
  }

  template <class Threads, class Link>
  static JO_HD void Run(const Threads& threads, Link& link, const Memory& memory, TeamShape team,
                        uint64_t sequence, Loaded loaded, const T* in, size_t n, T* out) {
    const auto epoch = static_cast<uint32_t>(sequence);
    const Index cells = CeilDiv(n, kPerCell<T>);
    const Others others{0, team.size, team.rank};
    Cell* const mine = memory.slot(sequence, team.rank, team.size);
    const Index step = threads.count();
    for (Index first = threads.index(); first < cells; first += kEach * step) {
      JO_UNROLL
      for (int e = 0; e < kEach; ++e) {
        const Index i = first + e * step;
        if (e != 0 && i >= cells) continue;
        others.ForAll([&](int peer) { link.StoreCell(mine + i, peer, loaded.cells[e], epoch); });
      }
      const Index next = first + kEach * step;
      if (next < cells) loaded = Load(threads, in, n, next);
    }
    SumCells<T, kAtOnce, kEach>(
        threads, link, others,
        [&](int source, Index i) { return memory.slot(sequence, source, team.size) + i; }, in, n,
        epoch, out);
  }

 private:
  // The cells `first`, which exists, and each a number of threads after the last.
  template <class Threads>
  static JO_HD Loaded Load(const Threads& threads, const T* in, Index n, Index first) {
    Loaded loaded;
    JO_UNROLL
    for (int e = 0; e < kEach; ++e) {
      const Index i = first + e * threads.count();
      loaded.cells[e] = e == 0 || i < CeilDiv(n, kPerCell<T>) ? PackCell(in, n, i) : 0;
    }
    return loaded;
  }
};

// The same with flags: half the bytes, and fences.
template <class T>
struct OneShotByFlags : LoadsNothing {
  struct Memory {
    T* slots;     // [2][source][slot]
    Word* flags;  // [source]
    size_t slot;
  };
  static JO_HD Memory Carve(Carver& carver, TeamShape team, size_t capacity) {
    const size_t slot = RoundUp(capacity, kSliceAlign<T>);
    T* const slots = carver.Take<T>(2 * team.size * slot);
    return {slots, carver.Take<Word>(team.size), slot};
  }

  template <class Threads, class Link>
  static JO_HD void Run(const Threads& threads, Link& link, const Memory& memory, TeamShape team,
                        uint64_t sequence, Loaded, const T* in, size_t n, T* out) {
    T* const slots = memory.slots + SlotOf(sequence) * team.size * memory.slot;
    const Others others{0, team.size, team.rank};
    others.SendAndSignal(threads, link, memory.flags + team.rank, sequence, [&](int peer) {
      Copy(threads, in, n, link.At(slots + team.rank * memory.slot, peer));
    });
    others.Wait(threads, link, memory.flags, sequence, 0);
    SumRows<T>(
        threads, team.size,
        [&](int source) { return source == team.rank ? in : slots + source * memory.slot; }, n,
        out);
  }
};

// ------------------------------------------------------------------ two_shot
template <class T, Steps kSteps>
struct TwoShot : LoadsNothing {
  using Memory = GroupSteps<T, kSteps>;
  static JO_HD Memory Carve(Carver& carver, TeamShape team, size_t capacity) {
    return Memory::Carve(carver, team.size, capacity);
  }

  template <class Threads, class Link>
  static JO_HD void Run(const Threads& threads, Link& link, const Memory& memory, TeamShape team,
                        uint64_t sequence, Loaded, const T* in, size_t n, T* out) {
    memory.AllReduce(threads, link, 0, team.size, sequence, in, n, out);
  }
};

// --------------------------------------------------------------------- nvrar
// Staged: the channel has room for the cells that leave as well, for links that put.
template <class T, Steps kSteps, bool Staged = false>
struct Nvrar : LoadsNothing {
  // An exchange with one partner: step 0 .. steps-1 of the doubling, then the two
  // of the fold.
  struct Memory {
    GroupSteps<T, kSteps> node;
    Acc<T>* partial;  // this rank's slice of the node's sum, then of the whole sum
    Cell* cells;      // [exchange][cells of a slice]
    Cell* staging;    // [exchange][cells of a slice] of what is sent, or null
    Word* ready;      // [exchange]
    size_t slice_cells;
  };
  static JO_HD Memory Carve(Carver& carver, TeamShape team, size_t capacity) {
    Memory memory;
    memory.node = GroupSteps<T, kSteps>::Carve(carver, team.node_size, capacity);
    const size_t slice = MaxSlice(capacity, team.node_size, kSliceAlign<T>);
    const int exchanges = Doubling{team.nodes()}.steps() + 2;
    memory.slice_cells = CeilDiv(slice, kPerCell<Acc<T>>);
    memory.partial = carver.Take<Acc<T>>(slice);
    memory.cells = carver.Take<Cell>(exchanges * memory.slice_cells);
    memory.staging = Staged ? carver.Take<Cell>(exchanges * memory.slice_cells) : nullptr;
    memory.ready = carver.Take<Word>(exchanges);
    return memory;
  }

  template <class Threads, class Link>
  static JO_HD void Run(const Threads& threads, Link& link, const Memory& memory, TeamShape team,
                        uint64_t sequence, Loaded, const T* in, size_t n, T* out) {
    const int first = team.first_of_node();
    const Slice own = SliceOf(n, team.node_size, team.local(), kSliceAlign<T>);
    memory.node.ReduceScatter(threads, link, first, team.node_size, sequence, in, n,
                              memory.partial);
    threads.sync();
    AcrossNodes<Threads, Link>{threads, link, memory, team, sequence, own.size()}.Run();
    threads.sync();
    for (Index i = threads.index(); i < own.size(); i += threads.count()) {
      out[own.begin + i] = Numeric<T>::Narrow(memory.partial[i]);
    }
    memory.node.AllGather(threads, link, first, team.node_size, sequence, n, out);
  }

 private:
  static constexpr size_t kChunkCells = 512;  // 4 KB of data

  // Recursive doubling on `partial`, cut into chunks: while a chunk's cells are on
  // their way, other chunks are added, and a chunk starts its next step as soon as
  // it has made this one. Every thread keeps to its own cells throughout, so no
  // step needs a sync (a link that puts a chunk as a whole makes its own).
  template <class Threads, class Link>
  struct AcrossNodes {
    const Threads& threads;
    Link& link;
    const Memory& memory;
    const TeamShape team;
    const uint64_t sequence;
    const size_t n;

    JO_HD void Run() {
      const Doubling doubling{team.nodes()};
      const int node = team.node();
      const int steps = doubling.steps();
      const int fold_in = steps, fold_out = steps + 1;
      const int fold_peer = RankIn(doubling.fold_partner(node));
      if (threads.index() == 0) WaitUntilReady(doubling);
      threads.sync();
      if (doubling.folded(node)) {
        ForChunks([&](Slice chunk) { Send(fold_in, fold_peer, chunk); });
        ForChunks([&](Slice chunk) { Receive(fold_out, fold_peer, chunk, Replace{}); });
      } else {
        ForChunks([&](Slice chunk) {
          if (doubling.hosts(node)) Receive(fold_in, fold_peer, chunk, AddHigher{});
          if (steps > 0) Send(0, Partner(0), chunk);
        });
        for (int step = 0; step < steps; ++step) {
          const bool partner_is_lower = Partner(step) < team.rank;
          ForChunks([&](Slice chunk) {
            if (partner_is_lower) {
              Receive(step, Partner(step), chunk, AddLower{});
            } else {
              Receive(step, Partner(step), chunk, AddHigher{});
            }
            if (step + 1 < steps) Send(step + 1, Partner(step + 1), chunk);
            if (step + 1 == steps && doubling.hosts(node)) Send(fold_out, fold_peer, chunk);
          });
        }
      }
      threads.sync();
      if (threads.index() == 0) SayReady(doubling);
    }

   private:
    // What becomes of the own value `a` when `b` is received. The order of the
    // operands is by node, so that both partners compute the same bits.
    struct AddHigher {
      JO_HD Acc<T> operator()(Acc<T> a, Acc<T> b) const { return Add(a, b); }
    };
    struct AddLower {
      JO_HD Acc<T> operator()(Acc<T> a, Acc<T> b) const { return Add(b, a); }
    };
    struct Replace {
      JO_HD Acc<T> operator()(Acc<T>, Acc<T> b) const { return b; }
    };

    JO_HD int RankIn(int node) const { return node * team.node_size + team.local(); }
    JO_HD int Partner(int step) const { return RankIn(Doubling::partner(team.node(), step)); }

    template <class F>
    JO_HD void ForChunks(F f) const {
      const size_t cells = CeilDiv(n, kPerCell<Acc<T>>);
      for (size_t begin = 0; begin < cells; begin += kChunkCells) {
        f(Slice{begin, Min(cells, begin + kChunkCells)});
      }
    }

    JO_HD Cell* Slot(int exchange) const { return memory.cells + exchange * memory.slice_cells; }

    JO_HD void Send(int exchange, int peer, Slice chunk) const {
      Cell* const staging = Staged ? memory.staging + exchange * memory.slice_cells : nullptr;
      SendCells(threads, link, staging, Slot(exchange), peer, chunk,
                static_cast<uint32_t>(sequence),
                [&](size_t i) { return PackCell(memory.partial, n, i); });
    }

    template <class Combine>
    JO_HD void Receive(int exchange, int peer, Slice chunk, Combine combine) const {
      const auto epoch = static_cast<uint32_t>(sequence);
      for (Index i = chunk.begin + threads.index(); i < chunk.end; i += threads.count()) {
        Acc<T> own[kPerCell<Acc<T>>], theirs[kPerCell<Acc<T>>];
        UnpackCell(PackCell(memory.partial, n, i), own);
        UnpackCell(link.LoadCell(Slot(exchange) + i, epoch, {peer, exchange}), theirs);
        for (size_t j = 0; j < kPerCell<Acc<T>>; ++j) own[j] = combine(own[j], theirs[j]);
        StoreElements(own, memory.partial, n, i);
      }
    }

    // f(exchange, peer, sends, receives) for each exchange this node takes part in.
    template <class F>
    JO_HD void ForExchanges(const Doubling& doubling, F f) const {
      const int node = team.node(), steps = doubling.steps();
      const int fold_peer = RankIn(doubling.fold_partner(node));
      if (doubling.folded(node)) {
        f(steps, fold_peer, true, false);
        f(steps + 1, fold_peer, false, true);
        return;
      }
      for (int step = 0; step < steps; ++step) f(step, Partner(step), true, true);
      if (doubling.hosts(node)) {
        f(steps, fold_peer, false, true);
        f(steps + 1, fold_peer, true, false);
      }
    }

    // The partner has read what the last call sent: its cells can be written again.
    JO_HD void WaitUntilReady(const Doubling& doubling) const {
      if (JO_MUTANT("missing_ready_wait")) return;
      ForExchanges(doubling, [&](int exchange, int peer, bool sends, bool) {
        if (sends) link.Wait(&memory.ready[exchange].value, sequence - 1, {peer, exchange});
      });
    }
    JO_HD void SayReady(const Doubling& doubling) const {
      ForExchanges(doubling, [&](int exchange, int peer, bool, bool receives) {
        if (receives) link.Signal(&memory.ready[exchange].value, peer, sequence);
      });
    }
  };
};

// ------------------------------------------------------------ all algorithms
// The bytes of a channel for chunks of up to `capacity` elements, on each rank.
template <class Algorithm>
JO_HD size_t PsumChannelBytes(TeamShape team, size_t capacity) {
  Carver carver(nullptr);
  carver.Take<Word>(1);
  Algorithm::Carve(carver, team, capacity);
  return carver.bytes();
}

// One rank's part of an all-reduce of `n` elements.
template <class Algorithm, class T, class Threads, class Link>
JO_HD void RunPsum(const Threads& threads, Link& link, TeamShape team, char* channel,
                   size_t capacity, const T* in, size_t n, T* out) {
  Carver carver(channel);
  Word* const last = carver.Take<Word>(1);
  const auto memory = Algorithm::Carve(carver, team, capacity);
  ForChunksInSequence(threads, last, n, capacity, [&](uint64_t sequence, size_t begin, size_t end) {
    Algorithm::Run(threads, link, memory, team, sequence,
                   Algorithm::Early(threads, in + begin, end - begin), in + begin, end - begin,
                   out + begin);
  });
}

}  // namespace jax_overlap

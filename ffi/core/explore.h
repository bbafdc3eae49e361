// A team of ranks on a machine whose memory is as unordered as the model allows.
//
// A flag protocol is tested as it is, in every order that can make a difference: ranks run
// the real algorithm as fibres, on a Link and Threads (explore_link.h) below which this
// Machine takes one step at a time, as a search (explore_search.h) chooses:
//
//   a thread's step   a wait or a load of a cell, once it can return; a plain access to
//                     the own heap; a sync. Then the thread runs to its next access.
//   a store's step    its arrival at the peer, some time after the thread has made it
//   a limit's step    a wait that cannot return gives up (only if asked for)
//
// The memory model. A thread's own steps come in its order. Its stores arrive in any order,
// and as late as they like, but
//   - two stores of a thread to one address arrive in their order;
//   - a signal arrives after all that its thread has stored before, wherever to, and what
//     the other threads of its rank had stored before the last sync.
// A cell arrives whole, as on a GPU, or in two halves, as on the host. Plain data are words
// of 8 bytes, each of which arrives by itself.
//
// What is checked, with calls counted by the test and not by the protocol:
//   - who reads in call c reads what was written in call c: no earlier data (stale), no
//     later (overwritten), and not nothing (early);
//   - no data arrives on top of data that nobody has read;
//   - there is a next step until all ranks are done (deadlock).
// Where waits may give up, none of this holds any more. Then what counts is the promise to
// the caller: whose call has not failed has the right result, which the test checks.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/explore_data.h"
#include "core/explore_step.h"
#include "core/fibers.h"
#include "core/mutants.h"
#include "core/schedule.h"
#include "core/testing.h"

namespace jax_overlap {

// ThreadSanitizer does not know about switched stacks.
#if defined(__SANITIZE_THREAD__)
constexpr bool kCanExplore = false;
#else
constexpr bool kCanExplore = true;
#endif

class Machine {
 public:
  static constexpr Mover kNone = -1;

  // At most `give_ups` waits of an execution give up. Whether one does is no race, so they
  // take a search of all states, and one thread a rank.
  Machine(int ranks, int threads, size_t heap_bytes, int give_ups = 0)
      : ranks_(ranks),
        per_rank_(threads),
        all_(ranks * threads),
        words_(CeilDiv(heap_bytes, kWordBytes)),
        max_give_ups_(give_ups) {}

  // Runs program(rank, thread of the rank) on all threads, step by step: choose() returns
  // one of Movable(), or kNone to stop.
  void Run(const std::function<void(int rank, int thread)>& program,
           std::function<Mover()> choose) {
    choose_ = std::move(choose);
    threads_.assign(all_, Thread());
    heaps_.assign(ranks_, std::vector<Line>(CeilDiv(words_ * kWordBytes, sizeof(Line))));
    origins_ = DataOrigins(ranks_, words_);
    barriers_.assign(ranks_, {});
    steps_.clear();
    races_.clear();
    violation_.clear();
    turn_ = give_ups_ = 0;
    stopped_ = false;
    RunRanks(all_, /*waits=*/true, /*helpers=*/0, {}, [&](int t, Waiter& waiter) {
      threads_[t].waiter = &waiter;
      AwaitTurn(t);
      program(t / per_rank_, t % per_rank_);
      if (!stopped_) Proceed({Kind::kEnd, {}, 0});
    });
  }

  // --- For the link, the threads and the test: of the thread whose turn it is.
  int ranks() const { return ranks_; }
  int threads() const { return per_rank_; }
  int rank() const { return RankOf(turn_); }
  // Nothing counts any more; the programs only run to their ends.
  bool stopped() const { return stopped_; }
  char* heap(int rank) { return heaps_[rank].data()->bytes; }
  int HeapOf(const void* at) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto begin = reinterpret_cast<uintptr_t>(heaps_[rank].data());
      const auto address = reinterpret_cast<uintptr_t>(at);
      if (begin <= address && address < begin + words_ * kWordBytes) return rank;
    }
    return -1;
  }

  void BeginCall(int call) {
    if (!stopped_) threads_[turn_].call = call;
  }
  void Fail(const std::string& violation) {
    if (!stopped_) Violated(violation, threads_[turn_].past);
  }
  // An access to the own heap: returns when it is made; false if it was given up.
  bool Act(Kind kind, const void* at, size_t bytes, uint64_t value = 0) {
    if (stopped_) return true;
    const Access access = AccessTo(at, bytes, kind == Kind::kWrite);
    JO_CHECK(access.heap == rank());
    const Thread& me = threads_[turn_];
    Proceed({kind, access, value});
    return stopped_ || !me.gave_up;
  }
  // A store at a peer: returns at once.
  void Send(Kind kind, void* at, const void* data, size_t bytes) {
    if (stopped_) return;
    Thread& me = threads_[turn_];
    Store store{kind, AccessTo(at, bytes, /*writes=*/true), me.call, me.syncs, me.past, {}, false};
    JO_CHECK(store.access.heap != rank() && bytes <= sizeof(store.data));
    memcpy(store.data, data, bytes);
    me.stores.push_back(store);
  }
  void Sync() {
    if (stopped_ || per_rank_ == 1 || JO_MUTANT("missing_sync")) return;
    const Thread& me = threads_[turn_];
    std::vector<Past>& barriers = barriers_[rank()];
    if (barriers.size() == me.syncs) barriers.emplace_back();
    barriers[me.syncs] |= me.past;
    Proceed({Kind::kSync, {}, me.syncs});
  }

  // --- For the search.
  const std::vector<Step>& steps() const { return steps_; }
  // Pairs of steps that conflict, and could have come in the other order.
  const std::vector<std::pair<int, int>>& races() const { return races_; }
  // What was wrong in the end, or empty; and the steps that led to it, a line each.
  const std::string& violation() const { return violation_; }
  std::vector<std::string> Trace() const {
    std::vector<std::string> lines;
    for (size_t i = 0; i < steps_.size(); ++i) {
      const bool own = steps_[i].kind == Kind::kSync || steps_[i].kind == Kind::kWrite;
      if (violation_past_[i] && !own) lines.push_back(Words(steps_[i]));
    }
    return lines;
  }

  std::vector<Mover> Movable() const {
    std::vector<Mover> movers;
    for (int t = 0; t < all_; ++t) {
      if (CanStep(t)) movers.push_back(t);
    }
    for (int t = 0; t < all_; ++t) {
      for (size_t i = threads_[t].arrived; i < threads_[t].stores.size(); ++i) {
        if (CanArrive(t, i)) movers.push_back(StoreMover(t, i));
      }
    }
    for (int t = 0; t < all_; ++t) {
      if (CanGiveUp(t)) movers.push_back(LimitMover(t));
    }
    return movers;
  }

  // How far the threads are and what they have read, which stores have arrived, and whose
  // data are where: executions that have come to the same state go on alike.
  std::string State() const {
    std::string state;
    size_t hash = give_ups_;
    const auto add = [&](size_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15u; };
    for (const Thread& thread : threads_) {
      state += std::to_string(thread.steps);
      for (const Store& store : thread.stores) state += store.arrived ? '+' : '-';
      add(thread.seen);
    }
    add(origins_.Hash());
    return state + std::to_string(hash);
  }

 private:
  using Past = Step::Past;
  struct alignas(64) Line {
    char bytes[64];
  };
  struct Action {
    Kind kind;
    Access access;
    uint64_t value;
  };
  struct Store {
    Kind kind;
    Access access;
    int call;
    size_t syncs;  // that its thread had made
    Past past;     // of its thread, then of its arrival
    char data[16];
    bool arrived;
  };
  struct Thread {
    Waiter* waiter = nullptr;
    int call = 0;
    Action next = {Kind::kEnd, {}, 0};
    bool gave_up = false;  // in its last step
    size_t steps = 0;
    size_t syncs = 0;
    size_t seen = 0;  // a hash of what it has read
    Past past;
    std::vector<Store> stores;
    size_t arrived = 0;  // all stores before this one have
  };

  // --- Names.
  static constexpr int kMaxStores = 1 << 12;  // of a thread
  int RankOf(int thread) const { return thread / per_rank_; }
  Mover StoreMover(int thread, size_t store) const {
    return all_ + thread * kMaxStores + static_cast<int>(store);
  }
  static Mover LimitMover(int thread) { return kNone - 1 - thread; }

  Access AccessTo(const void* at, size_t bytes, bool writes) const {
    const int heap = HeapOf(at);
    JO_CHECK(heap >= 0);
    const size_t offset = static_cast<const char*>(at) - heaps_[heap].data()->bytes;
    JO_CHECK(offset % kWordBytes == 0 && bytes % kWordBytes == 0);
    JO_CHECK(offset + bytes <= words_ * kWordBytes);
    return {heap, offset / kWordBytes, (offset + bytes) / kWordBytes, writes};
  }
  uint64_t WordAt(const Access& access) const {
    uint64_t word;
    memcpy(&word, heaps_[access.heap].data()->bytes + access.begin * kWordBytes, kWordBytes);
    return word;
  }

  // --- Whose turn it is.
  void AwaitTurn(int thread) {
    while (turn_ != thread && !stopped_) threads_[thread].waiter->Pause();
  }
  // The thread whose turn it is wants to make `action`, and waits until it has.
  void Proceed(const Action& action) {
    const int me = turn_;
    threads_[me].next = action;
    if (steps_.empty() && me + 1 < all_ && threads_[me + 1].waiter == nullptr) {
      turn_ = me + 1;  // all come to their first action before a step is made
    } else {
      MakeSteps();
    }
    if (action.kind != Kind::kEnd) AwaitTurn(me);
  }
  // Makes steps until one is a thread's, which then goes on.
  void MakeSteps() {
    while (!stopped_) {
      const Mover mover = choose_();
      if (mover >= all_) {
        Arrive((mover - all_) / kMaxStores, (mover - all_) % kMaxStores);
      } else if (mover == kNone) {
        stopped_ = true;
        if (Movable().empty() && max_give_ups_ == 0) CheckAllHaveEnded();
      } else {
        turn_ = mover > kNone ? mover : LimitMover(mover);
        mover > kNone ? MakeThreadStep() : GiveUp();
        return;
      }
    }
  }

  // --- What can happen next.
  static bool Returns(Kind kind, uint64_t expected, uint64_t word) {
    if (kind == Kind::kWait) return word >= expected;
    return kind != Kind::kLoadCell || word >> 32 == expected;
  }
  bool CanStep(int t) const {
    const Action& next = threads_[t].next;
    if (next.kind == Kind::kEnd) return false;
    if (next.kind != Kind::kSync) return Returns(next.kind, next.value, WordAt(next.access));
    for (int other = RankOf(t) * per_rank_; other < (RankOf(t) + 1) * per_rank_; ++other) {
      const Thread& o = threads_[other];
      const bool here = o.syncs == next.value && o.next.kind == Kind::kSync;
      if (!here && o.syncs <= next.value) return false;
    }
    return true;
  }
  bool CanGiveUp(int t) const {
    const Kind kind = threads_[t].next.kind;
    const bool waits = kind == Kind::kWait || kind == Kind::kLoadCell;
    return give_ups_ < max_give_ups_ && waits && !CanStep(t);
  }
  // f(store) for all that have to arrive before store i of thread t.
  template <class F>
  void ForEarlier(int t, size_t i, F f) const {
    const Store& store = threads_[t].stores[i];
    const bool releases = store.kind == Kind::kFlag && !JO_MUTANT("relaxed_flag");
    for (int s = RankOf(t) * per_rank_; s < (RankOf(t) + 1) * per_rank_; ++s) {
      for (size_t j = 0; j < (s == t ? i : threads_[s].stores.size()); ++j) {
        const Store& earlier = threads_[s].stores[j];
        const bool before = s == t || earlier.syncs < store.syncs;
        const bool same = s == t && Conflict(earlier.access, store.access);
        if (same || (releases && before)) f(earlier);
      }
    }
  }
  bool CanArrive(int t, size_t i) const {
    bool can = !threads_[t].stores[i].arrived;
    if (can) ForEarlier(t, i, [&](const Store& earlier) { can = can && earlier.arrived; });
    return can;
  }

  // --- Steps.
  void MakeThreadStep() {
    Thread& me = threads_[turn_];
    const Action next = me.next;
    JO_CHECK(CanStep(turn_));
    Past past = me.past;
    if (next.kind == Kind::kSync) past |= barriers_[rank()][me.syncs++];
    ++me.steps;
    me.gave_up = false;
    me.past = Record({turn_, next.kind, rank(), me.call, next.access, next.value, 0, past});
    if (next.kind == Kind::kWrite) {
      Check(origins_.Put(next.access, rank(), me.call, /*unread=*/false));
    } else if (next.kind == Kind::kRead || next.kind == Kind::kLoadCell) {
      Check(origins_.Take(next.access, rank(), me.call, &me.seen));
    }
  }
  void GiveUp() {
    Thread& me = threads_[turn_];
    JO_CHECK(CanGiveUp(turn_));
    ++give_ups_;
    ++me.steps;
    me.gave_up = true;
    me.seen = me.seen * 31 + 1;
    me.past = Record({LimitMover(turn_), Kind::kGiveUp, rank(), me.call, me.next.access,
                      me.next.value, 0, me.past});
  }
  void Arrive(int t, size_t i) {
    Thread& sender = threads_[t];
    Store& store = sender.stores[i];
    JO_CHECK(CanArrive(t, i));
    ForEarlier(t, i, [&](const Store& earlier) { store.past |= earlier.past; });
    uint64_t value;
    memcpy(&value, store.data, kWordBytes);
    store.past = Record({StoreMover(t, i), store.kind, RankOf(t), store.call, store.access, value,
                         WordAt(store.access), store.past});
    store.arrived = true;
    while (sender.arrived < sender.stores.size() && sender.stores[sender.arrived].arrived) {
      ++sender.arrived;
    }
    memcpy(heap(store.access.heap) + store.access.begin * kWordBytes, store.data,
           (store.access.end - store.access.begin) * kWordBytes);
    if (store.kind == Kind::kFlag) return;
    Check(origins_.Put(store.access, RankOf(t), store.call, /*unread=*/true));
  }

  // Appends a step, whose past is what orders it apart from its access; completes the past.
  Past Record(Step step) {
    const int place = static_cast<int>(steps_.size());
    JO_CHECK(steps_.size() < Step::kMax);
    for (int i = place - 1; i >= 0; --i) {
      const Step& earlier = steps_[i];
      if (!Conflict(earlier.access, step.access)) continue;
      // What a wait has waited for cannot come after it.
      const bool enables = IsStore(earlier.kind) && !Returns(step.kind, step.value, earlier.before);
      if (!step.past[i] && !enables) races_.emplace_back(i, place);
      step.past |= earlier.past;
    }
    step.past.set(place);
    steps_.push_back(step);
    return step.past;
  }

  // --- What must not happen.
  void Violated(const std::string& what, const Past& past) {
    violation_ = what;
    violation_past_ = past;
    stopped_ = true;
  }
  void Check(const std::string& wrong) {
    if (!wrong.empty() && max_give_ups_ == 0) Violated(wrong, steps_.back().past);
  }
  void CheckAllHaveEnded() {
    std::string stuck;
    for (int t = 0; t < all_; ++t) {
      const auto& [kind, access, value] = threads_[t].next;
      if (kind == Kind::kEnd) continue;
      stuck += std::string(stuck.empty() ? "" : "; ") + "rank " + std::to_string(RankOf(t)) +
               " in call " + std::to_string(threads_[t].call) + " " + Words(kind);
      if (kind != Kind::kSync) stuck += Place(access) + " to be " + std::to_string(value);
    }
    if (!stuck.empty()) Violated("deadlock: " + stuck, Past().set());
  }

  const int ranks_, per_rank_, all_;
  const size_t words_;  // of a heap
  const int max_give_ups_;
  std::function<Mover()> choose_;
  std::vector<Thread> threads_;
  std::vector<std::vector<Line>> heaps_;
  DataOrigins origins_{0, 0};
  std::vector<std::vector<Past>> barriers_;  // of a rank: what has happened before each sync
  std::vector<Step> steps_;
  std::vector<std::pair<int, int>> races_;
  std::string violation_;
  Past violation_past_;
  int turn_ = 0;
  int give_ups_ = 0;
  bool stopped_ = false;
};

}  // namespace jax_overlap

// What the tests of algorithms share: a team whose ranks are threads or fibres, with
// guarded memory, random delays between the steps of a protocol, and exact data.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/channel.h"
#include "core/fibers.h"
#include "core/host_link.h"
#include "core/sum.h"
#include "core/test_data.h"
#include "core/testing.h"

namespace jax_overlap {

using Clock = std::chrono::steady_clock;

// Now and then lets the others go first: between any two steps of the protocol.
template <bool Direct>
class DelayedLink : public HostLink<Direct> {
 public:
  template <class... Args>
  explicit DelayedLink(unsigned seed, Args&&... args)
      : HostLink<Direct>(std::forward<Args>(args)...), random_(seed) {}

  void StoreCell(Cell* mine, int peer, uint64_t data, uint32_t epoch) {
    Delay(64);
    HostLink<Direct>::StoreCell(mine, peer, data, epoch);
  }
  uint64_t LoadCell(const Cell* mine, uint32_t epoch, Where where) {
    Delay(64);
    return HostLink<Direct>::LoadCell(mine, epoch, where);
  }
  void Signal(uint64_t* mine, int peer, uint64_t value) {
    Delay(2);
    HostLink<Direct>::Signal(mine, peer, value);
    Delay(2);
  }
  void Wait(const uint64_t* mine, uint64_t value, Where where) {
    Delay(2);
    HostLink<Direct>::Wait(mine, value, where);
  }

 private:
  void Delay(unsigned one_in) {
    if (random_() % one_in != 0) return;
    random_() % 8 == 0 ? std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200))
                       : std::this_thread::yield();
  }
  std::minstd_rand random_;
};

constexpr unsigned char kGuard = 0xA5;

// Memory with guard bytes on both sides that starts at a cache line.
class Guarded {
 public:
  Guarded(size_t bytes, unsigned char fill) : bytes_(bytes), lines_(2 + CeilDiv(bytes, 64)) {
    std::memset(lines_.data(), kGuard, lines_.size() * sizeof(Word));
    std::memset(data(), fill, bytes_);
  }
  char* data() { return reinterpret_cast<char*>(lines_.data() + 1); }
  bool Intact() {
    const auto* begin = reinterpret_cast<const unsigned char*>(lines_.data());
    const unsigned char* end = begin + lines_.size() * sizeof(Word);
    const auto* inside = reinterpret_cast<const unsigned char*>(data());
    const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
    return std::all_of(begin, inside, is_guard) && std::all_of(inside + bytes_, end, is_guard);
  }

 private:
  size_t bytes_;
  std::vector<Word> lines_;  // aligned as the heap is
};

// A heap of each rank, and operand and result of each rank in each call.
template <class T>
class TestTeam {
 public:
  TestTeam(int size, size_t heap_bytes, std::string note) : size_(size), note_(std::move(note)) {
    for (int rank = 0; rank < size; ++rank) {
      heaps_.push_back(std::make_unique<Guarded>(heap_bytes, 0));
      heap_of_.push_back(heaps_.back()->data());
    }
  }

  // One more call, with so many elements in the operand and in the result of a rank.
  void AddCall(size_t in_count, size_t out_count) {
    Call call{in_count, out_count, {}, {}, {}, {}};
    const int index = static_cast<int>(calls_.size());
    for (int rank = 0; rank < size_; ++rank) {
      call.inputs.push_back(std::make_unique<Guarded>(in_count * sizeof(T), 0));
      call.outputs.push_back(std::make_unique<Guarded>(out_count * sizeof(T), 0xEE));
      T* const in = reinterpret_cast<T*>(call.inputs.back()->data());
      for (size_t i = 0; i < in_count; ++i) in[i] = FromInt<T>(InputAt(rank, i, index));
      call.input_of.push_back(in);
      call.output_of.push_back(call.outputs.back()->data());
    }
    calls_.push_back(std::move(call));
  }

  // Every rank does run(link, heap, call, in, out) for one call after the other,
  // without a barrier between them: a fast rank may be a call ahead, as on a GPU.
  template <bool Direct, class Run>
  void RunCalls(bool fibers, unsigned seed, Run run) {
    const RankProgram program = [&](int rank, Waiter& waiter) {
      for (size_t i = 0; i < calls_.size(); ++i) {
        const Call& call = calls_[i];
        DelayedLink<Direct> link(seed + rank, rank, size_, heap_of_.data(), call.input_of.data(),
                                 call.output_of.data(), waiter,
                                 Clock::now() + std::chrono::seconds(10));
        run(link, heap_of_[rank], static_cast<int>(i), static_cast<const T*>(call.input_of[rank]),
            static_cast<T*>(call.output_of[rank]));
        JO_CHECK_IN(!link.failed(), "%s call %zu rank %d waits for %d in step %d", note_.c_str(), i,
                    rank, link.status().peer, link.status().step);
      }
    };
    if (fibers) {
      RunRanks(size_, /*waits=*/true, /*helpers=*/0, {}, program);
    } else {
      RunRanksAsThreads(size_, program);
    }
  }

  // Element i of the result of `rank` is expected(rank, i, call); operands are
  // unchanged, and nothing is written outside of heaps, operands and results.
  template <class Expected>
  void Check(Expected expected) {
    for (int c = 0; c < static_cast<int>(calls_.size()); ++c) {
      Call& call = calls_[c];
      for (int rank = 0; rank < size_; ++rank) {
        const T* out = reinterpret_cast<const T*>(call.outputs[rank]->data());
        for (size_t i = 0; i < call.out_count; ++i) {
          const T right = FromInt<T>(expected(rank, i, c));
          // Equal bits, or zeros of either sign: a product may give -0.
          JO_CHECK_IN(Numeric<T>::Widen(out[i]) == Numeric<T>::Widen(right),
                      "%s call %d of %zu elements, rank %d, element %zu", note_.c_str(), c,
                      call.out_count, rank, i);
        }
        const T* in = reinterpret_cast<const T*>(call.inputs[rank]->data());
        for (size_t i = 0; i < call.in_count; ++i) {
          const T unchanged = FromInt<T>(InputAt(rank, i, c));
          JO_CHECK(std::memcmp(&in[i], &unchanged, sizeof(T)) == 0);
        }
        JO_CHECK(call.inputs[rank]->Intact() && call.outputs[rank]->Intact());
      }
    }
    for (auto& heap : heaps_) JO_CHECK(heap->Intact());
  }

  // Rank 0 alone does the first call: it gives up in time and names the first peer it
  // waits for.
  template <class Run>
  void CheckAbsentPeerIsNamed(Run run, int peer = 1) {
    const Call& call = calls_[0];
    ThreadWaiter waiter;
    HostLink<false> link(0, size_, heap_of_.data(), call.input_of.data(), call.output_of.data(),
                         waiter, Clock::now() + std::chrono::milliseconds(50));
    run(link, heap_of_[0], static_cast<const T*>(call.input_of[0]),
        static_cast<T*>(call.output_of[0]));
    JO_CHECK(link.failed() && link.status().rank == 0 && link.status().peer == peer);
    JO_CHECK(link.status().expected == 1 && link.status().seen == 0);
  }

 private:
  struct Call {
    size_t in_count;
    size_t out_count;
    std::vector<std::unique_ptr<Guarded>> inputs, outputs;
    std::vector<const void*> input_of;
    std::vector<void*> output_of;
  };

  const int size_;
  const std::string note_;
  std::vector<std::unique_ptr<Guarded>> heaps_;
  std::vector<char*> heap_of_;
  std::vector<Call> calls_;
};

}  // namespace jax_overlap

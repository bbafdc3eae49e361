// The algorithms of psum.h over the host link: every rank a thread, random delays
// between steps, staged as on a GPU and direct as on the CPU. Runs plain and under
// ThreadSanitizer and AddressSanitizer; with a mutant it has to fail.
#include "ops/psum.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/fibers.h"
#include "core/host_link.h"
#include "core/testing.h"

namespace jax_overlap {
namespace {

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

// Small integers are exact in every type, so every order of the sum gives them.
template <class T>
T FromInt(int value) {
  return Numeric<T>::Narrow(static_cast<Acc<T>>(value));
}
int InputAt(int rank, size_t i, int call) {
  return static_cast<int>((i * 7 + rank * 3 + call * 5) % 7) - 3;
}

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

struct Case {
  int size;
  int node_size;
  size_t capacity;             // elements in a chunk
  std::vector<size_t> counts;  // of one call after the other
  bool fibers = false;
};

// Several calls on one channel, without a barrier between them: a fast rank may
// be a call ahead, as on a GPU.
template <class Algorithm, bool Direct, class T>
void Check(const Case& c, unsigned seed) {
  const TeamShape shape{0, c.size, c.node_size};
  const size_t bytes = PsumChannelBytes<Algorithm>(shape, c.capacity);
  const int calls = static_cast<int>(c.counts.size());
  std::vector<std::unique_ptr<Guarded>> heaps;
  std::vector<std::vector<std::unique_ptr<Guarded>>> inputs(calls), outputs(calls);
  std::vector<char*> heap_of;
  std::vector<std::vector<const void*>> input_of(calls);
  std::vector<std::vector<void*>> output_of(calls);
  for (int rank = 0; rank < c.size; ++rank) {
    heaps.push_back(std::make_unique<Guarded>(bytes, 0));
    heap_of.push_back(heaps.back()->data());
  }
  for (int call = 0; call < calls; ++call) {
    const size_t n = c.counts[call];
    for (int rank = 0; rank < c.size; ++rank) {
      inputs[call].push_back(std::make_unique<Guarded>(n * sizeof(T), 0));
      outputs[call].push_back(std::make_unique<Guarded>(n * sizeof(T), 0xEE));
      T* in = reinterpret_cast<T*>(inputs[call].back()->data());
      for (size_t i = 0; i < n; ++i) in[i] = FromInt<T>(InputAt(rank, i, call));
      input_of[call].push_back(in);
      output_of[call].push_back(outputs[call].back()->data());
    }
  }
  const RankProgram program = [&](int rank, Waiter& waiter) {
    for (int call = 0; call < calls; ++call) {
      DelayedLink<Direct> link(seed + rank, rank, c.size, heap_of.data(), input_of[call].data(),
                               output_of[call].data(), waiter,
                               Clock::now() + std::chrono::seconds(10));
      RunPsum<Algorithm>(OneThread{}, link, {rank, c.size, c.node_size}, heap_of[rank], c.capacity,
                         static_cast<const T*>(input_of[call][rank]), c.counts[call],
                         static_cast<T*>(output_of[call][rank]));
      JO_CHECK_IN(!link.failed(), "size %d node %d call %d rank %d waits for %d in step %d", c.size,
                  c.node_size, call, rank, link.status().peer, link.status().step);
    }
  };
  if (c.fibers) {
    RunRanks(c.size, /*waits=*/true, /*helpers=*/0, {}, program);
  } else {
    RunRanksAsThreads(c.size, program);
  }
  for (int call = 0; call < calls; ++call) {
    for (int rank = 0; rank < c.size; ++rank) {
      const T* out = reinterpret_cast<const T*>(outputs[call][rank]->data());
      const T* in = reinterpret_cast<const T*>(inputs[call][rank]->data());
      for (size_t i = 0; i < c.counts[call]; ++i) {
        int sum = 0;
        for (int r = 0; r < c.size; ++r) sum += InputAt(r, i, call);
        const T expected = FromInt<T>(sum), unchanged = FromInt<T>(InputAt(rank, i, call));
        JO_CHECK_IN(std::memcmp(&out[i], &expected, sizeof(T)) == 0,
                    "size %d node %d call %d of %zu elements, rank %d, element %zu", c.size,
                    c.node_size, call, c.counts[call], rank, i);
        JO_CHECK(std::memcmp(&in[i], &unchanged, sizeof(T)) == 0);
      }
      JO_CHECK(inputs[call][rank]->Intact() && outputs[call][rank]->Intact());
    }
  }
  for (auto& heap : heaps) JO_CHECK(heap->Intact());
}

template <class T>
void CheckAllAlgorithms(const Case& c, unsigned seed) {
  Check<OneShot<T>, false, T>(c, seed);
  Check<TwoShot<T, false>, false, T>(c, seed);
  Check<Nvrar<T, false>, false, T>(c, seed);
  Check<Nvrar<T, true>, true, T>({c.size, c.node_size, c.capacity, {c.counts[0]}, c.fibers}, seed);
  Check<TwoShot<T, true>, true, T>({c.size, c.node_size, c.capacity, {c.counts[0]}, c.fibers},
                                   seed);
}

// Ranks and ranks a node: every split of 1 .. 8, odd node counts among them.
const int kShapes[][2] = {{1, 1}, {2, 1}, {2, 2}, {3, 1}, {3, 3}, {4, 1}, {4, 2}, {4, 4}, {5, 1},
                          {6, 1}, {6, 2}, {6, 3}, {7, 1}, {8, 1}, {8, 2}, {8, 4}, {8, 8}};

template <class T>
int SmallSizes(bool fibers) {
  int cases = 0;
  for (const auto& [size, node_size] : kShapes) {
    // Shrinking, growing, none at all, and more than one chunk.
    const Case c{size, node_size, 128, {300, 1, 0, 129, 7, 128, 64, 257}, fibers};
    CheckAllAlgorithms<T>(c, 17 * size + node_size);
    cases += 5;
  }
  return cases;
}

// Many calls in a row on one channel: slots are reused again and again.
int ManyCalls() {
  const std::vector<size_t> counts(200, 96);
  CheckAllAlgorithms<float>({4, 2, 32, counts}, 1);
  CheckAllAlgorithms<float>({3, 1, 32, counts}, 2);
  CheckAllAlgorithms<BFloat16>({6, 2, 64, counts}, 3);
  return 15;
}

// Half types are summed in float: the parts would overflow, or round, in between.
template <class Algorithm, bool Direct, class T>
void CheckOneElement(TeamShape shape, const std::vector<float>& parts, float expected) {
  std::vector<Guarded> heaps(shape.size, Guarded(PsumChannelBytes<Algorithm>(shape, 64), 0));
  std::vector<T> in(shape.size), out(shape.size);
  std::vector<char*> heap_of;
  std::vector<const void*> input_of;
  std::vector<void*> output_of;
  for (int r = 0; r < shape.size; ++r) {
    in[r] = Numeric<T>::Narrow(parts[r]);
    heap_of.push_back(heaps[r].data());
    input_of.push_back(&in[r]);
    output_of.push_back(&out[r]);
  }
  RunRanksAsThreads(shape.size, [&](int rank, Waiter& waiter) {
    HostLink<Direct> link(rank, shape.size, heap_of.data(), input_of.data(), output_of.data(),
                          waiter, Clock::now() + std::chrono::seconds(10));
    RunPsum<Algorithm>(OneThread{}, link, {rank, shape.size, shape.node_size}, heap_of[rank], 64,
                       &in[rank], 1, &out[rank]);
  });
  for (int r = 0; r < shape.size; ++r) JO_CHECK(Numeric<T>::Widen(out[r]) == expected);
}

int HalfTypesAreSummedInFloat() {
  const std::vector<float> large = {40000, 40000, -40000, -40000}, uneven = {256, 1, 1, 1};
  for (int node_size : {1, 2, 4}) {
    const TeamShape shape{0, 4, node_size};
    CheckOneElement<OneShot<Float16>, false, Float16>(shape, large, 0);
    CheckOneElement<TwoShot<Float16, false>, false, Float16>(shape, large, 0);
    CheckOneElement<Nvrar<Float16, false>, false, Float16>(shape, large, 0);
    CheckOneElement<OneShot<BFloat16>, false, BFloat16>(shape, uneven, 260);
    CheckOneElement<TwoShot<BFloat16, false>, false, BFloat16>(shape, uneven, 260);
    CheckOneElement<Nvrar<BFloat16, true>, true, BFloat16>(shape, uneven, 260);
  }
  return 18;
}

// A rank that never comes: the others give up in time and name it.
int AbsentRankIsNamed() {
  const TeamShape shape{0, 3, 3};
  std::vector<Guarded> heaps(3, Guarded(PsumChannelBytes<TwoShot<float, false>>(shape, 64), 0));
  std::vector<char*> heap_of;
  for (Guarded& heap : heaps) heap_of.push_back(heap.data());
  std::vector<float> in(64, 1), out(64);
  const void* inputs[] = {in.data(), in.data(), in.data()};
  void* outputs[] = {out.data(), out.data(), out.data()};
  ThreadWaiter waiter;
  HostLink<false> link(0, 3, heap_of.data(), inputs, outputs, waiter,
                       Clock::now() + std::chrono::milliseconds(50));
  RunPsum<TwoShot<float, false>>(OneThread{}, link, shape, heap_of[0], 64, in.data(), 64,
                                 out.data());
  JO_CHECK(link.failed() && link.status().rank == 0 && link.status().peer == 1);
  JO_CHECK(link.status().expected == 1 && link.status().seen == 0);
  return 1;
}

}  // namespace
}  // namespace jax_overlap

int main() {
  using namespace jax_overlap;  // NOLINT
  int passed = AbsentRankIsNamed() + HalfTypesAreSummedInFloat();
  passed += SmallSizes<float>(false) + SmallSizes<BFloat16>(false) + SmallSizes<double>(false);
  passed += SmallSizes<Float16>(false) + SmallSizes<int32_t>(false) + SmallSizes<int8_t>(false);
#if !defined(__SANITIZE_THREAD__)  // it does not know about switched stacks
  passed += SmallSizes<float>(true);
#endif
  passed += ManyCalls();
  std::printf("psum_test: %d passed, 0 failed\n", passed);
}

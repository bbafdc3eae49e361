// The algorithms of psum.h over the host link: every rank a thread, random delays
// between steps, staged as on a GPU and direct as on the CPU. Runs plain and under
// ThreadSanitizer and AddressSanitizer; with a mutant it has to fail.
#include "ops/psum.h"

#include <string>
#include <vector>

#include "ops/team_test.h"

namespace jax_overlap {
namespace {

struct Case {
  int size;
  int node_size;
  size_t capacity;             // elements in a chunk
  std::vector<size_t> counts;  // of one call after the other
  bool fibers = false;
};

// Several calls on one channel.
template <class Algorithm, bool Direct, class T>
void Check(const Case& c, unsigned seed) {
  const TeamShape shape{0, c.size, c.node_size};
  TestTeam<T> team(c.size, PsumChannelBytes<Algorithm>(shape, c.capacity),
                   "size " + std::to_string(c.size) + " node " + std::to_string(c.node_size));
  for (size_t n : c.counts) team.AddCall(n, n);
  team.template RunCalls<Direct>(
      c.fibers, seed, [&](auto& link, char* heap, int call, const T* in, T* out) {
        RunPsum<Algorithm>(OneThread{}, link, {link.rank(), c.size, c.node_size}, heap, c.capacity,
                           in, c.counts[call], out);
      });
  team.Check([&](int /*rank*/, size_t i, int call) {
    int sum = 0;
    for (int r = 0; r < c.size; ++r) sum += InputAt(r, i, call);
    return sum;
  });
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
  TestTeam<float> team(3, PsumChannelBytes<TwoShot<float, false>>(shape, 64), "");
  team.AddCall(64, 64);
  team.CheckAbsentPeerIsNamed([&](auto& link, char* heap, const float* in, float* out) {
    RunPsum<TwoShot<float, false>>(OneThread{}, link, shape, heap, 64, in, 64, out);
  });
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

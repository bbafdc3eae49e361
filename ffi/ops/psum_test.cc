// The algorithms of psum.h over the host link: every rank a thread, random delays
// between steps, staged as on a GPU and direct as on the CPU. Runs plain and under
// ThreadSanitizer and AddressSanitizer; with a mutant it has to fail.
#include "ops/psum.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>
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
  Check<OneShot<T, 2, 4>, false, T>(c, seed);
  Check<OneShotByFlags<T>, false, T>(c, seed);
  Check<TwoShot<T, Steps::kFlags>, false, T>(c, seed);
  Check<TwoShot<T, Steps::kCells>, false, T>(c, seed);
  Check<Nvrar<T, Steps::kFlags>, false, T>(c, seed);
  Check<Nvrar<T, Steps::kCells>, false, T>(c, seed);
  Check<Nvrar<T, Steps::kDirect>, true, T>(
      {c.size, c.node_size, c.capacity, {c.counts[0]}, c.fibers}, seed);
  Check<TwoShot<T, Steps::kDirect>, true, T>(
      {c.size, c.node_size, c.capacity, {c.counts[0]}, c.fibers}, seed);
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

// A network between nodes: fetches what is put when it gets to it, and delivers the halves of
// cells one by one in any order. It is all that NVSHMEM promises (core/nvshmem_link.cuh).
class Network {
 public:
  Network() : thread_([this] { Deliver(); }) {}
  ~Network() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void Put(const Cell* from, size_t cells, Cell* to) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < 2 * cells; ++i) {
      halves_.push_back(
          {reinterpret_cast<const char*>(from) + 8 * i, reinterpret_cast<uint64_t*>(to) + i});
    }
    changed_.notify_one();
  }

 private:
  struct Half {
    const char* from;
    uint64_t* to;
  };

  void Deliver() {
    std::minstd_rand random(1);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return done_ || !halves_.empty(); });
      if (halves_.empty()) return;
      std::swap(halves_[random() % halves_.size()], halves_.back());
      const Half half = halves_.back();
      halves_.pop_back();
      lock.unlock();
      if (random() % 64 == 0) std::this_thread::yield();
      uint64_t value;
      std::memcpy(&value, half.from, sizeof(value));
      __atomic_store_n(half.to, value, __ATOMIC_RELEASE);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Half> halves_;  // on their way
  bool done_ = false;
  std::thread thread_;  // the last, as it uses the others
};

// Reaches the ranks of other nodes through a network alone.
class PutLink : public DelayedLink<false> {
 public:
  PutLink(const DelayedLink<false>& link, int node_size, Network& network)
      : DelayedLink<false>(link), node_size_(node_size), network_(network) {}

  bool mapped(int peer) const { return peer / node_size_ == rank() / node_size_; }
  Network& network() { return network_; }
  void StoreCell(Cell* mine, int peer, uint64_t data, uint32_t epoch) {
    JO_CHECK(mapped(peer));
    DelayedLink<false>::StoreCell(mine, peer, data, epoch);
  }

 private:
  const int node_size_;
  Network& network_;
};

template <class Pack>
void SendCells(const OneThread&, PutLink& link, Cell* staging, Cell* slot, int peer, Slice range,
               uint32_t epoch, Pack pack) {
  JO_CHECK(!link.mapped(peer));
  for (size_t i = range.begin; i < range.end; ++i) {
    const uint64_t data = pack(i);
    staging[i] = {static_cast<uint32_t>(data), epoch, static_cast<uint32_t>(data >> 32), epoch};
  }
  link.network().Put(staging + range.begin, range.size(), link.At(slot, peer) + range.begin);
}

// That the ready word frees the staging, too, is for ThreadSanitizer to say: it sees what
// orders the network's loads from it before the next call's stores.
template <class T>
int OverPuts() {
  using Algorithm = Nvrar<T, Steps::kCells, true>;
  const int shapes[][2] = {{2, 1}, {3, 1}, {4, 2}, {6, 2}, {7, 1}, {8, 4}};
  const std::vector<size_t> counts = {3000, 1, 0, 64, 129, 7, 2049, 2048, 2048, 2048};
  for (const auto& [size, node_size] : shapes) {
    const TeamShape shape{0, size, node_size};
    TestTeam<T> team(size, PsumChannelBytes<Algorithm>(shape, 2048), "puts");
    for (size_t n : counts) team.AddCall(n, n);
    Network network;
    team.template RunCalls<false>(
        false, 5 * size, [&, node = node_size](auto& link, char* heap, int c, const T* in, T* out) {
          PutLink put(link, node, network);
          RunPsum<Algorithm>(OneThread{}, put, {link.rank(), link.size(), node}, heap, 2048, in,
                             counts[c], out);
          JO_CHECK(!put.failed());
        });
    team.Check([&, n = size](int /*rank*/, size_t i, int call) {
      int sum = 0;
      for (int r = 0; r < n; ++r) sum += InputAt(r, i, call);
      return sum;
    });
  }
  return 6;
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
    CheckOneElement<TwoShot<Float16, Steps::kFlags>, false, Float16>(shape, large, 0);
    CheckOneElement<Nvrar<Float16, Steps::kFlags>, false, Float16>(shape, large, 0);
    CheckOneElement<OneShot<BFloat16>, false, BFloat16>(shape, uneven, 260);
    CheckOneElement<TwoShot<BFloat16, Steps::kFlags>, false, BFloat16>(shape, uneven, 260);
    CheckOneElement<Nvrar<BFloat16, Steps::kDirect>, true, BFloat16>(shape, uneven, 260);
  }
  return 18;
}

// A rank that never comes: the others give up in time and name it.
int AbsentRankIsNamed() {
  const TeamShape shape{0, 3, 3};
  TestTeam<float> team(3, PsumChannelBytes<TwoShot<float, Steps::kFlags>>(shape, 64), "");
  team.AddCall(64, 64);
  team.CheckAbsentPeerIsNamed([&](auto& link, char* heap, const float* in, float* out) {
    RunPsum<TwoShot<float, Steps::kFlags>>(OneThread{}, link, shape, heap, 64, in, 64, out);
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
  passed += ManyCalls() + OverPuts<float>() + OverPuts<BFloat16>() + OverPuts<double>();
  std::printf("psum_test: %d passed, 0 failed\n", passed);
}

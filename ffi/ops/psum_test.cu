// The kernels of psum over the peer link, in one process: each rank is a stream of its own,
// on the GPUs in turn, so on one GPU its peers' heaps are memory of the same device.
//
// All calls are launched before any result is read, so that a fast rank runs ahead, and
// one rank is stalled before every step that others wait for. Built with a deliberate
// fault (JAX_OVERLAP_CUDA_MUTANT) it has to fail. Every wait is bounded by kLimitNs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "core/cuda_testing.h"
#include "core/p2p_link.cuh"
#include "core/test_data.h"
#include "ops/psum_kernel.cuh"

namespace jax_overlap {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 3;
constexpr int kMaxCalls = 40;
constexpr size_t kDirectoryBytes = kMaxGpuRanks * sizeof(uint64_t);
constexpr uint64_t kLimitNs = 2000 * 1000 * 1000ull;
constexpr unsigned char kGuard = 0xA5;
constexpr size_t kGuardBytes = 256;

__device__ int stalled_rank = -1;

// Waits a while before each step: a stalled rank long, the others now and then.
class StallingLink : public P2pLink {
 public:
  using P2pLink::P2pLink;

  __device__ void StoreCell(Cell* mine, int peer, uint64_t data, uint32_t epoch) {
    Stall(63);
    P2pLink::StoreCell(mine, peer, data, epoch);
  }
  __device__ uint64_t LoadCell(const Cell* mine, uint32_t epoch, Where where) {
    Stall(63);
    return P2pLink::LoadCell(mine, epoch, where);
  }
  __device__ void Signal(uint64_t* mine, int peer, uint64_t value) {
    Stall(1);
    P2pLink::Signal(mine, peer, value);
    Stall(1);
  }
  __device__ void Wait(const uint64_t* mine, uint64_t value, Where where) {
    Stall(1);
    P2pLink::Wait(mine, value, where);
    Stall(1);
  }

 private:
  __device__ void Stall(unsigned one_in) {
    const unsigned random = static_cast<unsigned>(clock64()) * 2654435761u >> 8;
    if ((random & one_in) != 0) return;
    __nanosleep(rank() == stalled_rank ? 20000 : random % 500);
  }
};

constexpr int kMaxRanks = 8;

int Devices() {
  static const int count = static_cast<int>(Ordinals(kMaxRanks).size());
  return count;
}
void UseDevice(int device) { JO_CUDA(cudaSetDevice(device)); }
void UseDeviceOf(int rank) { UseDevice(rank % Devices()); }

// f() with each device in turn as the current one.
template <class F>
void OnAllDevices(F f) {
  for (int device = 0; device < Devices(); ++device) {
    UseDevice(device);
    f(device);
  }
}
void Synchronize() {
  OnAllDevices([](int) { JO_CUDA(cudaDeviceSynchronize()); });
}

// Memory of a rank's device between guards.
class Buffer {
 public:
  Buffer(int rank, size_t bytes, unsigned char fill) : bytes_(bytes) {
    UseDeviceOf(rank);
    JO_CUDA(cudaMalloc(&base_, bytes + 2 * kGuardBytes));
    JO_CUDA(cudaMemset(base_, kGuard, bytes + 2 * kGuardBytes));
    JO_CUDA(cudaMemset(data(), fill, bytes));
  }
  Buffer(Buffer&& other) : bytes_(other.bytes_), base_(other.base_) { other.base_ = nullptr; }
  ~Buffer() {
    if (base_ != nullptr) cudaFree(base_);
  }
  char* data() const { return base_ + kGuardBytes; }

  template <class T>
  void Store(const std::vector<T>& values) {
    JO_CUDA(cudaMemcpy(data(), values.data(), bytes_, cudaMemcpyHostToDevice));
  }
  template <class T>
  std::vector<T> Load() const {
    std::vector<T> values(bytes_ / sizeof(T));
    JO_CUDA(cudaMemcpy(values.data(), data(), bytes_, cudaMemcpyDeviceToHost));
    return values;
  }
  bool Intact() const {
    std::vector<unsigned char> all(bytes_ + 2 * kGuardBytes);
    JO_CUDA(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost));
    const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
    return std::all_of(all.begin(), all.begin() + kGuardBytes, is_guard) &&
           std::all_of(all.end() - kGuardBytes, all.end(), is_guard);
  }

 private:
  size_t bytes_;
  char* base_ = nullptr;
};

// What the ranks of every team use, made once.
struct Shared {
  Shared() {
    OnAllDevices([&](int device) {
      for (int peer = 0; peer < Devices(); ++peer) {
        if (peer != device) JO_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
      }
    });
    for (int r = 0; r < kMaxRanks; ++r) {
      UseDeviceOf(r);
      JO_CUDA(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    }
    JO_CUDA(cudaHostAlloc(&statuses, kMaxCalls * kMaxRanks * sizeof(Status),
                          cudaHostAllocMapped | cudaHostAllocPortable));
  }
  static Shared& Get() {
    static Shared* const shared = new Shared;
    return *shared;
  }
  cudaStream_t streams[kMaxRanks];
  Status* statuses;  // [call][rank]
};

void StallRank(int rank) {
  OnAllDevices([&](int) { JO_CUDA(cudaMemcpyToSymbol(stalled_rank, &rank, sizeof(rank))); });
}

// One team, and calls of the sizes `counts` on one channel.
template <class Link, class Algorithm, class T>
class Team {
 public:
  Team(TeamShape shape, size_t capacity, std::vector<size_t> counts)
      : shape_(shape), capacity_(capacity), counts_(std::move(counts)) {
    const size_t bytes = kDirectoryBytes + GpuChannel::kHeadBytes + kBlocks * BlockBytes();
    for (int r = 0; r < shape.size; ++r) {
      heaps_.emplace_back(r, bytes, 0);
      for (size_t c = 0; c < counts_.size(); ++c) {
        std::vector<T> in(counts_[c]);
        for (size_t i = 0; i < in.size(); ++i)
          in[i] = FromInt<T>(InputAt(r, i, static_cast<int>(c)));
        inputs_.emplace_back(r, in.size() * sizeof(T), 0);
        inputs_.back().Store(in);
        outputs_.emplace_back(r, in.size() * sizeof(T), 0xEE);
      }
    }
    Shared& shared = Shared::Get();
    memset(shared.statuses, 0, kMaxCalls * kMaxRanks * sizeof(Status));
    OnAllDevices([&](int) {
      // Loading a kernel while another spins may wait for that one to end.
      cudaFuncAttributes attributes;
      JO_CUDA(cudaFuncGetAttributes(&attributes, PsumKernel<Link, Algorithm, T>));
    });
    Synchronize();
  }

  // All ranks but `absent`, or `only` one, do all calls.
  void Run(int absent = -1, uint64_t limit_ns = kLimitNs, int only = -1) {
    Shared& shared = Shared::Get();
    for (size_t c = 0; c < counts_.size(); ++c) {
      for (int r = 0; r < shape_.size; ++r) {
        if (r == absent || (only >= 0 && r != only)) continue;
        const size_t at = r * counts_.size() + c;
        PsumArguments arguments = {};
        GpuChannel& channel = arguments.channel;
        channel.shape = {r, shape_.size, shape_.node_size};
        for (int peer = 0; peer < shape_.size; ++peer) {
          channel.heaps[peer] = heaps_[peer].data() + kDirectoryBytes;
          channel.pes[peer] = -1;
        }
        channel.own = channel.heaps[r];
        channel.directory = kDirectoryBytes;
        channel.descriptor = descriptor(r);
        channel.limit_ns = limit_ns;
        channel.error = &StatusOf(r, static_cast<int>(c));
        arguments.block_bytes = static_cast<uint32_t>(BlockBytes());
        arguments.piece = static_cast<uint32_t>(capacity_);
        // As two leaves: their pieces go to the blocks in turn.
        const size_t half = counts_[c] / 2 / Pack<T>::kCount * Pack<T>::kCount;
        const auto pieces = [&](size_t n) { return static_cast<uint32_t>(CeilDiv(n, capacity_)); };
        arguments.leaf_count = 2;
        arguments.leaf = {inputs_[at].data(), outputs_[at].data(), half, pieces(half), 0};
        arguments.more[0] = {inputs_[at].data() + half * sizeof(T),
                             outputs_[at].data() + half * sizeof(T), counts_[c] - half,
                             pieces(counts_[c] - half), pieces(half) % kBlocks};
        UseDeviceOf(r);
        PsumKernel<Link, Algorithm, T><<<kBlocks, kThreads, 0, shared.streams[r]>>>(arguments);
        JO_CUDA(cudaGetLastError());
      }
    }
    Synchronize();
  }

  static Status& StatusOf(int rank, int call) {
    return Shared::Get().statuses[call * kMaxRanks + rank];
  }

  // What rank `rank` takes the channel for.
  uint64_t descriptor(int rank) const { return rank == liar ? 77 : 7; }
  int liar = -1;

  // Of the first call.
  void SetInput(int rank, const std::vector<T>& in) { inputs_[rank * counts_.size()].Store(in); }
  std::vector<T> Result(int rank, int call = 0) const {
    return outputs_[rank * counts_.size() + call].template Load<T>();
  }
  // A result holds NaNs, or the smallest integer.
  void CheckPoisoned(int rank, int call) const {
    for (const T x : Result(rank, call)) JO_CHECK(IsPoison(x));
  }
  // Piece by piece.
  void CheckRightOrPoisoned(int rank, int call) const { CheckCall(rank, call, true); }
  static bool IsPoison(T x) {
    const auto value = static_cast<float>(Numeric<T>::Widen(x));
    return value != value || value == 128;  // -128 as its unsigned accumulator
  }

  void Check() const {
    for (int r = 0; r < shape_.size; ++r) {
      JO_CHECK(heaps_[r].Intact());
      for (int c = 0; c < static_cast<int>(counts_.size()); ++c) {
        const Status& s = StatusOf(r, c);
        JO_CHECK_IN(s.failed == 0, "%d ranks, nodes of %d: rank %d waits for %d in step %d",
                    shape_.size, shape_.node_size, r, s.peer, s.step);
        CheckCall(r, c);
      }
    }
  }

  void CheckCall(int rank, int call, bool or_poisoned = false) const {
    const Buffer& buffer = outputs_[rank * counts_.size() + call];
    JO_CHECK(buffer.Intact() && inputs_[rank * counts_.size() + call].Intact());
    const std::vector<T> out = buffer.template Load<T>();
    for (size_t i = 0; i < out.size(); ++i) {
      int sum = 0;
      for (int r = 0; r < shape_.size; ++r) sum += InputAt(r, i, call);
      const T right = FromInt<T>(sum);
      if (or_poisoned && IsPoison(out[i])) continue;
      JO_CHECK_IN(memcmp(&out[i], &right, sizeof(T)) == 0,
                  "%d ranks, nodes of %d, call %d of %zu elements, rank %d, element %zu",
                  shape_.size, shape_.node_size, call, out.size(), rank, i);
    }
  }

 private:
  size_t BlockBytes() const { return PsumChannelBytes<Algorithm>(shape_, capacity_); }

  const TeamShape shape_;
  const size_t capacity_;
  const std::vector<size_t> counts_;
  std::vector<Buffer> heaps_, inputs_, outputs_;
};

template <class Link, class Algorithm, class T>
void Check(TeamShape shape, size_t capacity, const std::vector<size_t>& counts) {
  Team<Link, Algorithm, T> team(shape, capacity, counts);
  team.Run();
  team.Check();
}

template <class Link, class T>
int CheckAllAlgorithms(TeamShape shape, size_t capacity, const std::vector<size_t>& counts) {
  Check<Link, OneShot<T>, T>(shape, capacity, counts);
  Check<Link, OneShot<T, 2>, T>(shape, capacity, counts);
  Check<Link, OneShot<T, 2, sizeof(T) == 1 ? 2 : 4>, T>(shape, capacity, counts);
  Check<Link, OneShot<T, 4, 2>, T>(shape, capacity, counts);
  Check<Link, OneShotByFlags<T>, T>(shape, capacity, counts);
  Check<Link, TwoShot<T, Steps::kFlags>, T>(shape, capacity, counts);
  Check<Link, TwoShot<T, Steps::kCells>, T>(shape, capacity, counts);
  Check<Link, Nvrar<T, Steps::kFlags>, T>(shape, capacity, counts);
  Check<Link, Nvrar<T, Steps::kCells>, T>(shape, capacity, counts);
  return 9;
}

// Every split of 1 .. 8 ranks, odd node counts among them.
const int kShapes[][2] = {{1, 1}, {2, 1}, {2, 2}, {3, 1}, {3, 3}, {4, 1}, {4, 2}, {4, 4}, {5, 1},
                          {6, 1}, {6, 2}, {6, 3}, {7, 1}, {8, 1}, {8, 2}, {8, 4}, {8, 8}};

// Shrinking, growing, none at all, and more than one chunk.
template <class T>
int Sizes() {
  int cases = 0;
  for (const auto& [size, node_size] : kShapes) {
    const TeamShape shape{0, size, node_size};
    cases += CheckAllAlgorithms<P2pLink, T>(shape, 1024, {3000, 1, 0, 1025, 7, 1024, 64, 2049});
  }
  // Several accesses of a thread at once, as many as there are at most and all fewer.
  constexpr size_t kOfAll = kThreads * Pack<T>::kCount;
  for (const auto& [size, node_size] : {std::pair{2, 1}, {2, 2}, {4, 4}}) {
    const TeamShape shape{0, size, node_size};
    cases += CheckAllAlgorithms<P2pLink, T>(
        shape, 14 * kOfAll, {14 * kOfAll + 5, 14 * kOfAll - 1, 7 * kOfAll + 3, 3 * kOfAll, 1});
  }
  return cases;
}

// Many calls in a row, of changing sizes, with one rank after the other stalled.
int Stragglers() {
  int cases = 0;
  for (const auto& [size, node_size] : kShapes) {
    if (size == 1) continue;
    std::vector<size_t> counts;
    for (size_t i = 0; i < 40; ++i) counts.push_back(1 + i * i * 37 % 600);
    for (int stalled = 0; stalled < size; stalled += size > 4 ? 3 : 1) {
      StallRank(stalled);
      const TeamShape shape{0, size, node_size};
      cases += CheckAllAlgorithms<StallingLink, float>(shape, 256, counts);
      cases += CheckAllAlgorithms<StallingLink, BFloat16>(shape, 256, counts);
    }
  }
  StallRank(-1);
  return cases;
}

// Half types are summed in float: the parts would overflow, or round, in between.
template <class Algorithm, class T>
int OneElement(TeamShape shape, const std::vector<float>& parts, float right) {
  Team<P2pLink, Algorithm, T> team(shape, 64, {1});
  for (int r = 0; r < shape.size; ++r) team.SetInput(r, {Numeric<T>::Narrow(parts[r])});
  team.Run();
  for (int r = 0; r < shape.size; ++r) JO_CHECK(Numeric<T>::Widen(team.Result(r)[0]) == right);
  return 1;
}

int HalfTypesAreSummedInFloat() {
  const std::vector<float> large = {40000, 40000, -40000, -40000}, uneven = {256, 1, 1, 1};
  int cases = 0;
  for (const int node_size : {1, 2, 4}) {
    const TeamShape shape{0, 4, node_size};
    cases += OneElement<OneShot<Float16>, Float16>(shape, large, 0);
    cases += OneElement<TwoShot<Float16, Steps::kFlags>, Float16>(shape, large, 0);
    cases += OneElement<Nvrar<Float16, Steps::kFlags>, Float16>(shape, large, 0);
    cases += OneElement<OneShot<BFloat16>, BFloat16>(shape, uneven, 260);
    cases += OneElement<TwoShot<BFloat16, Steps::kFlags>, BFloat16>(shape, uneven, 260);
    cases += OneElement<Nvrar<BFloat16, Steps::kFlags>, BFloat16>(shape, uneven, 260);
  }
  return cases;
}

// A rank that never comes: all others give up in time, those that wait for it directly
// name it, and nobody passes on a wrong number. `times`: as many elements as else.
template <class Algorithm, class T>
int AbsentRank(TeamShape shape, int absent, bool named_by_all, size_t times = 1) {
  constexpr uint64_t kShort = 50 * 1000 * 1000;
  Team<P2pLink, Algorithm, T> team(shape, 256 * times, {100 * times, 50 * times, 200 * times});
  team.Run(absent, kShort);
  bool named = false;
  for (int r = 0; r < shape.size; ++r) {
    if (r == absent) continue;
    const Status& s = team.StatusOf(r, 0);
    JO_CHECK_IN(s.failed == kExpired && s.rank == r, "rank %d of %d", r, shape.size);
    JO_CHECK_IN(!named_by_all || s.peer == absent, "rank %d names %d", r, s.peer);
    named = named || s.peer == absent;
    for (int call = 0; call < 3; ++call) team.CheckPoisoned(r, call);
  }
  JO_CHECK(named);
  // It comes after all: what the others had sent is right, and nothing follows.
  team.Run(-1, kShort, absent);
  team.CheckRightOrPoisoned(absent, 0);
  JO_CHECK(team.StatusOf(absent, 0).failed == kExpired);
  for (int call = 1; call < 3; ++call) team.CheckPoisoned(absent, call);
  return 1;
}

// A rank that takes the call for another one: nobody adds its numbers.
template <class Algorithm, class T>
int Mismatch(TeamShape shape, int liar) {
  Team<P2pLink, Algorithm, T> team(shape, 256, {1000, 50});
  team.liar = liar;
  team.Run();
  for (int r = 0; r < shape.size; ++r) {
    const Status& s = team.StatusOf(r, 0);
    JO_CHECK_IN(s.failed == kMismatch && (r == liar || s.peer == liar), "rank %d: %d for %d", r,
                s.failed, s.peer);
    for (int call = 0; call < 2; ++call) team.CheckPoisoned(r, call);
  }
  return 1;
}

template <class T>
int AbsentRanks() {
  int cases =
      Mismatch<OneShot<T>, T>({0, 4, 4}, 1) + Mismatch<Nvrar<T, Steps::kFlags>, T>({0, 4, 2}, 3);
  cases += AbsentRank<OneShot<T>, T>({0, 4, 4}, 2, true);
  cases += AbsentRank<OneShot<T, 4, 2>, T>({0, 4, 4}, 3, true, 16);
  cases += AbsentRank<OneShotByFlags<T>, T>({0, 4, 4}, 0, true, 16);
  cases += AbsentRank<TwoShot<T, Steps::kFlags>, T>({0, 4, 4}, 0, true);
  cases += AbsentRank<TwoShot<T, Steps::kCells>, T>({0, 4, 4}, 0, true);
  for (int absent = 0; absent < 6; ++absent) {
    cases += AbsentRank<Nvrar<T, Steps::kFlags>, T>({0, 6, 2}, absent, false);
  }
  return cases;
}

}  // namespace
}  // namespace jax_overlap

// With an argument only one type and the absent rank: for compute-sanitizer, which is slow.
int main(int argc, char**) {
  using namespace jax_overlap;  // NOLINT
  if (argc > 1) {
    int passed = Sizes<float>() + AbsentRanks<float>();
    std::printf("psum_test (CUDA, short): %d passed, 0 failed\n", passed);
    return 0;
  }
  int passed = Sizes<float>() + Sizes<double>() + Sizes<BFloat16>() + Sizes<Float16>();
  passed += Sizes<int32_t>() + Sizes<int8_t>() + Stragglers();
  passed += HalfTypesAreSummedInFloat();
  passed += AbsentRanks<float>() + AbsentRanks<BFloat16>() + AbsentRanks<int8_t>();
  std::printf("psum_test (CUDA, %d devices): %d passed, 0 failed\n", Devices(), passed);
}

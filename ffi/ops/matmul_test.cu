// The fused matmuls in one process: each rank has a stream and a lane of its own, on the GPUs
// there are in turn, and stores to the heaps of its peers.
//
// All calls are launched before any result is read, and one rank is late. Built with a
// deliberate fault (JAX_OVERLAP_CUDA_MUTANT) it has to fail. Every wait is bounded.
//
// CUDA_DEVICE_MAX_CONNECTIONS=32 gives each stream a queue of its own.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda_testing.h"
#include "core/gpu_device.h"
#include "core/gpu_memory.h"
#include "core/schedule.h"
#include "ops/all_gather_matmul.h"
#include "ops/matmul_launch.h"
#include "ops/matmul_reduce_scatter.h"
#include "ops/matmul_test.h"

namespace jax_overlap {
namespace {

constexpr int kMaxRanks = 5;  // four streams each
constexpr int kSets = 2;      // of streams, for calls at once
constexpr uint64_t kLimitNs = 3000 * 1000 * 1000ull;

__global__ void Sleep(int us) {
  for (int i = 0; i < us; ++i) __nanosleep(1000);
}

template <class T>
GemmType TypeOf();
template <>
GemmType TypeOf<float>() {
  return GemmType::kF32;
}
template <>
GemmType TypeOf<double>() {
  return GemmType::kF64;
}
template <>
GemmType TypeOf<BFloat16>() {
  return GemmType::kBF16;
}
template <>
GemmType TypeOf<Float16>() {
  return GemmType::kF16;
}

template <class Op>
MatmulKind KindOf() {
  if (Op::kGathers) return MatmulKind::kGather;
  return Op::kScatters ? MatmulKind::kScatter : MatmulKind::kReduce;
}

const std::vector<int>& Devices() {
  static const std::vector<int> ordinals = Ordinals(kMaxRanks);
  return ordinals;
}

int DeviceOf(int rank) { return rank % static_cast<int>(Devices().size()); }

void Synchronize() {
  for (const int ordinal : Devices()) {
    const CurrentDevice current(ordinal);
    JO_CUDA(cudaDeviceSynchronize());
  }
}

// What the ranks of all teams use.
struct Shared {
  static Shared& Get() {
    static Shared* const shared = new Shared;
    return *shared;
  }
  Shared() {
    std::string error = EnablePeers(Devices());
    JO_CHECK_IN(error.empty(), "%s", error.c_str());
    for (int r = 0; r < kMaxRanks; ++r) {
      const CurrentDevice current(DeviceOf(r));
      lanes[r] = GpuGemm::Get().MakeLane(DeviceOf(r), &error);
      JO_CHECK_IN(lanes[r] != nullptr, "%s", error.c_str());
      for (auto& set : streams) {
        JO_CUDA(cudaStreamCreateWithFlags(&set[r], cudaStreamNonBlocking));
      }
    }
    constexpr unsigned kForAll = cudaHostAllocMapped | cudaHostAllocPortable;
    for (Status*& set : statuses) JO_CUDA(cudaHostAlloc(&set, kMaxRanks * sizeof(Status), kForAll));
    // Loading a kernel while another spins may wait for that one to end.
    std::vector<const void*> kernels = ExchangeKernels();
    kernels.push_back(reinterpret_cast<const void*>(&Sleep));
    error = LoadKernels(Devices(), kernels);
    JO_CHECK_IN(error.empty(), "%s", error.c_str());
  }
  std::unique_ptr<GpuLane> lanes[kMaxRanks];
  cudaStream_t streams[kSets][kMaxRanks];
  Status* statuses[kSets];  // [rank]
};

// A team and calls on its exchange.
template <class Op, class T>
class Team {
 public:
  // `liar` takes its calls for others. `set`: of streams.
  Team(std::vector<MatmulCase> cases, size_t exchange_bytes, uint64_t limit_ns = kLimitNs,
       int liar = -1, int set = 0)
      : cases_(std::move(cases)), ranks_(cases_[0].shape.ranks), liar_(liar), set_(set) {
    memset(Shared::Get().statuses[set], 0, kMaxRanks * sizeof(Status));
    constexpr size_t kDirectory = kMaxGpuRanks * sizeof(uint64_t);
    size_t bytes = 0;
    for (const MatmulCase& one : cases_) {
      const MatmulSizes<Op> sizes(one);
      for (const auto* ends : {&sizes.inputs, &sizes.outputs}) {
        bytes += ends->back() * sizeof(T) + ends->size() * kPlaceAlign;
      }
    }
    for (int r = 0; r < ranks_; ++r) {
      const CurrentDevice current(DeviceOf(r));
      heaps_.emplace_back(kDirectory + exchange_bytes);
      if (Devices().size() > 1) arenas_.emplace_back(bytes, 0xEE);
    }
    for (int r = 0; r < ranks_; ++r) {
      GpuChannel channel = {};
      channel.shape = {r, ranks_, ranks_};
      for (int p = 0; p < ranks_; ++p) channel.heaps[p] = heaps_[p].data() + kDirectory;
      channel.own = channel.heaps[r];
      channel.directory = kDirectory;
      channel.descriptor = 7;
      channel.limit_ns = limit_ns;
      channel.error = &Shared::Get().statuses[set][r];
      for (size_t c = 0; c < cases_.size(); ++c) AddCall(r, c, channel, exchange_bytes);
    }
    Synchronize();
  }

  // All ranks but `absent`, or `only` one, make all calls; `late` sleeps before each.
  void Run(int late = -1, int absent = -1, int only = -1) {
    Launch(late, absent, only);
    Synchronize();
  }
  void Launch(int late, int absent, int only) {
    for (size_t c = 0; c < cases_.size(); ++c) {
      for (int r = 0; r < ranks_; ++r) {
        if (r == absent || (only >= 0 && r != only)) continue;
        const CurrentDevice current(DeviceOf(r));
        if (r == late) Sleep<<<1, 1, 0, StreamOf(r)>>>(300);
        const std::string error = launches_[r][c]->Run(calls_[r][c], results_[r][c], StreamOf(r));
        JO_CHECK_IN(error.empty(), "%s", error.c_str());
      }
    }
  }

  void Check() const {
    CheckStatuses();
    for (int r = 0; r < ranks_; ++r) {
      for (size_t c = 0; c < cases_.size(); ++c) CheckCall(r, c, false);
    }
  }
  void CheckStatuses() const {
    for (int r = 0; r < ranks_; ++r) {
      const Status& s = StatusOf(r);
      JO_CHECK_IN(s.failed == kNone, "%d ranks: rank %d failed: %d, for %d in step %d", ranks_, r,
                  s.failed, s.peer, s.step);
    }
  }
  // A result is right or, all of it, not a number.
  void CheckCall(int r, size_t c, bool or_poisoned) const {
    const MatmulSizes<Op> sizes(cases_[c]);
    const MatmulInputs<Op> in{sizes, static_cast<int>(c)};
    for (size_t a = 0; a + 1 < sizes.outputs.size(); ++a) {
      const size_t n = sizes.outputs[a + 1] - sizes.outputs[a];
      std::vector<T> part(n);
      JO_CUDA(
          cudaMemcpy(part.data(), results_[r][c][a].data, n * sizeof(T), cudaMemcpyDeviceToHost));
      if (or_poisoned && n > 0 && IsNan(part[0])) {
        for (const T x : part) JO_CHECK(IsNan(x));
        continue;
      }
      for (size_t i = 0; i < n; ++i) {
        const int right = MatmulExpected(in, r, a, i);
        const T wanted = FromInt<T>(right);
        JO_CHECK_IN(memcmp(&part[i], &wanted, sizeof(T)) == 0,
                    "%d ranks, rank %d, call %zu, result %zu, element %zu: %g for %d", ranks_, r, c,
                    a, i, static_cast<double>(Numeric<T>::Widen(part[i])), right);
      }
    }
  }
  // Some elements of a scattered sum of rows, where what each rank adds is rounded first.
  void CheckRounded(int r, size_t c) const {
    const MatmulSizes<Op> sizes(cases_[c]);
    const MatmulInputs<Op> in{sizes, static_cast<int>(c)};
    const MatmulShape& s = cases_[c].shape;
    const size_t inner = s.products[0].inner, cols = s.products[0].cols;
    std::vector<T> result(sizes.outputs.back());
    JO_CUDA(cudaMemcpy(result.data(), results_[r][c][0].data, result.size() * sizeof(T),
                       cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < result.size(); i += 997) {
      const size_t row = r * (s.rows / ranks_) + i / cols, col = i % cols;
      Acc<T> sum = 0;
      for (int source = 0; source < ranks_; ++source) {
        int one = 0;
        for (size_t k = 0; k < inner; ++k) {
          one += in.X(source, 0, 0, row, k) * in.W(source, 0, 0, k, col, inner);
        }
        sum = Add(sum, Numeric<T>::Widen(FromInt<T>(one)));
      }
      const T right = Numeric<T>::Narrow(sum);
      JO_CHECK_IN(memcmp(&result[i], &right, sizeof(T)) == 0, "rank %d, element %zu: %g for %g", r,
                  i, static_cast<double>(Numeric<T>::Widen(result[i])),
                  static_cast<double>(Numeric<T>::Widen(right)));
    }
  }
  void CheckPoisoned(int r, size_t c) const {
    for (const ExchangeCall::Result& result : results_[r][c]) {
      std::vector<T> part(result.bytes / sizeof(T));
      JO_CUDA(cudaMemcpy(part.data(), result.data, result.bytes, cudaMemcpyDeviceToHost));
      for (const T x : part) JO_CHECK(IsNan(x));
    }
  }
  const Status& StatusOf(int r) const { return Shared::Get().statuses[set_][r]; }
  cudaStream_t StreamOf(int r) const { return Shared::Get().streams[set_][r]; }
  // Whether a call does on some rank (core/hopper_scatter.h).
  bool ScattersInOne() const {
    for (const auto& calls : launches_) {
      for (const auto& call : calls) {
        for (const MatmulStep& step : call->steps()) {
          if (step.kind == StepKind::kScatter) return true;
        }
      }
    }
    return false;
  }
  static bool IsNan(T x) {
    const auto value = Numeric<T>::Widen(x);
    return value != value;
  }

 private:
  void AddCall(int r, size_t c, const GpuChannel& channel, size_t exchange_bytes) {
    const CurrentDevice current(DeviceOf(r));
    const MatmulCase& one = cases_[c];
    const MatmulSizes<Op> sizes(one);
    const MatmulInputs<Op> in{sizes, static_cast<int>(c)};
    const MatmulSpec spec{KindOf<Op>(), one.shape, one.xs(Op::kGathers), TypeOf<T>(), TypeOf<T>(),
                          TypeOf<T>(),  false,     one.gathered};
    std::string error;
    const uint64_t call = spec.Hash() + (r == liar_ ? 1 : 0);
    launches_[r].push_back(
        MatmulLaunches::Make(spec, *Shared::Get().lanes[r], channel, exchange_bytes, call, &error));
    JO_CHECK_IN(launches_[r].back() != nullptr, "%s", error.c_str());
    MatmulLaunches::Arrays arrays;
    std::vector<ExchangeCall::Result> results;
    for (size_t a = 0; a + 1 < sizes.inputs.size(); ++a) {
      std::vector<T> values;
      for (size_t i = sizes.inputs[a]; i < sizes.inputs[a + 1]; ++i) {
        values.push_back(FromInt<T>(in.At(r, i)));
      }
      char* const place = Take(r, values.size() * sizeof(T));
      JO_CUDA(cudaMemcpy(place, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
      (a < sizes.xs ? arrays.x : arrays.w).push_back(place);
    }
    for (size_t a = 0; a + 1 < sizes.outputs.size(); ++a) {
      const size_t bytes = (sizes.outputs[a + 1] - sizes.outputs[a]) * sizeof(T);
      char* const place = Take(r, bytes);
      arrays.out.push_back(place);
      results.push_back({place, bytes});
    }
    if (one.gathered) arrays.gathered = arrays.out.back();
    calls_[r].push_back(arrays);
    results_[r].push_back(results);
  }

  // Of its own, for compute-sanitizer; but memory that is mapped into other devices takes long
  // to get.
  char* Take(int r, size_t bytes) {
    if (arenas_.empty()) return memory_.emplace_back(bytes, 0xEE).data();
    char* const place = arenas_[r].data() + taken_[r];
    taken_[r] += RoundUp(bytes, kPlaceAlign);
    return place;
  }

  static constexpr size_t kPlaceAlign = 256;
  const std::vector<MatmulCase> cases_;
  const int ranks_, liar_, set_;
  std::vector<Memory> heaps_, arenas_;  // [rank]
  std::vector<Memory> memory_;
  size_t taken_[kMaxRanks] = {};
  std::vector<MatmulLaunches::Arrays> calls_[kMaxRanks];
  std::vector<std::vector<ExchangeCall::Result>> results_[kMaxRanks];
  std::vector<std::unique_ptr<MatmulLaunches>> launches_[kMaxRanks];
};

// What Hopper's own kernels take, of which two ranks scatter in one (core/hopper_scatter.h): a
// few tiles, the last ones ragged, also of several matrices.
template <class Op>
std::vector<MatmulCase> TiledCases(int ranks) {
  const size_t p = ranks, rows = Op::kScatters ? p : 1;
  std::vector<MatmulCase> cases;
  for (const bool t : {false, true}) {
    cases.push_back({{Cut::kRows, ranks, 1, 1, 450 * rows, {{16, 264, t}}}});
    cases.push_back({{Cut::kRows, ranks, 2, 1, 220 * rows, {{24, 136, t}}}});
    if (!Op::kScatters) continue;
    cases.push_back({{Cut::kBatch, ranks, 3 * p, 1, 210, {{8, 128, t}}}});
    cases.push_back({{Cut::kCols, ranks, 1, 1, 250, {{16, 136 * p, t}}}});
  }
  return cases;
}

template <class Op>
std::vector<MatmulCase> Cases(int ranks) {
  std::vector<MatmulCase> cases;
  for (const MatmulCase& c : MatmulShapes<Op>(ranks)) {
    const MatmulShape& s = c.shape;
    if (s.rows > 0 && s.products[0].inner > 0 && s.products[0].cols > 0) cases.push_back(c);
  }
  // A row for each rank, of several batches: products of matrices with vectors.
  const size_t rows = Op::kScatters ? ranks : 1;
  for (const bool t : {false, true}) {
    cases.push_back({{Cut::kRows, ranks, 3, 1, rows, {{7, 5, t}}}, Op::kGathers});
    cases.push_back({{Cut::kRows, ranks, 3, 2, rows, {{5, 1, t}}}, Op::kGathers});
  }
  return cases;
}

// Of an exchange; with less in a few rounds, and in many.
constexpr size_t kLarge = 16 << 20, kSome = 512 << 10, kSmall = 64 << 10;

template <class Op, class T>
int Values(int ranks, size_t bytes) {
  std::vector<MatmulCase> cases = Cases<Op>(ranks);
  // Not in more rounds than a stream takes launches: one thread makes those of all ranks.
  if (bytes == kLarge) {
    for (const MatmulCase& c : TiledCases<Op>(ranks)) cases.push_back(c);
  }
  Team<Op, T> team(cases, bytes);
  team.Run();
  team.Check();
  return 1;
}

// Slots are used again and again, whoever is late.
template <class Op>
int Stragglers(int ranks) {
  const std::vector<MatmulCase> cases = Cases<Op>(ranks);
  std::vector<MatmulCase> calls;
  for (int i = 0; i < 12; ++i) calls.push_back(cases[i * 5 % cases.size()]);
  for (int late = 0; late < ranks; ++late) {
    Team<Op, float> team(calls, kSmall);
    team.Run(late);
    team.Check();
  }
  return ranks;
}

// Whether two ranks scatter in one kernel here, what that takes.
bool HasScatter() {
#ifdef JAX_OVERLAP_CUTLASS
  cudaDeviceProp properties;
  JO_CUDA(cudaGetDeviceProperties(&properties, Devices()[0]));
  return properties.major == 9;
#else
  return false;
#endif
}

// One that is late has not sent in time what could be added at once.
template <class Op>
int Scattered() {
  std::vector<MatmulCase> calls;
  for (int i = 0; i < 3; ++i) {
    for (const MatmulCase& c : TiledCases<Op>(2)) calls.push_back(c);
  }
  for (const size_t bytes : {kLarge, kSome}) {
    for (int late = -1; late < 2; ++late) {
      Team<Op, BFloat16> team(calls, bytes);
      JO_CHECK(team.ScattersInOne() == HasScatter());
      team.Run(late);
      team.Check();
    }
  }
  return 6;
}

// More tiles than there are multiprocessors, and a long sum; whoever is late, the same bits.
int ScatteredLarge() {
  if (!HasScatter()) return 0;  // others do not round before they add
  for (const bool t : {false, true}) {
    // The last tiles are ragged, or those of several columns follow one another.
    const size_t rows = t ? 1024 : 1280, cols = t ? 2048 : 2056;
    const MatmulCase one = {{Cut::kRows, 2, 1, 1, 2 * rows, {{1032, cols, t}}}};
    for (int late = -1; late < 2; ++late) {
      Team<MatmulReduceScatter, BFloat16> team({one, one}, 32 << 20);
      JO_CHECK(team.ScattersInOne());
      team.Run(late);
      for (int r = 0; r < 2; ++r) {
        for (int call = 0; call < 2; ++call) team.CheckRounded(r, call);
      }
    }
  }
  return 6;
}

// Two calls at once on a device, of two teams, at several distances. The one that begins later
// is refused and has no numbers; the other one is right, and so are those after it.
int AtOnce() {
  if (!HasScatter()) return 0;  // as above
  constexpr int kTimes = 24;
  const MatmulCase first = {{Cut::kRows, 2, 1, 1, 2 * 450, {{32768, 264, false}}}};
  const MatmulCase second = {{Cut::kRows, 2, 1, 1, 2 * 220, {{30720, 392, false}}}};
  const MatmulCase large = {{Cut::kRows, 2, 1, 1, 2 * 1280, {{1032, 2056, false}}}};
  Team<MatmulReduceScatter, BFloat16> team({first}, 32 << 20);
  // An odd number: what a slot holds is never what it held before.
  Team<MatmulReduceScatter, BFloat16> next({large, large, large}, 32 << 20);
  cudaEvent_t begun;
  JO_CUDA(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming));
  for (int time = 0; time < kTimes; ++time) {
    Team<MatmulReduceScatter, BFloat16> other({second}, kLarge, kLimitNs, -1, 1);
    {
      const CurrentDevice current(DeviceOf(0));
      Sleep<<<1, 1, 0, team.StreamOf(0)>>>(2000);  // until all is launched
      JO_CUDA(cudaEventRecord(begun, team.StreamOf(0)));
      JO_CUDA(cudaStreamWaitEvent(other.StreamOf(0), begun, 0));
      Sleep<<<1, 1, 0, other.StreamOf(0)>>>(4 + time);
    }
    team.Launch(-1, -1, -1);
    other.Run(-1, -1, 0);
    JO_CHECK_IN(other.StatusOf(0).failed == kConcurrent, "%d", other.StatusOf(0).failed);
    other.CheckPoisoned(0, 0);
    team.CheckStatuses();
    next.Run(time % 2);
    next.CheckStatuses();
    for (int r = 0; r < 2; ++r) {
      team.CheckRounded(r, 0);
      for (int call = 0; call < 3; ++call) next.CheckRounded(r, call);
    }
  }
  JO_CUDA(cudaEventDestroy(begun));
  return kTimes;
}

// A rank that does not come: the others name it and give no numbers. When it comes at last
// it finds out that they have failed, or is in vain as well: it has no wrong numbers.
template <class Op>
int Absent(int ranks, int absent) {
  constexpr uint64_t kShort = 100 * 1000 * 1000;
  const MatmulCase one = TiledCases<Op>(ranks)[0];
  Team<Op, BFloat16> team({one, one}, kLarge, kShort);
  team.Run(-1, absent);
  for (int r = 0; r < ranks; ++r) {
    if (r == absent) continue;
    const Status& s = team.StatusOf(r);
    const bool named = s.failed == kExpired && s.peer == absent;
    JO_CHECK_IN(s.rank == r && (named || s.failed == kPeerFailed), "rank %d: %d for %d, step %d", r,
                s.failed, s.peer, s.step);
    for (int call = 0; call < 2; ++call) team.CheckPoisoned(r, call);
  }
  team.Run(-1, -1, absent);
  for (int call = 0; call < 2; ++call) team.CheckPoisoned(absent, call);
  const Status& s = team.StatusOf(absent);
  JO_CHECK(s.failed == kPeerFailed || s.failed == kExpired);
  return 1;
}

// A rank that fails in the second call, when the first may not have been read yet.
template <class Op>
int FailsLater(int ranks) {
  constexpr uint64_t kShort = 100 * 1000 * 1000;
  const MatmulCase one = Cases<Op>(ranks)[0];
  Team<Op, float> team({one, one, one}, kLarge, kShort);
  team.Run(0);
  team.Check();
  team.Run(-1, ranks - 1);  // the last one stays out from here on
  for (int r = 0; r < ranks - 1; ++r) {
    const int32_t failed = team.StatusOf(r).failed;
    JO_CHECK(failed == kExpired || failed == kPeerFailed);
    for (int call = 0; call < 3; ++call) team.CheckPoisoned(r, call);
  }
  return 1;
}

template <class Op>
int Mismatch(int ranks) {
  const MatmulCase one = Cases<Op>(ranks)[0];
  Team<Op, float> team({one}, kLarge, kLimitNs / 10, 1);
  team.Run();
  for (int r = 0; r < ranks; ++r) {
    const Status& s = team.StatusOf(r);
    // Or it heard of it from one that has found out before.
    JO_CHECK_IN(s.failed == kPeerFailed || (s.failed == kMismatch && (r == 1 || s.peer == 1)),
                "rank %d: %d for %d, step %d, expected %llx, seen %llx", r, s.failed, s.peer,
                s.step, static_cast<unsigned long long>(s.expected),
                static_cast<unsigned long long>(s.seen));
    team.CheckPoisoned(r, 0);
  }
  return 1;
}

template <class Op>
int All(bool brief) {
  int passed = 0;
  for (const int ranks : {2, 3, 5}) {
    passed += Values<Op, float>(ranks, kLarge) + Values<Op, float>(ranks, kSmall);
    if (brief) continue;
    passed += Values<Op, BFloat16>(ranks, kLarge) + Values<Op, BFloat16>(ranks, kSmall);
    passed += Values<Op, Float16>(ranks, kSmall) + Values<Op, double>(ranks, kSmall);
    passed += Stragglers<Op>(ranks);
  }
  if (!Op::kGathers) passed += Scattered<Op>();
  passed += Absent<Op>(2, 1) + Absent<Op>(3, 0) + FailsLater<Op>(3) + Mismatch<Op>(2);
  return passed + Mismatch<Op>(4);
}

}  // namespace
}  // namespace jax_overlap

// With `short` one type only: for compute-sanitizer, which is slow. Then, or after another
// word, an op: scatter, gather or reduce.
int main(int argc, char** argv) {
  using namespace jax_overlap;  // NOLINT
  const std::string mode = argc > 1 ? argv[1] : "";
  const bool brief = mode == "short";
  const std::string op = argc > 2 ? argv[2] : "";
  int passed = 0;
  if (op.empty() || op == "scatter") {
    passed += All<MatmulReduceScatter>(brief) + (brief ? 0 : ScatteredLarge() + AtOnce());
  }
  if (op.empty() || op == "gather") passed += All<AllGatherMatmul>(brief);
  if (op.empty() || op == "reduce") passed += All<MatmulAllReduce>(brief);
  std::printf("matmul_test (CUDA, %zu devices): %d passed, 0 failed\n", Devices().size(), passed);
}

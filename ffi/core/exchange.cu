#include "core/exchange.h"

#include "core/dtype.h"
#include "core/mutants.h"
#include "core/p2p_link.cuh"
#include "core/sum.h"

namespace jax_overlap {
namespace {

constexpr int kThreads = 256;
constexpr int kReadyStep = 0, kArrivedStep = 1;  // of errors

// What a kernel that is launched early does before all else: waits for the kernel before it.
__device__ void AwaitKernelBefore() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
// What comes after this block may be launched, if early, once a thread of it has said so.
__device__ void LetNextBegin() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// What the kernels share: the state of the rank in the exchange.
class Session {
 public:
  __device__ Session(const ExchangeCall& call, int half, Status* status)
      : call_(call),
        half_(call.layout.half[half]),
        link_(call.channel, status),
        epoch_(half_.epoch->value),
        broken_(call.layout.broken->value != 0) {}

  __device__ bool broken() const { return broken_; }
  __device__ uint64_t epoch() const { return epoch_; }
  __device__ P2pLink& link() { return link_; }

  // Whether this thread speaks for the peer that is its number.
  __device__ bool SpeaksFor(int wanted) const {
    const int peer = threadIdx.x;
    return peer < link_.size() && peer != link_.rank() && (wanted < 0 || wanted == peer);
  }

  // Until the peer that is this thread's number has filled the slot here, for this call.
  __device__ void WaitFor(int half) {
    const int peer = static_cast<int>(threadIdx.x);
    const uint64_t* const arrived = &call_.layout.half[half].arrived[peer].value;
    const Where where{peer, kArrivedStep};
    const uint64_t seen = link_.WaitUnless(&call_.layout.revoked[peer].value, arrived,
                                           (epoch_ + 1) << kExchangeCallBits, where);
    if (!link_.failed() && (seen & kExchangeCallMask) != call_.call) {
      link_.Fail(kMismatch, call_.call, seen & kExchangeCallMask, where);
    }
  }

  // What says that this call has filled a slot.
  __device__ uint64_t Arrival() const { return (epoch_ + 1) << kExchangeCallBits | call_.call; }

  // By all threads, after what may have failed. What fails now is told, once. The next kernel may
  // be launched: not before, as what it takes of a GPU could be what a peer needs that this one
  // waited for.
  __device__ void Settle() {
    __syncthreads();
    LetNextBegin();
    if (broken_ || !link_.failed()) return;
    if (SpeaksFor(-1)) {
      uint64_t* const revoked = &call_.layout.revoked[link_.rank()].value;
      P2pLink::StoreReleased(link_.At(revoked, threadIdx.x), 1);
    }
    if (threadIdx.x == 0) {
      call_.layout.broken->value = 1;
      call_.channel.Tell(*link_.status());
    }
    broken_ = true;
    __syncthreads();
  }

 private:
  const ExchangeCall& call_;
  const ExchangeHalf& half_;
  P2pLink link_;
  const uint64_t epoch_;
  bool broken_;
};

__global__ void Begin(const __grid_constant__ ExchangeCall a, int half, bool first) {
  AwaitKernelBefore();
  __shared__ Status status;
  Session s(a, half, &status);
  if (threadIdx.x == 0 && first) {
    if (atomicExch(a.busy, 1) != 0) s.link().Fail(kConcurrent, 0, 1, {s.link().rank(), 0});
    if (s.broken()) a.channel.Report({kBroken, a.channel.shape.rank, -1, 0, 0, 0});
  }
  __syncthreads();
  if (!s.broken()) {
    if (s.epoch() == 0) a.channel.Meet(s.link());
    if (s.SpeaksFor(-1) && !JO_MUTANT("missing_ready_wait")) {
      s.link().WaitUnless(&a.layout.revoked[threadIdx.x].value,
                          &a.layout.half[half].ready[threadIdx.x].value, s.epoch(),
                          {static_cast<int>(threadIdx.x), kReadyStep});
    }
  }
  s.Settle();
  // Who has failed tells nobody.
  if (threadIdx.x == 0) a.layout.half[half].telling->value = s.broken() ? 0 : s.Arrival();
}

// `then_waits`: also Wait.
__global__ void Arrive(const __grid_constant__ ExchangeCall a, int half, int peer,
                       bool then_waits) {
  AwaitKernelBefore();
  __shared__ Status status;
  Session s(a, half, &status);
  if (!s.broken() && s.SpeaksFor(peer)) {
    // What the kernels and copies before have stored there, too.
    __threadfence_system();
    s.link().Signal(&a.layout.half[half].arrived[a.channel.shape.rank].value, threadIdx.x,
                    s.Arrival());
  }
  if (!then_waits) return;
  __syncthreads();  // what one of them misses keeps no other from telling
  if (!s.broken() && s.SpeaksFor(peer)) s.WaitFor(half);
  s.Settle();
}

__global__ void Wait(const __grid_constant__ ExchangeCall a, int half, int peer) {
  AwaitKernelBefore();
  __shared__ Status status;
  Session s(a, half, &status);
  if (!s.broken() && s.SpeaksFor(peer)) s.WaitFor(half);
  s.Settle();
}

// NaN in each type of a result.
__device__ void Poison(void* data, size_t bytes) {
  auto* const words = static_cast<uint16_t*>(data);
  for (size_t i = threadIdx.x; i < bytes / sizeof(uint16_t); i += blockDim.x) words[i] = 0x7fff;
}

__device__ void EndRound(const ExchangeCall& a, int half, bool last, Status* status) {
  Session s(a, half, status);
  const ExchangeHalf& h = a.layout.half[half];
  if (!s.broken() && s.SpeaksFor(-1)) {
    // The slots were read before, by a kernel before this or as Finish has counted.
    const uint64_t revoked = P2pLink::Acquired(&a.layout.revoked[threadIdx.x].value);
    if (revoked != 0) s.link().Fail(kPeerFailed, 0, 1, {static_cast<int>(threadIdx.x), 0});
  }
  s.Settle();
  if (!s.broken() && s.SpeaksFor(-1)) {
    s.link().Signal(&h.ready[a.channel.shape.rank].value, threadIdx.x, s.epoch() + 1);
  }
  if (threadIdx.x == 0) {
    if (!JO_MUTANT("stale_epoch") || s.epoch() == 0) h.epoch->value = s.epoch() + 1;
    if (last) atomicExch(a.busy, 0);
  }
  if (!s.broken()) return;
  for (const auto& result : a.results) Poison(result.data, result.bytes);
}

__global__ void End(const __grid_constant__ ExchangeCall a, int half, bool last) {
  AwaitKernelBefore();
  __shared__ Status status;
  EndRound(a, half, last, &status);
}

// kCount elements that are loaded at once.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Group {
  T values[kCount];
};

// Group i of a row that begins at `from` in the first slot.
template <class T, int kCount>
__device__ Group<T, kCount> SumOfSlots(const SumShape& s, const char* from, int64_t i) {
  Acc<T> sums[kCount];
  for (int r = 0; r < s.ranks; ++r) {
    const auto group = reinterpret_cast<const Group<T, kCount>*>(from + r * s.slot_bytes)[i];
    JO_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const Acc<T> value = Numeric<T>::Widen(group.values[j]);
      sums[j] = r == 0 ? value : Add(sums[j], value);
    }
  }
  Group<T, kCount> result;
  JO_UNROLL
  for (int j = 0; j < kCount; ++j) result.values[j] = Numeric<T>::Narrow(sums[j]);
  return result;
}

// Packs or, where something is not aligned, single elements.
template <class T, int kCount>
__global__ void SumKernel(const __grid_constant__ SumShape s) {
  AwaitKernelBefore();
  const int64_t groups = s.cols / kCount;
  for (int64_t row = blockIdx.y; row < s.blocks * s.rows; row += gridDim.y) {
    const int64_t block = row / s.rows, at = row % s.rows;
    const char* const from = s.slots + (block * s.block + at * s.ld) * sizeof(T);
    T* const to = static_cast<T*>(s.out) + block * s.out_block + at * s.out_ld;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < groups;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
      reinterpret_cast<Group<T, kCount>*>(to)[i] = SumOfSlots<T, kCount>(s, from, i);
    }
  }
}

template <class T>
__device__ void SumTile(const TileSumShape& a, int64_t tile) {
  constexpr int kCount = 16 / sizeof(T);
  const SumShape& s = a.all;
  const int64_t across = CeilDiv(s.cols, a.tile), down = CeilDiv(s.rows, a.tile);
  const int64_t block = tile / across / down;
  const int64_t row = tile / across % down * a.tile, col = tile % across * a.tile;
  const int64_t rows = Min(a.tile, s.rows - row), groups = Min(a.tile, s.cols - col) / kCount;
  const char* const from = s.slots + (block * s.block + row * s.ld + col) * sizeof(T);
  T* const to = static_cast<T*>(s.out) + block * s.out_block + row * s.out_ld + col;
  for (int64_t i = threadIdx.x; i < rows * groups; i += blockDim.x) {
    const int64_t r = i / groups, g = i % groups;
    reinterpret_cast<Group<T, kCount>*>(to + r * s.out_ld)[g] =
        SumOfSlots<T, kCount>(s, from + r * s.ld * sizeof(T), g);
  }
}

// A block has every so many tiles. The last one to be through ends the round.
template <class T>
__global__ void Finish(const __grid_constant__ ExchangeCall call, int half, bool last,
                       const __grid_constant__ TileSumShape a) {
  AwaitKernelBefore();
  __shared__ Status status;
  __shared__ bool ends, marked[kThreads];
  const SumShape& s = a.all;
  const int64_t tiles = s.blocks * CeilDiv(s.rows, a.tile) * CeilDiv(s.cols, a.tile);
  for (int64_t first = blockIdx.x; first < tiles; first += int64_t{kThreads} * gridDim.x) {
    const int64_t mine = first + int64_t{threadIdx.x} * gridDim.x;
    marked[threadIdx.x] = mine < tiles && a.marks[mine] != 0;
    if (!__syncthreads_or(marked[threadIdx.x])) continue;
    for (int i = 0; i < kThreads; ++i) {
      if (marked[i]) SumTile<T>(a, first + int64_t{i} * gridDim.x);
    }
    __syncthreads();
  }
  __syncthreads();  // this block has read what it adds
  if (threadIdx.x == 0) {
    __threadfence();
    ends = atomicInc(a.through, gridDim.x - 1) + 1 == gridDim.x;
    __threadfence();
  }
  __syncthreads();
  if (ends) EndRound(call, half, last, &status);
}

}  // namespace

// Launches a kernel, which begins with AwaitKernelBefore().
template <class... Parameters, class... Args>
static cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, cudaStream_t stream,
                          const Args&... args) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

ExchangeLayout ExchangeLayout::Carve(char* base, int ranks, size_t bytes) {
  ExchangeLayout layout;
  Carver carver(base);
  carver.Take<Word>(1);  // GpuChannel::kHeadBytes
  layout.broken = carver.Take<Word>(1);
  layout.revoked = carver.Take<Word>(ranks);
  for (ExchangeHalf& half : layout.half) {
    half.epoch = carver.Take<Word>(1);
    half.arrived = carver.Take<Word>(ranks);
    half.ready = carver.Take<Word>(ranks);
    half.telling = carver.Take<Word>(1);
  }
  constexpr size_t kAlign = 256;
  const size_t head = RoundUp(carver.bytes(), kAlign);
  layout.slot_bytes = bytes < head ? 0 : (bytes - head) / (kHalves * ranks) / kAlign * kAlign;
  for (int h = 0; h < kHalves; ++h) {
    layout.half[h].slots = base + head + h * ranks * layout.slot_bytes;
  }
  return layout;
}

cudaError_t LaunchBegin(const ExchangeCall& call, int half, bool first, cudaStream_t stream) {
  return Launch(&Begin, 1, stream, call, half, first);
}
cudaError_t LaunchArrive(const ExchangeCall& call, int half, int peer, cudaStream_t stream) {
  return Launch(&Arrive, 1, stream, call, half, peer, false);
}
cudaError_t CopyArrival(const ExchangeCall& call, int half, int peer, cudaStream_t stream) {
  const ExchangeHalf& h = call.layout.half[half];
  return cudaMemcpyAsync(call.channel.At(&h.arrived[call.channel.shape.rank].value, peer),
                         &h.telling->value, sizeof(h.telling->value), cudaMemcpyDefault, stream);
}
cudaError_t LaunchArriveAndWait(const ExchangeCall& call, int half, cudaStream_t stream) {
  return Launch(&Arrive, 1, stream, call, half, -1, true);
}
cudaError_t LaunchWait(const ExchangeCall& call, int half, int peer, cudaStream_t stream) {
  return Launch(&Wait, 1, stream, call, half, peer);
}
cudaError_t LaunchEnd(const ExchangeCall& call, int half, bool last, cudaStream_t stream) {
  return Launch(&End, 1, stream, call, half, last);
}

template <class T>
cudaError_t LaunchSum(const SumShape& wanted, int max_blocks, cudaStream_t stream) {
  SumShape shape = wanted;
  if (shape.blocks * shape.rows * shape.cols == 0) return cudaSuccess;
  // Rows that follow one another are one.
  if (shape.ld == shape.cols && shape.out_ld == shape.cols) {
    shape.cols *= shape.rows;
    shape.rows = 1;
    shape.ld = shape.out_ld = shape.cols;
    if (shape.block == shape.cols && shape.out_block == shape.cols) {
      shape.cols *= shape.blocks;
      shape.blocks = 1;
    }
  }
  constexpr int kPack = 16 / sizeof(T);
  const auto whole = [](int64_t n) { return n % kPack == 0; };
  const bool packs = whole(shape.cols) && whole(shape.ld) && whole(shape.block) &&
                     whole(shape.out_ld) && whole(shape.out_block) &&
                     reinterpret_cast<uintptr_t>(shape.slots) % 16 == 0 &&
                     reinterpret_cast<uintptr_t>(shape.out) % 16 == 0;
  const size_t groups = CeilDiv(shape.cols, packs ? kPack : 1);
  const size_t rows = Min(shape.blocks * shape.rows, 65535);
  const size_t across = Min(CeilDiv(groups, kThreads), CeilDiv(max_blocks, rows));
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(rows));
  return Launch(packs ? &SumKernel<T, kPack> : &SumKernel<T, 1>, grid, stream, shape);
}

template <class T>
cudaError_t LaunchFinish(const ExchangeCall& call, int half, bool last, const TileSumShape& shape,
                         int max_blocks, cudaStream_t stream) {
  const SumShape& s = shape.all;
  const int64_t tiles = s.blocks * CeilDiv(s.rows, shape.tile) * CeilDiv(s.cols, shape.tile);
  return Launch(&Finish<T>, static_cast<unsigned>(Min(tiles, max_blocks)), stream, call, half, last,
                shape);
}

template cudaError_t LaunchFinish<BFloat16>(const ExchangeCall&, int, bool, const TileSumShape&,
                                            int, cudaStream_t);
template cudaError_t LaunchSum<float>(const SumShape&, int, cudaStream_t);
template cudaError_t LaunchSum<double>(const SumShape&, int, cudaStream_t);
template cudaError_t LaunchSum<BFloat16>(const SumShape&, int, cudaStream_t);
template cudaError_t LaunchSum<Float16>(const SumShape&, int, cudaStream_t);

std::vector<const void*> ExchangeKernels() {
  std::vector<const void*> kernels = {
      reinterpret_cast<const void*>(&Begin), reinterpret_cast<const void*>(&Arrive),
      reinterpret_cast<const void*>(&Wait), reinterpret_cast<const void*>(&End),
      reinterpret_cast<const void*>(&Finish<BFloat16>)};
  const auto add = [&](auto element) {
    using T = decltype(element);
    kernels.push_back(reinterpret_cast<const void*>(&SumKernel<T, 1>));
    kernels.push_back(reinterpret_cast<const void*>(&SumKernel<T, 16 / sizeof(T)>));
  };
  add(float{});
  add(double{});
  add(BFloat16{});
  add(Float16{});
  return kernels;
}

}  // namespace jax_overlap
